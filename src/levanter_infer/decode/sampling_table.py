"""`SamplingTable`: how each slot is sampled."""

import dataclasses

import equinox as eqx
import haliax.haxtyping as ht
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

from levanter_infer.axes import BIAS, ROW, SEED_WORD, STOP, STOP_TOKEN
from levanter_infer.cache.named import full, replace
from levanter_infer.decode.shapes import SamplingLimits


class SamplingTable(eqx.Module):
    """Sampling parameters, one row per sequence.

    The leading axis is `seq` at rest, `row` within a step (`rows`) and `admitted` in an upload. A row that holds no
    sequence samples greedily and wants nothing else, so that it causes no work.
    """

    temperature: ht.f32[NamedArray, " seq"]
    """At least 0; below `GREEDY_TEMPERATURE` the likeliest token is taken."""
    top_k: ht.i32[NamedArray, " seq"]
    """Tokens to choose from, the likeliest ones; 0 and anything from the vocabulary size up: all."""
    top_p: ht.f32[NamedArray, " seq"]
    """In (0, 1]; 1: all."""
    min_p: ht.f32[NamedArray, " seq"]
    """In [0, 1]; 0: all."""
    frequency_penalty: ht.f32[NamedArray, " seq"]
    presence_penalty: ht.f32[NamedArray, " seq"]
    repetition_penalty: ht.f32[NamedArray, " seq"]
    """Above 0; 1: none."""
    seed: ht.u32[NamedArray, "seq seed_word"]
    """A 64-bit seed, high word first."""
    sample_index: ht.i32[NamedArray, " seq"]
    """Which of a request's `n` samples; at least 0."""
    min_tokens: ht.i32[NamedArray, " seq"]
    """Generated tokens before which no stop sequence ends the sequence."""
    num_logprobs: ht.i32[NamedArray, " seq"]
    """Likeliest tokens to report."""
    bias_ids: ht.i32[NamedArray, "seq bias"]
    """Distinct token ids; none is `vocab_size`."""
    bias_values: ht.f32[NamedArray, "seq bias"]
    stop_ids: ht.i32[NamedArray, "seq stop stop_token"]
    """Stop sequences, aligned right; none is `vocab_size`."""
    stop_lens: ht.i32[NamedArray, "seq stop"]
    """Tokens of each stop sequence; 0: unused."""
    limits: SamplingLimits = eqx.field(static=True)

    @staticmethod
    def empty(axis: str, size: int, limits: SamplingLimits) -> "SamplingTable":
        """`size` rows that hold no sequence, over `axis`."""
        lead = (axis, size)
        bias, stop = (BIAS, limits.max_logit_bias), (STOP, limits.max_stop_sequences)
        nothing = _nothing(limits)

        def column(name: str, *trailing: tuple[str, int]) -> NamedArray:
            return full((lead, *trailing), nothing[name], jnp.float32 if type(nothing[name]) is float else jnp.int32)

        return SamplingTable(
            **{name: column(name) for name in _SCALAR_COLUMNS},
            seed=full((lead, (SEED_WORD, 2)), nothing["seed"], jnp.uint32),
            bias_ids=column("bias_ids", bias),
            bias_values=column("bias_values", bias),
            stop_ids=column("stop_ids", stop, (STOP_TOKEN, limits.max_stop_tokens)),
            stop_lens=column("stop_lens", stop),
            limits=limits,
        )

    @property
    def columns(self) -> dict[str, NamedArray]:
        return {name: getattr(self, name) for name in COLUMNS}

    def rows(self, slot_ids: Array) -> "SamplingTable":
        """The rows of `slot_ids` i32[row], over `row`; those of absent slots hold no sequence."""
        nothing = _nothing(self.limits)

        def take(name: str, column: NamedArray) -> NamedArray:
            values = column.array.at[slot_ids].get(mode="fill", fill_value=nothing[name])
            return NamedArray(values, (column.axes[0].resize(slot_ids.shape[0]).alias(ROW), *column.axes[1:]))

        return dataclasses.replace(self, **{name: take(name, column) for name, column in self.columns.items()})

    def set_rows(self, slot_ids: Array, values: "SamplingTable") -> "SamplingTable":
        """The table with `values`, one row per entry of `slot_ids`, written there; absent slots are dropped.

        Requires: present slots are distinct.
        """

        def put(column: NamedArray, new: NamedArray) -> Array:
            return column.array.at[slot_ids].set(new.array, mode="drop")

        return replace(self, **{name: put(column, getattr(values, name)) for name, column in self.columns.items()})


_SCALAR_COLUMNS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "sample_index",
    "min_tokens",
    "num_logprobs",
)
COLUMNS = (*_SCALAR_COLUMNS, "seed", "bias_ids", "bias_values", "stop_ids", "stop_lens")
"""Names of the array fields."""


def _nothing(limits: SamplingLimits) -> dict[str, float | int]:
    """What the columns of a row without a sequence hold; a float stands for f32."""
    zeros: dict[str, float | int] = {name: 0 for name in COLUMNS}
    floats = ("temperature", "min_p", "frequency_penalty", "presence_penalty", "bias_values")
    return {
        **zeros,
        **{name: 0.0 for name in floats},
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "bias_ids": limits.vocab_size,
        "stop_ids": limits.vocab_size,
    }


def stop_match(stop_ids: Array, stop_lens: Array, window: Array, enough: Array) -> Array:
    """Which rows end with one of their stop token sequences.

    Args:
        stop_ids: i32[row, stop, stop_token], aligned right.
        stop_lens: i32[row, stop]; 0: unused.
        window: i32[row, stop_token], the last generated tokens, the newest last; where fewer have been generated, an
            id that is in no stop sequence (the vocabulary size).
        enough: bool[row], whether `min_tokens` tokens have been generated.
    Returns:
        bool[row]
    """
    width = window.shape[-1]
    place = jax.lax.broadcasted_iota(jnp.int32, (1, 1, width), 2)
    outside = place < width - stop_lens[:, :, None]
    matches = jnp.all(outside | (stop_ids == window[:, None, :]), axis=-1) & (stop_lens > 0)
    return jnp.any(matches, axis=-1) & enough
