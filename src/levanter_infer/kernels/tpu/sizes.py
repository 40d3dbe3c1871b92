"""Static sizes of the `tpu` implementation."""

import dataclasses
import math

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.tpu.pool import LANES, TpuPool

OUT_SLOTS = 2


def align_queries(heads_per_group: int) -> int:
    """Queries whose rows fill whole tiles of 16 rows: where a row of the batch may begin."""
    return 16 // math.gcd(heads_per_group, 16)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Static sizes of a path."""

    pages: int
    """Pages of an item; a power of two."""
    slots: int
    """Items whose pages have room at once: one is computed, the others are on their way. At least 2."""
    parts: int
    """Parts that the groups of heads are cut into, each walking by itself; divides the groups. On a chip with two cores
    they share the parts."""
    queries: int = 1
    """Queries of a block: 1 for rows of one query; else a power of two times `align_queries`."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel's body needs to know of the shapes."""

    tile: Tile
    pool: TpuPool
    page_size: int
    q_per_kv: int
    rows: int
    """Rows of a block of queries for one group of heads: pairs of query and head, padded."""
    operand: jnp.dtype
    """Of the matmuls."""

    @property
    def tokens(self) -> int:
        """Keys of an item."""
        return self.tile.pages * self.page_size

    @property
    def narrow_pages(self) -> int:
        """Pages that a masked computation takes at once: a quarter of an item, so that a short sequence pays for
        little."""
        pages = self.tile.pages
        for _ in range(2):
            if pages % 2 == 0 and pages // 2 * self.page_size >= LANES:
                pages //= 2
        return pages

    @property
    def groups(self) -> int:
        """Of a part."""
        return self.pool.groups // self.tile.parts

    @property
    def q_tiles(self) -> int:
        """Tiles of 128 lanes that a row of queries of a part has."""
        return self.groups * self.pool.lane_tiles

    @property
    def heads_per_group(self) -> int:
        """Query heads."""
        return self.pool.heads_per_group * self.q_per_kv

    @property
    def number_slabs(self) -> int:
        """Slabs of a part that hold keys and values."""
        return 2 * self.q_tiles

    @property
    def slabs(self) -> int:
        """All of a part."""
        return self.number_slabs + self.pool.scaled

    @property
    def id_chunks(self) -> int:
        """Rows of 128 page ids that an item's lie in."""
        return max(1, self.tile.pages // LANES)

    def keys(self, group: int, t: int) -> int:
        """Slab of a group's keys."""
        return 2 * group * self.pool.lane_tiles + t

    def values(self, group: int, t: int) -> int:
        return self.keys(group, t) + self.pool.lane_tiles

    def scratch(self, kv_dtype, q_dtype) -> dict:
        """What a walk needs, and room for queries and outputs."""
        tile, dma = self.tile, pltpu.SemaphoreType.DMA
        page = (self.slabs, self.page_size, LANES)
        block = (self.q_tiles, self.rows, LANES)
        return dict(
            items=pltpu.SMEM((tile.slots + 1, 16), jnp.int32),
            ids_buf=pltpu.SMEM((tile.slots + 1, self.id_chunks, 1, LANES), jnp.int32),
            kv_buf=pltpu.VMEM((tile.slots, tile.pages, *page), kv_dtype),
            q_buf=pltpu.VMEM((tile.slots, *block), self.operand),
            out_buf=pltpu.VMEM((OUT_SLOTS, *block), q_dtype),
            ids_sem=dma((tile.slots + 1,)),
            kv_sem=dma((tile.slots,)),
            q_sem=dma((tile.slots,)),
            out_sem=dma((OUT_SLOTS,)),
            out_tokens=pltpu.SMEM((OUT_SLOTS,), jnp.int32),
        )
