"""`LogitsMod`: a caller's function that changes the logits of every row, and what it remembers of each sequence."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, scatter
from levanter_infer.layers.shard_axis import Vocabulary


class TokenHistory(NamedTuple):
    """The known tokens of one sequence, as a `logits_mod` gets them."""

    tokens: Array
    """i32[max_seq_len]; what stands behind the first `seq_len` is undefined."""
    prompt_len: Array
    """i32[], tokens of the prompt."""
    seq_len: Array
    """i32[], tokens of prompt and generation: the position that the next token takes."""


LogitsFunction = Callable[[Array, TokenHistory, Any], tuple[Array, Any]]
"""(logits f32[vocab], history, memory) -> (logits f32[vocab], memory), of one sequence."""


class LogitsMod(eqx.Module):
    """The function, and its memory of each sequence: a pytree of arrays of the caller's making."""

    function: LogitsFunction = eqx.field(static=True)
    initial: Any
    """The memory before the first token."""
    memory: Any
    """The memory of each slot, with a leading axis `seq`."""

    @staticmethod
    def init(function: LogitsFunction, initial: Any, num_slots: int) -> "LogitsMod":
        """No sequence has a memory yet. Args: initial: arrays or numbers."""
        initial = jax.tree.map(jnp.asarray, initial)
        return LogitsMod(function, initial, jax.tree.map(lambda a: jnp.repeat(a[None], num_slots, axis=0), initial))

    def __call__(
        self, logits: Array, slots: Array, tokens: Array, prompt_lens: Array, seq_lens: Array, vocab: Vocabulary
    ) -> tuple[Array, Any, Array]:
        """The new logits f32[row, vocab], of this device's part, the new memory of each row, and whether the new logits
        hold neither NaN nor +inf, bool[row].

        Args:
            slots, prompt_lens, seq_lens: i32[row].
            tokens: i32[seq, position].
        """
        whole = vocab.shard_axis.all_gather(logits, 1)[:, : vocab.size]
        is_first = seq_lens == prompt_lens

        def memory_of(stored: Array, initial: Array) -> Array:
            before = stored.at[slots].get(mode="clip")
            return jnp.where(is_first.reshape(-1, *[1] * initial.ndim), initial, before)

        history = TokenHistory(tokens.at[slots].get(mode="clip"), prompt_lens, seq_lens)
        memory = jax.tree.map(memory_of, self.memory, self.initial)
        changed, memory = jax.vmap(self.function)(whole, history, memory)
        finite = jnp.all(changed < jnp.inf, axis=1)  # false for NaN
        changed = jnp.pad(changed, ((0, 0), (0, vocab.padded_size - vocab.size)), constant_values=-jnp.inf)
        return vocab.shard_axis.own(changed.astype(logits.dtype), 1), memory, finite

    def of_rows(self, count: int) -> Any:
        """Memory of `count` rows, of zeros: a place for it."""
        return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), self.initial)

    def remember(self, slots: Array, memory: Any) -> "LogitsMod":
        """With the memory of the rows whose `slots`, i32[row], are not absent."""
        stored = jax.tree.map(lambda old, new: scatter(old, slots, new), self.memory, memory)
        return LogitsMod(self.function, self.initial, stored)

    def moved(self, ancestors: Array) -> "LogitsMod":
        """Each slot goes on from the memory of `ancestors`, i32[seq]."""
        stored = jax.tree.map(lambda old: gather(old, ancestors), self.memory)
        return LogitsMod(self.function, self.initial, stored)
