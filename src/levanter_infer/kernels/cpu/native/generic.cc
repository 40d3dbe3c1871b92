// The kernels for any processor.

#include "kernels.h"

namespace levanter_infer::generic {
constexpr int LANES = 4;
constexpr int64_t ROWS = 6;
#include "kernels.inc"
}  // namespace levanter_infer::generic
