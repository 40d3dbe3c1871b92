"""Families with latent attention: published configurations, refusals, and tensors that are not read."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levanter_infer.axes import POSITION
from levanter_infer.cache.memory import Latents
from levanter_infer.checkpoints.load import load_model, load_weights
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels.backend import Task, Work
from levanter_infer.kernels.registry import BACKENDS, make_backend
from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.registry import family_for
from tests.family_cases import SIZES, golden_prompts, golden_requests, sampled_requests, samples
from tests.golden_cases import load_case, write_checkpoint
from tests.tiers import nightly_but

DEEPSEEK_V3 = json.loads((Path(__file__).parents[2] / "configs/shapes/deepseek-v3.json").read_text())
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "max_position_embeddings": 163840,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "auto_map": DEEPSEEK_V3["auto_map"],
}

MISTRAL_SMALL_4 = {
    "model_type": "mistral4",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "qk_head_dim": 128,
    "rope_parameters": {
        **{"type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "beta_fast": 32.0},
        **{"original_max_position_embeddings": 8192, "max_position_embeddings": 1048576, "beta_slow": 1.0},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5},
    },
}


def parse(raw, **changes):
    config = {**raw, **changes}
    return family_for(config).config_from_hf(config)


def test_published_sizes():
    v3, k2, lite = map(parse, (DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V2_LITE))
    assert v3.num_parameters == 671_026_419_200
    assert round(k2.num_parameters / 1e9) == 1026 and lite.num_parameters == 15_706_484_224
    assert [pool.memory for pool in v3.pools] == [Latents(576)] and v3.value_dim == 512
    assert [(group.first, group.repeats) for group in v3.groups] == [(0, 3), (3, 58)]
    assert (v3.num_heads, v3.num_kv_heads, v3.head_dim) == (128, 1, 576)


def test_the_scale_has_the_square_of_mscale_where_yarn_names_all_dimensions():
    def scale(raw, **changes):
        mixer = parse(raw, **changes).blocks[0].mixer
        assert isinstance(mixer, LatentAttentionBlock)
        return mixer.scale

    assert scale(DEEPSEEK_V3) == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert scale(DEEPSEEK_V2_LITE) == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    no_mscale = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    assert scale(DEEPSEEK_V3, rope_scaling=no_mscale) == scale(DEEPSEEK_V3, rope_scaling=None) == 192**-0.5


@pytest.mark.parametrize(
    "raw, changes, message",
    [
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads=8, expected num_attention_heads=128"),
        (DEEPSEEK_V3, {"head_dim": 128}, "head_dim=128, expected qk_rope_head_dim=64"),
        (DEEPSEEK_V3, {"qk_head_dim": 128}, "qk_head_dim=128, expected None or 192"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax', expected 'sigmoid'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy', expected 'noaux_tc'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2, expected 1"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group=7, expected a divisor of the number of experts, 256"),
        (DEEPSEEK_V3, {"topk_group": 9}, "at least topk_group=9"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 257}, "num_experts_per_tok=257, expected at most"),
        (DEEPSEEK_V3, {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map=.*modeling_deepseek"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*expected None"),
        (DEEPSEEK_V3, {"index_topk": 2048}, "'index_topk'"),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob=True, expected False"),
        (DEEPSEEK_V2_LITE, {"num_experts_per_tok": None}, "num_experts_per_tok=None, expected a whole number"),
    ],
)
def test_config_refuses_by_name(raw, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(raw, **changes)


def test_layers_for_multi_token_prediction_are_not_read(tmp_path):
    case = load_case("deepseek_v3")
    directory, last = write_checkpoint(tmp_path / "model", case), case.config["num_hidden_layers"]
    tensors = load_file(directory / "model.safetensors")
    extra = {name.replace("layers.1.", f"layers.{last}."): tensors[name] for name in tensors if ".layers.1." in name}
    extra[f"model.layers.{last}.eh_proj.weight"] = tensors["model.norm.weight"]
    save_file({**tensors, **extra}, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_weights(resolve_source(str(directory))).dtype == jnp.float32
    (directory / "config.json").write_text(json.dumps({**case.config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=rf"tensors that config.json has no use for: .*layers\.{last}\."):
        load_weights(resolve_source(str(directory)))


def test_mistral_small_4():
    """As transformers writes it: keys of HF's defaults left out, sizes of a whole head, and a share of it."""
    config = parse(MISTRAL_SMALL_4)
    mixer, rope = config.blocks[0].mixer, config.ropes[0]
    assert isinstance(mixer, LatentAttentionBlock) and round(config.num_parameters / 1e9) == 119
    assert (mixer.nope_dim, mixer.rope_dim, mixer.value_dim, mixer.latent_dim, mixer.q_latent_dim) == (
        *(64, 64, 128, 256, 1024),
    )
    assert mixer.scale == 128**-0.5  # although mscale_all_dim is 1
    assert (rope.query_beta, rope.original_len, rope.interleaved, rope.partial) == (0.1, 8192, True, 1.0)
    assert config == parse({key: value for key, value in MISTRAL_SMALL_4.items() if key != "rope_parameters"})
    assert parse(family_for(MISTRAL_SMALL_4).config_to_hf(config)) == config
    half = {**MISTRAL_SMALL_4["rope_parameters"], "partial_rotary_factor": 0.25}
    for changes, message in (
        ({"rope_parameters": half}, r"partial_rotary_factor=0.25, expected 0.5: qk_rope_head_dim"),
        ({"head_dim": 64}, "head_dim=64, expected None or 128"),
        ({"num_experts_per_tok": 129}, "at most the number of experts, 128"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "expected llama_4_scaling_beta"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(MISTRAL_SMALL_4, **changes)


def test_experts_of_mistral_small_4_are_read_one_by_one_too(tmp_path):
    case = load_case("mistral4")
    directory = write_checkpoint(tmp_path, case)
    whole = load_weights(resolve_source(directory), dtype=jnp.float32)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        start, both, down = name.removesuffix("gate_up_proj"), tensors.pop(name), None
        down = tensors.pop(f"{start}down_proj")
        for expert, (gate_up, out) in enumerate(zip(both, down, strict=True)):
            gate, up = np.split(gate_up, 2)
            parts = {"gate": gate, "up": up, "down": out}
            tensors |= {f"{start}{expert}.{part}_proj.weight": np.ascontiguousarray(x) for part, x in parts.items()}
    save_file(tensors, directory / "model.safetensors")
    assert eqx.tree_equal(load_weights(resolve_source(directory), dtype=jnp.float32), whole)


DSA = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
DEEPSEEK_V32 = {**DEEPSEEK_V3, "model_type": "deepseek_v32", **DSA}
GLM_5 = {
    **{"model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288},
    **{"num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64},
    **{"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "rope_interleave": True},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, **DSA},
    **{"indexer_types": ["full", "shared"] * 39, "layer_types": ["indexed_attention"] * 78},
}


def test_sparse_attention_has_indexers():
    v32, v3, glm = parse(DEEPSEEK_V32), parse(DEEPSEEK_V3), parse(GLM_5)
    of_one = 64 * 128 * 1536 + (128 + 64) * 7168 + 2 * 128
    assert v32.num_parameters == v3.num_parameters + 61 * of_one
    assert v32.num_chosen == 2048 and v32.chooses_keys(2049) and not v32.chooses_keys(2048)
    assert [spec.memory for spec in v32.pools] == [Latents(576 + 128, 128)] and not v32.attention[0].indexer.interleaved
    assert [(spec.memory, len(spec.layers)) for spec in glm.pools] == [(Latents(704, 128), 39), (Latents(576), 39)]
    assert round(glm.num_parameters / 1e9) == 744 and glm.attention[0].indexer.interleaved
    assert [mixer.shares_choice for mixer in glm.attention] == [False, True] * 39
    for changes, refused in (
        ({"index_topk": 0}, "index_topk=0, expected a whole number"),
        ({"index_local_window": 64}, "'index_local_window' "),
        ({"rope_interleave": False}, "rope_interleave=False, expected True"),
        ({"layer_types": ["full_attention"]}, "layer_types="),
        ({"indexer_types": ["full"]}, "1 entries of indexer_types .* one for each of num_hidden_layers=78"),
        ({"model_type": "deepseek_v32"}, "layers of deepseek_v32 have an indexer each"),
        ({"indexer_types": ["shared", "full"] * 39}, "shares a choice of keys, expected an indexer"),
        ({"indexer_types": None, "index_topk_pattern": "FSX"}, "index_topk_pattern='FSX', expected a letter F or S"),
        ({"q_lora_rank": None}, "an indexer computes its queries from the latent of queries"),
        ({"index_head_dim": 32}, "heads of an indexer have 32 numbers, of which 64 rotate"),
    ):
        with pytest.raises(ValueError, match=refused):
            parse(GLM_5, **changes)


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, "FFFFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSFSS"),
        ({"index_topk_freq": 0}, "FFFFFFFF"),
        ({"index_topk_pattern": ["full", *["shared"] * 6, "full"]}, "FSSSSSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "SFSFSFSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "FFFSFSFS"),
        ({"index_topk_pattern": "FSSFSSFS", "index_topk_freq": 4}, "FSSFSSFS"),
        ({"indexer_types": ["full", *["shared"] * 7], "index_topk_pattern": "FFFFFFFF"}, "FSSSSSSS"),
    ],
)
def test_layers_with_an_indexer_are_those_of_transformers(keys, expected):
    """transformers 5.24, GlmMoeDsaConfig."""
    raw = {key: value for key, value in GLM_5.items() if key not in ("indexer_types", "layer_types")}
    if expected.startswith("S"):
        with pytest.raises(ValueError, match="shares a choice of keys, expected an indexer"):
            parse({**raw, "num_hidden_layers": 8, **keys})
        return
    found = parse({**raw, "num_hidden_layers": 8, **keys})
    assert "".join("S" if mixer.shares_choice else "F" for mixer in found.attention) == expected


def test_numerics_are_batch_invariant_where_no_keys_are_chosen():
    """XLA's code for the choice rounds by the tokens that it computes together."""
    config = parse(DEEPSEEK_V32)

    def task(max_seq_len: int) -> Task:
        device, chooses = SimpleNamespace(platform="tpu"), config.chooses_keys(max_seq_len)
        return Task(Work.ATTENTION, device, jnp.dtype(jnp.bfloat16), chooses_keys=chooses)

    for name in ("tpu", "cpu", "gpu"):
        backend = make_backend(name)
        assert backend.why_not_invariant(task(2048)) is None
        assert "XLA" in str(backend.why_not_invariant(task(2049)))
    assert BACKENDS["tpu"].refusal(task(4096)) is None


@pytest.fixture(scope="module", params=nightly_but(["glm_moe_dsa"], ["deepseek_v32", "glm_moe_dsa"]))
def sparse(request, tmp_path_factory):
    case = load_case(request.param)
    model, _ = load_model(write_checkpoint(tmp_path_factory.mktemp(request.param), case), dtype="float32")
    return case, model


@pytest.mark.slow
def test_sparse_attention_over_pages_is_hf(sparse):
    """Prompts in chunks, beside decode tokens of others, longer and shorter than an indexer chooses."""
    case, model = sparse
    engine = InferenceEngine(model, config=EngineConfig(**SIZES))
    requests = golden_requests(case)
    found = [samples(output)[0] for output in engine.generate([*requests, *sampled_requests(256), *requests])]
    for prompt, sample, again in zip(golden_prompts(case), found[:2], found[-2:], strict=True):
        assert sample.tokens == again.tokens == prompt.greedy.tolist()
        np.testing.assert_allclose(sample.logprobs, prompt.greedy_logprobs, rtol=0, atol=2 * prompt.bound)
        np.testing.assert_allclose(again.logprobs, sample.logprobs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_sequences_that_need_no_choice_are_dense(sparse):
    """With no more tokens than are chosen, a model is that without its indexer, whose attention kernels compute."""
    case, model = sparse
    assert case.config["index_topk"] == 13
    config = dataclasses.replace(model.config, blocks=tuple(map(_dense, model.config.blocks)))
    stacks = tuple(
        eqx.tree_at(lambda s: s.attention.indexer, stack, None, is_leaf=lambda part: part is None)
        for stack in model.stacks
    )
    if case.name == "deepseek_v32":  # layers of GLM-5 are in other stacks without their indexers
        tokens = hax.named(jnp.arange(13, dtype=jnp.int32), POSITION)
        plain = dataclasses.replace(model, config=config, stacks=stacks)
        np.testing.assert_array_equal(plain(tokens).array, model(tokens).array)
    prompt = case.prompts[0].tokens[:5].tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    request = Request(prompt_token_ids=prompt, sampling=greedy)
    short, long = (InferenceEngine(model, config=EngineConfig(**{**SIZES, "max_seq_len": n})) for n in (13, 14))
    (one,), (other,) = (samples(engine.generate([request])[0]) for engine in (short, long))
    assert one.tokens == other.tokens and len(one.tokens) == 8
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


def _dense(block: Block) -> Block:
    assert isinstance(block.mixer, LatentAttentionBlock)
    return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, indexer=None, shares_choice=False))


def test_indexers_of_layers_that_share_a_choice_are_not_read(tmp_path):
    case = load_case("glm_moe_dsa")
    directory = write_checkpoint(tmp_path, case)
    model, _ = load_model(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.indexer.wk.weight"] = np.ones(3, np.float32)
    save_file(tensors, directory / "model.safetensors")
    assert eqx.tree_equal(load_model(directory)[0], model)
    tensors["model.layers.0.self_attn.indexer.wk.weight"] = np.ones(3, np.float32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="layers.0.self_attn.indexer.wk.weight"):
        load_model(directory)


def test_batch_invariant_numerics_are_refused_where_keys_are_chosen(sparse):
    _, model = sparse
    with pytest.raises(ValueError, match="attention=cpu on cpu: XLA scores the keys of several"):
        InferenceEngine(model, config=EngineConfig(**SIZES, numerics="batch_invariant"))
    InferenceEngine(model, config=EngineConfig(**{**SIZES, "max_seq_len": 13}, numerics="batch_invariant"))
