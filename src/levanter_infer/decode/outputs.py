"""The results of a round: `OutputRing` while it runs, `RoundOutputs` when it ends, `RoundResult` on the host."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from levanter_infer.cache.arrays import cumsum, full, gather_together, replace
from levanter_infer.decode.codes import RUNNING, WAITING
from levanter_infer.decode.sampling import SampleOutput
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import Counters, DecodeState


class OutputRing(eqx.Module):
    """Sampled tokens in the order of sampling; entries from `count` on are stale."""

    slot_ids: Int32[Array, " output"]
    tokens: Int32[Array, " output"]
    logprobs: Float32[Array, " output"]
    """Log probabilities under the model."""
    processed_logprobs: Float32[Array, " output"]
    """Log probabilities under the distribution that was sampled from."""
    top_ids: Int32[Array, "top output"]
    top_logprobs: Float32[Array, "top output"]
    """Outputs last: a TPU fills the last axis up to a multiple of 128."""
    count: Int32[Array, ""]

    @staticmethod
    def init(size: int, max_top: int) -> "OutputRing":
        return OutputRing(
            slot_ids=full(size, 0),
            tokens=full(size, 0),
            logprobs=full(size, 0, jnp.float32),
            processed_logprobs=full(size, 0, jnp.float32),
            top_ids=full((max_top, size), 0),
            top_logprobs=full((max_top, size), 0, jnp.float32),
            count=jnp.int32(0),
        )

    @property
    def size(self) -> int:
        return self.tokens.shape[-1]

    def push(self, emits: Array, slots: Array, sampled: SampleOutput) -> "OutputRing":
        """Append the rows in the mask `emits`, bool[row]. Requires: as many entries as there are rows are free."""
        rank = cumsum(emits)
        entries = jnp.arange(1, emits.shape[0] + 1, dtype=jnp.int32)
        # The row of each new entry. Entries behind them repeat the last row, and are stale: so all are one piece.
        found = jnp.searchsorted(rank, entries, side="left", method="compare_all").astype(jnp.int32)
        rows = jnp.minimum(found, emits.shape[0] - 1)
        columns = dict(
            slot_ids=slots,
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            processed_logprobs=sampled.processed_logprobs,
        )
        chosen = gather_together(columns, rows, dict.fromkeys(columns, 0))
        chosen |= {"top_ids": sampled.top_ids[rows].T, "top_logprobs": sampled.top_logprobs[rows].T}

        def put(name, values):
            start = (*[jnp.int32(0)] * (values.ndim - 1), self.count)
            return jax.lax.dynamic_update_slice(getattr(self, name), values, start)

        return replace(
            self, count=self.count + rank[-1], **{name: put(name, values) for name, values in chosen.items()}
        )


class RoundOutputs(eqx.Module):
    """One download per round: everything of fixed small size in one int32 array.

    `packed` is scalars, then status, finish reason, `seq_lens` and `num_cached` of every slot, then the ring's slot
    ids, tokens and the bits of both logprobs. The likeliest tokens stay apart: they are read only if a request wants
    them.
    """

    packed: Array
    top_ids: Array
    top_logprobs: Array


_STATE_SCALARS = (
    "cached_pages",
    "count",
    "free_pages",
    "host_call",
    "running",
    "waiting",
    "stored_tokens",
    "refs_max",
    "refs_sum",
)
_SCALARS = (*_STATE_SCALARS, *Counters.__annotations__)
_MAXIMA = ("refs_max",)
"""Scalars of a round of which the largest of all ranks counts; of the others the sum."""


def pack_outputs(state: DecodeState, ring: OutputRing, host_call: Array) -> RoundOutputs:
    """Args: host_call: of `kv_offload.host_call`, whether the host should move pages."""
    table, ref_counts, prefix = state.sequences, state.page_table.ref_counts, state.prefix
    scalars = {
        "count": ring.count,
        "cached_pages": jnp.int32(0)
        if prefix is None
        else jnp.sum(prefix.findable(jnp.arange(prefix.num_pages)), dtype=jnp.int32),
        "host_call": host_call,
        "free_pages": state.page_table.num_free,
        "running": jnp.sum(table.is_status(RUNNING), dtype=jnp.int32),
        "waiting": jnp.sum(table.is_status(WAITING), dtype=jnp.int32),
        "stored_tokens": jnp.sum(table.num_computed, dtype=jnp.int32),
        "refs_max": jnp.max(ref_counts),
        "refs_sum": jnp.sum(ref_counts, dtype=jnp.int32),
        **{name: getattr(state.counters, name) for name in Counters.__annotations__},
    }
    bits = [jax.lax.bitcast_convert_type(a, jnp.int32) for a in (ring.logprobs, ring.processed_logprobs)]
    packed = jnp.concatenate(
        [
            jnp.stack([scalars[name] for name in _SCALARS]),
            table.status,
            table.finish_reason,
            table.seq_lens,
            table.num_cached,
            ring.slot_ids,
            ring.tokens,
            *bits,
        ]
    )
    return RoundOutputs(packed=packed, top_ids=ring.top_ids, top_logprobs=ring.top_logprobs)


class HostOutputs:
    """`RoundOutputs` on the host, unpacked into numpy arrays of the entries in use."""

    def __init__(self, outputs: RoundOutputs, shapes: Shapes, rank: int | None = None):
        """Args: rank: of several data-parallel ranks, the one to unpack; None: the arrays have no axis of ranks."""
        packed = np.asarray(outputs.packed)
        packed = packed if rank is None else packed[rank]
        scalars, rest = packed[: len(_SCALARS)], packed[len(_SCALARS) :]
        self.scalars: dict[str, int] = dict(zip(_SCALARS, scalars.tolist(), strict=True))
        per_slot, ring = rest[: 4 * shapes.num_slots], rest[4 * shapes.num_slots :]
        self.status, self.finish_reason, self.seq_lens, self.num_cached = per_slot.reshape(4, shapes.num_slots)
        count = self.scalars["count"]
        slot_ids, tokens, logprobs, processed = ring.reshape(4, -1)[:, :count]
        self.slot_ids, self.tokens = slot_ids, tokens
        self.logprobs, self.processed_logprobs = logprobs.view(np.float32), processed.view(np.float32)
        self._outputs, self._count, self._rank = outputs, count, rank

    def top(self) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, logprobs) of the likeliest tokens of each entry, [count, max_logprobs]: a download of its own."""
        arrays = (np.asarray(array) for array in (self._outputs.top_ids, self._outputs.top_logprobs))
        ids, logprobs = (array if self._rank is None else array[self._rank] for array in arrays)
        return ids[:, : self._count].T, logprobs[:, : self._count].T


class RoundResult:
    """The outputs of a round on the host; waits for its end.

    Args:
        num_ranks: data-parallel ranks. The outputs of one have no axis of ranks.
    """

    def __init__(self, outputs: RoundOutputs, shapes: Shapes, num_ranks: int):
        ranks = range(num_ranks) if num_ranks > 1 else (None,)
        self.ranks = [HostOutputs(outputs, shapes, rank) for rank in ranks]
        scalars = [rank.scalars for rank in self.ranks]
        self.scalars = {name: (max if name in _MAXIMA else sum)(of[name] for of in scalars) for name in scalars[0]}
        """Scalars of all ranks together: sums, and maxima of `_MAXIMA`."""

    @property
    def steps(self) -> list[int]:
        """Steps of each rank since the last reset."""
        return [rank.scalars["steps"] for rank in self.ranks]
