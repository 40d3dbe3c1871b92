// The kernels for AVX-512, for its BF16 extension, and for AMX.

#include "kernels.h"

#ifdef LEVANTER_INFER_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
namespace levanter_infer::avx512 {
constexpr int LANES = 16;
constexpr int64_t ROWS = 12;
#define LEVANTER_INFER_SCALEF  // p * 2^n is one instruction
inline __attribute__((always_inline)) __m512i ints_of(const int8_t* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#include "kernels.inc"
#undef LEVANTER_INFER_SCALEF
}  // namespace levanter_infer::avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prefer-vector-width=512")
namespace levanter_infer::avx512_bf16 {
#include "pairs.inc"
}  // namespace levanter_infer::avx512_bf16
#pragma GCC pop_options
#ifdef LEVANTER_INFER_AMX
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,amx-tile,amx-bf16,fma,prefer-vector-width=512")
namespace levanter_infer::amx_bf16 {
#include "tiles.inc"
#include "tile_attention.inc"
}  // namespace levanter_infer::amx_bf16
#pragma GCC pop_options
#endif
#endif
