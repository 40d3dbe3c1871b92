"""Attention over pages and matmuls, on plain arrays. Imports nothing of this package's other parts."""

from levanter_infer.kernels.attention import IMPLEMENTATIONS as IMPLEMENTATIONS
from levanter_infer.kernels.attention import TPU_POOL as TPU_POOL
from levanter_infer.kernels.attention import ragged_paged_attention as ragged_paged_attention
