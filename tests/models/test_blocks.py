"""Every option of a block against a decoder in plain NumPy and float64; and stacks, periods and loops against each
other."""

import copy
import dataclasses
import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.axes import POSITION
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.layers.activation import Activation, ClampedSwiglu
from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Router, Score, SelectionBias
from levanter_infer.models.blocks import Block, Placement, differences
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from tests.layers.test_router import choice
from tests.models.test_decoder import SEQUENCES, paged_logits, plain, tokens_of
from tests.tiers import nightly_but

HIDDEN, VOCAB = 16, 17
NORM, PLUS_ONE, CENTERED = NormConfig(0.1), NormConfig(0.1, plus_one=True), NormConfig(0.1, center=True)
LAYER_NORM, WEIGHTLESS = NormConfig(0.1, center=True, bias=True), NormConfig(0.1, weight=False)
GATED = NormConfig(0.1, gate_rank=3)
EXPERTS = ExpertsBlock(5, 2, 12, Router(normalize=True))
ATTENTION = AttentionBlock(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(theta=100.0))
BLOCK = Block(ATTENTION, DenseBlock(24), NORM)
SIGMOID = Router(Score.SIGMOID, normalize=True, scale=2.5, selection_bias=SelectionBias.ON_SCORES, float32=True)


def block(placement: Placement = Placement.BEFORE, mlp: dict | None = None, norm: NormConfig = NORM, **mixer) -> Block:
    dense = dataclasses.replace(BLOCK.feed_forward, **(mlp or {}))
    return Block(dataclasses.replace(ATTENTION, **mixer), dense, norm, placement)


def model_of(*blocks: Block, **fields) -> DecoderModel:
    config = DecoderConfig("llama", VOCAB, HIDDEN, 32, blocks, blocks[0].norm, **fields)
    types = DecoderModel.types(config)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.4, jnp.float32), types)


def experts_block(**fields) -> Block:
    return dataclasses.replace(BLOCK, feed_forward=dataclasses.replace(EXPERTS, **fields))


# The oracle


def f64(named) -> np.ndarray:
    return np.asarray(named.array, np.float64)


def normed(x: np.ndarray, norm, index: int | None = None) -> np.ndarray:
    """Over as many of the last axes as the weight has; without one, over the last."""
    weight, bias = (
        default if part is None else f64(part) if index is None else f64(part)[index]
        for part, default in ((norm.weight, np.ones(1)), (norm.bias, np.zeros(1)))
    )
    axes = tuple(range(-(len(norm.over or ()) or weight.ndim), 0))
    factor = weight + 1 if norm.config.plus_one else weight
    if norm.config.center:
        x = x - x.mean(axis=axes, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + norm.config.eps) * factor + bias
    return x if norm.config.gate_rank is None else gated(x, norm, index)


def gated(x: np.ndarray, norm, index: int | None) -> np.ndarray:
    down, up = (
        f64(part.weight) if index is None else f64(part.weight)[index] for part in (norm.gate_down, norm.gate_up)
    )
    return x / (1 + np.exp(-(ACTIVATIONS[Activation.SILU](x @ down.T) @ up.T)))


def linear(part, index: int, x: np.ndarray) -> np.ndarray:
    weight = f64(part.weight)[index]
    outs = weight.shape[: weight.ndim - part.num_in]
    y = x.reshape(len(x), -1) @ weight.reshape(math.prod(outs), -1).T
    y = y.reshape(len(x), *outs)
    return y if part.bias is None else y + f64(part.bias)[index]


def rotated(x: np.ndarray, rope: RopeConfig | None) -> np.ndarray:
    """[position, ..., head_size]"""
    if rope is None:
        return x
    size = int(x.shape[-1] * rope.partial)
    angles = np.arange(len(x))[:, None] * rope.theta ** (-np.arange(0, size, 2) / size)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), size // 2)
    x = x.copy()
    pairs = (
        (slice(0, size, 2), slice(1, size, 2)) if rope.interleaved else (slice(0, size // 2), slice(size // 2, size))
    )
    first, second = x[..., pairs[0]].copy(), x[..., pairs[1]].copy()
    x[..., pairs[0]] = first * np.cos(angles) - second * np.sin(angles)
    x[..., pairs[1]] = second * np.cos(angles) + first * np.sin(angles)
    return x


def qk_normed(x: np.ndarray, norm, mixer: AttentionBlock, index: int) -> np.ndarray:
    """Norms without weights are none of the parameters."""
    if norm is not None or mixer.qk_norm is None:
        return x if norm is None else normed(x, norm, index)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + mixer.qk_norm.eps)


def attention(part, mixer: AttentionBlock, index: int, x: np.ndarray) -> np.ndarray:
    q, k, v = (linear(each, index, x) for each in (part.q_proj, part.k_proj, part.v_proj))
    after = mixer.qk_norm_after_rope
    if not after:
        q, k = (qk_normed(*each, mixer, index) for each in ((q, part.q_norm), (k, part.k_norm)))
    clip = mixer.qkv_clip or np.inf
    q, k, v = (np.clip(each, -clip, clip) for each in (q, k, v))
    q, k = rotated(q, mixer.rope), rotated(k, mixer.rope)
    if after:
        q, k = (qk_normed(*each, mixer, index) for each in ((q, part.q_norm), (k, part.k_norm)))
    if mixer.rope is not None and mixer.rope.query_beta is not None:
        stretches = np.log(1 + (np.arange(len(x)) + mixer.rope.query_shift) // mixer.rope.original_len)
        q = q * (1 + mixer.rope.query_beta * stretches)[:, None, None, None]
    scores = np.einsum("qhgd,khd->hgqk", q, k) * (mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale)
    if mixer.soft_cap is not None:
        scores = mixer.soft_cap * np.tanh(scores / mixer.soft_cap)
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    seen = (distance >= 0) & (distance < (mixer.window or len(x)))
    chunk = np.arange(len(x)) // (mixer.attention_chunk or len(x))
    weights = np.exp(np.where(seen & (chunk[:, None] == chunk), scores, -np.inf))
    sinks = 0.0 if part.sinks is None else np.exp(f64(part.sinks)[index])[:, :, None, None]
    weights /= weights.sum(axis=-1, keepdims=True) + sinks
    attended = np.einsum("hgqk,khd->qhgd", weights, v)
    if mixer.exclusive:
        own = v[:, :, None]
        attended = (
            attended - (attended * own).sum(-1, keepdims=True) / ((own * own).sum(-1, keepdims=True) + 1e-6) * own
        )
    if mixer.head_gate:
        attended = attended * 2 / (1 + np.exp(-linear(part.gate_proj, index, x)))[..., None]
    return linear(part.o_proj, index, attended)


ACTIVATIONS = {
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
    Activation.GELU: lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    Activation.GELU_TANH: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.RELU2: lambda x: np.maximum(x, 0) ** 2,
}


def xielu(part, index: int):
    alpha_p, alpha_n, beta, eps = (f64(each)[index] for each in (part.alpha_p, part.alpha_n, part.beta, part.eps))
    softplus = lambda x: np.log1p(np.exp(x))  # noqa: E731

    def apply(x: np.ndarray) -> np.ndarray:
        below = (beta + softplus(alpha_n)) * (np.expm1(np.minimum(x, eps)) - x)
        return np.where(x > 0, softplus(alpha_p) * x * x, below) + beta * x

    return apply


def feed_forward(part, dense: DenseBlock | ExpertsBlock, index: int, x: np.ndarray) -> np.ndarray:
    if isinstance(dense, ExpertsBlock):
        return experts(part, dense, index, x)
    up = linear(part.up_proj, index, x)
    activation = ACTIVATIONS[dense.activation] if part.xielu is None else xielu(part.xielu, index)
    inner = activation(linear(part.gate_proj, index, x)) * up if dense.gated else activation(up)
    return linear(part.down_proj, index, inner)


def experts(part, block: ExpertsBlock, index: int, x: np.ndarray) -> np.ndarray:
    """Token by token, expert by expert, and the shared expert."""
    maps = [f64(each.weight)[index] for each in (part.gate_proj, part.up_proj, part.down_proj)]
    biases = [
        np.zeros(block.num_experts) if each.bias is None else f64(each.bias)[index]
        for each in (part.gate_proj, part.up_proj, part.down_proj)
    ]
    selection_bias = None if part.selection_bias is None else f64(part.selection_bias)[index]
    result, logits = np.zeros_like(x), linear(part.router, index, x)
    for row, own in enumerate(logits):
        chosen, weights = choice(block.router, own, block.num_chosen, selection_bias)
        for expert, weight in zip(chosen, weights, strict=True):
            (gate, up, down), (gate_bias, up_bias, down_bias) = (
                [each[expert] for each in all_] for all_ in (maps, biases)
            )
            before, after = (weight, 1.0) if block.router.weigh_inputs else (1.0, weight)
            gated, upper = gate @ (before * x[row]) + gate_bias, up @ (before * x[row]) + up_bias
            result[row] += after * (down @ inner(block.activation, gated, upper) + down_bias)
    if block.shared_width is None:
        return result
    shared = feed_forward(part.shared, DenseBlock(block.shared_width), index, x)
    return result + (shared / (1 + np.exp(-linear(part.shared_gate, index, x))) if block.shared_gate else shared)


def inner(activation: Activation | ClampedSwiglu, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if isinstance(activation, Activation):
        return ACTIVATIONS[activation](gate) * up
    gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate / (1 + np.exp(-activation.alpha * gate))


def branch(part, each: Block, at: int, x: np.ndarray, before, after) -> np.ndarray:
    x = x if before is None else normed(x, before, at)
    y = attention(part, each.mixer, at, x) if hasattr(part, "q_proj") else feed_forward(part, each.feed_forward, at, x)
    return each.residual_multiplier * (y if after is None else normed(y, after, at))


def oracle(model: DecoderModel, tokens: np.ndarray) -> np.ndarray:
    config = model.config
    x = f64(model.embeddings.weight)[tokens] * config.embedding_multiplier
    if config.learnt_positions:
        x = x + f64(model.position_embeddings.weight)[: len(x)]
    x = x if config.embedding_norm is None else normed(x, model.embedding_norm)
    for number, each in enumerate(config.blocks):
        stack = next(i for i, stack in enumerate(config.stacks) if number in stack.layers)
        layer, at = model.stacks[stack], config.stacks[stack].layers.index(number)

        mixed = branch(layer.attention, each, at, x, layer.input_norm, layer.mixer_out_norm)
        if each.placement.is_parallel:
            before = layer.mlp_norm if each.placement is Placement.PARALLEL_TWO else layer.input_norm
            x = x + mixed + branch(layer.mlp, each, at, x, before, None)
        else:
            x = x + mixed
            x = x + branch(layer.mlp, each, at, x, layer.mlp_norm, layer.mlp_out_norm)
    head = model.lm_head or model.embeddings
    logits = normed(x, model.norm) @ f64(head.weight).T + (f64(head.bias) if config.head_bias else 0)
    logits = logits * config.logits_multiplier / config.logits_divisor
    cap = config.logits_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


OPTIONS = {
    "plain": block(),
    "window": block(window=3),
    "no_rope": block(rope=None),
    "partial_rope": block(rope=RopeConfig(theta=100.0, partial=0.5)),
    "interleaved_rope": block(rope=RopeConfig(theta=100.0, interleaved=True)),
    "partial_interleaved_rope": block(rope=RopeConfig(theta=100.0, partial=0.25, interleaved=True)),
    "scale": block(scale=1.0),
    "soft_cap": block(soft_cap=0.3),
    "qk_norm": block(qk_norm=NORM),
    "qk_norm_plus_one": block(qk_norm=PLUS_ONE),
    "qk_norm_by_head": block(qk_norm=NORM, qk_norm_by_head=True),
    "qk_layer_norm_by_head": block(qk_norm=CENTERED, qk_norm_by_head=True),
    "qkv_clip": block(qkv_clip=0.5),
    "qkv_clip_after_norms": block(qk_norm=NORM, qkv_clip=0.3),
    "query_scale": block(rope=RopeConfig(theta=100.0, original_len=2, query_beta=0.7)),
    "query_scale_without_rotation": block(rope=RopeConfig(partial=0.0, original_len=2, query_beta=0.7, query_shift=1)),
    "qk_norm_after_rope": block(qk_norm=NORM, qk_norm_after_rope=True),
    "qk_norm_without_weight_after_rope": block(qk_norm=WEIGHTLESS, qk_norm_after_rope=True),
    "attention_chunk": block(attention_chunk=4),
    "sinks": block(sinks=True),
    "sinks_of_a_window": block(sinks=True, window=3, soft_cap=0.8),
    "layer_norm": block(norm=CENTERED),
    "parallel_layer_norm": block(Placement.PARALLEL, norm=CENTERED),
    "layer_norm_with_bias": block(norm=LAYER_NORM),
    "layer_norm_without_weight": block(norm=dataclasses.replace(WEIGHTLESS, center=True)),
    "qk_layer_norm_with_bias": block(qk_norm=LAYER_NORM),
    "qk_layer_norm_with_bias_by_head": block(qk_norm=LAYER_NORM, qk_norm_by_head=True),
    "gated_norm": block(norm=GATED),
    "gated_norm_before_experts": dataclasses.replace(BLOCK, feed_forward=EXPERTS, norm=GATED),
    "exclusive": block(exclusive=True),
    "exclusive_clipped_values": block(exclusive=True, qkv_clip=0.3, rope=None),
    "head_gate": block(head_gate=True),
    "exclusive_head_gate": block(exclusive=True, head_gate=True, window=3),
    "experts": dataclasses.replace(BLOCK, feed_forward=EXPERTS),
    "shares_of_experts": dataclasses.replace(BLOCK, feed_forward=dataclasses.replace(EXPERTS, router=Router())),
    "shared_expert": dataclasses.replace(BLOCK, feed_forward=dataclasses.replace(EXPERTS, shared_width=20)),
    "sigmoid_router": experts_block(router=SIGMOID, shared_width=20),
    "biases_of_experts": experts_block(bias=True, router=Router(Score.SOFTMAX_OF_CHOSEN, bias=True)),
    "clamped_experts": experts_block(bias=True, activation=ClampedSwiglu(1.3, 0.5)),
    "weighted_inputs": experts_block(router=Router(Score.SIGMOID, weigh_inputs=True)),
    "gated_shared_expert": dataclasses.replace(
        BLOCK, feed_forward=dataclasses.replace(EXPERTS, shared_width=20, shared_gate=True)
    ),
    "qk_norm_whole": block(qk_norm=NORM, qk_norm_whole=True),
    "biases": block(qkv_bias=True, out_bias=True, mlp={"bias": True}),
    "plus_one": block(norm=PLUS_ONE),
    "after": block(Placement.AFTER),
    "both": block(Placement.BOTH),
    "parallel": block(Placement.PARALLEL),
    "parallel_two": block(Placement.PARALLEL_TWO),
    "residual": dataclasses.replace(BLOCK, residual_multiplier=0.4),
    "residual_both": dataclasses.replace(block(Placement.BOTH), residual_multiplier=0.4),
    "gelu": block(mlp={"activation": Activation.GELU}),
    "gelu_tanh": block(mlp={"activation": Activation.GELU_TANH}),
    "relu": block(mlp={"activation": Activation.RELU}),
    "ungated": block(mlp={"activation": Activation.RELU2, "gated": False, "bias": True}),
    "xielu": block(mlp={"activation": Activation.XIELU, "gated": False}),
}
GAINS = {
    "embedding_norm": dict(embedding_norm=NORM),
    "gated_embedding_norm": dict(embedding_norm=GATED),
    "embeddings": dict(embedding_multiplier=2.5),
    "logits": dict(logits_divisor=3.0),
    "logits_multiplier": dict(logits_multiplier=3.0),
    "logits_cap": dict(logits_soft_cap=0.5),
    "head_bias": dict(head_bias=True),
    "head_bias_behind_a_multiplier": dict(head_bias=True, logits_multiplier=3.0),
    "head_bias_tied": dict(head_bias=True, tie_word_embeddings=True),
    "learnt_positions": dict(learnt_positions=True),
}
OPTIONS_IN_CI = (
    "plain", "partial_interleaved_rope", "qk_norm_after_rope", "attention_chunk", "sinks_of_a_window",
    "exclusive_head_gate", "gated_norm_before_experts", "sigmoid_router", "parallel_two", "residual_both", "xielu",
)  # fmt: skip
"""The others are nightly; tests/models/test_hf_parity.py has them in the families that use them."""
BACKENDS = [XLA, *([CpuBackend()] if cpu.available() else [])]
FASTEST = BACKENDS[-1:]
"""Enough for what is outside of attention: the plain forward computes it with XLA too."""


LONGEST = max(map(len, SEQUENCES))
TOGETHER = tokens_of([np.pad(sequence, (0, LONGEST - len(sequence))) for sequence in SEQUENCES])
"""`SEQUENCES` for one program: compiling is what takes time here."""


def check(model: DecoderModel, backends=FASTEST) -> np.ndarray:
    """Compare the plain forward, and the paged one of `backends`, with the oracle. Returns: logits of `TOGETHER`."""
    expected = [oracle(model, sequence) for sequence in SEQUENCES]
    bound = 2e-4 * max(1.0, max(np.abs(each).max() for each in expected))
    together = np.asarray(plain(model, TOGETHER))
    for logits, want in zip(together, expected, strict=True):
        np.testing.assert_allclose(logits[: len(want)], want, atol=bound)
    for backend in backends:
        for logits, want in zip(paged_logits(model.prepare(backend), backend=backend), expected, strict=True):
            np.testing.assert_allclose(logits, want, atol=bound)
    return together


@pytest.mark.parametrize("name", nightly_but(OPTIONS_IN_CI, OPTIONS))
def test_an_option_of_a_block_is_computed_as_it_says(name):
    model = model_of(OPTIONS[name], OPTIONS[name])
    logits = check(model, BACKENDS if OPTIONS[name].mixer != ATTENTION or name == "plain" else FASTEST)
    if name != "plain" and OPTIONS[name].stored == BLOCK.stored:  # the same parameters without the option
        config = dataclasses.replace(model.config, blocks=(BLOCK, BLOCK))
        without = oracle(dataclasses.replace(model, config=config), SEQUENCES[0])
        assert np.abs(without - logits[0][: len(without)]).max() > 1e-2


@pytest.mark.parametrize("name", GAINS)
def test_a_gain_of_a_decoder_is_applied(name):
    model = model_of(BLOCK, BLOCK, **GAINS[name])
    check(model)
    assert model.config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
    without = dataclasses.replace(model, config=model_of(BLOCK, BLOCK).config)
    assert np.abs(oracle(model, SEQUENCES[0]) - oracle(without, SEQUENCES[0])).max() > 1e-2


W, F, B = block(window=3), block(rope=RopeConfig(theta=10.0)), block(qkv_bias=True)
STACKS = {
    "period_of_two": ([W, F] * 3, [(2, 3)], 1),
    "partial_period": ([W, W, F, W, W, F, W, W, F, W], [(3, 3), (1, 1)], 1),
    "first_layer": ([B, W, W, W], [(1, 1), (1, 3)], 2),
    "last_layer": ([W, W, B], [(1, 2), (1, 1)], 2),
    "two_stacks_in_a_period": ([W, B, F] * 2, [(3, 2)], 2),
    "one_of_each": ([W, F, B], [(3, 1)], 2),
}


@pytest.mark.parametrize("name", STACKS)
def test_layers_run_in_order_whatever_their_stacks_and_periods(name):
    blocks, groups, stacks = STACKS[name]
    model = model_of(*blocks)
    assert [(len(group.period), group.repeats) for group in model.config.groups] == groups
    assert len(model.stacks) == stacks
    check(model)


def test_dense_and_expert_layers_stand_in_two_stacks():
    experts = dataclasses.replace(BLOCK, feed_forward=ExpertsBlock(4, 2, 8, Router(normalize=True)))
    model = model_of(BLOCK, experts, experts)
    assert [stack.layers for stack in model.config.stacks] == [(0,), (1, 2)] and model.config.num_experts == 4
    assert model.config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
    for logits, sequence in zip(paged_logits(model), SEQUENCES, strict=True):
        np.testing.assert_allclose(logits, plain(model, tokens_of(sequence)), atol=2e-4)
    with pytest.raises(ValueError, match="stored in 2 stacks, expected one; use `stacks`"):
        _ = model.layers


@pytest.mark.parametrize("name", nightly_but(["partial_period"], ["partial_period", "two_stacks_in_a_period"]))
def test_the_plain_forward_has_the_gradient_of_a_loop_over_layers(name):
    """The gradient of one layer's weights, against a difference of the oracle."""
    model = model_of(*STACKS[name][0])
    tokens = SEQUENCES[1]

    @jax.jit
    def gradient(model):
        return jax.grad(lambda m: jnp.sum(m(hax.named(jnp.asarray(tokens, jnp.int32), POSITION)).array ** 2))(model)

    found = gradient(model)
    where = lambda m: m.stacks[-1].mlp.down_proj.weight.array  # noqa: E731
    direction = np.random.default_rng(1).normal(size=where(model).shape)
    moved = [
        eqx.tree_at(where, model, np.asarray(where(model), np.float64) + sign * 1e-4 * direction) for sign in (1, -1)
    ]
    high, low = (float((oracle(m, tokens) ** 2).sum()) for m in moved)
    expected = (high - low) / 2e-4
    assert float((np.asarray(where(found), np.float64) * direction).sum()) == pytest.approx(expected, rel=1e-2)


def test_every_block_counts_its_parameters():
    for each in (*OPTIONS.values(), B):
        model = eqx.filter_eval_shape(lambda each=each: model_of(each, each))
        assert model.config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(model))


def test_differences_name_the_field_and_the_layer():
    config = model_of(W, F).config
    other = dataclasses.replace(config, blocks=(W, block(rope=None)), vocab_size=18)
    found = differences(config, other)
    assert found[0] == "vocab_size was 17 and is 18" and found[1].startswith("blocks[1].mixer.rope was RopeConfig(")
    assert differences(config, dataclasses.replace(config, blocks=(W,))) == ["number of blocks was 2 and is 1"]
    assert differences(config, config) == []


def test_configs_are_equal_by_their_fields_and_by_the_order_of_their_layers():
    config = model_of(W, F).config
    again = copy.deepcopy(config)
    assert config == again and hash(config) == hash(again) and config != "config"
    for other in (dataclasses.replace(config, vocab_size=18), dataclasses.replace(config, blocks=(F, W))):
        assert config != other and hash(config) != hash(other)
