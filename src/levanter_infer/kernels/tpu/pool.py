"""The layout of the KV pool in a TPU's memory: `KvPages` allocates it, the kernels for TPUs write and read it.

A page is `slabs × page_size × 128`: for each group of kv heads the keys of all its tokens, then their values. So one
contiguous copy brings a page, and what arrives is the operand of a matmul as it is: no strided load, no transposition,
no padding at call time. Heads narrower than the 128 lanes share a slab, as many as fit and divide the heads evenly;
wider ones take several slabs.

    head_dim 128, 2 heads   k0 | v0 | k1 | v1
    head_dim 64, 4 heads    k0 k1 | v0 v1 | k2 k3 | v2 v3
    head_dim 256, 1 head    k0 (0…127) | k0 (128…255) | v0 (0…127) | v0 (128…255)

A pool of latents (`PoolShape.is_latent`) stores keys alone, and the first slabs of a head's keys are its values too:

    576 numbers, 1 head     k0 (0…127) | k0 (128…255) | k0 (256…383) | k0 (384…511) | k0 (512…575)

An index key of sparse attention (`PoolShape.index_dim`) has slabs of its own behind them.

A pool of int8 has one slab more per page, with the codes of the scales (`kernels.int8`): lane 2 h for the keys of kv
head h, lane 2 h + 1 for its values. It comes with the same copy.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels import int8
from levanter_infer.kernels.call import AttentionCall

LANES = 128


@dataclass(frozen=True)
class TpuPool:
    """The layout of one token's keys and values.

    `kv_heads` and `head_dim` are those of a model, or of its share on one device.
    """

    kv_heads: int
    head_dim: int
    scaled: bool = False
    """Whether the pool holds int8, with scales."""
    value_dim: int | None = None
    """Numbers of a key that are its value too, in a pool of latents; None: values are stored beside keys."""
    index_dim: int = 0
    """Numbers of an index key, which are not among `head_dim`; 0: there is none."""
    masked: bool = False
    """Whether pages get one slab more in VMEM, behind all others: the choice of keys (`kernels.tpu.choice`)."""

    @staticmethod
    def of(call: AttentionCall) -> "TpuPool":
        """The layout of the pool that a call reads."""
        masked = call.chosen is not None
        sizes = call.kv_heads, call.q.shape[2], call.kv_dtype == jnp.int8, call.value_dim
        return TpuPool(*sizes, call.index_dim, masked)

    def __post_init__(self):
        if self.scaled and 2 * self.kv_heads > LANES:
            raise ValueError(
                f"kv_heads={self.kv_heads} with int8 pages: a page holds the scales of {LANES // 2} kv heads per "
                "device at most; use another dtype, or shard the heads over more devices"
            )

    @property
    def heads_per_group(self) -> int:
        """Kv heads that share a slab; 1 for a head_dim of 128 and more."""
        fits = 1 if self.value_dim is not None else max(1, LANES // self.head_dim)
        return max(n for n in range(1, fits + 1) if self.kv_heads % n == 0)

    @property
    def groups(self) -> int:
        return self.kv_heads // self.heads_per_group

    @property
    def lane_tiles(self) -> int:
        """Slabs per group for keys, and as many for values that are stored."""
        return math.ceil(self.head_dim / LANES)

    @property
    def query_tiles(self) -> int:
        """Tiles of 128 lanes of a group's queries: as many as slabs of keys, and one for the choice of keys."""
        return self.lane_tiles + self.masked

    @property
    def index_slabs(self) -> int:
        """Slabs per page that hold index keys, behind those of keys."""
        return math.ceil(self.index_dim / LANES)

    @property
    def value_tiles(self) -> int:
        """Slabs per group that are read as values."""
        return self.lane_tiles if self.value_dim is None else math.ceil(self.value_dim / LANES)

    @property
    def sides(self) -> int:
        """2 where keys and values are stored, 1 where keys alone are."""
        return 2 if self.value_dim is None else 1

    @property
    def number_slabs(self) -> int:
        """Slabs per page that hold keys, values and index keys."""
        return self.sides * self.groups * self.lane_tiles + self.index_slabs

    @property
    def slabs(self) -> int:
        """All slabs per page; the last one of a scaled pool holds the codes of the scales."""
        return self.number_slabs + self.scaled

    @property
    def copied_slabs(self) -> int:
        """Slabs of a page in VMEM."""
        return self.slabs + self.masked

    def shape(self, *, num_layers: int, num_pages: int, page_size: int) -> tuple[int, int, int, int, int]:
        """Shape of the whole pool: [layers, page, slab, page_offset, lane]."""
        return num_layers, num_pages, self.slabs, page_size, LANES

    def pack(self, *sides: Array) -> Array:
        """New keys and values in the layout of a page.

        Args:
            sides: keys and values, or keys alone, [T, Hkv, D] each.
        Returns: [T, slabs, 128], int8 if the pool is scaled; unused lanes are 0.
        """
        if self.scaled:
            sides = tuple(jnp.concatenate(int8.encode(side), axis=-1) for side in sides)
        return self.pack_stored(*sides)

    def pack_stored(self, *sides: Array) -> Array:
        """`pack` for keys and values as other layouts store them: int8 with the code of the scale behind, [T, Hkv,
        D + 1]."""
        assert len(sides) == self.sides
        num_tokens, codes = sides[0].shape[0], []
        if self.scaled:
            both = sides[0][..., -1], sides[-1][..., -1]
            codes = jnp.stack(both, axis=2).reshape(num_tokens, 1, 2 * self.kv_heads)
            codes = [jnp.pad(codes, ((0, 0), (0, 0), (0, LANES - 2 * self.kv_heads)))]
        packed = jnp.stack([self.pack_heads(side[..., : self.head_dim]) for side in sides], axis=2)
        packed, index = packed.reshape(num_tokens, -1, LANES), []
        if self.index_dim:
            keys = sides[0][:, 0, self.head_dim : self.head_dim + self.index_dim]
            filled = jnp.pad(keys, ((0, 0), (0, self.index_slabs * LANES - self.index_dim)))
            index = [filled.reshape(num_tokens, self.index_slabs, LANES)]
        return jnp.concatenate([packed, *index, *codes], axis=1)

    def pack_heads(self, x: Array) -> Array:
        """[T, Hkv, D] -> [T, groups, lane_tiles, 128], for keys or values alone."""
        width = self.heads_per_group * self.head_dim
        x = x.reshape(x.shape[0], self.groups, width)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.lane_tiles * LANES - width)))
        return x.reshape(x.shape[0], self.groups, self.lane_tiles, LANES)

    def unpack(self, tokens: Array) -> Array:
        """The inverse of `pack`: [..., slabs, 128] -> [..., 2 * Hkv, D], heads interleaved k0, v0, k1, v1, …, or
        of keys alone [..., Hkv, D]; int8 is decoded to f32."""
        leading, count = tokens.shape[:-2], self.sides
        codes = tokens[..., -1, : 2 * self.kv_heads : 2 // count]
        first = self.number_slabs - self.index_slabs
        index = tokens[..., first : self.number_slabs, :].reshape(*leading, 1, -1)[..., : self.index_dim]
        tokens = tokens[..., :first, :]
        sides = tokens.reshape(*leading, self.groups, count, self.lane_tiles * LANES)
        sides = sides[..., : self.heads_per_group * self.head_dim]
        heads = sides.reshape(*leading, self.groups, count, self.heads_per_group, self.head_dim)
        heads = jnp.moveaxis(heads, -3, -2).reshape(*leading, count * self.kv_heads, self.head_dim)
        if self.index_dim:
            heads = jnp.concatenate([heads, index], axis=-1)
        return int8.decode(heads, codes[..., None]) if self.scaled else heads

    def pack_queries(self, q: Array) -> Array:
        """Queries laid out so that one matmul with a slab of keys gives the scores of all heads that share it.

        Args:
            q: [T, Hq, D].
        Returns: [T, groups, rows, lane_tiles, 128] with one row per query head of the group, which is 0 in the lanes
            of the other kv heads.
        """
        num_tokens, num_heads = q.shape[:2]
        n, per_kv_head = self.heads_per_group, num_heads // self.kv_heads
        q = q.reshape(num_tokens, self.groups, n, per_kv_head, self.head_dim)
        if n > 1:
            own = jnp.eye(n, dtype=jnp.bool)[None, None, :, None, :, None]
            q = jnp.where(own, q[:, :, :, :, None, :], jnp.zeros((), q.dtype))
        q = q.reshape(num_tokens, self.groups, n * per_kv_head, n * self.head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, self.lane_tiles * LANES - n * self.head_dim)))
        return q.reshape(*q.shape[:3], self.lane_tiles, LANES)

    def unpack_outputs(self, out: Array) -> Array:
        """Head by head, the outputs of matmuls with slabs of values: [T, groups, rows, value_tiles * 128] -> [T, Hq,
        size of values]."""
        num_tokens, groups, rows = out.shape[:3]
        if self.value_dim is not None:
            assert self.heads_per_group == 1, "latents of several heads in one slab"
            return out.reshape(num_tokens, groups * rows, -1)[..., : self.value_dim]
        n = self.heads_per_group
        out = out[..., : n * self.head_dim].reshape(num_tokens, groups, n, rows // n, n, self.head_dim)
        own = [out[:, :, head, :, head] for head in range(n)]
        return jnp.stack(own, axis=2).reshape(num_tokens, groups * rows, self.head_dim)


def pairs(tiles: int) -> list[range]:
    """The tiles of 128 lanes of a head that one matmul takes: two fill a matrix unit of 256, as v6e has, and spare
    others a sum."""
    return [range(first, min(first + 2, tiles)) for first in range(0, tiles, 2)]


def side_by_side(tiles: list[Array]) -> Array:
    """[n, 128] each -> [n, 128 * tiles]"""
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=1)


def apart(columns: Array) -> list[Array]:
    """The inverse of `side_by_side`."""
    if columns.shape[1] == LANES:
        return [columns]
    return [columns[:, first : first + LANES] for first in range(0, columns.shape[1], LANES)]
