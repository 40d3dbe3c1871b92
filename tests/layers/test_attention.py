"""Attention sinks and chunked attention in the layer: over a plain sequence and over pages."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from levanter_infer.axes import EMBED, HEAD_SIZE, KV_HEADS, POSITION, Q_HEADS_PER_GROUP, ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.kernels.call import AttentionCall, PoolShape
from levanter_infer.kernels.rules import LOG2_E
from levanter_infer.kernels.tpu.backend import TpuBackend
from levanter_infer.layers.attention import Attention, AttentionBlock, AttentionInputs, AttentionSpec, attend_to_all
from levanter_infer.layers.linear import Fusion, apply
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.rotary import RopeConfig, rope_at
from tests.kernels.ragged import Ragged, Sizes, dense_attention
from tests.tiers import nightly_but

LENGTH, PAGE_SIZE, KV, GROUP, SIZE = 30, 4, 2, 3, 8
EMBEDDING = Axis(EMBED, KV * GROUP * SIZE)
BLOCK = AttentionBlock(KV * GROUP, KV, SIZE, rope=None)
RULES = {
    "neither": {},
    "sinks": dict(sinks=jnp.linspace(-3, 3, KV * GROUP, dtype=jnp.float32)),
    "chunk": dict(attention_chunk=7),
    "both": dict(sinks=jnp.linspace(-3, 3, KV * GROUP, dtype=jnp.float32), attention_chunk=7),
}


@pytest.fixture(scope="module")
def layer() -> tuple[Attention, RMSNorm, NamedArray]:
    """A layer whose output projection changes nothing, its norm, and hidden states [position, embed]."""
    attention = Attention.init((), EMBEDDING, BLOCK, key=jax.random.key(0), dtype=jnp.float32)
    heads = (Axis(KV_HEADS, KV), Axis(Q_HEADS_PER_GROUP, GROUP), Axis(HEAD_SIZE, SIZE))
    weight = NamedArray(jnp.eye(EMBEDDING.size).reshape(-1, KV, GROUP, SIZE), (EMBEDDING, *heads))
    attention = dataclasses.replace(attention, o_proj=dataclasses.replace(attention.o_proj, weight=weight))
    norm = RMSNorm.init((), EMBEDDING, config=NormConfig(1e-6), dtype=jnp.float32)
    return attention, norm, 2 * hax.random.normal(jax.random.key(1), (Axis(POSITION, LENGTH), EMBEDDING))


def inputs(rules: dict) -> AttentionInputs:
    """Without a rotation."""
    block = dataclasses.replace(BLOCK, attention_chunk=rules.get("attention_chunk"), sinks="sinks" in rules)
    return AttentionInputs(block, None, AttentionSpec())


def with_sinks(attention: Attention, rules: dict) -> Attention:
    if "sinks" not in rules:
        return attention
    heads = (Axis(KV_HEADS, KV), Axis(Q_HEADS_PER_GROUP, GROUP))
    return dataclasses.replace(attention, sinks=NamedArray(rules["sinks"].reshape(KV, GROUP), heads))


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_attention_over_a_sequence_and_over_pages_equals_attention_in_f64(layer, rules):
    attention, norm, x = layer
    attention = with_sinks(attention, rules)
    dense, _ = attention.dense(x, Fusion(norm=norm), inputs(rules))
    q, k, v = (
        np.asarray(part.array).reshape(LENGTH, -1, SIZE)
        for part in apply(x, attention.q_proj, attention.k_proj, attention.v_proj, norm=norm)
    )
    batch = Ragged(Sizes(KV * GROUP, KV, SIZE, PAGE_SIZE, tokens=LENGTH), {}, (LENGTH,), (LENGTH,), [q], [k], [v])
    exact = dense_attention(batch, scale=SIZE**-0.5, **rules).reshape(LENGTH, -1)
    np.testing.assert_allclose(dense.array, exact, atol=1e-5)

    kv = KvPages.init(PoolShape(1, 9, PAGE_SIZE, KV, SIZE, jnp.dtype(jnp.float32)))
    tokens = x.rename({POSITION: TOKEN})
    paged, _ = attention.paged(tokens, Fusion(norm=norm), inputs(rules), kv, jnp.int32(0), prompt())
    np.testing.assert_allclose(paged.array, exact, atol=1e-5)


def test_sinks_and_chunks_matter(layer):
    attention, norm, x = layer
    neither, *others = (
        with_sinks(attention, rules).dense(x, Fusion(norm=norm), inputs(rules))[0].array for rules in RULES.values()
    )
    assert all(np.abs(other - neither).max() > 0.01 * np.abs(neither).max() for other in others)


SCALED = dict(num_heads=8, num_kv_heads=2, head_dim=128, rope=RopeConfig(), scale=0.2)
IN_RULES = {
    "soft-cap": dict(soft_cap=2.0),
    "part-of-a-head": dict(rope=RopeConfig(partial=0.5)),
    "norm-behind": dict(qk_norm=NormConfig(1e-6), qk_norm_after_rope=True),
}
IN_QUERIES = {
    "rope": {},
    "norm-before": dict(qk_norm=NormConfig(1e-6)),
    "neighbours": dict(rope=RopeConfig(interleaved=True)),
}


@pytest.mark.parametrize("dtype", nightly_but(["float32"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("options", [*IN_QUERIES, *IN_RULES])
def test_a_tpu_takes_the_scale_in_queries_whose_rotation_comes_last(options, dtype, monkeypatch):
    """In bfloat16 the kernel's rotation is taken where it can be; in float32 the layer rotates."""
    block, length = AttentionBlock(**SCALED | (IN_QUERIES | IN_RULES)[options]), 32
    embed, positions = Axis(EMBED, 64), NamedArray(jnp.arange(length), (Axis(POSITION, length),))
    attention = Attention.init((), embed, block, key=jax.random.key(0), dtype=jnp.dtype(dtype))
    norm = RMSNorm.init((), embed, config=NormConfig(1e-6), dtype=jnp.dtype(dtype))
    x = (2 * hax.random.normal(jax.random.key(1), (positions.axes[0], embed))).astype(dtype)
    scales, shape = [], PoolShape(1, 9, 16, 2, 128, jnp.dtype(dtype))

    def attend(backend: TpuBackend, call: AttentionCall):
        """With the rules of the call, over the keys and values of the pool."""
        scales.append(call.rules.scale)
        position = jnp.arange(length)
        both = backend.read_kv(call.kv_pages, shape, call.page_indices[0, position // 16], position % 16)[0]
        keys, values = both[:, 0::2], both[:, 1::2]
        return attend_to_all(call.q.reshape(length, 2, 4, 128), keys, values, call.rules).reshape(call.q.shape)

    monkeypatch.setattr(TpuBackend, "attend", attend)
    kv = KvPages.init(shape, TpuBackend())

    def inputs_of(axis: str) -> AttentionInputs:
        assert block.rope is not None
        return AttentionInputs(
            block, rope_at(block.rope, 128, positions.rename({POSITION: axis}), length), AttentionSpec()
        )

    dense, _ = attention.dense(x, Fusion(norm=norm), inputs_of(POSITION))
    tokens = x.rename({POSITION: TOKEN})
    paged, _ = attention.paged(tokens, Fusion(norm=norm), inputs_of(TOKEN), kv, jnp.int32(0), prompt(length, 16))
    assert scales == [1 / LOG2_E if options in IN_QUERIES else 0.2]
    exact = np.asarray(dense.array, np.float32)
    error = np.abs(np.asarray(paged.array, np.float32) - exact).max() / np.abs(exact).max()
    assert error < (1e-5 if dtype == "float32" else 0.02)


def prompt(length: int = LENGTH, page_size: int = PAGE_SIZE) -> PageBatchInfo:
    """All positions of one sequence, on pages in reverse."""
    position, pages = np.arange(length), -(-length // page_size)
    page = np.arange(pages)[::-1]

    def array(values, *axes) -> NamedArray:
        values = jnp.asarray(values, jnp.int32)
        return NamedArray(values, tuple(Axis(name, size) for name, size in zip(axes, values.shape, strict=True)))

    return PageBatchInfo(
        tokens=array(0 * position, TOKEN),
        positions=array(position, TOKEN),
        slot_ids=array([0], ROW),
        cu_q_lens=array([0, length], ROW_BOUND),
        seq_lens=array([length], ROW),
        page_indices=array(page[None], ROW, SEQ_PAGE),
        num_seqs=array(1),
        new_token_dests=array(page[position // page_size] * page_size + position % page_size, TOKEN),
        page_size=page_size,
    )
