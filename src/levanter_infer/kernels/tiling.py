"""Tiles of the attention kernel for TPUs: proposals from shapes, data type and chip. The compiler decides."""

from dataclasses import dataclass

import jax

from levanter_infer.kernels.rpa_tpu_sizes import Tile, align_queries
from levanter_infer.kernels.tpu_pool import LANES, TpuPool

_DECODE_BYTES = 12 << 20
"""Of the pages that a decode loop holds: what is left of 16 MiB goes to queries, sums and spills."""
_DECODE_TILES = 64
"""Tiles of 128 keys, all heads together, of a decode item: enough that their chains of latencies hide each other."""
_CHUNK_ROWS = 1024
_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Tiles:
    """Static sizes of one call."""

    decode: Tile
    chunk: Tile


def propose(pool: TpuPool, *, page_size: int, q_per_kv: int, itemsize: int, max_tokens: int, cores: int) -> Tiles:
    """Tiles that should do.

    Args:
        itemsize: bytes of a stored number.
        max_tokens: queries of the longest row.
        cores: that share the parts.
    """
    page_bytes = pool.slabs * page_size * LANES * itemsize
    parts = min(cores, pool.groups) if pool.groups % cores == 0 else 1
    while 3 * page_bytes > _DECODE_BYTES * parts and pool.groups % (2 * parts) == 0:
        parts *= 2
    groups = pool.groups // parts * pool.lane_tiles
    tokens = min(max(_DECODE_TILES // groups, 1) * LANES, 4096)
    pages = _floor_power(max(1, tokens // page_size))
    while pages > 1 and 3 * pages * page_bytes > _DECODE_BYTES * parts:
        pages //= 2
    slots = 3 if 3 * pages * page_bytes <= _DECODE_BYTES * parts else 2
    per_group = q_per_kv * pool.heads_per_group
    align = align_queries(per_group)
    queries = align * _floor_power(max(1, min(_CHUNK_ROWS // per_group, max_tokens) // align))
    chunk = Tile(
        pages=_floor_power(max(1, _CHUNK_TOKENS // page_size)), slots=3, parts=pool.groups, queries=max(queries, 2)
    )
    return Tiles(decode=Tile(pages=pages, slots=slots, parts=parts), chunk=chunk)


def num_cores() -> int:
    """TensorCores that share one device's memory; 1 where that is not known."""
    kind = jax.sharding.get_abstract_mesh().abstract_device
    kind = None if kind is None else kind.device_kind
    return 2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1


def _floor_power(size: int) -> int:
    return 1 << (size.bit_length() - 1)
