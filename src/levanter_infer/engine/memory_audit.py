"""`audit`: pages of the pool that sequences hold, and how much of them is filled."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.state import DecodeState
from levanter_infer.engine.metrics import Value


@dataclasses.dataclass(frozen=True)
class MemoryAudit:
    """Memory of a `DecodeState` at one moment, in tokens and pages."""

    page_size: int
    pages_in_use: int
    live_tokens: int
    """Tokens whose keys and values are stored; a token that several sequences share counts once."""
    table_bytes: int
    """Bytes of everything but the pool."""
    refcounts: dict[int, int]
    """Pages by reference count."""
    slot_pages: dict[int, int]
    """Pages per slot that holds any."""
    slot_tokens: dict[int, int]
    """Known tokens per slot that holds pages, stored or not."""
    windows: tuple["WindowAudit", ...] = ()
    """Audits of the pages of layers with a sliding window, as `Shapes.windows`."""

    @property
    def wasted_tokens(self) -> int:
        """Unfilled tokens of pages in use."""
        return self.pages_in_use * self.page_size - self.live_tokens

    def reserved_bytes(self, page_bytes: Sequence[int]) -> int:
        """Bytes of the pages in use. Args: page_bytes: as in `metrics`."""
        in_use = (self.pages_in_use, *(each.pages_in_use for each in self.windows))
        return sum(pages * each for pages, each in zip(in_use, page_bytes, strict=True))

    def live_bytes(self, page_bytes: Sequence[int]) -> int:
        """Bytes of the tokens that they store. Args: page_bytes: as in `metrics`."""
        live = (self.live_tokens, *(each.live_tokens for each in self.windows))
        return sum(tokens * each // self.page_size for tokens, each in zip(live, page_bytes, strict=True))

    def overhead(self, *, page_bytes: Sequence[int], weights_bytes: int) -> float:
        """Memory in use over the theoretical minimum, which is weights and stored K/V; less 1."""
        used = weights_bytes + self.table_bytes + self.reserved_bytes(page_bytes)
        return used / (weights_bytes + self.live_bytes(page_bytes)) - 1

    def metrics(self, *, page_bytes: Sequence[int], weights_bytes: int) -> dict[str, Value]:
        """Values of the "state" metrics.

        Args:
            page_bytes: bytes per page in all layers that store it, and per window page of each window.
            weights_bytes: bytes of the model.
        """
        reserved, live = self.reserved_bytes(page_bytes), self.live_bytes(page_bytes)
        return {
            "reserved_bytes": reserved,
            "live_bytes": live,
            "wasted_bytes": reserved - live,
            "table_bytes": self.table_bytes,
            "memory_overhead": self.overhead(page_bytes=page_bytes, weights_bytes=weights_bytes),
            "refcount_histogram": {str(count): pages for count, pages in self.refcounts.items()},
            "slot_pages": {str(slot): pages for slot, pages in self.slot_pages.items()},
            "slot_tokens": {str(slot): tokens for slot, tokens in self.slot_tokens.items()},
        }


@dataclasses.dataclass(frozen=True)
class WindowAudit:
    """Window pages that sequences hold."""

    pages_in_use: int
    live_tokens: int
    """Tokens that these store; those that several sequences share count once."""


def audit(state: DecodeState) -> MemoryAudit:
    """Audit a state; fetches its tables from the device and waits for the rounds under way."""
    size, num_pages = state.page_table.page_size, state.page_table.num_pages
    table = state.sequences
    computed, lens, pages, counts = (
        np.asarray(column)
        for column in (table.num_computed, table.seq_lens, table.page_indices, state.page_table.ref_counts)
    )
    if pages.ndim == 3:  # one pool per data-parallel rank, concatenated
        rank = np.arange(len(pages))[:, None, None]
        pages = np.where(pages < num_pages, pages + rank * num_pages, num_pages * len(pages))
        num_pages *= len(pages)
        computed, lens, pages, counts = (a.reshape(-1, *a.shape[2:]) for a in (computed, lens, pages, counts))
    first = np.arange(pages.shape[1]) * size
    filled = np.clip(computed[:, None] - first, 0, size)
    held = filled > 0
    most = np.zeros(num_pages, np.int64)
    np.maximum.at(most, pages[held], filled[held])  # holders of one page may have filled it to different offsets
    references, times = np.unique(counts, return_counts=True)
    num_held = held.sum(axis=1)
    holders = np.flatnonzero(num_held).tolist()
    return MemoryAudit(
        page_size=size,
        pages_in_use=int((counts > 0).sum()),
        live_tokens=int(most.sum()),
        table_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        refcounts=dict(zip(references.tolist(), times.tolist(), strict=True)),
        slot_pages={slot: int(num_held[slot]) for slot in holders},
        slot_tokens={slot: int(lens[slot]) for slot in holders},
        windows=tuple(_audit_window(each, most) for each in state.windows),
    )


def _audit_window(window: WindowPages, filled: np.ndarray) -> WindowAudit:
    """Args: filled: tokens that each page of the tables stores, those of all ranks concatenated."""
    counts, attached = np.asarray(window.table.ref_counts), np.asarray(window.attached)
    if attached.ndim == 2:
        num, rank = counts.shape[1], np.arange(len(attached))[:, None]
        attached = np.where(attached < num, attached + rank * num, num * len(attached))
    counts, attached = counts.reshape(-1), attached.reshape(-1)
    held = np.append(counts > 0, False)[np.minimum(attached, len(counts))]
    return WindowAudit(pages_in_use=int((counts > 0).sum()), live_tokens=int(filled[held].sum()))
