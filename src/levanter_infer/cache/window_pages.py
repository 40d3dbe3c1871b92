"""`WindowPages`: where the layers with a sliding window have stored a page, and the pages that are free for them."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from levanter_infer.cache.arrays import full, gather, replace, scatter
from levanter_infer.cache.page_math import page_of
from levanter_infer.cache.page_table import PageTable


class WindowPages(eqx.Module):
    """The pages of the layers with one sliding window: a *window page* for each page that a window reaches into.

    The tables know one page for the tokens of all layers (`SequenceTable.page_indices`). In the pools of these layers
    the same tokens are stored in the window page that is attached to it. So a prefix, a fork or a copy that shares a
    page shares its window page, and no table of sequences is kept here.

    A slot holds the window pages of its pages from `first_column` on: those that its next query can see. A window page
    that no slot holds is free, but stays attached until it is allocated again, so that a prefix that is found again
    brings its last window along.
    Source: the groups of vLLM's hybrid KV cache manager, which keep a table of pages for each kind of layer.
    """

    table: PageTable
    """The window pages. References: slots whose window reaches into the page."""
    attached: Int32[Array, " page"]
    """Window page of each page; none is the number of window pages."""
    owner: Int32[Array, " window_page"]
    """The page that each window page is attached to; none is the number of pages."""
    window: int = eqx.field(static=True)
    """Tokens that a query sees, its own included."""

    @staticmethod
    def init(window: int, num_window_pages: int, num_pages: int, page_size: int) -> "WindowPages":
        """Every window page free, and none attached."""
        return WindowPages(
            table=PageTable.init(num_window_pages, page_size),
            attached=full(num_pages, num_window_pages),
            owner=full(num_window_pages, num_pages),
            window=window,
        )

    @property
    def num_pages(self) -> int:
        """Window pages; an absent one is this number."""
        return self.table.num_pages

    @property
    def num_free(self) -> Array:
        """i32[]"""
        return self.table.num_free

    def first_column(self, computed: Array) -> Array:
        """Column of the first page that a query at position `computed` or later can see; like `computed`."""
        return page_of(jnp.maximum(computed - (self.window - 1), 0), self.table.page_size)

    def of(self, pages: Array) -> Array:
        """The window page of each of `pages`, of any shape; none where there is none."""
        return gather(self.attached, pages, self.num_pages)

    def seen_from(self, page_indices: Array, computed: Array, most: int) -> Array:
        """The window pages at the columns that rows see, i32[row, seq_page]; none at the others.

        Only those columns are looked up: a few of a long sequence, whose lookups one by one would cost a TPU more than
        a layer.

        Args:
            page_indices: i32[row, seq_page]
            computed: i32[row], position of each row's first query.
            most: static bound of the queries of a row.
        """
        width = min(self.most_columns(most), page_indices.shape[1])
        first = self.first_column(computed)
        padded = jnp.pad(page_indices, ((0, 0), (0, width)), constant_values=self.attached.shape[0])
        seen = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (width,)))(padded, first)
        none = jnp.full_like(padded, self.num_pages)
        pages = jax.vmap(lambda row, own, at: jax.lax.dynamic_update_slice(row, own, (at,)))(none, self.of(seen), first)
        return pages[:, : page_indices.shape[1]]

    def most_columns(self, queries: int) -> int:
        """Columns that `queries` consecutive queries see together, at most."""
        return (self.window + queries + self.table.page_size - 3) // self.table.page_size + 1

    def attach(self, pages: Array, count: Array) -> "WindowPages":
        """Allocate a window page for each of `pages` i32[n], of which the first `count` are not none, with a reference.

        The window pages that were attached to them, and those that are taken from other pages, are detached.
        Requires: as many free window pages; no slot holds a window page of `pages`.
        """
        table, taken = self.table.allocate(count, pages.shape[0])
        owner = scatter(self.owner, self.of(pages), self.attached.shape[0])
        attached = scatter(self.attached, gather(owner, taken, self.attached.shape[0]), self.num_pages)
        return replace(self, table=table, attached=scatter(attached, pages, taken), owner=scatter(owner, taken, pages))
