"""The `gpu` backend: Pallas on Triton (docs/decisions/0017), where this jax has it."""

from typing import Any

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # jax calls it deprecated; without it everything but these kernels works
    _triton = None

plt: Any = _triton
"""`jax.experimental.pallas.triton`; None in a jax without it."""
