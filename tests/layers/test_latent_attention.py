"""Latent attention: its absorbed form over pages gives what its expanded form gives, and stores latents alone."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from levanter_infer.axes import EMBED, LAYERS, POSITION, TOKEN
from levanter_infer.cache.memory import FullKv, Latents, PoolSizes
from levanter_infer.kernels.backend import Platform
from levanter_infer.kernels.call import KvWrite, PoolShape
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.xla.backend import ReferenceBackend, XlaBackend
from levanter_infer.layers.attention import AttentionInputs, AttentionSpec
from levanter_infer.layers.latent_attention import LatentAttention, LatentAttentionBlock
from levanter_infer.layers.linear import Fusion, Linear
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.rotary import RopeConfig, rope_at
from tests.layers.test_attention import LENGTH, PAGE_SIZE, prompt
from tests.tiers import nightly_but

NORM = NormConfig(1e-6)
BLOCK = LatentAttentionBlock(3, 24, 14, 10, 18, RopeConfig(interleaved=True), NORM, 20, bias=True)
BLOCKS = {
    "query latents": BLOCK,
    "no query latents": dataclasses.replace(BLOCK, q_latent_dim=None, rope=RopeConfig(), bias=False, scale=0.4),
    "no rope": dataclasses.replace(BLOCK, rope=None),
}
EMBEDDING = Axis(EMBED, 40)


def make_layer(block: LatentAttentionBlock, num_layers: int = 2) -> LatentAttention:
    """A stack with weights and biases that are all random."""

    @jax.jit
    def make() -> LatentAttention:
        layer = LatentAttention.init(
            (Axis(LAYERS, num_layers),), EMBEDDING, block, key=jax.random.key(0), dtype=jnp.float32
        )
        leaves, tree = jax.tree.flatten(layer)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        return jax.tree.unflatten(
            tree, [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        )

    return make()


def pick(layer: LatentAttention, index: int) -> LatentAttention:
    """One layer of a stack, as the paged forward picks it."""
    return jax.tree.map(
        lambda part: part.at(jnp.int32(index)) if isinstance(part, RMSNorm) else part.at(jnp.int32(index), None),
        layer,
        is_leaf=lambda part: isinstance(part, RMSNorm | Linear),
    )


def inputs(block: LatentAttentionBlock, axis: str) -> AttentionInputs:
    positions = NamedArray(jnp.arange(LENGTH, dtype=jnp.int32), (Axis(axis, LENGTH),))
    rope = None if block.rope is None else rope_at(block.rope, block.rope_dim, positions, LENGTH)
    return AttentionInputs(
        block,
        rope,
        AttentionSpec(score_mod=lambda score, q, k, head: score + jnp.float32(0.1) * head.astype(jnp.float32)),
    )


def attend_to_pages(block, layer, x, backend, dtype=jnp.float32):
    sizes = PoolSizes(9, PAGE_SIZE, 1, jnp.dtype(dtype), backend)
    pool = block.memory.init(2, sizes)
    tokens = x.rename({POSITION: TOKEN})

    @jax.jit
    def attend(layer, tokens, pool, batch):
        own = inputs(block, TOKEN)
        return pick(layer, 1).paged(tokens, Fusion(residual=tokens), own, pool, jnp.int32(1), batch)

    return attend(layer, tokens, pool, prompt())


@pytest.mark.parametrize("name", nightly_but(["no query latents"], BLOCKS))
def test_the_absorbed_form_over_pages_equals_the_expanded_form(name):
    block = BLOCKS[name]
    layer = make_layer(block)
    x = hax.random.normal(jax.random.key(2), (Axis(POSITION, LENGTH), EMBEDDING))
    expanded, _ = jax.jit(lambda layer, x: pick(layer, 1).dense(x, Fusion(residual=x), inputs(block, POSITION)))(
        layer, x
    )
    assert np.abs(expanded.array - x.array).max() > 1
    for backend in (ReferenceBackend(), XlaBackend()):
        absorbed, pool = attend_to_pages(block, layer, x, backend)
        np.testing.assert_allclose(absorbed.array, expanded.array, atol=2e-5 * np.abs(expanded.array).max())
    assert pool.pages.array.shape == (2, 9, PAGE_SIZE, 1, 24 + 10)  # no values, and one head for all
    assert not pool.pages.array[0].any() and pool.pages.array[1, 0].any()


def test_a_sequence_that_is_batched_or_alone_has_the_same_expanded_form():
    layer = pick(make_layer(BLOCK), 0)
    x = hax.random.normal(jax.random.key(2), (Axis("batch", 2), Axis(POSITION, LENGTH), EMBEDDING))
    dense = jax.jit(lambda x: layer.dense(x, Fusion(), inputs(BLOCK, POSITION))[0])
    both, alone = dense(x), dense(x["batch", 1])
    np.testing.assert_allclose(both.array[1], alone.array, atol=1e-5 * np.abs(alone.array).max())


def test_the_maps_of_heads_are_never_packed_and_keep_their_dtype():
    """A CPU's backends store the bits of bfloat16, and its own kernels read panels."""
    layer = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_layer(BLOCK))
    x = jax.random.normal(jax.random.key(3), (5, 3, 14), jnp.bfloat16)
    expected = pick(layer, 1).k_proj.absorbed(x)
    backends = [XlaBackend(Platform("cpu", integers_for_floats=True))]
    backends += [make_backend("cpu")] if make_backend("cpu").why_unavailable() is None else []
    for backend in backends:
        stored = layer.k_proj.prepare(backend)
        assert stored.packed_axes is None and stored.weight.array.dtype == jnp.uint16
        np.testing.assert_array_equal(stored.at(jnp.int32(1), None).absorbed(x), expected)


@pytest.mark.parametrize("name", ["reference", "xla", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_latents_are_read_back_as_written(name, dtype):
    shape = PoolShape(2, 5, 4, kv_heads=1, head_dim=34, dtype=jnp.dtype(dtype), is_latent=True)
    backend, rng = make_backend(name), np.random.default_rng(0)
    latents = jnp.asarray(rng.standard_normal((3, 1, 34)), jnp.float32)
    page, offset = (jnp.asarray(values, jnp.int32) for values in ([4, 0, 5], [1, 3, 0]))  # the last is not stored
    write = KvWrite(latents, None, jnp.int32(1), page * 4 + offset, page, offset, shape.dtype)
    pool = backend.write_kv(backend.init_pool(shape), write)[1]
    read = np.asarray(backend.read_kv(pool, shape, page[:2], offset[:2]))
    assert read.shape == (2, 2, 1, 34) and not read[0].any()
    exact = np.asarray(latents[:2].astype(jnp.dtype(dtype)) if dtype != "int8" else latents[:2], np.float32)
    np.testing.assert_allclose(read[1], exact, atol=0.02 if dtype == "int8" else 0)


@pytest.mark.parametrize("name, latent, full", [("xla", 576, 2 * 128 * 128), ("tpu", 640, 2 * 128 * 128)])
def test_a_page_of_deepseek_v3_holds_576_numbers_per_token_and_layer(name, latent, full):
    """Far less than 128 heads of 128; a TPU fills up the last slab."""
    sizes = PoolSizes(100, 16, 1, jnp.dtype(jnp.bfloat16), make_backend(name))
    assert Latents(576).entry_bytes(61, sizes) == 61 * 16 * 2 * latent
    assert FullKv(128, 128).entry_bytes(61, sizes) == 61 * 16 * 2 * full


def test_an_odd_rope_is_refused():
    with pytest.raises(ValueError, match="rope_dim=9 is odd"):
        dataclasses.replace(BLOCK, rope_dim=9)
