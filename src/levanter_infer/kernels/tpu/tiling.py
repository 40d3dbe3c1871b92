"""Tiles of the attention for TPUs: those that a search found, and proposals from shapes, data type and chip.

The compiler decides whether a tile fits. `scripts/search_tiles.py --write` puts into the table tiles that compile, with
the shortest loops.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from levanter_infer.kernels.tpu.choice import MAX_QUERIES
from levanter_infer.kernels.tpu.pool import LANES, TpuPool
from levanter_infer.kernels.tpu.sizes import Tile, align_queries
from levanter_infer.kernels.tpu.word_rows import copied_dtype

GENERATIONS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
"""Generations by jax's `device_kind`."""
_CORES = {"v4": 2, "v5p": 2}
"""TensorCores that share one device's memory; 1 elsewhere."""
_DECODE_BYTES = 12 << 20
"""Bytes of all KV buffers of the decode path: the rest of 16 MiB of VMEM holds queries, m, l, acc and spills."""
_DECODE_TILES = 64
"""Tiles of 128 keys, all heads together, per KV block of the decode path: enough that their latencies hide behind each
other."""
_LATENT_TOKENS = 2048
"""Keys per KV block of the decode path for latents, at least: many query heads share them, and the latencies of their
softmax weigh less with more keys."""
_PREFILL_ROWS = 1024
"""Rows, pairs of query and head, per query block of the prefill path."""
_PREFILL_TOKENS = 512, 1024
"""Keys per KV block of the prefill path, at least and at most. The work that is done once per stripe of queries and KV
block weighs less with more keys; but of a query block's last KV block all keys are computed with masks."""
_PREFILL_TILES = {"v6e": (16, 32)}
"""Tiles of 128 keys, all heads of a part together, per KV block of the prefill path: of few heads, whose KV blocks are
longer than others', and of many, at most; 8 of both elsewhere. A turn of its loop begins and ends with the latency of
the matrix unit, which weighs less with more of them."""
_VMEM_BYTES = {"v6e": 64 << 20}
"""VMEM that the prefill path may take. The compiler's default is 16 MiB, which is all that a core of v4 has, and 32 on
v6e, which has 128."""

_INVARIANT_ROWS = 128
"""Rows per query block where decode tokens are chunks too (`invariant_tile`): those that the lanes of scores hold."""


@dataclass(frozen=True)
class Tiles:
    """Static sizes of one call."""

    decode: Tile
    """Tile for rows with one query."""
    prefill: Tile
    """Tile for rows with more queries (prompt chunks)."""


@dataclass(frozen=True)
class TileShape:
    """The sizes that tiles depend on; those of one device's share under a mesh."""

    generation: str | None
    """v4, v5e, v5p or v6e; None without a TPU."""
    kv_heads: int
    head_dim: int
    q_per_kv: int
    page_size: int
    kv_dtype: str = "bfloat16"
    value_dim: int | None = None
    """`TpuPool.value_dim`."""
    index_dim: int = 0
    masked: bool = False
    """As in `TpuPool`."""

    @property
    def cores(self) -> int:
        return cores_of(self.generation)

    @property
    def pool(self) -> TpuPool:
        sizes = self.kv_heads, self.head_dim, self.kv_dtype == "int8", self.value_dim
        return TpuPool(*sizes, self.index_dim, self.masked)

    @property
    def page_bytes(self) -> int:
        return self.pool.copied_slabs * self.page_size * LANES * jnp.dtype(self.kv_dtype).itemsize


def generation() -> str | None:
    """The generation of the TPU that is compiled for; None if it is unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return GENERATIONS.get(kind)


def cores_of(generation: str | None) -> int:
    """TensorCores that share one device's memory."""
    return _CORES.get(generation or "", 1)


def shifts_words() -> bool:
    """Whether the chip has no instruction from 8-bit to 16-bit numbers, so that shifts are quicker."""
    return generation() == "v4"


def adds_late() -> bool:
    """Whether `Sizes.adds_late` makes the loop of the prefill path shorter."""
    return generation() in ("v5e", "v5p")


def transposes_queries() -> bool:
    """Whether `Sizes.transposes_queries` makes the loop of the prefill path shorter."""
    return generation() != "v4"


def vmem_bytes() -> int | None:
    """`Sizes.vmem_bytes` of the prefill path."""
    return _VMEM_BYTES.get(generation() or "")


def propose(shape: TileShape) -> Tiles:
    """Tiles that are expected to fit into VMEM and to run near the best."""
    pool, page_size, page_bytes = shape.pool, shape.page_size, shape.page_bytes
    parts = min(shape.cores, pool.groups) if pool.groups % shape.cores == 0 else 1
    while 3 * page_bytes > _DECODE_BYTES * parts and pool.groups % (2 * parts) == 0:
        parts *= 2
    groups = pool.groups // parts * pool.lane_tiles
    tokens = min(max(_DECODE_TILES // groups, 1) * LANES, 4096)
    if shape.value_dim is not None:
        tokens = max(tokens, _LATENT_TOKENS)
    pages = _floor_power(max(1, tokens // page_size))
    while pages > 1 and 3 * pages * page_bytes > _DECODE_BYTES * parts:
        pages //= 2
    slots = 3 if 3 * pages * page_bytes <= _DECODE_BYTES * parts else 2
    per_group = shape.q_per_kv * pool.heads_per_group
    align = align_queries(per_group)
    has_wide_queries = copied_dtype(jnp.bfloat16, per_group) != jnp.bfloat16
    rows = _PREFILL_ROWS // (max(1, pool.lane_tiles // 2) if _is_wide(shape) else 1)
    if has_wide_queries:
        rows //= pool.lane_tiles
    queries = align * _floor_power(max(1, rows // per_group // align))
    queries = min(queries, MAX_QUERIES) if shape.masked else queries
    prefill_parts, tokens = _prefill_sizes(shape)
    prefill_pages = _floor_power(max(1, tokens // page_size))
    return Tiles(
        decode=Tile(pages=pages, slots=slots, parts=parts, row_shares=_row_shares(shape, parts)),
        prefill=Tile(
            pages=prefill_pages,
            slots=3,
            parts=prefill_parts,
            queries=max(queries, 2),
            row_shares=_row_shares(shape, prefill_parts),
        ),
    )


def _prefill_sizes(shape: TileShape) -> tuple[int, int]:
    """Parts, and keys per KV block, of the prefill path."""
    pool, (least, most) = shape.pool, _PREFILL_TOKENS
    of_few, of_many = (
        tiles // pool.lane_tiles // (2 if _is_wide(shape) else 1)
        for tiles in _PREFILL_TILES.get(shape.generation or "", (8, 8))
    )
    groups = 1
    while (
        2 * groups * max(least, shape.page_size) <= of_many * LANES
        and pool.groups % (2 * groups) == 0
        and pool.groups // (2 * groups) >= min(shape.cores, pool.groups)
    ):
        groups *= 2
    if groups > 1:
        return pool.groups // groups, max(least, min(of_few * LANES // groups, most))
    # Heads wider than 256 have more work for each stripe and KV block, and need as much more VMEM.
    return pool.groups, most // (pool.lane_tiles if _is_wide(shape) else max(1, pool.lane_tiles // 2))


def _is_wide(shape: TileShape) -> bool:
    """Whether keys and values have 32 bits."""
    return jnp.dtype(shape.kv_dtype).itemsize > 2


def _row_shares(shape: TileShape, parts: int) -> int:
    """One per core where the parts of the heads cannot be shared evenly."""
    return 1 if parts % shape.cores == 0 else shape.cores


_FOUND: list[tuple[tuple, tuple, tuple]] = []
"""The fields of a `TileShape`, of its decode `Tile` and of its prefill `Tile`."""

TABLE = {TileShape(*shape): Tiles(Tile(*decode), Tile(*prefill)) for shape, decode, prefill in _FOUND}


def choose(shape: TileShape) -> Tiles:
    """The tiles of the table, or for a shape that it does not hold those that `propose` gives."""
    return TABLE.get(shape) or propose(shape)


def candidates(shape: TileShape) -> Iterator[Tiles]:
    """The proposal, and then tiles that need less and less memory."""
    tiles = propose(shape)
    yield tiles
    while (smaller := Tiles(_smaller(shape, tiles.decode), _smaller(shape, tiles.prefill))) != tiles:
        yield (tiles := smaller)


def _smaller(shape: TileShape, tile: Tile) -> Tile:
    """The next smaller tile; the same tile if no smaller one exists."""
    align = align_queries(shape.q_per_kv * shape.pool.heads_per_group)
    if tile.slots > 2:
        return replace(tile, slots=2)
    if tile.queries > max(4 * align, 2):
        return replace(tile, queries=tile.queries // 2)
    if tile.pages > 1:
        return replace(tile, pages=tile.pages // 2)
    if shape.pool.groups % (2 * tile.parts) == 0:
        return replace(tile, parts=2 * tile.parts)
    if tile.queries > max(align, 2):
        return replace(tile, queries=tile.queries // 2)
    return tile


def invariant_tile(tiles: Tiles, shape: TileShape) -> Tile:
    """The one tile of a call whose decode tokens are chunks of one token: that of chunks, with query blocks so small
    that one token in a block computes little more than it."""
    per_group = shape.q_per_kv * shape.pool.heads_per_group
    align = align_queries(per_group)
    queries = align * _floor_power(max(1, _INVARIANT_ROWS // per_group // align))
    return replace(tiles.prefill, queries=min(tiles.prefill.queries, max(queries, 2)))


def cut_queries(tile: Tile, shape: TileShape, max_tokens: int) -> Tile:
    """The prefill tile for a call of `max_tokens` tokens: no query block is larger than a row can be."""
    align = align_queries(shape.q_per_kv * shape.pool.heads_per_group)
    most = max(2, align * _floor_power(max(1, max_tokens // align)))
    return replace(tile, queries=min(tile.queries, most))


def _floor_power(size: int) -> int:
    """The largest power of two <= size."""
    return 1 << (size.bit_length() - 1)
