"""The rules that all implementations of attention share: which keys a query sees, and the score of query and key."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels import int8

LOG2_E = math.log2(math.e)
"""Factor of scores for a softmax with powers of 2."""

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of an unseen key. Finite, so that no infinities are subtracted."""

NOTHING_SEEN = MASKED / 2
"""Initial value of the running maximum m: above `MASKED`, so that unseen keys get the weight 0 even before the first
key is seen."""


@dataclasses.dataclass(frozen=True)
class ScoreRules:
    """The options of one attention call. All methods are elementwise: index arrays have the rank of the scores."""

    scale: float
    sliding_window: Array | None = None
    """i32[]"""
    attention_chunk: int | None = None
    """Positions of a chunk, as Llama 4's chunked attention has them: a query at q sees a key at k only if
    k // attention_chunk = q // attention_chunk. None: all keys."""
    soft_cap: float | None = None
    alibi_slopes: Array | None = None
    """f32[q_heads]"""
    score_mod: Callable | None = None
    mask_mod: Callable | None = None

    @property
    def is_linear(self) -> bool:
        """Whether a score is the scale times q · k, without a soft cap, ALiBi or `score_mod`."""
        return self.soft_cap is None and self.alibi_slopes is None and self.score_mod is None

    def scores(self, matmul: Array, q_pos: Array, kv_pos: Array, head: Array) -> Array:
        """Scores from q · k: scale, soft cap, ALiBi, `score_mod`, in this order; f32 in and out."""
        scores = matmul * jnp.float32(self.scale)
        if self.soft_cap is not None:
            cap = jnp.float32(self.soft_cap)
            scores = cap * jnp.tanh(scores / cap)
        if self.alibi_slopes is not None:
            scores = scores + self.alibi_slopes[head] * (kv_pos - q_pos).astype(jnp.float32)
        if self.score_mod is not None:
            scores = self.score_mod(scores, q_pos, kv_pos, head).astype(jnp.float32)
        return scores

    def scores_in_log2(self, matmul: Array, q_pos: Array, kv_pos: Array, head: Array) -> Array:
        """`scores` times log2 e; q · k as it is where queries hold the factor (`Backend.scale_in_queries`)."""
        if not self.is_linear:
            return self.scores(matmul, q_pos, kv_pos, head) * jnp.float32(LOG2_E)
        factor = self.scale * LOG2_E
        return matmul if factor == 1 else matmul * jnp.float32(factor)

    def with_scale_in_queries(self) -> tuple[float, "ScoreRules"]:
        """The factor of queries by which `scores_in_log2` is q · k as it is, and the rules with them. Scores that are
        not linear keep their scale, with the factor 1."""
        if not self.is_linear:
            return 1.0, self
        return self.scale * LOG2_E, dataclasses.replace(self, scale=1 / LOG2_E)

    def seen(self, q_pos: Array, kv_pos: Array, head: Array) -> Array:
        """Mask of the keys a query sees (causality, window, chunk, `mask_mod`): bool, broadcastable to the scores."""
        seen = kv_pos <= q_pos
        if self.sliding_window is not None:
            seen = seen & (q_pos - kv_pos < self.sliding_window)
        if self.attention_chunk is not None:
            seen = seen & (kv_pos >= self.chunk_start(q_pos))
        if self.mask_mod is not None:
            seen = seen & self.mask_mod(q_pos, kv_pos, head)
        return seen

    def first_seen(self, q_pos: Array) -> Array:
        """Lower bound of the positions of keys that a query at `q_pos` sees."""
        if self.sliding_window is None:
            first = jnp.zeros_like(q_pos)
        else:
            first = jnp.maximum(q_pos - self.sliding_window + 1, 0)
        return first if self.attention_chunk is None else jnp.maximum(first, self.chunk_start(q_pos))

    def chunk_start(self, q_pos: Array) -> Array:
        """Position of the first key in the chunk of a query at `q_pos`, i32; only with an `attention_chunk`."""
        chunk = self.attention_chunk
        assert chunk is not None
        # A constant power of two spares the kernels a division.
        return q_pos & -chunk if chunk & (chunk - 1) == 0 else q_pos - jax.lax.rem(q_pos, jnp.int32(chunk))


def decode_bits(stored: Array, kv_dtype: jnp.dtype) -> Array:
    """Stored keys or values as f32.

    Args:
        stored: [..., D] of `kv_dtype`, or of the unsigned integer of its width that holds its bits; for int8 [..., D +
            1], the code of each head's scale behind its integers (`kernels.int8`).
    """
    if kv_dtype == jnp.int8:
        return int8.decode(stored[..., :-1], stored[..., -1:])
    if stored.dtype != kv_dtype:
        # bfloat16 is the upper half of a float32; written like this the conversion is one shift on every target.
        if kv_dtype == jnp.bfloat16:
            return (stored.astype(jnp.uint32) << jnp.uint32(16)).view(jnp.float32)
        stored = stored.view(kv_dtype)
    return stored.astype(jnp.float32)
