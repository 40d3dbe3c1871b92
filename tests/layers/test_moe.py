"""Mixture of experts: sorted blocks give what a loop over tokens gives, whichever tokens share a block."""

import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from levanter_infer.axes import EMBED, EXPERT, LAYERS, MLP, TOKEN
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.kernels.xla.grouped import block_size
from levanter_infer.layers.linear import Fusion, Linear
from levanter_infer.layers.moe import ExpertsBlock, Moe
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.router import Router
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for
from tests.tiny_models import LLAMA

NUM_LAYERS, EXPERTS, WIDTH, INNER, CHOSEN, EPS = 2, 8, 16, 12, 3, 1e-6
LAYER, EMBED_AXIS = Axis(LAYERS, NUM_LAYERS), Axis(EMBED, WIDTH)


BLOCK = ExpertsBlock(EXPERTS, CHOSEN, INNER, Router(normalize=True))


def block_of() -> tuple[Moe, RMSNorm]:
    moe = Moe.init((LAYER,), EMBED_AXIS, BLOCK, key=jax.random.key(0), dtype=jnp.float32)
    return moe, RMSNorm.init((LAYER,), EMBED_AXIS, config=NormConfig(EPS), dtype=jnp.float32)


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, WIDTH)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="block")
def paged(moe, norm, x, layer, num_rows, block=BLOCK):
    x = NamedArray(x, (Axis(TOKEN, x.shape[0]), EMBED_AXIS))
    return moe.at(layer, num_rows)(x, Fusion(norm=norm.at(layer), residual=x), block).array


def one_by_one(moe: Moe, x: np.ndarray, layer: int, normalize: bool = True) -> tuple[np.ndarray, set[int]]:
    """The oracle, in float64: token by token, expert by expert; and the chosen experts."""
    router, gate, up, down = (
        np.asarray(part.weight.array, np.float64)[layer]
        for part in (moe.router, moe.gate_proj, moe.up_proj, moe.down_proj)
    )
    x = x.astype(np.float64)
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS)
    logits = normed @ router.T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    result, everybody = x.copy(), set()
    for row in range(len(x)):
        best = np.argsort(-shares[row])[:CHOSEN]
        total = shares[row][best].sum() if normalize else 1.0
        for expert in best:
            gated = gate[expert] @ normed[row]
            inner = gated / (1 + np.exp(-gated)) * (up[expert] @ normed[row])
            result[row] += shares[row][expert] / total * (down[expert] @ inner)
        everybody |= set(best.tolist())
    return result, everybody


@pytest.mark.parametrize("normalize", [True, False])
def test_blocks_give_what_a_loop_over_tokens_gives(normalize):
    (moe, norm), x = block_of(), rows_of(20)
    block = dataclasses.replace(BLOCK, router=Router(normalize=normalize))
    for layer in range(NUM_LAYERS):
        for count in (20, 7):
            got = paged(moe, norm, x, jnp.int32(layer), jnp.int32(count), block)
            np.testing.assert_allclose(got[:count], one_by_one(moe, x[:count], layer, normalize)[0], atol=2e-6)
            assert (got[count:] == x[count:]).all()  # rows that do not count go through no expert


class FilledBackend(XlaBackend):
    grouped_ins = 10


@pytest.mark.parametrize("backend", [FilledBackend(), make_backend("tpu_interpret")], ids=lambda each: each.name)
def test_stacks_are_stored_with_their_inputs_filled_up(backend):
    (moe, norm), x = block_of(), rows_of(20)
    stored = jax.tree.map(
        lambda part: part.prepare(backend) if isinstance(part, Linear) else part,
        moe,
        is_leaf=lambda part: isinstance(part, Linear),
    )
    multiple = backend.grouped_ins
    embed, inner = (-(-size // multiple) * multiple for size in (WIDTH, INNER))
    assert embed > WIDTH and inner > INNER
    assert stored.gate_proj.weight.array.shape == (NUM_LAYERS, EXPERTS, INNER, embed)
    assert stored.down_proj.weight.array.shape == (NUM_LAYERS, EXPERTS, WIDTH, inner)
    assert stored.router.weight.array.shape == moe.router.weight.array.shape  # no stack of experts
    got = paged(stored, norm, x, jnp.int32(1), jnp.int32(20))
    np.testing.assert_allclose(got, one_by_one(moe, x, 1)[0], atol=2e-6)


def test_a_stack_that_fills_its_lanes_is_stored_as_it_is():
    weight = Linear.init((LAYER, Axis(EXPERT, 2)), (EMBED_AXIS,), (Axis(MLP, 128),), key=None, dtype=jnp.float32)
    stored = weight.prepare(make_backend("tpu_interpret"))
    assert stored.weight.array is weight.weight.array and stored.unpadded_in is None


def test_the_plain_form_agrees_and_has_a_gradient():
    (moe, _), x = block_of(), rows_of(6)

    def plain(moe: Moe, layer: int):
        picked = {
            name: dataclasses.replace(part, weight=NamedArray(part.weight.array[layer], part.weight.axes[1:]))
            for name, part in vars(moe).items()
            if isinstance(part, Linear)
        }
        one = dataclasses.replace(moe, **picked)
        axes = (Axis("batch", 2), Axis("position", 3), EMBED_AXIS)
        named = NamedArray(jnp.asarray(x).reshape(2, 3, WIDTH), axes)
        return one(named, Fusion(norm=RMSNorm(hax.ones(EMBED_AXIS), NormConfig(EPS)), residual=named), BLOCK).array

    @jax.jit
    def both(moe: Moe):
        gradient = jax.grad(lambda moe: jnp.sum(plain(moe, 1) ** 2))(moe)
        return plain(moe, 1).reshape(6, WIDTH), gradient

    got, gradient = both(moe)
    np.testing.assert_allclose(got, one_by_one(moe, x, 1)[0], atol=2e-6)
    used = sorted(one_by_one(moe, x, 1)[1])
    sizes = jnp.abs(gradient.down_proj.weight.array[1]).sum(axis=(1, 2))
    assert (sizes[jnp.asarray(used)] > 0).all() and float(jnp.abs(gradient.router.weight.array).sum()) > 0


def test_an_expert_that_nobody_chose_is_not_computed():
    (moe, norm), x = block_of(), rows_of(2)
    expected, used = one_by_one(moe, x, 0)
    unused = jnp.asarray([expert for expert in range(EXPERTS) if expert not in used])
    assert len(unused)
    broken = dataclasses.replace(
        moe,
        down_proj=dataclasses.replace(
            moe.down_proj,
            weight=NamedArray(moe.down_proj.weight.array.at[0, unused].set(jnp.nan), moe.down_proj.weight.axes),
        ),
    )
    got = paged(broken, norm, np.pad(x, [(0, 6), (0, 0)]), jnp.int32(0), jnp.int32(2))
    np.testing.assert_allclose(got[:2], expected, atol=2e-6)


def test_blocks_grow_with_an_experts_share():
    assert [block_size(pairs, 8) for pairs in (8, 32, 33, 64, 10_000)] == [4, 8, 16, 16, 128]


@pytest.mark.skipif(not cpu.available(), reason="the kernels for CPUs were not built")
def test_a_token_has_the_same_bits_in_any_company_where_weights_lie_in_panels():
    raw = {
        **LLAMA, "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    }  # fmt: skip
    config = family_for(raw).config_from_hf(raw)
    model = DecoderModel.init(config, key=jax.random.key(2)).prepare(CpuBackend())
    embed = model.embed
    x = np.random.default_rng(3).standard_normal((64, embed.size)).astype(np.float32)

    @jax.jit
    def run(x, num_rows):
        named = NamedArray(x, (Axis(TOKEN, x.shape[0]), embed))
        layer = model.layers.at(jnp.int32(1), num_rows)
        return layer.mlp(named, Fusion(norm=layer.mlp_norm, residual=named), config.blocks[1].feed_forward).array

    together = np.asarray(run(x, jnp.int32(64)))
    for first, size, count in ((0, 4, 1), (13, 4, 3), (40, 16, 16), (9, 16, 5)):
        apart = np.asarray(run(x[first : first + size], jnp.int32(count)))
        assert (apart[:count].view(np.int32) == together[first : first + count].view(np.int32)).all(), (first, count)
