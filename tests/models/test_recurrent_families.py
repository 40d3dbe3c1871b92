"""Families with recurrences: configurations as they are published, and tensors that only published files have."""

import json
import math

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levanter_infer.checkpoints.load import load_model
from levanter_infer.layers.delta_net import DeltaNetBlock
from levanter_infer.layers.kimi_delta import KimiDeltaBlock
from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.layers.mamba2 import GatedNorm, Mamba2Block
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.short_conv import ShortConvBlock
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for
from tests.golden_cases import load_case, write_checkpoint

LFM2_1B = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
LFM2_8B = {
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
OLMO_HYBRID_7B = {
    "model_type": "olmo_hybrid",
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "num_key_value_heads": 30,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "linear_allow_neg_eigval": True,
    "linear_a_log_max": 16.0,
}
KIMI_LINEAR_48B = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
QWEN3_NEXT_80B = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN3_5_35B = {
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": {
        **{key: value for key, value in QWEN3_NEXT_80B.items() if key not in ("decoder_sparse_step", "rope_theta")},
        "model_type": "qwen3_5_moe_text",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_scaling": None,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
}
GRANITE_4_TINY = {
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "intermediate_size": 512,
    "layer_types": [*(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 62,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 100352,
}

FALCON_H1_HALF_B = {
    "model_type": "falcon_h1",
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "vocab_size": 32784,
}

NEMOTRON_3_NANO = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


def config_of(raw: dict):
    return family_for(raw).config_from_hf(raw)


def test_published_configurations_are_read():
    lfm2 = config_of(LFM2_1B)
    assert [block.attention is not None for block in lfm2.blocks] == [i in LFM2_1B["full_attn_idxs"] for i in range(16)]
    assert lfm2.blocks[0].feed_forward.width == 8192 and lfm2.blocks[0].recurrent == ShortConvBlock(2048, 3)
    assert lfm2.tie_word_embeddings and round(lfm2.num_parameters / 1e8) == 12

    following = config_of(QWEN3_NEXT_80B)
    assert [len(group.period) for group in following.groups] == [4] and round(following.num_parameters / 1e9) == 80
    assert following.blocks[0].recurrent == DeltaNetBlock(16, 32, 128, 128, 4, 1e-6)
    text = config_of(QWEN3_5_35B)
    assert text.model_type == "qwen3_5_moe_text" and text.ropes[0].theta == 1e7 and text.ropes[0].partial == 0.25
    assert [block.mixer for block in text.blocks] == [block.mixer for block in following.blocks]

    granite = config_of(GRANITE_4_TINY)
    assert granite.blocks[0].recurrent == Mamba2Block(48, 64, 1, 128, 4, 1e-5) and granite.attention[0].rope is None
    assert round(granite.num_parameters / 1e8) in range(66, 73)

    falcon = config_of(FALCON_H1_HALF_B)
    mixer = falcon.blocks[0].mixer
    assert mixer.recurrent.norm is GatedNorm.NONE and mixer.recurrent.multipliers[3] == 0.5 * 1.25
    assert mixer.attention.scale == 64**-0.5 * 0.390625 and mixer.attention_multiplier == 0.9375
    assert [pool.memory.is_paged for pool in falcon.pools] == [True, False] and round(falcon.num_parameters / 1e7) == 52

    nemotron = config_of(NEMOTRON_3_NANO)
    assert [len(pool.layers) for pool in nemotron.pools] == [23, 6] and len(nemotron.expert_layers) == 23
    assert nemotron.part_numbers[2:4] == ((4, 4), (5, 6)) and nemotron.ropes == ()
    assert round(nemotron.num_parameters / 1e7) == 3158


@pytest.mark.parametrize("raw", [GRANITE_4_TINY, FALCON_H1_HALF_B, NEMOTRON_3_NANO])
def test_unlimited_steps_are_read_as_published_and_as_transformers_writes_them(raw):
    """transformers 5 writes a number that JSON does not have as an object."""
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None):
        assert config_of({**raw, "time_step_limit": limit}) == config_of(raw)
    with pytest.raises(ValueError, match="time_step_limit="):
        config_of({**raw, "time_step_limit": [0.001, {"__float__": "Infinity"}]})


@pytest.mark.parametrize(
    "pattern, num_layers, num_bodies",
    [
        ("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 28, 7),  # 8B
        (f"M-M-M-M*-{'M-M-M-M-M*-' * 9}M-M-M-M-M-", 64, 7),  # 56B
        (
            "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
            54,
            4,
        ),  # 47B
        ("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 31, 3),  # Nano 9B v2
        (f"{'MEMEMEM*E' * 3}{'MEMEMEMEM*E' * 4}MEMEMEM*EMEMEMEME", 48, 3),  # 3 Super
    ],
)
def test_published_patterns_of_nemotron_h_have_few_bodies(pattern, num_layers, num_bodies):
    raw = {**NEMOTRON_3_NANO, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    config = config_of(raw)
    assert config.num_layers == num_layers and sum(len(group.bodies) for group in config.groups) == num_bodies
    numbers = [number for pair in config.part_numbers for number in sorted({*pair})]
    assert numbers == list(range(len(pattern)))
    assert family_for(raw).config_to_hf(config)["hybrid_override_pattern"] == pattern


@pytest.mark.parametrize(
    "raw, change, message",
    [
        (LFM2_1B, {"conv_dim": 1024}, "conv_dim=1024, expected 2048"),
        (LFM2_1B, {"layer_types": ["conv"] * 3}, "one entry for each of num_hidden_layers=16"),
        (LFM2_1B, {"full_attn_idxs": []}, "no layer attends"),
        (QWEN3_NEXT_80B, {"attn_output_gate": False}, "attn_output_gate=False, expected True"),
        (QWEN3_NEXT_80B, {"linear_num_key_heads": 5}, "linear_num_value_heads=32 is no multiple"),
        (QWEN3_NEXT_80B, {"layer_types": ["mamba"] * 48}, "a list of full_attention and linear_attention"),
        (GRANITE_4_TINY, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (GRANITE_4_TINY, {"mamba_n_heads": 47}, "mamba_n_heads=47, expected with mamba_d_head=64"),
        (FALCON_H1_HALF_B, {"attention_bias": True, "attention_in_multiplier": 2.0}, "1.0 with a bias behind it"),
        (FALCON_H1_HALF_B, {"ssm_multipliers": [1.0] * 4}, "a list of 5 numbers"),
        (NEMOTRON_3_NANO, {"mlp_bias": True}, "false where layers have experts"),
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": "MX"}, r"expected letters M, \*, - and E"),
        (NEMOTRON_3_NANO, {"layers_block_type": ["mamba"] * 52}, "leave one out"),
        (NEMOTRON_3_NANO, {"num_hidden_layers": 51}, "num_hidden_layers=51, expected 52"),
        (NEMOTRON_3_NANO, {"residual_in_fp32": True}, "residual_in_fp32=True, expected False"),
        (NEMOTRON_3_NANO, {"n_shared_experts": 2}, "n_shared_experts=2, expected 1"),
        (GRANITE_4_TINY, {"position_embedding_type": "learned"}, "position_embedding_type='learned'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(raw, change, message):
    with pytest.raises(ValueError, match=message):
        config_of({**raw, **change})


def test_published_files_of_qwen3_5_are_read(tmp_path):
    """The text model within a multimodal one: experts stacked, a vision tower, layers that predict several tokens, and
    decays in float32 beside weights in another dtype."""
    case = load_case("qwen3_5_moe")
    plain, _ = load_model(write_checkpoint(tmp_path / "plain", case), dtype="float32")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    experts, published = case.config["num_experts"], {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            published[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(case.config["num_hidden_layers"]):
        start = f"model.layers.{layer}.mlp.experts"
        own = [
            {part: tensors[f"{start}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for expert in range(experts)
        ]
        start = start.replace("model.", "model.language_model.", 1)
        published[f"{start}.gate_up_proj"] = np.stack([np.concatenate([e["gate"], e["up"]]) for e in own])
        published[f"{start}.down_proj"] = np.stack([each["down"] for each in own])
    exact = (".A_log", ".dt_bias", ".linear_attn.norm.weight")
    published = {k: v if k.endswith(exact) else v.astype(np.float16) for k, v in published.items()}
    published |= {"model.visual.patch_embed.weight": np.zeros(3), "mtp.fc.weight": np.zeros(3)}
    (tmp_path / "published").mkdir()
    save_file(published, tmp_path / "published" / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": case.config}
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    model, _ = load_model(tmp_path / "published")
    assert model.config == plain.config
    for got, want in zip(model.stacks, plain.stacks, strict=True):
        assert got.mlp.gate_proj.weight.array.dtype == np.float16
        for part in ("gate_proj", "up_proj", "down_proj"):
            want_part = np.asarray(getattr(want.mlp, part).weight.array).astype(np.float16)
            assert (np.asarray(getattr(got.mlp, part).weight.array) == want_part).all(), part
        if want.recurrent is not None:
            assert (np.asarray(got.recurrent.a_log.array) == np.asarray(want.recurrent.a_log.array)).all()


def parse(config: dict):
    return family_for(config).config_from_hf(config)


def test_kimi_linear_48b_is_read():
    config = parse(KIMI_LINEAR_48B)
    delta, full = config.blocks[0].mixer, config.blocks[3].mixer
    assert delta == KimiDeltaBlock(num_heads=32, head_dim=128, taps=4, norm_eps=1e-5)
    assert isinstance(full, LatentAttentionBlock) and full.rope is None and full.head_dim == 576
    assert [block.attention is not None for block in config.blocks].count(True) == 7
    assert [isinstance(block.feed_forward, ExpertsBlock) for block in config.blocks] == [False, *[True] * 26]
    assert 48e9 < config.num_parameters < 50e9 and config.max_position_embeddings == 1048576
    assert config.blocks[26].mixer == full and config.experts.router.groups is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_config": {"use_full_rank_gate": True}}, r"linear_attn_config has \['use_full_rank_gate'\]"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "expected each of the layers 1 to 27 once"),
        ({"linear_attn_config": {"kda_layers": 3}}, "kda_layers=3, expected each of the layers 1 to 27 once"),
        ({"linear_attn_config": {"kda_layers": ["1"], "full_attn_layers": [2]}}, "expected each of the layers 1 to 27"),
        ({"linear_attn_config": [1]}, "linear_attn_config=.*expected an object"),
        ({"mla_use_nope": False}, "mla_use_nope=False, expected True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True, expected False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax', expected 'sigmoid'"),
        ({"hidden_act": "situ"}, "hidden_act='situ', expected one of silu"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*one entry for each of num_hidden_layers=27"),
        ({"routed_expert_hidden_size": 3584}, "'routed_expert_hidden_size' .* is not known here"),
    ],
)
def test_what_kimi_linear_does_not_implement_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse({**KIMI_LINEAR_48B, **changes})


def test_layers_of_kimi_linear_without_a_list_are_those_of_transformers():
    config = {key: value for key, value in KIMI_LINEAR_48B.items() if key != "linear_attn_config"}
    found = parse({**config, "linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 3})
    assert [i for i, block in enumerate(found.blocks) if block.attention is not None] == [4, 8, 12, 16, 20, 24]
    assert found.blocks[0].mixer == KimiDeltaBlock(num_heads=4, head_dim=16, taps=3, norm_eps=1e-5)


@pytest.mark.parametrize("name", ["kimi_linear", "kimi_linear_biased", "grug_moe_hero", "grug_moe_hero_plain"])
def test_the_number_of_parameters_is_that_of_the_arrays(name):
    config = parse(load_case(name).config)
    assert config.num_parameters == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(DecoderModel.types(config)))


def test_lfm2_8b_is_read():
    config = parse(LFM2_8B)
    assert 8.3e9 < config.num_parameters < 8.5e9
    assert [isinstance(block.feed_forward, ExpertsBlock) for block in config.blocks] == [False] * 2 + [True] * 22
    assert [layer for layer, block in enumerate(config.blocks) if block.attention is not None] == [2, 6, 10, 14, 18, 21]
    assert parse(family_for(LFM2_8B).config_to_hf(config)) == config
    with pytest.raises(ValueError, match="at most the number of experts, 32"):
        parse({**LFM2_8B, "num_experts_per_tok": 33})
    with pytest.raises(ValueError, match="'block_auto_adjust_ff_dim' "):
        parse({**LFM2_8B, "block_auto_adjust_ff_dim": True})


def test_olmo_hybrid_7b_is_read():
    config = parse(OLMO_HYBRID_7B)
    delta, full = config.blocks[0].mixer, config.blocks[3].mixer
    assert delta == DeltaNetBlock(30, 30, 96, 192, 4, 1e-5, beta_scale=2.0) and full.rope is None
    assert [layer for layer, block in enumerate(config.blocks) if block.attention is not None] == [*range(3, 32, 4)]
    assert 7e9 < config.num_parameters < 8e9
    assert parse(family_for(OLMO_HYBRID_7B).config_to_hf(config)) == config
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    assert parse({**OLMO_HYBRID_7B, "rope_parameters": rope}).ropes[0].theta == 5e5
    for changes, message in (
        ({"rope_parameters": None}, r"rope_parameters=None, expected a rope_theta, or "),
        ({"linear_num_value_heads": 60}, "linear_num_value_heads=60, expected None or 30"),
        ({"layer_types": ["linear_attention"] * 32}, "some of each kind"),
        ({"layer_types": ["full_attention"]}, "one entry for each of num_hidden_layers=32"),
    ):
        with pytest.raises(ValueError, match=message):
            parse({**OLMO_HYBRID_7B, **changes})


def test_norms_of_olmo_hybrid_are_read_under_all_of_their_names(tmp_path):
    """As published; and as transformers 5.23 writes them, in attention layers too."""
    case = load_case("olmo_hybrid")
    plain, _ = load_model(write_checkpoint(tmp_path / "plain", case))
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    linear = {name.split(".")[2] for name in tensors if ".linear_attn." in name}
    for written_by_hf in (False, True):
        named = {}
        for name, tensor in tensors.items():
            if written_by_hf or name.split(".")[2:3] and name.split(".")[2] in linear:
                name = name.replace(".input_layernorm.", ".attention_layer_norm.")
                name = name.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
            named[name] = tensor
        directory = tmp_path / str(written_by_hf)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(case.config))
        save_file(named, directory / "model.safetensors")
        assert set(named) != set(tensors)
        assert eqx.tree_equal(load_model(directory)[0], plain)
