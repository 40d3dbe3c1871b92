"""The `tpu` backend: attention and experts in Pallas on Mosaic, for TPUs from v4 on; other matmuls are XLA's.

Paged attention takes two paths: `decode` computes rows with one query, which read each key once for a few queries and
are bound by memory; `prefill` computes rows with more, in blocks of queries, and is bound by the matrix unit. Both read
pages of the full pool, all layers (`pool`); nothing is sliced or copied for them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels import scopes
from levanter_infer.kernels.backend import Fuse, Platform, Task, Work
from levanter_infer.kernels.call import (
    AttentionCall,
    GroupedCall,
    IndexQueries,
    KvWrite,
    PoolShape,
    Rotation,
    check_index,
    checked,
)
from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.kernels.tpu import choice, grouped, kv_write, row_writes, sampling
from levanter_infer.kernels.tpu.decode import decode_attention
from levanter_infer.kernels.tpu.kv_write import WritePlan, rotate_and_write, write_kv
from levanter_infer.kernels.tpu.pool import LANES, TpuPool
from levanter_infer.kernels.tpu.prefill import prefill_attention
from levanter_infer.kernels.tpu.tables import Tables
from levanter_infer.kernels.tpu.tiling import Tiles, TileShape, choose, cut_queries, generation, invariant_tile
from levanter_infer.kernels.xla.backend import XlaBackend, rounded
from levanter_infer.kernels.xla.index import SCORES_TOGETHER

TPU = Platform("tpu")
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)


@dataclass(frozen=True)
class TpuBackend(XlaBackend):
    """The pool is [layers, P, slabs, page_size, 128], as `TpuPool` lays out a token; it holds numbers, never bits."""

    platform: Platform = TPU
    tiles: Tiles | None = None
    """Tiles of the kernels; None: those that `kernels.tpu.tiling` knows, or proposed ones."""
    interpret: bool = False
    """Run by Pallas' interpreter, on a CPU, slowly, with its detector of races; for tests."""

    name = "tpu"
    home = TPU
    kernels = frozenset({Work.MATMUL, Work.ATTENTION})
    fuses = frozenset({Fuse.ROTATION})
    options = frozenset({"tiles"})
    grouped_ins = LANES
    """Else XLA stores the stacks with their experts in lanes, which need no padding, and every round copies them into
    the order that the kernel reads."""
    merges_ins = True
    """A layer is read out of its stack by the matmul only if the matmul's two axes are the last ones that are stored; a
    layer of heads and head sizes is copied into another order first."""
    compares_tables = True
    ring_bytes = 2**18
    """A link takes 3 to 6 µs for so many, several times its latency."""
    pool_order = (0, 1, 3, 2, 4)

    @classmethod
    def refusal(cls, task: Task) -> str | None:
        if task.device.platform != "tpu":
            return f"this engine runs on {task.device.platform}"
        supported = grouped.supports_dtype if task.work is Work.MATMUL else supports_dtype
        if not supported(task.dtype):
            return f"{task.stored} are {task.dtype}, which the kernel does not take"
        return None

    def why_not_invariant(self, task: Task) -> str | None:
        """Attention takes one path: decode tokens are prompt chunks of one token."""
        if task.work is Work.ATTENTION and task.chooses_keys:
            return SCORES_TOGETHER
        return None

    def configured(self, **options) -> "TpuBackend":
        names = {"tiles": "tiles", "rows_apart": "is_apart"}
        return dataclasses.replace(self, **{names[name]: value for name, value in options.items() if name in names})

    def halves_ring_matmuls(self) -> bool:
        return generation() == "v5p"  # by the schedules in decision 0044

    def grouped_linear(self, call: GroupedCall) -> list[Array]:
        """Uses the kernel where it takes the shapes, and XLA's matmul in blocks otherwise."""
        if not grouped.supports(call):
            return super().grouped_linear(call)
        return grouped.grouped_matmul(call, interpret=_interpreter(self.interpret))

    def bucketed(self, compute: Callable[[int], Array], num_rows: Array, buckets: Sequence[int], zeros: Array) -> Array:
        return sampling.bucketed(compute, num_rows, buckets, zeros)

    def put_numbers(self, table: Array, row: Array, column: Array, values: Array) -> Array:
        plain = super().put_numbers
        if not row_writes.supports(table):
            return plain(table, row, column, values)
        return jax.lax.platform_dependent(table, row, column, values, tpu=row_writes.put, default=plain)

    def logit_stats(self, logits: Array, num_rows: Array) -> tuple[Array, Array, Array] | None:
        if not sampling.supports(logits):
            return None
        return sampling.logit_stats(logits, num_rows, interpret=_interpreter(self.interpret))

    def sampling_kernels(self, logits: Array) -> sampling.TpuSampling | None:
        return sampling.TpuSampling(_interpreter(self.interpret)) if sampling.supports(logits) else None

    def pool_shape(self, shape: PoolShape) -> tuple[int, int, int, int, int]:
        return shape.num_layers, shape.num_pages, _layout(shape).slabs, shape.page_size, LANES

    def init_pool(self, shape: PoolShape) -> Array:
        return jnp.full(self.pool_shape(shape), 0, shape.dtype)

    def rotates(self, rotation: Rotation, q: Array, k: Array, kv_dtype: jnp.dtype) -> bool:
        return not self.is_apart and kv_write.rotates(q, k, rotation, kv_dtype)

    def scale_in_queries(self, rules: ScoreRules) -> tuple[float, ScoreRules]:
        return rules.with_scale_in_queries()

    def write_plan(self, pool: Array, dests: Array) -> WritePlan:
        return WritePlan.of(pool, dests)

    def write_kv(self, pool: Array, write: KvWrite) -> tuple[Array | None, Array]:
        # Under a `shard_map` these are the heads of one device.
        kv_heads, head_dim = write.k.shape[1:]
        value_dim = head_dim if write.v is None else None
        layout = TpuPool(kv_heads, head_dim - write.index_dim, write.kv_dtype == jnp.int8, value_dim, write.index_dim)
        plan = self.write_plan(pool, write.dests) if write.plan is None else write.plan

        def scattered(pages: Array, packed: Array) -> Array:
            stored = packed.astype(pages.dtype)
            return pages.at[write.layer, write.page, :, write.offset].set(stored, mode="drop")

        if write.rotation is not None:
            return _rotated_and_written(pool, write, write.rotation, plan, scattered)
        sides = (write.k,) if write.v is None else (write.k, write.v)
        packed = layout.pack(*(sides if layout.scaled else (rounded(side, write.kv_dtype) for side in sides)))
        return write.q, jax.lax.platform_dependent(
            pool,
            packed,
            tpu=lambda pages, packed: write_kv(pages, write.layer, packed, plan),
            default=scattered,
        )

    def read_kv(self, pool: Array, shape: PoolShape, pages: Array, offsets: Array) -> Array:
        tokens = pool.at[:, pages, :, offsets].get(mode="clip").swapaxes(0, 1)
        return _layout(shape).unpack(tokens).astype(jnp.float32)

    def choose_keys(self, call: AttentionCall, queries: IndexQueries) -> Array:
        call = checked(call)
        _check_pool(call)
        check_index(call, queries)
        return choice.choose_keys(call, queries)

    def choice_type(
        self, num_tokens: int, max_pages: int, page_size: int, num_chosen: int, kv_dtype: jnp.dtype
    ) -> jax.ShapeDtypeStruct:
        return choice.choice_type(num_tokens, max_pages, page_size, kv_dtype)

    def attend(self, call: AttentionCall) -> Array:
        call = checked(call)
        _check_pool(call)
        return tpu_attention(call, self.tiles, invariant=self.is_apart, interpret=self.interpret)


def _rotated_and_written(
    pool: Array,
    write: KvWrite,
    rotation: Rotation,
    plan: WritePlan,
    scattered: Callable[[Array, Array], Array],
) -> tuple[Array, Array]:
    """Rotated queries, and the pool, of a write that `kv_write.rotates`. Args: scattered: the pool with packed keys and
    values, by XLA."""
    q, v = write.q, write.v
    assert q is not None and v is not None, "queries to rotate, keys and values"

    def by_kernel(pages: Array, q: Array, k: Array, v: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        own = dataclasses.replace(rotation, cos=cos, sin=sin)
        return rotate_and_write(pages, write.layer, (q, k, v), own, plan)

    def by_xla(pages: Array, q: Array, k: Array, v: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        own = dataclasses.replace(rotation, cos=cos, sin=sin)
        packed = TpuPool(k.shape[1], k.shape[2]).pack(_rotated(k, own), v)
        return _rotated(q, own, own.query_factor), scattered(pages, packed)

    arrays = pool, q, write.k, v, rotation.cos, rotation.sin
    return jax.lax.platform_dependent(*arrays, tpu=by_kernel, default=by_xla)


def _rotated(x: Array, rotation: Rotation, factor: float = 1.0) -> Array:
    """Heads [T, heads, D] rotated in float32, times a factor, in the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (side[:, None] * jnp.float32(factor) for side in (rotation.cos, rotation.sin))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _layout(shape: PoolShape) -> TpuPool:
    value_dim = shape.head_dim if shape.is_latent else None  # how many of them does not change the layout
    head_dim = shape.head_dim - shape.index_dim
    return TpuPool(shape.kv_heads, head_dim, shape.dtype == jnp.int8, value_dim, shape.index_dim)


def _check_pool(call: AttentionCall) -> None:
    if call.chosen is not None:
        sizes = call.num_tokens, call.page_indices.shape[1], call.page_size, call.kv_dtype
        expected, chosen = choice.choice_type(*sizes), call.chosen
        if (chosen.shape, chosen.dtype) != (expected.shape, expected.dtype):
            raise ValueError(
                f"chosen: got {chosen.dtype}{list(chosen.shape)}, expected {expected.dtype}{list(expected.shape)}, as "
                "choose_keys gives it"
            )
    kv_heads, kv_pages = call.kv_heads, call.kv_pages
    if kv_heads < 1 or call.q.shape[1] % kv_heads != 0:
        raise ValueError(f"kv_heads: got {kv_heads}, expected a number that divides the {call.q.shape[1]} query heads")
    slabs = TpuPool.of(call).slabs
    if kv_pages.ndim != 5 or kv_pages.shape[2:] != (slabs, call.page_size, LANES):
        raise ValueError(
            f"kv_pages: got shape {kv_pages.shape}, expected [layers, pages, {slabs}, page_size, 128] for "
            f"{kv_heads} kv heads of {call.q.shape[2]} and pages of {call.page_size} tokens, as kernels.tpu.pool lays "
            "it out"
        )
    if kv_pages.dtype != call.kv_dtype:
        raise ValueError(
            f"kv_pages: got dtype {kv_pages.dtype}, expected {call.kv_dtype}; a TPU "
            "stores pages in their own dtype, not as unsigned integers"
        )


def supports_dtype(dtype) -> bool:
    """Whether pages of this dtype can be read."""
    return jnp.dtype(dtype) in _DTYPES


def tpu_attention(
    call: AttentionCall, tiles: Tiles | None = None, *, invariant: bool = False, interpret: bool = False
) -> Array:
    """`ragged_paged_attention` on a TPU.

    Args:
        tiles: None for those that `tiling.choose` gives.
        invariant: compute decode tokens as chunks of one token, so that the bits of a token depend neither on what
            stands beside it nor on where its chunk begins and ends.
        interpret: run in Pallas' interpreter, on a CPU, slowly, with its race detector; for tests.
    Returns: `call.out_shape`, 0 for padding tokens.
    Raises: ValueError for pages of other dtypes.
    """
    if not supports_dtype(call.kv_dtype):
        raise ValueError(
            f'impl="tpu" reads pages of float32, bfloat16, float8_e4m3fn or int8, not {call.kv_dtype}; use "xla"'
        )
    params = _interpreter(interpret)
    operand = _operand_dtype(call)
    heads = call.kv_heads, call.q.shape[2], call.heads_per_kv_head
    masked = call.chosen is not None
    pages = call.page_size, call.kv_dtype.name, call.value_dim, call.index_dim, masked
    shape = TileShape(generation(), *heads, *pages)
    tiles = choose(shape) if tiles is None else tiles
    assert not masked or tiles.prefill.queries <= choice.MAX_QUERIES, "more queries than a group of tokens holds"
    if not interpret and not call.is_q_ordered:
        call = dataclasses.replace(call, q=_tokens_in_lanes(call.q))

    def ordered(x: Array) -> Array:
        """Stored axis by axis. Else XLA lets the output projection read tokens in lanes, which takes it longer."""
        return x if interpret else with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    if invariant:
        tile = cut_queries(invariant_tile(tiles, shape), shape, call.num_tokens)
        tables = Tables.of(call, tile)
        out = prefill_attention(call, tile, tables, operand, invariant=True, interpret=params)
        return _behind_barrier(_without_padding(call, out, ordered)).reshape(call.out_shape)
    out = ordered(decode_attention(call, tiles.decode, operand, interpret=params))
    rows = _without_padding(call, out, ordered)
    if call.num_tokens > 1:
        prefill = cut_queries(tiles.prefill, shape, call.num_tokens)
        # Computed out here, from where XLA moves them in front of the loop over layers.
        tables, is_chunk = Tables.of(call, prefill), _is_of_chunk(call)

        def with_chunks(carry):
            out = ordered(prefill_attention(call, prefill, tables, operand, interpret=params))
            return jnp.bool(False), ordered(jnp.where(is_chunk[:, None], _as_rows(call, out), carry[1]))

        # A loop of no or one turn, because a branch (`lax.cond`) would copy what it carries on other devices.
        with jax.named_scope(scopes.CHUNKS):
            _, rows = jax.lax.while_loop(lambda carry: carry[0], with_chunks, (jnp.any(call.q_lens > 1), rows))
    return _behind_barrier(rows).reshape(call.out_shape)


def _is_of_chunk(call: AttentionCall) -> Array:
    """bool[T]: whether a token is one of several queries of its row."""
    # A search for the row would be a loop of gathers.
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)[:, None]
    starts = call.cu_q_lens[None, :-1]
    return jnp.any((starts <= token) & (token < starts + call.q_lens[None, :]) & (call.q_lens[None, :] > 1), axis=1)


def _as_rows(call: AttentionCall, out: Array) -> Array:
    """The output as the output projection reads it, [T, numbers of a token]."""
    return out.reshape(call.num_tokens, -1)


def _without_padding(call: AttentionCall, out: Array, ordered: Callable[[Array], Array]) -> Array:
    """`_as_rows`, with zeros for padding tokens."""
    live = jnp.arange(call.num_tokens, dtype=jnp.int32) < call.cu_q_lens[call.num_seqs]
    return ordered(jnp.where(live[:, None], _as_rows(call, out), jnp.zeros((), out.dtype)))


def _behind_barrier(rows: Array) -> Array:
    """So that XLA brings them into the order of the output projection once, and not in each of the matmuls."""
    return jax.lax.optimization_barrier(rows)


def _tokens_in_lanes(q: Array) -> Array:
    """Queries [T, Hq, D] as they are, computed with tokens in lanes where these suffice for whole registers.

    So the matmul gives them, and there the halves that a rope exchanges are whole registers. XLA would take them into
    the order of the kernels first, in which a register holds the halves of four heads, and rotate there: 4,500 cycles
    on v5e for 256 tokens of 8 heads, and 1,800 with the rotation first.
    """
    return with_layout_constraint(q, Layout((1, 2, 0))) if q.shape[0] % LANES == 0 else q


def _interpreter(interpret: bool) -> pltpu.InterpretParams | bool:
    """The argument of `pallas_call` for it."""
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan") if interpret else False


def _operand_dtype(call: AttentionCall) -> jnp.dtype:
    """Dtype of the matmuls' operands: bfloat16 if queries and pages are no wider, so that the matrix unit takes them as
    they are."""
    narrow = call.q.dtype == jnp.bfloat16 and (call.kv_dtype == jnp.bfloat16 or call.kv_dtype.itemsize == 1)
    return jnp.dtype(jnp.bfloat16) if narrow else jnp.dtype(jnp.float32)
