"""`ScorePages`: log probabilities of prompt tokens, stored by page as their keys and values are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from levanter_infer.cache.arrays import full, replace, scatter


class ScorePages(eqx.Module):
    """Scores of prompt tokens.

    A score is `1 + 2 * num_top` numbers: the log probability of the token at a position, given those before it; the ids
    of the likeliest tokens there, best first; and their log probabilities. Floats are stored as their bits, so that a
    score is written, copied and read as one. It belongs to the page as keys and values do: a page that prefix caching
    finds brings its scores along.
    """

    scores: Int32[Array, "page page_offset score"]
    ends: Float32[Array, "page embed"]
    """Hidden state of the last computed token of each page, from which the next token is scored."""
    complete: Int32[Array, "seq seq_page page_offset score"]
    """Scores of the prompts that are complete: they outlive their pages, until the slot's next prompt is complete."""

    @staticmethod
    def init(
        *, num_top: int, hidden_size: int, num_pages: int, page_size: int, num_slots: int, max_seq_len: int
    ) -> "ScorePages":
        """Args: num_top: likeliest tokens kept of each position; hidden_size: of the model's hidden states."""
        page = (page_size, 1 + 2 * num_top)
        return ScorePages(
            scores=full((num_pages, *page), 0),
            ends=full((num_pages, hidden_size), 0, jnp.float32),
            complete=full((num_slots, -(-max_seq_len // page_size), *page), 0),
        )

    @property
    def num_top(self) -> int:
        return self.scores.shape[-1] // 2

    def copy_pages(self, source: Array, target: Array) -> "ScorePages":
        """Copy pages, as `Cache.copy_pages` does."""

        def copied(array: Array) -> Array:
            return scatter(array, target, array.at[source].get(mode="clip"))

        return replace(self, scores=copied(self.scores), ends=copied(self.ends))


def pack_scores(logprobs: Array, top_ids: Array, top_logprobs: Array) -> Array:
    """i32[n, score] of f32[n], i32[n, top] and f32[n, top]."""
    floats = (jax.lax.bitcast_convert_type(a, jnp.int32) for a in (logprobs[:, None], top_logprobs))
    own, top = floats
    return jnp.concatenate([own, top_ids, top], axis=1)


def unpack_scores(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of `pack_scores` on the host, for i32[n, score]."""
    num_top = scores.shape[1] // 2
    own, ids, top = np.split(scores, [1, 1 + num_top], axis=1)
    return own[:, 0].copy().view(np.float32), ids, np.ascontiguousarray(top).view(np.float32)
