"""`SamplingTable`: sampling parameters of each slot."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32, UInt32

from levanter_infer.cache.arrays import full, gather, gather_together, replace, scatter
from levanter_infer.decode.shapes import SamplingLimits
from levanter_infer.kernels import MIN_EXPONENT


class SamplingTable(eqx.Module):
    """Sampling parameters, one row per sequence.

    The leading axis is `seq` at rest, `row` within a step (`rows`) and `admitted` in an upload. A row that holds no
    sequence samples greedily and wants nothing else, so that it causes no work.
    """

    temperature: Float32[Array, " seq"]
    """At least 0; below `GREEDY_TEMPERATURE`: greedy."""
    top_k: Int32[Array, " seq"]
    """Tokens to choose from, the likeliest ones; 0 and anything from the vocabulary size up: all."""
    top_p: Float32[Array, " seq"]
    """In (0, 1]; 1: all."""
    log_min_p: Float32[Array, " seq"]
    """At most 0; `MIN_EXPONENT` and below: all. A logarithm of the host's, because XLA may round one by its place."""
    frequency_penalty: Float32[Array, " seq"]
    presence_penalty: Float32[Array, " seq"]
    repetition_penalty: Float32[Array, " seq"]
    """Above 0; 1: none."""
    seed: UInt32[Array, "seq seed_word"]
    """A 64-bit seed, high word first."""
    sample_index: Int32[Array, " seq"]
    """Sample index, from `first_sample` on."""
    first_sample: Int32[Array, " seq"]
    """Index of the first sample of the request."""
    min_tokens: Int32[Array, " seq"]
    """Generated tokens before which no stop sequence ends the sequence."""
    num_logprobs: Int32[Array, " seq"]
    """Likeliest tokens to report."""
    bias_ids: Int32[Array, "seq bias"]
    """Distinct token ids; none is `vocab_size`."""
    bias_values: Float32[Array, "seq bias"]
    stop_ids: Int32[Array, "seq stop_token"]
    """Stop sequences, side by side, each aligned right; none is `vocab_size`. A TPU stores them in an eighth of the
    bytes of [seq, stop, stop_token]."""
    stop_lens: Int32[Array, "seq stop"]
    """Tokens of each stop sequence; 0: unused."""
    limits: SamplingLimits = eqx.field(static=True)

    @staticmethod
    def empty(size: int, limits: SamplingLimits) -> "SamplingTable":
        """`size` rows that hold no sequence."""
        bias, stop = limits.max_logit_bias, limits.max_stop_sequences
        nothing = _nothing(limits)

        def column(name: str, *trailing: int) -> Array:
            return full((size, *trailing), nothing[name], jnp.float32 if type(nothing[name]) is float else jnp.int32)

        return SamplingTable(
            **{name: column(name) for name in _SCALAR_COLUMNS},
            seed=full((size, 2), nothing["seed"], jnp.uint32),
            bias_ids=column("bias_ids", bias),
            bias_values=column("bias_values", bias),
            stop_ids=column("stop_ids", stop * limits.max_stop_tokens),
            stop_lens=column("stop_lens", stop),
            limits=limits,
        )

    @property
    def columns(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in COLUMNS}

    def rows(self, slot_ids: Array) -> "SamplingTable":
        """The rows of `slot_ids` i32[row], over `row`; those of absent slots hold no sequence."""
        nothing, scalars = _nothing(self.limits), {name: getattr(self, name) for name in _SCALAR_COLUMNS}
        others = {name: column for name, column in self.columns.items() if name not in scalars}
        rows = {name: gather(column, slot_ids, nothing[name]) for name, column in others.items()}
        return dataclasses.replace(self, **rows, **gather_together(scalars, slot_ids, nothing))

    def set_rows(self, slot_ids: Array, values: "SamplingTable") -> "SamplingTable":
        """The table with `values`, one row per entry of `slot_ids`, written there; absent slots are dropped.

        Requires: present slots are distinct.
        """
        columns = self.columns.items()
        return replace(self, **{name: scatter(column, slot_ids, getattr(values, name)) for name, column in columns})


_SCALAR_COLUMNS = (
    "temperature",
    "top_k",
    "top_p",
    "log_min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "sample_index",
    "first_sample",
    "min_tokens",
    "num_logprobs",
)
COLUMNS = (*_SCALAR_COLUMNS, "seed", "bias_ids", "bias_values", "stop_ids", "stop_lens")
"""Names of the array fields."""


def _nothing(limits: SamplingLimits) -> dict[str, float | int]:
    """Values of the columns of a row without a sequence; a float means dtype f32."""
    zeros: dict[str, float | int] = {name: 0 for name in COLUMNS}
    floats = ("temperature", "frequency_penalty", "presence_penalty", "bias_values")
    return {
        **zeros,
        **{name: 0.0 for name in floats},
        "top_p": 1.0,
        "log_min_p": MIN_EXPONENT,
        "repetition_penalty": 1.0,
        "bias_ids": limits.vocab_size,
        "stop_ids": limits.vocab_size,
    }


def stop_match(stop_ids: Array, stop_lens: Array, window: Array, enough: Array) -> Array:
    """The rows that end with one of their stop token sequences.

    Args:
        stop_ids, stop_lens: as in `SamplingTable`, of each row.
        window: i32[row, width], as wide as a stop sequence can be: the last generated tokens, the newest last; where
            fewer have been generated, an id that is in no stop sequence (the vocabulary size).
        enough: bool[row], whether `min_tokens` tokens have been generated.
    Returns:
        bool[row]
    """
    width = window.shape[-1]
    stop_ids = stop_ids.reshape(*stop_lens.shape, width)
    place = jax.lax.broadcasted_iota(jnp.int32, (1, 1, width), 2)
    outside = place < width - stop_lens[:, :, None]
    matches = jnp.all(outside | (stop_ids == window[:, None, :]), axis=-1) & (stop_lens > 0)
    return jnp.any(matches, axis=-1) & enough
