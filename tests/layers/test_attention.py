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
from levanter_infer.kernels.call import PoolShape
from levanter_infer.layers.attention import Attention, AttentionBlock, AttentionInputs, AttentionSpec
from levanter_infer.layers.linear import Fusion, apply
from levanter_infer.layers.norm import NormConfig, RMSNorm
from tests.kernels.ragged import Ragged, Sizes, dense_attention

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


def prompt() -> PageBatchInfo:
    """All positions of one sequence, on pages in reverse."""
    position, pages = np.arange(LENGTH), -(-LENGTH // PAGE_SIZE)
    page = np.arange(pages)[::-1]

    def array(values, *axes) -> NamedArray:
        values = jnp.asarray(values, jnp.int32)
        return NamedArray(values, tuple(Axis(name, size) for name, size in zip(axes, values.shape, strict=True)))

    return PageBatchInfo(
        tokens=array(0 * position, TOKEN),
        positions=array(position, TOKEN),
        slot_ids=array([0], ROW),
        cu_q_lens=array([0, LENGTH], ROW_BOUND),
        seq_lens=array([LENGTH], ROW),
        page_indices=array(page[None], ROW, SEQ_PAGE),
        num_seqs=array(1),
        new_token_dests=array(page[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE, TOKEN),
        page_size=PAGE_SIZE,
    )
