"""Static sizes of the `tpu` implementation, and the scratch memory that follows from them."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.tpu.pool import LANES, TpuPool
from levanter_infer.kernels.tpu.word_rows import copied_dtype, packing

SUBLANES = 8
"""Rows of a register of 32-bit numbers."""
OUT_SLOTS = 2
"""Output buffers: one is filled while the other is stored to HBM."""


def align_queries(heads_per_group: int) -> int:
    """Fewest queries that fill whole tiles of 16 rows."""
    return 16 // math.gcd(heads_per_group, 16)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Static sizes of one path, decode or prefill."""

    pages: int
    """Pages of a KV block; a power of two."""
    slots: int
    """KV buffers: the kernel computes on one while the others are being filled. At least 2."""
    parts: int
    """Grid steps that share the groups of heads, each with a pipeline of its own; divides the groups. A chip with two
    cores runs two of them at once."""
    queries: int = 1
    """Queries of a query block: 1 for decode; else a power of two times `align_queries`."""
    row_shares: int = 1
    """Grid steps that share the rows of each part, or their query blocks: every so-manyth is one step's."""

    @property
    def id_chunks(self) -> int:
        """Copies of 128 page ids per work item."""
        return max(1, self.pages // LANES)


class Scratch(NamedTuple):
    """Scratch memory of one grid step. `slots`, `pages` and `parts` are those of the `Tile`."""

    acc_ref: Any
    """VMEM: running sum of p · v. Decode: f32[groups * value_tiles, rows, 128]; prefill: f32[groups, numbers of a
    value, columns]."""
    m_ref: Any
    """VMEM: running maximum. Decode: f32[groups, rows, 128], the same in all lanes; prefill: f32[groups, 8, columns],
    the same in all sublanes."""
    page_ids_buf: Any
    """SMEM i32[slots + 1, id_chunks, 1, 128]: page ids of each work item."""
    page_ids_sem: Any
    """DMA semaphores [slots + 1]."""
    items: Any
    """SMEM i32[slots + 1, 16]: the fields (`work_items.Item`) of the current work item and of those after it."""
    kv_buf: Any
    """VMEM [slots, pages, slabs, page_size, 128], the pool's dtype: keys and values of each work item, and all else
    that its pages hold."""
    kv_sem: Any
    """DMA semaphores [slots]; the copies of all pages of an item signal the same one."""
    out_buf: Any
    """VMEM [OUT_SLOTS, out_tiles, rows, 128], the dtype of q: outputs of a query block, of as many rows as `q_buf`, for
    prefill as `word_rows` in the dtype that `copied_dtype` gives, for decode as `word_rows` where parts share them."""
    out_sem: Any
    """DMA semaphores [OUT_SLOTS]."""
    out_tokens: Any
    """SMEM i32[OUT_SLOTS]: number of queries whose outputs are in a buffer."""
    q_buf: Any
    """VMEM [slots, q_tiles, rows, 128], the operands' dtype: queries of a query block; for prefill with as many rows as
    there are columns, as `word_rows` in the dtype that `copied_dtype` gives."""
    q_sem: Any
    """DMA semaphores [slots]."""
    l_ref: Any
    """VMEM, of the shape of m: running denominator, one partial sum per lane, for prefill per sublane."""
    q_columns_ref: Any = None
    """Prefill with `Sizes.transposes_queries`: VMEM [groups, columns / 128, numbers of a query, 128], the queries of
    the current query block, in slabs of 128 columns."""
    factor_ref: Any = None
    """Prefill: VMEM, of the shape of m: factor of acc and l, for the maximum of the keys whose scores are stored."""
    score_ref: Any = None
    """Prefill: VMEM f32[groups, tokens, columns]: scores of a work item."""
    value_ref: Any = None
    """Prefill: VMEM [groups, tokens / width, numbers of a value, width], the operands' dtype: its values, transposed,
    in slabs of `Sizes.value_width` keys."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes that a kernel's body uses."""

    tile: Tile
    pool: TpuPool
    page_size: int
    q_per_kv: int
    """Query heads per kv head."""
    rows: int
    """Rows of a query block for one group of heads: pairs of query and head, padded."""
    operand: jnp.dtype
    """Dtype of the matmuls' operands."""
    invariant: bool = False
    """Whether the prefill path computes rows of one query too, and the same sub-blocks of keys for every query."""
    adds_late: bool = False
    """Whether prefill multiplies the values of some keys after it has computed the scores of the next ones."""
    transposes_queries: bool = False
    """Whether prefill transposes the queries of a query block once, and not in each matmul."""
    interpreted: bool = False
    """Whether Pallas interprets the kernel."""
    vmem_bytes: int | None = None
    """Bytes of VMEM that the kernel may take; None for the compiler's default."""
    in_words: bool = False
    """Whether decode converts int8 by shifts of 32-bit words, and so in another order of keys (`scales`)."""
    sharing: int = 1
    """Decode: neighbouring groups of heads whose queries stand in the same rows, group behind group; divides the groups
    of a part, or is divided by them. Each group is computed for all rows, and its own are used."""

    @property
    def least_queries(self) -> int:
        """Fewest queries of the rows that the prefill path computes."""
        return 1 if self.invariant else 2

    @property
    def columns(self) -> int:
        """The rows as lanes of prefill's scores: filled up to whole registers. What the added ones hold is never
        read."""
        return -(-self.rows // LANES) * LANES

    @property
    def tokens(self) -> int:
        """Keys of a KV block."""
        return self.tile.pages * self.page_size

    @property
    def subblock_pages(self) -> int:
        """Pages that a masked computation takes at once: a quarter of a KV block, so that a short sequence computes
        little more than its own keys."""
        pages = self.tile.pages
        for _ in range(2):
            if pages % 2 == 0 and pages // 2 * self.page_size >= LANES:
                pages //= 2
        return pages

    @property
    def value_width(self) -> int:
        """Keys per slab of transposed values. In slabs of 128 keys every register is what a matmul takes; slices of
        longer rows are unpacked and packed again by a v4."""
        return math.gcd(self.subblock_pages * self.page_size, LANES)

    @property
    def groups(self) -> int:
        """Groups of kv heads per part."""
        return self.pool.groups // self.tile.parts

    @property
    def sharing_parts(self) -> int:
        """Parts whose groups share rows: they read the same tiles of queries, and each stores its rows of the same
        tiles of outputs."""
        return max(1, self.sharing // self.groups)

    @property
    def q_tiles(self) -> int:
        """Tiles of 128 lanes per row of queries of a part."""
        return max(1, self.groups // self.sharing) * self.pool.query_tiles

    @property
    def out_tiles(self) -> int:
        """Tiles of 128 lanes per row of outputs of a part."""
        return max(1, self.groups // self.sharing) * self.pool.value_tiles

    @property
    def heads_per_group(self) -> int:
        """Query heads per group."""
        return self.pool.heads_per_group * self.q_per_kv

    @property
    def number_slabs(self) -> int:
        """Slabs per part that hold keys, values and index keys."""
        return self.pool.sides * self.groups * self.pool.lane_tiles + self.pool.index_slabs

    @property
    def copied_slabs(self) -> int:
        """All slabs per part, with the scales' and that of chosen keys."""
        return self.number_slabs + self.pool.scaled + self.pool.masked

    def keys(self, group: int, t: int) -> int:
        """Index of a slab of a group's keys, or of the slab of chosen keys for the tile of queries behind those."""
        if t == self.pool.lane_tiles:
            return self.copied_slabs - 1
        return self.pool.sides * group * self.pool.lane_tiles + t

    def values(self, group: int, t: int) -> int:
        """Index of a slab of a group's values."""
        return self.keys(group, t) + (self.pool.sides - 1) * self.pool.lane_tiles

    @property
    def q_block(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the queries of a query block."""
        return self._block(self.q_tiles, self.operand, in_word_rows=self.tile.queries > 1)

    def out_block(self, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the outputs of a query block, for queries of `dtype`."""
        return self._block(self.out_tiles, dtype, in_word_rows=self.tile.queries > 1 or self.sharing_parts > 1)

    def _block(self, tiles: int, dtype: jnp.dtype, *, in_word_rows: bool) -> jax.ShapeDtypeStruct:
        rows = self.rows
        if self.tile.queries > 1:
            rows, dtype = self.columns, copied_dtype(dtype, self.heads_per_group)
        pack = packing(dtype)
        return jax.ShapeDtypeStruct((tiles, rows // pack, pack, LANES) if in_word_rows else (tiles, rows, LANES), dtype)

    def scratch(self, kv_dtype, q_dtype) -> Scratch:
        tile, dma = self.tile, pltpu.SemaphoreType.DMA
        page, is_prefill, f32 = (self.copied_slabs, self.page_size, LANES), tile.queries > 1, jnp.float32
        rows, value = self.columns if is_prefill else self.rows, self.pool.value_tiles * LANES
        q_block, out_block = self.q_block, self.out_block(q_dtype)
        q_columns = (self.groups, rows // LANES, self.pool.query_tiles * LANES, LANES)
        per_group = pltpu.VMEM((self.groups, *((SUBLANES, rows) if is_prefill else (rows, LANES))), f32)
        prefill = dict(
            acc_ref=pltpu.VMEM((self.groups, value, rows), f32),
            q_columns_ref=pltpu.VMEM(q_columns, self.operand) if self.transposes_queries else None,
            factor_ref=per_group,
            score_ref=pltpu.VMEM((self.groups, self.tokens, rows), f32),
            value_ref=pltpu.VMEM((self.groups, self.tokens // self.value_width, value, self.value_width), self.operand),
        )
        sums = pltpu.VMEM((self.groups * self.pool.value_tiles, rows, LANES), f32)
        own = prefill if is_prefill else dict(acc_ref=sums)
        return Scratch(
            m_ref=per_group,
            page_ids_buf=pltpu.SMEM((tile.slots + 1, tile.id_chunks, 1, LANES), jnp.int32),
            page_ids_sem=dma((tile.slots + 1,)),
            items=pltpu.SMEM((tile.slots + 1, 16), jnp.int32),
            kv_buf=pltpu.VMEM((tile.slots, tile.pages, *page), kv_dtype),
            kv_sem=dma((tile.slots,)),
            out_buf=pltpu.VMEM((OUT_SLOTS, *out_block.shape), out_block.dtype),
            out_sem=dma((OUT_SLOTS,)),
            out_tokens=pltpu.SMEM((OUT_SLOTS,), jnp.int32),
            q_buf=pltpu.VMEM((tile.slots, *q_block.shape), q_block.dtype),
            q_sem=dma((tile.slots,)),
            l_ref=per_group,
            **own,
        )
