"""Changes of logits before a draw on the `gpu` backend: Pallas on Triton.

One launch counts the known tokens of each sequence, one writes the changed logits, and one those of the few tokens that
have a bias or are impossible. XLA's code has a loop over the known tokens, and a condition around each kind of change,
for which the host waits.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels.backend import LogitChanges
from levanter_infer.kernels.gpu import plt

_CHUNK = 1024
"""Known tokens that a program counts."""
_TILE = 2048
"""Logits that a program writes."""
_IN_OUTPUT = 2
"""What an occurrence in the output adds to the count of a token. The lowest bit is set if the token occurs at all."""


class _Given(NamedTuple):
    """What the kernels read."""

    logits: Any
    """f32[row, vocab]"""
    changes: LogitChanges


def changed_logits(logits: Array, changes: LogitChanges, num_rows: Array, *, interpret: bool = False) -> Array:
    """`Backend.changed_logits`. Rows without changes are not written."""
    rows, vocab = logits.shape
    changes = changes._replace(
        bias_ids=_filled(changes.bias_ids, vocab),
        bias_values=_filled(changes.bias_values, 0),
        banned_ids=_filled(changes.banned_ids, vocab),
        masks=_filled(changes.masks, 0),
        masked=changes.masked.astype(jnp.int32),
        changed=(changes.changed & (jnp.arange(rows, dtype=jnp.int32) < num_rows)).astype(jnp.int32),
    )
    given = _Given(logits, changes)
    inputs = len(jax.tree.leaves(given))

    def call(kernel, name: str, grid: tuple[int, ...], dtype, *others: Array, into: int | None = None) -> Array:
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=jax.ShapeDtypeStruct((rows, vocab), dtype),
            input_output_aliases={} if into is None else {inputs + into: 0},
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name=name,
        )(given, *others)

    chunks = pl.cdiv(changes.tokens.shape[1], _CHUNK)
    count = functools.partial(_count, interpret=interpret)
    counts = call(count, "count_tokens", (rows, chunks), jnp.int32, jnp.zeros((rows, vocab), jnp.int32), into=0)
    changed = call(_change, "change_logits", (rows, pl.cdiv(vocab, _TILE)), jnp.float32, counts)
    return call(_change_few, "change_few_logits", (rows,), jnp.float32, counts, changed, into=1)


def _filled(columns: Array, value: int) -> Array:
    """The array [row, n], with one column of the value where n is 0."""
    return columns if columns.shape[1] > 0 else jnp.full((columns.shape[0], 1), value, columns.dtype)


def _count(given: _Given, _zeros, counts, *, interpret: bool) -> None:
    """Adds a chunk of the known tokens of a row to the counts."""
    row, chunk, own = pl.program_id(0), pl.program_id(1), given.changes
    slot, first = own.slot_ids[row], chunk * _CHUNK
    exists = (own.changed[row] > 0) & (slot >= 0) & (slot < own.tokens.shape[0])
    known = jnp.where(exists, jnp.minimum(own.seq_lens[row], own.tokens.shape[1]), 0)

    @pl.when(first < known)
    def _():
        place = first + jnp.arange(_CHUNK, dtype=jnp.int32)
        token = plt.load(own.tokens.at[slot, place], mask=place < known, other=jnp.int32(-1))
        is_token = (token >= 0) & (token < counts.shape[1])
        in_output = is_token & (place >= own.prompt_lens[row])
        if interpret:  # the interpreter has no such atomics, and runs one program after the other
            old, nothing = counts[...], jnp.zeros(counts.shape, jnp.int32)
            at = row, jnp.where(is_token, token, counts.shape[1])
            added = nothing.at[at].add(jnp.where(in_output, _IN_OUTPUT, 0), mode="drop")
            counts[...] = (old | nothing.at[at].set(1, mode="drop")) + added
            return
        plt.atomic_or(counts, (row, token), jnp.ones_like(token), mask=is_token)
        plt.atomic_add(counts, (row, token), jnp.full_like(token, _IN_OUTPUT), mask=in_output)


def _change(given: _Given, counts, out) -> None:
    """Writes a tile of changed logits, without bias and impossible tokens."""
    row, tile = pl.program_id(0), pl.program_id(1)
    token = tile * _TILE + jnp.arange(_TILE, dtype=jnp.int32)
    exists = token < out.shape[1]

    @pl.when(given.changes.changed[row] > 0)
    def _():
        z = plt.load(given.logits.at[row, token], mask=exists, other=jnp.float32(0))
        plt.store(out.at[row, token], _changed(given.changes, counts, z, row, token, exists), mask=exists)


def _change_few(given: _Given, counts, _changed_logits, out) -> None:
    """Changes the tokens of a row that have a bias or are impossible."""
    row, own = pl.program_id(0), given.changes
    vocab = out.shape[1]

    def column(ref, other) -> Array:
        number = jnp.arange(pl.next_power_of_2(ref.shape[1]), dtype=jnp.int32)
        return plt.load(ref.at[row, number], mask=number < ref.shape[1], other=jnp.asarray(other, ref.dtype))

    @pl.when(own.changed[row] > 0)
    def _():
        token, banned = column(own.bias_ids, vocab), column(own.banned_ids, vocab)
        exists = (token >= 0) & (token < vocab)
        z = plt.load(given.logits.at[row, token], mask=exists, other=jnp.float32(0)) + column(own.bias_values, 0)
        z = _changed(own, counts, z, row, token, exists)
        is_banned = jnp.max((token[:, None] == banned[None, :]).astype(jnp.int32), axis=1) > 0
        plt.store(out.at[row, token], jnp.where(is_banned, -jnp.inf, z), mask=exists)
        nothing = jnp.full(banned.shape, -jnp.inf, jnp.float32)
        plt.store(out.at[row, banned], nothing, mask=(banned >= 0) & (banned < vocab))


def _changed(changes: LogitChanges, counts, z: Array, row: Array, token: Array, exists: Array) -> Array:
    """Penalties and masks of the logits `z` of some tokens that exist."""
    is_penalised = changes.seq_lens[row] > 0
    count = plt.load(counts.at[row, token], mask=exists & is_penalised, other=jnp.int32(0))
    repetition, generated = changes.repetition[row], (count // _IN_OUTPUT).astype(jnp.float32)
    penalised = jnp.where(z > 0, z / repetition, z * repetition) - changes.frequency[row] * generated
    penalised = jnp.where(generated > 0, penalised - changes.presence[row], penalised)
    z = jnp.where(count > 0, penalised, z)
    words, is_masked = changes.masks.shape[1], changes.masked[row] > 0
    word = plt.load(changes.masks.at[row, token % words], mask=exists & is_masked, other=jnp.uint32(0))
    is_allowed = jax.lax.shift_right_logical(word, (token // words).astype(jnp.uint32)) & 1
    return jnp.where(is_masked & (is_allowed == 0), -jnp.inf, z)
