// The kernels for AVX2 and FMA.

#include "kernels.h"

#ifdef LEVANTER_INFER_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace levanter_infer::avx2 {
constexpr int LANES = 8;
constexpr int64_t ROWS = 6;
#include "kernels.inc"
}  // namespace levanter_infer::avx2
#pragma GCC pop_options
#endif
