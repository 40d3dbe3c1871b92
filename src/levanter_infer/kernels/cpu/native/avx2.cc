// The kernels for AVX2 and FMA.

#include "kernels.h"

#ifdef LEVANTER_INFER_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace levanter_infer::avx2 {
constexpr int LANES = 8;
constexpr int64_t ROWS = 6;
inline __attribute__((always_inline)) __m256i ints_of(const int8_t* from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
#include "kernels.inc"
}  // namespace levanter_infer::avx2
#pragma GCC pop_options
#endif
