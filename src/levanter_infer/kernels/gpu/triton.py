"""Pallas' Triton backend, where this jax has it: the kernels for GPUs are written for it (docs/decisions/0017)."""

from typing import Any

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # jax calls it deprecated; without it everything but these kernels works
    _triton = None

plt: Any = _triton
"""None in a jax without it."""
