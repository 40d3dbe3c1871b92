"""The `xla` backend: XLA's own code, on any platform; and `reference`, the specification of attention."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels import int8, scopes
from levanter_infer.kernels.backend import Backend, Task, Work
from levanter_infer.kernels.call import (
    AttentionCall,
    GroupedCall,
    IndexQueries,
    KvWrite,
    LinearCall,
    PoolShape,
    check_index,
    check_pool,
    checked,
)
from levanter_infer.kernels.loops import run_bucket
from levanter_infer.kernels.rules import decode_bits
from levanter_infer.kernels.xla.attention import xla_attention
from levanter_infer.kernels.xla.grouped import in_blocks, ragged_matmul
from levanter_infer.kernels.xla.index import ACCELERATOR, xla_choose_keys
from levanter_infer.kernels.xla.linear import as_floats, matmul, to_bits
from levanter_infer.kernels.xla.reference import reference_attention, reference_choice

BLOCK_TOKENS = 256
"""Tokens of a block in `numerics: batch_invariant`: about as many as take a matrix unit as long as reading the weights
takes (240 on v5e, 166 on v5p, 224 on v4), so that a lone decode token costs little more than without blocks."""
_BITS = {1: jnp.uint8, 2: jnp.uint16}


@dataclass(frozen=True)
class XlaBackend(Backend):
    """Matmuls and attention in jnp. The pool is [layers, P, page_size, 2 * Hkv, D], heads interleaved k0, v0, k1, …,
    and of latents [layers, P, page_size, Hkv, D]; pages of int8 are [..., D + 1], the code of each head's scale behind
    its integers (`kernels.int8`).

    Where the platform wants integers for floats, the pool and the weights of layers hold the bits of 16- and 8-bit
    floats: XLA would convert the full pool at every scatter, and the full stack for every layer.
    """

    is_apart: bool = False
    """`Backend.rows_apart`."""
    block_size: int = BLOCK_TOKENS
    """Rows of the blocks that steps are then computed in."""

    name = "xla"

    @classmethod
    def refusal(cls, task: Task) -> str | None:
        return None

    def configured(self, **options) -> Self:
        return dataclasses.replace(self, is_apart=options["rows_apart"]) if "rows_apart" in options else self

    @property
    def rows_apart(self) -> bool:
        return self.is_apart

    @property
    def block_tokens(self) -> int | None:
        return self.block_size if self.is_apart else None

    def why_not_invariant(self, task: Task) -> str | None:
        """Blocks of one size send every row of a matmul through the same instructions. On a TPU these give a row the
        same bits at any index of a block."""
        if self.platform.name == "tpu":
            return None if task.work is Work.MATMUL else "it computes decode tokens and prompt chunks in other shapes"
        if self.platform.name == "gpu":
            return "its libraries may sum a row of a matmul in an order that depends on the row's index in a block"
        return super().why_not_invariant(task)

    def activation_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        return jnp.dtype(dtype)

    def store(self, weight: Array, num_outs: int, num_ins: int) -> Array:
        return to_bits(weight) if self.platform.integers_for_floats else weight

    def store_tables(self, embeddings: Array, head: Array | None) -> tuple[Array, Array | None]:
        """Rows are taken from bits and matmuls read floats, so that a tied head becomes an array of its own."""
        lookup = self.store(embeddings, *embeddings.shape)
        return lookup, embeddings if head is None and lookup is not embeddings else head

    def linear(self, call: LinearCall) -> list[Array]:
        """A layer's weights are sliced out of the stack."""

        def of_layer(stack: Array) -> Array:
            return stack if call.layer is None else jax.lax.dynamic_index_in_dim(stack, call.layer, keepdims=False)

        def one(weight: Array, num_outs: int) -> Array:
            if call.scales and call.layer is not None:  # else XLA copies the layer before it is converted
                weight = weight.reshape(weight.shape[0], num_outs, -1)
            return matmul(call.x, as_floats(of_layer(weight), call.x.dtype).reshape(num_outs, -1))

        sums = [one(weight, num_outs) for weight, num_outs in zip(call.weights, call.num_outs, strict=True)]
        if not call.scales:
            return sums
        return [y * of_layer(scale)[None] for y, scale in zip(sums, call.scales, strict=True)]

    def grouped_linear(self, call: GroupedCall) -> list[Array]:
        """Computes blocks of a group's rows for stacked weights; `jax.lax.ragged_dot` for others."""
        return ragged_matmul(call) if call.layer is None else in_blocks(call, self.linear)

    def combine(self, values: Array, places: Array, weights: Array, num_rows: Array | None) -> Array:
        terms = [weights[:, i : i + 1] * values[places[:, i]] for i in range(places.shape[1])]
        return functools.reduce(operator.add, terms)

    def by_rows(self, compute: Callable, num_rows: Array | None, *rows: Array) -> Any:
        return compute(*rows)

    def take_rows(self, table: Array, indices: Array, num_ins: int, dtype) -> Array:
        return as_floats(table.at[indices].get(mode="fill", fill_value=0), dtype)

    def bucketed(self, compute: Callable[[int], Array], num_rows: Array, buckets: Sequence[int], zeros: Array) -> Array:
        def run(rows: int, results: Array) -> Array:
            return results.at[:rows].set(compute(rows))

        return run_bucket(num_rows, buckets, scopes.head, run, zeros)

    def logit_stats(self, logits: Array, num_rows: Array) -> tuple[Array, Array, Array] | None:
        return None

    def pool_shape(self, shape: PoolShape) -> tuple[int, int, int, int, int]:
        width = shape.head_dim + (shape.dtype == jnp.int8)
        return shape.num_layers, shape.num_pages, shape.page_size, shape.heads_per_token, width

    def init_pool(self, shape: PoolShape) -> Array:
        dtype, stored = jnp.dtype(shape.dtype), jnp.dtype(shape.dtype)
        if self.platform.integers_for_floats and jnp.issubdtype(dtype, jnp.floating):
            stored = _BITS.get(dtype.itemsize, dtype)
        return jnp.full(self.pool_shape(shape), 0, stored)

    def write_kv(self, pool: Array, write: KvWrite) -> tuple[Array | None, Array]:
        """One scatter of all tokens."""
        flat = write.k
        if write.v is not None:
            pair = jnp.stack([write.k, write.v], axis=2)
            flat = pair.reshape(pair.shape[0], 2 * pair.shape[1], pair.shape[3])
        encoded = _encode(flat, write.kv_dtype, pool.dtype)
        return write.q, pool.at[write.layer, write.page, write.offset].set(encoded, mode="drop")

    def read_kv(self, pool: Array, shape: PoolShape, pages: Array, offsets: Array) -> Array:
        return decode_bits(pool.at[:, pages, offsets].get(mode="clip"), shape.dtype)

    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        def copy_layer(layer: Array, pool: Array) -> Array:
            return pool.at[layer, target].set(pool.at[layer, source].get(mode="clip"), mode="drop")

        # All layers at once would need memory for everything that is copied.
        return jax.lax.fori_loop(0, pool.shape[0], copy_layer, pool)

    def choose_keys(self, call: AttentionCall, queries: IndexQueries) -> Array:
        call = checked(call)
        check_pool(call)
        check_index(call, queries)
        return self._choose_keys(call, queries)

    def _choose_keys(self, call: AttentionCall, queries: IndexQueries) -> Array:
        return xla_choose_keys(call, queries, ACCELERATOR if self.platform.name in ("gpu", "tpu") else None)

    def choice_type(
        self, num_tokens: int, max_pages: int, page_size: int, num_chosen: int, kv_dtype: jnp.dtype
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_tokens, min(num_chosen, max_pages * page_size)), jnp.int32)

    def attend(self, call: AttentionCall) -> Array:
        call = checked(call)
        check_pool(call)
        return self._attend(call)

    def _attend(self, call: AttentionCall) -> Array:
        return xla_attention(call)


@dataclass(frozen=True)
class ReferenceBackend(XlaBackend):
    """The oracle: every page of every row is gathered, and one dense softmax computed per token; else as `xla`."""

    name = "reference"

    def _choose_keys(self, call: AttentionCall, queries: IndexQueries) -> Array:
        return reference_choice(call, queries)

    def _attend(self, call: AttentionCall) -> Array:
        return reference_attention(call)[0]


XLA = XlaBackend()
"""XLA's own code with all numbers stored as they are."""


def rounded(values: Array, dtype: jnp.dtype) -> Array:
    """`values` in the pool's dtype. 8-bit floats have no infinity, and a conversion makes NaN of what is beyond their
    largest number; it is stored as that number."""
    if dtype == jnp.float8_e4m3fn:
        most = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -most, most)
    return values.astype(dtype)


def _encode(values: Array, dtype: jnp.dtype, stored: jnp.dtype) -> Array:
    if dtype == jnp.int8:
        return jnp.concatenate(int8.encode(values), axis=-1)
    values = rounded(values, dtype)
    return values if stored == values.dtype else jax.lax.bitcast_convert_type(values, stored)
