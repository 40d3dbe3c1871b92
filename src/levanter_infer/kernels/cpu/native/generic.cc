// The kernels for any processor.

#include "kernels.h"

namespace levanter_infer::generic {
constexpr int LANES = 4;
constexpr int64_t ROWS = 6;
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
inline Ints ints_of(const int8_t* from) { return Ints{from[0], from[1], from[2], from[3]}; }
#include "kernels.inc"
}  // namespace levanter_infer::generic
