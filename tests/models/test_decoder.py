"""The decoder itself: causality, layouts, and the paged forward against the plain one."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from levanter_infer.axes import POSITION, ROW, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.cache import Cache
from levanter_infer.cache.memory import FullKv, PoolSizes, WindowKv
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CPU, CpuBackend
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.xla.backend import XLA, XlaBackend
from levanter_infer.layers.attention import AttentionBlock, AttentionSpec
from levanter_infer.layers.layout import Layout
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.uncached import keys_and_values
from tests.tiers import nightly_but

PAGE_SIZE, NUM_PAGES, SEQ_PAGES = 4, 16, 6
NUM_TOKENS, NUM_ROWS = 12, 3
PLAIN = AttentionSpec()


NORM = NormConfig(1e-5)


def config_of(windows=(3, None), tie_word_embeddings: bool = False, **mixer) -> DecoderConfig:
    """One layer per window. `mixer`: fields of `AttentionBlock`."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": RopeConfig()}
    options = {**sizes, "qkv_bias": True, "out_bias": True, "qk_norm": NORM, **mixer}
    blocks = [Block(AttentionBlock(**options, window=w), DenseBlock(24, bias=True), NORM) for w in windows]
    return DecoderConfig("qwen3", 17, 16, 32, tuple(blocks), NORM, tie_word_embeddings)


@functools.cache
def tiny(dtype: str = "float32", **changes) -> DecoderModel:
    """Two layers with every option, the first with a window; weights from numpy, which compiles nothing."""
    config = config_of(**changes)
    rng = np.random.default_rng(0)
    shapes = DecoderModel.types(config)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.4, dtype), shapes)


def tokens_of(rows) -> hax.NamedArray:
    rows = jnp.asarray(rows, jnp.int32)
    return hax.named(rows, ("batch", POSITION)[-rows.ndim :])


@functools.partial(jax.jit, static_argnums=2)
def plain(model, tokens, spec=PLAIN):
    return model(tokens, spec).array


@functools.partial(jax.jit, static_argnums=(3,))
def paged(model, batch, kv, spec):
    hidden, kv = model.hidden(batch, kv, spec)
    return model.logits(hidden).array, kv


def batch_of(sequences, starts, pages) -> PageBatchInfo:
    """Row s computes `sequences[s][starts[s]:]`, its K/V in `pages[s]`; padded to NUM_TOKENS and NUM_ROWS."""
    spots = [(s, p) for s, start in enumerate(starts) for p in range(start, len(sequences[s]))]
    pad, pad_rows = NUM_TOKENS - len(spots), NUM_ROWS - len(sequences)
    bounds = np.cumsum([0, *(len(q) - start for q, start in zip(sequences, starts, strict=True)), *[0] * pad_rows])
    table = np.full((NUM_ROWS, SEQ_PAGES), NUM_PAGES)
    for row, held in enumerate(pages):
        table[row, : len(held)] = held
    dests = [pages[s][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for s, p in spots]

    def i32(values, *axes):
        return hax.named(jnp.asarray(np.array(values), jnp.int32), axes)

    return PageBatchInfo(
        tokens=i32([*(sequences[s][p] for s, p in spots), *[0] * pad], TOKEN),
        positions=i32([*(p for _, p in spots), *[0] * pad], TOKEN),
        slot_ids=i32(range(NUM_ROWS), ROW),
        cu_q_lens=i32(bounds, "row_bound"),
        seq_lens=i32([*map(len, sequences), *[0] * pad_rows], ROW),
        page_indices=i32(table, ROW, SEQ_PAGE),
        num_seqs=i32(len(sequences)),
        new_token_dests=i32([*dests, *[NUM_PAGES * PAGE_SIZE] * pad], TOKEN),
        page_size=PAGE_SIZE,
    )


ON_CPU = XlaBackend(CPU)
"""XLA's own code on a CPU, which stores 16-bit floats as integers."""


def empty_cache(model: DecoderModel, backend: Backend = XLA) -> Cache:
    sizes = PoolSizes(NUM_PAGES, PAGE_SIZE, num_slots=2, dtype=model.dtype, backend=backend)
    return Cache.init(model.config.pools, sizes)


SEQUENCES = [np.arange(9) * 5 % 17, np.arange(6) * 7 % 17]
PAGES = [[3, 0, 7], [12, 5]]


def paged_logits(model, spec=PLAIN, backend: Backend = XLA):
    """Logits of every token of SEQUENCES: the first sequence in chunks of 4 and 5, the second whole."""
    first, cache = paged(model, batch_of([SEQUENCES[0][:4]], [0], PAGES[:1]), empty_cache(model, backend), spec)
    second, _ = paged(model, batch_of(SEQUENCES, [4, 0], PAGES), cache, spec)
    return [np.concatenate([first[:4], second[:5]]), np.asarray(second[5:11])]


@pytest.mark.parametrize("impl", nightly_but(["xla"], ["reference", "xla"]))
def test_paged_forward_equals_the_plain_one(impl):
    model = tiny()
    for logits, sequence in zip(paged_logits(model, backend=make_backend(impl)), SEQUENCES, strict=True):
        np.testing.assert_allclose(logits, plain(model, tokens_of(sequence)), atol=2e-4)


@pytest.mark.slow
def test_hooks_act_alike_in_both_forwards():
    spec = AttentionSpec(
        score_mod=lambda score, q_pos, kv_pos, head: score + 0.5 * ((q_pos - kv_pos) * (head + 1)).astype(jnp.float32),
        mask_mod=lambda q_pos, kv_pos, head: (kv_pos % 3 != 1) | (head == 2),
    )
    model = tiny(soft_cap=0.1)
    expected = [np.asarray(plain(model, tokens_of(sequence), spec)) for sequence in SEQUENCES]
    for logits, want in zip(paged_logits(model, spec), expected, strict=True):
        np.testing.assert_allclose(logits, want, atol=2e-4)
    assert np.abs(expected[0] - plain(model, tokens_of(SEQUENCES[0]))).max() > 0.1
    assert np.abs(plain(model, tokens_of(SEQUENCES[0])) - plain(tiny(), tokens_of(SEQUENCES[0]))).max() > 0.01


@pytest.mark.slow
def test_bits_of_bf16_weights_and_pages_give_the_same_bits():
    model = tiny("bfloat16", tie_word_embeddings=True)
    stored = model.prepare(ON_CPU)
    linear = stored.layers.attention.o_proj
    assert linear.weight.dtype == jnp.uint16 == stored.embeddings.weight.dtype
    assert (
        stored.dtype == model.dtype == jnp.bfloat16
        and tiny().prepare(ON_CPU).embeddings.weight.array is tiny().embeddings.weight.array
    )
    for a, b in zip(paged_logits(model), paged_logits(stored, backend=ON_CPU), strict=True):
        assert a.dtype == np.float32 and (a == b).all() and np.isfinite(a).all()
    rounded = np.asarray(plain(model, tokens_of(SEQUENCES[0])))
    assert np.abs(paged_logits(stored, backend=ON_CPU)[0] - rounded).max() < 0.05 * np.abs(rounded).max()


@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("windows", [pytest.param((3, None, 3), marks=pytest.mark.slow), (None, 3, 5, None)])
def test_a_layers_norms_are_its_own_whatever_its_number_in_the_pool(windows):
    """The kernel that rotates looks up norms by layer; layers with a window have another number in their pool."""
    model = tiny(windows=windows)
    for logits, other in zip(paged_logits(model, backend=CpuBackend()), paged_logits(model), strict=True):
        np.testing.assert_allclose(logits, other, atol=2e-4)


@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
def test_attention_in_float32_is_followed_by_matmuls_of_bf16_bits():
    model = tiny("bfloat16").prepare(ON_CPU)
    for logits, other in zip(paged_logits(model, backend=CpuBackend()), paged_logits(model), strict=True):
        np.testing.assert_allclose(logits, other, atol=0.1 * np.abs(other).max())


@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("tied", [True, False])
def test_panels_give_the_same_logits_paged_and_plain(tied):
    model = tiny(tie_word_embeddings=tied)
    stored = model.prepare(CpuBackend())
    assert stored.layers.mlp.down_proj.packed_axes is not None and stored.is_packed and not model.is_packed
    for logits, other in zip(paged_logits(stored), paged_logits(model), strict=True):
        np.testing.assert_allclose(logits, other, atol=1e-4)
    np.testing.assert_allclose(plain(stored, tokens_of(SEQUENCES[0])), plain(model, tokens_of(SEQUENCES[0])), atol=1e-4)
    with pytest.raises(ValueError, match="packed already"):
        stored.prepare(CpuBackend())


@pytest.mark.parametrize("kernel", ["xla", "cpu"] if cpu.available() else ["xla"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_donated_model_is_not_kept_beside_its_copy(kernel, tied):
    model = jax.tree.map(jnp.copy, tiny("bfloat16", tie_word_embeddings=tied))
    expected = np.asarray(plain(model.prepare(make_backend(kernel, "cpu")), tokens_of(SEQUENCES[0])))
    stored = model.prepare(make_backend(kernel, "cpu"), donate=True)
    alive = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model) if not leaf.is_deleted()}
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(stored)}
    assert alive <= own, "weights of the given model that no one uses any more"
    np.testing.assert_array_equal(plain(stored, tokens_of(SEQUENCES[0])), expected)


def test_plain_forward_gives_f32_logits_of_every_position_in_any_company():
    model = tiny()
    rows = np.stack([SEQUENCES[0], SEQUENCES[0][::-1]])
    logits = plain(model, tokens_of(rows))
    assert logits.shape == (2, 9, 17) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[1], plain(model, tokens_of(rows[1])), atol=1e-5)


def test_later_tokens_do_not_reach_earlier_logits():
    model = tiny()
    changed = SEQUENCES[0].copy()
    changed[5] += 1
    before, after = (np.asarray(plain(model, tokens_of(t))) for t in (SEQUENCES[0], changed))
    assert (before[:5] == after[:5]).all() and (np.abs(before[5:] - after[5:]).max(axis=-1) > 1e-4).all()


def test_window_hides_what_lies_before_it():
    model = tiny(windows=(3, 3))
    changed = SEQUENCES[0].copy()
    changed[0] += 1
    before, after = (np.asarray(plain(model, tokens_of(t))) for t in (SEQUENCES[0], changed))
    # Two layers of window 3 see four positions back.
    assert (np.abs(before[:5] - after[:5]).max(axis=-1) > 1e-4).all() and (before[5:] == after[5:]).all()


def test_weights_are_stored_layers_then_outputs_then_inputs():
    layers = tiny().layers
    q = ("kv_head", "q_heads_per_group", "head_size")
    names = {
        "q_proj": ("layers", *q, "embed"),
        "k_proj": ("layers", "kv_head", "head_size", "embed"),
        "v_proj": ("layers", "kv_head", "head_size", "embed"),
        "o_proj": ("layers", "embed", *q),
    }
    for name, expected in names.items():
        assert tuple(axis.name for axis in getattr(layers.attention, name).weight.axes) == expected
    for name, expected in {"gate": ("mlp", "embed"), "up": ("mlp", "embed"), "down": ("embed", "mlp")}.items():
        axes = getattr(layers.mlp, f"{name}_proj").weight.axes
        assert tuple(axis.name for axis in axes) == ("layers", *expected)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "qkv_bias": False, "qk_norm": None}])
def test_parameter_count_from_sizes_equals_that_of_the_arrays(changes):
    model = tiny(**changes)
    assert model.config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(model))


def test_tied_head_is_the_embeddings():
    model = tiny(tie_word_embeddings=True)
    assert model.lm_head is None
    untied = eqx.tree_at(lambda m: m.lm_head, model, model.embeddings, is_leaf=lambda leaf: leaf is None)
    hidden = hax.named(jnp.linspace(-1, 1, 16), "embed")
    assert (model.logits(hidden).array == untied.logits(hidden).array).all()


def test_init_is_finite_and_follows_its_key():
    init = jax.jit(lambda key: DecoderModel.init(tiny().config, key=key))
    first, again, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    assert eqx.tree_equal(first, again) and not eqx.tree_equal(first, other)
    assert float(jnp.std(first.embeddings.weight.array)) == pytest.approx(0.02, rel=0.2)
    assert float(jnp.std(first.layers.mlp.down_proj.weight.array)) == pytest.approx(24**-0.5, rel=0.1)


def test_rope_that_depends_on_length_wants_to_know_it():
    longrope = RopeConfig(
        kind="longrope", factor=4.0, original_len=8, short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 3.0, 4.0)
    )
    model = tiny(rope=longrope)
    with pytest.raises(ValueError, match=r"up to 24 tokens here, beyond the original 8; give AttentionSpec\(max_seq"):
        paged_logits(model)
    spec = AttentionSpec(max_seq_len=24)
    expected = np.asarray(plain(model, tokens_of(SEQUENCES[1]), spec))
    np.testing.assert_allclose(paged_logits(model, spec)[1], expected, atol=2e-4)
    # Left to itself the plain forward goes by the sequence, as HF does: 6 tokens are within the original 8.
    assert np.abs(plain(model, tokens_of(SEQUENCES[1])) - expected).max() > 1e-3


def test_layers_that_remember_alike_share_a_pool_in_their_order():
    config = config_of(windows=(3, 3, None) * 3 + (3, 5))
    memories = [(type(pool.memory), pool.memory.window, pool.layers) for pool in config.pools]
    threes = (0, 1, 3, 4, 6, 7, 9)
    assert memories == [(WindowKv, 3, threes), (FullKv, None, (2, 5, 8)), (WindowKv, 5, (10,))]
    places = {layer: config.remembered_at(layer, is_paged=True) for layer in range(11)}
    assert places == {layer: (i, at) for i, pool in enumerate(config.pools) for at, layer in enumerate(pool.layers)}


@pytest.mark.slow
def test_layers_with_other_pools_may_have_other_heads():
    config = config_of(windows=(3, 3, None) * 2)
    full = dict(num_heads=6, num_kv_heads=3, head_dim=4)
    blocks = [
        b if b.mixer.window else dataclasses.replace(b, mixer=dataclasses.replace(b.mixer, **full))
        for b in config.blocks
    ]
    config = dataclasses.replace(config, blocks=tuple(blocks))
    rng = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(DecoderModel.init, config, key=jax.eval_shape(lambda: jax.random.key(0)))
    model = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.4, "float32"), shapes)
    assert [pool.pages.array.shape[0::3] for pool in empty_cache(model).pools] == [(4, 4), (2, 6)]
    for logits, sequence in zip(paged_logits(model), SEQUENCES, strict=True):
        np.testing.assert_allclose(logits, plain(model, tokens_of(sequence)), atol=2e-4)
    mesh = AbstractMesh((2,), ("model",))
    layout = Layout.of(mesh, config)
    assert (layout.local_kv_heads(2), layout.local_kv_heads(3)) == (1, 3)  # of three each device has a copy
    shapes = [fitted.attention.q_proj.weight.array.shape[1:4] for fitted in layout.fit_model(shapes).stacks]
    assert shapes == [(2, 2, 8), (6, 1, 4)]
    with pytest.raises(ValueError, match="mesh.model=2: layers differ in their heads, and score_mod"):
        layout.head_index(0)
    whole = [
        dataclasses.replace(b, mixer=dataclasses.replace(b.mixer, qk_norm=b.norm, qk_norm_whole=True))
        for b in config.blocks
    ]
    with pytest.raises(ValueError, match=r"mesh.model=2: layers differ in .*\(4, 2\), \(6, 3\), and tensor"):
        Layout.of(mesh, dataclasses.replace(config, blocks=tuple(whole)))


def test_keys_and_values_of_several_pools_have_the_numbers_of_their_layers():
    tokens = jnp.arange(8, dtype=jnp.int32)
    several, one = (tiny(windows=windows) for windows in ((100, None, 100, None), (None,) * 4))
    found, expected = keys_and_values(several, tokens), keys_and_values(one, tokens)
    assert sorted(found) == sorted(expected) == [0, 1, 2, 3]
    for layer, values in found.items():
        np.testing.assert_array_equal(values, expected[layer])


def test_config_refuses_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="num_attention_heads=4 is no multiple of num_key_value_heads=3"):
        config_of(num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=7 is odd"):
        config_of(head_dim=7)
    config = tiny().config
    first = config.blocks[0]
    experts = [dataclasses.replace(first, feed_forward=ExpertsBlock(n, 2, 8, Router())) for n in (4, 8)]
    with pytest.raises(ValueError, match="layers have 4 and 8 experts"):
        dataclasses.replace(config, blocks=tuple(experts))
    with pytest.raises(ValueError, match=r"9 layer bodies.*are 2 x \(mixer.window=3\), \(mixer.window=1\), "):
        config_of(windows=(3, 3, 1, 2, 4, 5, 6, 7, 8, 9))


@pytest.mark.slow
def test_bits_spare_a_cpu_the_conversion_of_whole_stacks():
    def converted(model: DecoderModel) -> bool:
        batch = batch_of(SEQUENCES, [0, 0], PAGES)
        text = paged.lower(model, batch, empty_cache(model, backend=ON_CPU), PLAIN).compile().as_text()
        return any(shape in text for shape in ("f32[2,24,16]", "f32[2,16,24]", "f32[17,16]"))

    model = tiny("bfloat16", tie_word_embeddings=True)
    assert not converted(model.prepare(ON_CPU))
    if jax.__version_info__ < (0, 12):  # From 0.12 on XLA leaves the floats alone too.
        assert converted(model)
