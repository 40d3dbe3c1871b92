"""The golden cases: configs of small random checkpoints, their prompts, and changes that have to be visible."""

from dataclasses import dataclass, field

BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "torch_dtype": "float32",
    "transformers_version": "4.57.6",
}
LLAMA = {
    **BASE,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "pretraining_tp": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}
MISTRAL = {**BASE, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 16}
QWEN = {**BASE, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None}
QWEN2 = {**QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3_MOE = {
    **QWEN,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
QWEN3 = {**QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}  # a window that must not act
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_ALL_KEYS = {
    **YARN,
    "beta_fast": 16.0,
    "beta_slow": 0.5,
    "mscale": 1.3,
    "mscale_all_dim": 0.6,
    "truncate": False,
}
SHORT_FACTOR = [1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75]
LONG_FACTOR = [1.05, 1.3, 1.8, 2.6, 4.0, 5.5, 7.0, 8.0]


@dataclass(frozen=True)
class Case:
    config: dict
    prompt_lens: tuple[int, ...]
    without: dict = field(default_factory=dict)  # config keys that switch the case's feature off
    changes: tuple[dict, ...] = ()  # config keys that neutralise one option each, with the same tensors
    zeroed: tuple[str, ...] = ()  # ends of the names of tensors that are options of their own, neutral at zero
    length_threshold: int | None = None  # the rope changes when a sequence grows beyond this
    changes_beyond: bool = False  # and keeps changing with every token after it
    reference: str = "transformers"  # what answers the case; "levanter": make_levanter_goldens.py


def longrope(**keys) -> dict:
    return {"rope_type": "longrope", "short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR, **keys}


CASES = {
    "llama1": Case({**LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}, (1, 7, 40), {"rope_theta": 100.0}),
    "llama2_bias": Case(
        {**LLAMA, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.03},
        (6, 33),
        {"attention_bias": False},
    ),
    "llama_mlp_bias": Case({**LLAMA, "mlp_bias": True, "rms_norm_eps": 0.03}, (9, 26), {"rms_norm_eps": 1e-5}),
    "llama3": Case({**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}, (8, 120), {"rope_scaling": None}),
    "llama_linear": Case({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}, (9, 70), {"rope_scaling": None}),
    "llama_dynamic": Case(
        {**LLAMA, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        (9, 32, 64, 100),
        {"rope_scaling": None},
        length_threshold=64,
        changes_beyond=True,
    ),
    "llama_yarn": Case(
        {**LLAMA, "max_position_embeddings": 128, "rope_scaling": YARN}, (10, 90), {"rope_scaling": None}
    ),
    "llama_yarn_keys": Case(
        {**LLAMA, "max_position_embeddings": 128, "rope_scaling": YARN_ALL_KEYS}, (10, 90), {"rope_scaling": YARN}
    ),
    "llama_yarn_factor": Case(
        {**LLAMA, "max_position_embeddings": 128, "rope_scaling": {**YARN, "attention_factor": 1.4}},
        (12, 70),
        {"rope_scaling": YARN},
    ),
    "llama_longrope": Case(
        {
            **LLAMA,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 48,
            "rope_scaling": longrope(),
        },
        (14, 48, 49, 100),
        {"rope_scaling": longrope(long_factor=SHORT_FACTOR)},
        length_threshold=48,
    ),
    "llama_longrope_factor": Case(
        {**LLAMA, "max_position_embeddings": 64, "rope_scaling": longrope(factor=4.0)},
        (16, 80),
        {"rope_scaling": longrope(factor=1.0)},
        length_threshold=64,
    ),
    "llama_tied": Case({**LLAMA, "tie_word_embeddings": True, "num_hidden_layers": 3}, (5, 30), {"rope_theta": 100.0}),
    "llama_head_dim": Case(
        {**LLAMA, "hidden_size": 48, "head_dim": 32, "num_key_value_heads": 1}, (5, 30), {"rope_theta": 100.0}
    ),
    "mistral_window": Case({**MISTRAL, "sliding_window": 8}, (5, 8, 9, 96), {"sliding_window": 9}),
    "mistral": Case({**MISTRAL, "sliding_window": None, "head_dim": 24}, (5, 60), {"sliding_window": 40}),
    "qwen2": Case({**QWEN2, **NO_WINDOW}, (6, 40), {"rope_theta": 1e4}),
    "qwen2_window": Case(
        {**QWEN2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        (7, 80),
        {"max_window_layers": 0},
    ),
    "qwen3": Case({**QWEN3, **NO_WINDOW, "head_dim": 32, "tie_word_embeddings": True}, (6, 40), {"rope_theta": 1e4}),
    "qwen3_moe": Case(QWEN3_MOE, (7, 60), {"num_experts_per_tok": 2}),
    "qwen3_moe_shares": Case({**QWEN3_MOE, "norm_topk_prob": False}, (9, 40), {"norm_topk_prob": True}),
    "qwen3_layer_types": Case(
        {
            **QWEN3,
            "head_dim": 16,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (7, 80),
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
}


EVERY = {**BASE, "hidden_size": 56, "intermediate_size": 88, "num_hidden_layers": 4, "head_dim": 16}
"""Sizes that differ from each other."""
OLMO2 = {**{k: v for k, v in EVERY.items() if k != "head_dim"}, "model_type": "olmo2", "num_attention_heads": 14}
OLMO2["architectures"] = ["Olmo2ForCausalLM"]
OLMO3 = {**{k: v for k, v in OLMO2.items() if k != "rope_theta"}, "model_type": "olmo3", "sliding_window": 6}
OLMO3 |= {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 5}
GEMMA = {**EVERY, "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}
GEMMA["tie_word_embeddings"] = True
GEMMA2 = {
    **GEMMA,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 0.5,
    "sliding_window": 6,
}
GEMMA3 = {
    **{k: v for k, v in GEMMA2.items() if k not in ("attn_logit_softcapping", "rope_theta")},
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 8,
}
PHI3 = {**{k: v for k, v in EVERY.items() if k != "head_dim"}, "model_type": "phi3", "hidden_size": 64}
PHI3 |= {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 48, "pad_token_id": 0}
SMOLLM3 = {**EVERY, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "tie_word_embeddings": True}
SMOLLM3["pad_token_id"] = 0
GRANITE = {
    **{k: v for k, v in EVERY.items() if k != "head_dim"},
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "hidden_size": 64,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
GRANITE_CHANGES = tuple(
    {key: 1.0} for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
)
BY_KIND = {
    "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 2e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
SAME_ROPES = {"rope_parameters": dict.fromkeys(BY_KIND, BY_KIND["sliding_attention"])}
NO_WINDOWS = {"sliding_window": 500}
CASES |= {
    "olmo2": Case(OLMO2, (6, 40), {"rope_theta": 100.0}, changes=({"rope_theta": 100.0},)),
    "olmo2_tied": Case(
        {**OLMO2, "num_attention_heads": 10, "hidden_size": 40, "attention_bias": True, "tie_word_embeddings": True}
        | {"num_hidden_layers": 6},
        (9, 35),
        {"attention_bias": False},
    ),
    "olmo3": Case(
        {**OLMO3, "rope_theta": 5e5, "rope_scaling": YARN},
        (7, 60),
        {"rope_scaling": None},
        changes=({"rope_scaling": None}, NO_WINDOWS, {"layer_types": ["full_attention"] * 5}),
    ),
    "olmo3_tied": Case(
        {**OLMO3, "rope_parameters": BY_KIND, "tie_word_embeddings": True, "attention_bias": True},
        (9, 50),
        {"attention_bias": False},
        changes=(SAME_ROPES, NO_WINDOWS),
    ),
    "gemma": Case(GEMMA, (6, 40), {"rope_theta": 100.0}, changes=({"rope_theta": 100.0},)),
    "gemma_untied": Case(
        {**GEMMA, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1},
        (5, 31),
        {"attention_bias": False},
    ),
    "gemma2": Case(
        GEMMA2,
        (7, 60),
        {"sliding_window": 7},
        changes=(
            {"query_pre_attn_scalar": 16},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            NO_WINDOWS,
        ),
    ),
    "gemma2_untied": Case(
        {
            **GEMMA2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        (8, 45),
        {"attention_bias": False},
        changes=({"layer_types": None}, {"query_pre_attn_scalar": 16}, NO_WINDOWS),
    ),
    "gemma3": Case(
        {
            **GEMMA3,
            "rope_theta": 1e4,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        (7, 60),
        {"rope_local_base_freq": 1e4},
        changes=(
            {"query_pre_attn_scalar": 16},
            {"rope_local_base_freq": 1e4},
            {"rope_scaling": None},
            {"final_logit_softcapping": None},
            {"sliding_window_pattern": 4},
            NO_WINDOWS,
        ),
    ),
    "gemma3_untied": Case(
        {
            **GEMMA3,
            "rope_parameters": BY_KIND,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 3,
        },
        (9, 50),
        {"attention_bias": False},
        changes=(SAME_ROPES, {"sliding_window_pattern": 6}),
    ),
    "phi3": Case(
        {**PHI3, "rope_scaling": None, "sliding_window": 8, "partial_rotary_factor": 0.5},
        (7, 60),
        {"sliding_window": 9},
        changes=({"partial_rotary_factor": 1.0}, {"sliding_window": None}),
    ),
    "phi3_tied": Case(
        {
            **PHI3,
            "max_position_embeddings": 192,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "rope_scaling": longrope(short_factor=SHORT_FACTOR[:6], long_factor=LONG_FACTOR[:6]),
        },
        (14, 48, 49, 100),
        {"rope_scaling": longrope(short_factor=SHORT_FACTOR[:6], long_factor=SHORT_FACTOR[:6])},
        length_threshold=48,
    ),
    "smollm3": Case(
        {
            **SMOLLM3,
            "num_hidden_layers": 6,
            "no_rope_layer_interval": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
        (7, 60),
        {"sliding_window": 7},
        changes=({"no_rope_layers": [1] * 6}, NO_WINDOWS, {"use_sliding_window": False}),
    ),
    "smollm3_untied": Case(
        {
            **SMOLLM3,
            "tie_word_embeddings": False,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
        },
        (6, 40),
        {"mlp_bias": False},
        changes=({"no_rope_layers": [0, 1, 0, 1]},),
    ),
    "granite": Case(GRANITE, (7, 41), {"residual_multiplier": 1.0}, changes=GRANITE_CHANGES),
    "granite_tied": Case(
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.02},
        (10, 36),
        {"mlp_bias": False},
        changes=GRANITE_CHANGES,
    ),
}
SEED_OSS = {**EVERY, "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "pad_token_id": 0}
CASES |= {
    "seed_oss": Case(
        {**SEED_OSS, "attention_out_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3_ROPE},
        (7, 60),
        {"attention_bias": False},
        changes=({"rope_scaling": None},),
    ),
    "seed_oss_tied": Case(
        {**SEED_OSS, "tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 0.02},
        (9, 41),
        {"attention_bias": False},
        changes=({"rope_theta": 100.0},),
    ),
}
EXAONE4 = {**EVERY, "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 6}
CASES |= {
    "exaone4": Case(
        {**EXAONE4, "sliding_window": 6, "sliding_window_pattern": 3, "rope_scaling": LLAMA3_ROPE},
        (7, 60),
        {"sliding_window": 7},
        changes=({"sliding_window_pattern": 4}, NO_WINDOWS, {"rope_scaling": None}),
    ),
    "exaone4_tied": Case(
        {
            **EXAONE4,
            "num_hidden_layers": 8,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 8,
        },
        (14, 29),
        {"rope_theta": 100.0},
        changes=({"rope_theta": 100.0}, {"sliding_window": 500}),
    ),
}
MIXTRAL = {
    **EVERY,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 40,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": None,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": False,
    "router_jitter_noise": 0.0,
}
CASES |= {
    "mixtral": Case(
        {**MIXTRAL, "sliding_window": 6},
        (7, 60),
        {"sliding_window": 7},
        changes=(NO_WINDOWS, {"num_experts_per_tok": 2}),
    ),
    "mixtral_tied": Case(
        {**{k: v for k, v in MIXTRAL.items() if k not in ("head_dim", "rope_theta")}, "hidden_size": 48}
        | {"tie_word_embeddings": True, "num_hidden_layers": 3, "num_local_experts": 5},
        (9, 41),
        {"rope_theta": 100.0},
        changes=({"rope_theta": 1e4}, {"num_experts_per_tok": 4}),
    ),
}
GRANITEMOE = {
    **GRANITE,
    "model_type": "granitemoe",
    "architectures": ["GraniteMoeForCausalLM"],
    "intermediate_size": 40,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}
CASES |= {
    "granitemoe": Case(
        GRANITEMOE, (7, 41), {"residual_multiplier": 1.0}, changes=(*GRANITE_CHANGES, {"num_experts_per_tok": 2})
    ),
    "granitemoe_tied": Case(
        {**GRANITEMOE, "tie_word_embeddings": True, "attention_bias": True, "num_local_experts": 6}
        | {"embedding_multiplier": 0.5},
        (12, 29),
        {"attention_bias": False},
        changes=GRANITE_CHANGES,
    ),
}
OLMOE = {
    **{k: v for k, v in EVERY.items() if k != "head_dim"},
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": False,
    "pad_token_id": 0,
}
CASES |= {
    "olmoe": Case(
        {**OLMOE, "clip_qkv": 0.7},
        (7, 41),
        {"clip_qkv": None},
        changes=({"clip_qkv": None}, {"norm_topk_prob": True}, {"num_experts_per_tok": 2}),
    ),
    "olmoe_tied": Case(
        {**OLMOE, "tie_word_embeddings": True, "attention_bias": True, "norm_topk_prob": True, "num_experts": 5}
        | {"clip_qkv": 1.5, "num_key_value_heads": 4},
        (10, 36),
        {"attention_bias": False},
        changes=({"clip_qkv": None}, {"norm_topk_prob": False}, {"rope_theta": 100.0}),
    ),
}
QWEN2_MOE = {
    **EVERY,
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
    "sliding_window": 6,
    "max_window_layers": 28,
}
CASES |= {
    "qwen2_moe": Case(
        {**QWEN2_MOE, "mlp_only_layers": [0], "use_sliding_window": True, "num_hidden_layers": 5},
        (7, 60),
        {"sliding_window": 7},
        changes=(
            {"norm_topk_prob": True},
            {"num_experts_per_tok": 2},
            {"use_sliding_window": False},
            {"max_window_layers": 2},
        ),
    ),
    "qwen2_moe_tied": Case(
        {
            **{k: v for k, v in QWEN2_MOE.items() if k != "head_dim"},
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "num_experts": 5,
        },
        (8, 37),
        {"rope_theta": 100.0},
        changes=({"norm_topk_prob": False}, {"use_sliding_window": True}),
    ),
}
COHERE = {
    **{k: v for k, v in EVERY.items() if k not in ("rms_norm_eps", "head_dim")},
    "model_type": "cohere",
    "architectures": ["CohereForCausalLM"],
    "hidden_size": 64,
    "layer_norm_eps": 1e-3,
    "logit_scale": 0.3,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
COHERE2 = {**COHERE, "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "sliding_window": 6}
CASES |= {
    "cohere": Case(
        {**COHERE, "use_qk_norm": True, "attention_bias": True},
        (8, 45),
        {"logit_scale": 1.0},
        changes=({"logit_scale": 1.0}, {"rope_theta": 100.0}),
    ),
    "cohere_untied": Case(
        {**COHERE, "tie_word_embeddings": False, "num_key_value_heads": 1, "layer_norm_eps": 0.05, "rope_theta": 100.0},
        (9, 33),
        {"layer_norm_eps": 1e-5},
        changes=({"logit_scale": 1.0}, {"rope_theta": 1e4}),
    ),
}
CASES |= {
    "cohere2": Case(
        {**COHERE2, "attention_bias": True, "num_hidden_layers": 6},
        (7, 60),
        {"sliding_window": 7},
        changes=({"logit_scale": 1.0}, NO_WINDOWS, {"sliding_window_pattern": 3}),
    ),
    "cohere2_untied": Case(
        {**COHERE2, "tie_word_embeddings": False, "sliding_window_pattern": 2, "num_key_value_heads": 1},
        (10, 36),
        {"sliding_window_pattern": 4},
        changes=({"logit_scale": 1.0}, {"rope_theta": 100.0}, {"sliding_window_pattern": 4}),
    ),
}
GLM4 = {**EVERY, "model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "pad_token_id": 0}
CASES |= {
    "glm4": Case(
        GLM4,
        (7, 41),
        {"partial_rotary_factor": 1.0},
        changes=({"partial_rotary_factor": 1.0}, {"rope_theta": 100.0}),
    ),
    "glm4_tied": Case(
        {**GLM4, "tie_word_embeddings": True, "attention_bias": False, "partial_rotary_factor": 0.25},
        (10, 36),
        {"partial_rotary_factor": 0.5},
        changes=({"partial_rotary_factor": 0.5},),
    ),
}
GRUG_MOE = {
    "model_type": "grug_moe",
    "architectures": ["GrugMoeForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 56,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "sliding_window": 6,
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.0098821,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "qk_mult": 1.7,
    "grugmoe_attention_mode": "production",
    "grugmoe_artifact_schema_version": 1,
}
CASES |= {
    "grug_moe": Case(
        GRUG_MOE,
        (7, 60),
        {"sliding_window": 7},
        changes=(NO_WINDOWS, {"qk_mult": 1.0}, {"rope_theta": 1e4}, {"num_experts_per_tok": 2}),
        zeroed=("router.bias", "shared_expert.down_proj.weight", "attn_gate.weight"),
        reference="levanter",
    ),
    "grug_moe_alone": Case(
        {**GRUG_MOE, "num_hidden_layers": 4, "num_key_value_heads": 1, "num_experts_per_tok": 1, "hidden_size": 64}
        | {"sliding_window": 9, "qk_mult": 0.6, "head_dim": 16, "rms_norm_eps": 1e-5},
        (8, 44),
        {"qk_mult": 1.0},
        changes=({"sliding_window": 500}, {"qk_mult": 1.0}, {"rope_theta": 1e4}, {"num_experts_per_tok": 2}),
        zeroed=("router.bias", "shared_expert.down_proj.weight", "attn_gate.weight"),
        reference="levanter",
    ),
}
ERNIE4_5 = {**EVERY, "model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], "pad_token_id": 0}
CASES |= {
    "ernie4_5": Case(
        {**ERNIE4_5, "tie_word_embeddings": True, "use_bias": True, "head_dim": 24},
        (7, 41),
        {"use_bias": False},
        changes=({"rope_theta": 100.0},),
    ),
    "ernie4_5_untied": Case(
        {**{k: v for k, v in ERNIE4_5.items() if k != "rope_theta"}, "rms_norm_eps": 0.02, "num_key_value_heads": 1},
        (10, 36),
        {"rms_norm_eps": 1e-5},
        changes=({"rope_theta": 100.0},),
    ),
}
MINISTRAL3 = {
    **{k: v for k, v in EVERY.items() if k != "rope_theta"},
    "model_type": "ministral3",
    "architectures": ["Ministral3ForCausalLM"],
    "sliding_window": None,
    "pad_token_id": 0,
}


def beta_rope(beta: float, **keys) -> dict:
    """`rope_parameters` of Ministral 3."""
    rope = {**YARN, "original_max_position_embeddings": 16, "rope_theta": 1e4, "llama_4_scaling_beta": beta}
    return {"rope_parameters": {**rope, **keys}}


CASES |= {
    "ministral3": Case(
        {**MINISTRAL3, **beta_rope(0.4), "sliding_window": 12},
        (7, 60),
        {"sliding_window": 13},
        changes=(beta_rope(1e-9), beta_rope(0.4, factor=1.0), NO_WINDOWS),
    ),
    "ministral3_tied": Case(
        {**MINISTRAL3, **beta_rope(0.8, mscale=1.3, mscale_all_dim=0.6), "tie_word_embeddings": True, "head_dim": 24},
        (10, 50),
        beta_rope(1e-9, mscale=1.3, mscale_all_dim=0.6),
        changes=(beta_rope(1e-9, mscale=1.3, mscale_all_dim=0.6), beta_rope(0.8)),
    ),
}
GPT_OSS = {
    **{k: v for k, v in EVERY.items() if k != "rope_theta"},
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "intermediate_size": 40,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "swiglu_limit": 0.8,
    "swiglu_alpha": 1.3,
    "router_aux_loss_coef": 0.9,
    "pad_token_id": 0,
}
GPT_OSS_YARN = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
CASES |= {
    "gpt_oss": Case(
        {**GPT_OSS, "rope_theta": 150000.0, "rope_scaling": GPT_OSS_YARN, "max_position_embeddings": 128},
        (7, 60),
        {"sliding_window": 7},
        changes=(
            NO_WINDOWS,
            {"rope_scaling": None},
            {"swiglu_limit": 7.0},
            {"swiglu_alpha": 1.0},
            {"num_experts_per_tok": 2},
        ),
        zeroed=("sinks", "router.bias", "gate_up_proj_bias", "down_proj_bias"),
    ),
    "gpt_oss_tied": Case(
        {**GPT_OSS, "tie_word_embeddings": True, "attention_bias": False, "num_experts_per_tok": 2, "rope_theta": 1e4}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]}
        | {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        (10, 36),
        {"layer_types": None},
        changes=({"layer_types": None}, {"swiglu_limit": 7.0}),
        zeroed=("sinks", "down_proj_bias"),
    ),
}
GLM4_MOE = {
    **EVERY,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "use_qk_norm": True,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
}
CASES |= {
    "glm4_moe": Case(
        {**GLM4_MOE, "first_k_dense_replace": 2, "num_hidden_layers": 5},
        (9, 53),
        {"routed_scaling_factor": 1.0},
        changes=(
            {"routed_scaling_factor": 1.0},
            {"norm_topk_prob": False},
            {"n_group": 1, "topk_group": 1},
            {"partial_rotary_factor": 1.0},
            {"num_experts_per_tok": 2},
        ),
        zeroed=("e_score_correction_bias", "shared_experts.down_proj.weight"),
    ),
    "glm4_moe_tied": Case(
        {**GLM4_MOE, "tie_word_embeddings": True, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
        | {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 1, "n_routed_experts": 7}
        | {"partial_rotary_factor": 0.25},
        (10, 36),
        {"partial_rotary_factor": 0.5},
        changes=({"norm_topk_prob": True}, {"partial_rotary_factor": 0.5}, {"routed_scaling_factor": 1.0}),
        zeroed=("e_score_correction_bias",),
    ),
}
MINIMAX_M2 = {
    **{k: v for k, v in EVERY.items() if k != "rope_theta"},
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "intermediate_size": 40,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "rotary_dim": 8,
    "pad_token_id": 0,
}
CASES |= {
    "minimax_m2": Case(
        {**MINIMAX_M2, "rope_theta": 1e4, "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer"},
        (7, 41),
        {"rotary_dim": 16},
        changes=({"rotary_dim": 16}, {"num_experts_per_tok": 2}, {"rope_theta": 100.0}),
        zeroed=("e_score_correction_bias",),
    ),
    "minimax_m2_tied": Case(
        {**MINIMAX_M2, "tie_word_embeddings": True, "num_key_value_heads": 1, "rotary_dim": 4, "num_local_experts": 6},
        (10, 36),
        {"rotary_dim": 8},
        changes=({"rotary_dim": 8}, {"rope_theta": 100.0}),
        zeroed=("e_score_correction_bias",),
    ),
}
ERNIE4_5_MOE = {
    **{k: v for k, v in EVERY.items() if k != "head_dim"},
    "model_type": "ernie4_5_moe",
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 64,
    "moe_intermediate_size": 40,
    "moe_num_experts": 7,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "pad_token_id": 0,
}
CASES |= {
    "ernie4_5_moe": Case(
        {**ERNIE4_5_MOE, "num_hidden_layers": 5, "moe_layer_start_index": 1, "moe_layer_end_index": 3}
        | {"tie_word_embeddings": True, "moe_norm_min": 0.8},
        (7, 41),
        {"moe_norm_min": 1e-12},
        changes=({"moe_norm_min": 1e-12}, {"moe_k": 2}, {"rope_theta": 100.0}),
        zeroed=("e_score_correction_bias", "shared_experts.down_proj.weight"),
    ),
    "ernie4_5_moe_untied": Case(
        {**ERNIE4_5_MOE, "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_num_shared_experts": 0}
        | {"moe_num_experts": 6, "moe_k": 2, "moe_layer_end_index": -1, "num_key_value_heads": 1},
        (10, 36),
        {"rope_theta": 100.0},
        changes=({"moe_k": 3}, {"rope_theta": 100.0}),
        zeroed=("e_score_correction_bias",),
    ),
}
HUNYUAN = {**EVERY, "model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"], "pad_token_id": 0}
ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
HUNYUAN_MOE = {
    **{**HUNYUAN, "model_type": "hunyuan_v1_moe", "architectures": ["HunYuanMoEV1ForCausalLM"]},
    "intermediate_size": 40,
    "num_experts": 7,
    "moe_topk": 3,
}
CASES |= {
    "hunyuan_v1_dense": Case(
        {**HUNYUAN, "rope_scaling": ALPHA, "attention_bias": True},
        (7, 60),
        {"rope_scaling": None},
        changes=({"rope_scaling": None},),
        zeroed=("query_layernorm.weight",),
    ),
    "hunyuan_v1_dense_tied": Case(
        {**HUNYUAN, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24},
        (10, 36),
        {"rope_theta": 100.0},
        changes=({"rope_theta": 100.0},),
    ),
    "hunyuan_v1_moe": Case(
        {**HUNYUAN_MOE, "rope_scaling": ALPHA, "moe_topk": [3, 2, 3, 2]},
        (7, 60),
        {"rope_scaling": None},
        changes=({"rope_scaling": None}, {"moe_topk": 3}),
        zeroed=("shared_mlp.down_proj.weight",),
    ),
    "hunyuan_v1_moe_tied": Case(
        {**HUNYUAN_MOE, "tie_word_embeddings": True, "attention_bias": True, "num_experts": 6},
        (10, 36),
        {"rope_theta": 100.0},
        changes=({"rope_theta": 100.0}, {"moe_topk": 2}),
    ),
}
CASES |= {
    "granitemoeshared": Case(
        {**GRANITEMOE, "model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
        | {"shared_intermediate_size": 72},
        (7, 41),
        {"residual_multiplier": 1.0},
        changes=(*GRANITE_CHANGES, {"num_experts_per_tok": 2}),
        zeroed=("shared_mlp.output_linear.weight",),
    ),
    "granitemoeshared_tied": Case(
        {**GRANITEMOE, "model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
        | {"tie_word_embeddings": True, "attention_bias": True, "num_local_experts": 6, "embedding_multiplier": 0.5},
        (12, 29),
        {"attention_bias": False},
        changes=GRANITE_CHANGES,
    ),
}
LLAMA4 = {
    **{k: v for k, v in EVERY.items() if k != "rope_theta"},
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 12,
    "attn_temperature_tuning": True,
    "attn_scale": 0.9,
    "floor_scale": 8,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
}
CASES |= {
    "llama4": Case(
        {**LLAMA4, "interleave_moe_layer_step": 2, "rope_theta": 1e4, "rope_scaling": LLAMA3_ROPE},
        (7, 60),
        {"attention_chunk_size": 13},
        changes=(
            {"attention_chunk_size": 500},
            {"attn_temperature_tuning": False},
            {"attn_scale": 0.1},
            {"use_qk_norm": False},
            {"no_rope_layer_interval": 4},
            {"rope_scaling": None},
        ),
        zeroed=("shared_expert.down_proj.weight",),
    ),
    "llama4_tied": Case(
        {**LLAMA4, "tie_word_embeddings": True, "moe_layers": [0, 2, 3], "num_experts_per_tok": 2, "rope_theta": 1e4}
        | {"no_rope_layers": [1, 0, 1, 0, 1, 1], "use_qk_norm": False, "attention_bias": True, "floor_scale": 4},
        (10, 40),
        {"attention_bias": False},
        changes=({"num_experts_per_tok": 1}, {"floor_scale": 500}, {"attention_chunk_size": 500}),
    ),
}
LFM2 = {
    **{k: v for k, v in EVERY.items() if k not in ("rms_norm_eps", "rope_theta", "hidden_act")},
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "norm_eps": 1e-3,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.3,
    "block_auto_adjust_ff_dim": True,
    "conv_L_cache": 3,
    "conv_bias": True,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
CASES |= {
    "lfm2": Case(
        {**LFM2, "num_hidden_layers": 7, "full_attn_idxs": [2, 5]},
        (7, 60),
        {"conv_bias": False},
        changes=({"rope_theta": 100.0},),
    ),
    "lfm2_untied": Case(
        {
            **{k: v for k, v in LFM2.items() if k != "head_dim"},
            "tie_word_embeddings": False,
            "conv_bias": False,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "num_key_value_heads": 1,
            "layer_types": ["conv", "full_attention", "full_attention", "conv"],
            "rope_theta": 300.0,
        },
        (2, 41),
        {"norm_eps": 0.1},
        changes=({"rope_theta": 1e4},),
    ),
}
DELTA_NET = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
QWEN3_NEXT = {
    **{k: v for k, v in QWEN2_MOE.items() if k not in ("use_sliding_window", "sliding_window", "max_window_layers")},
    **DELTA_NET,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 5,
}
CASES |= {
    "qwen3_next": Case(
        {**QWEN3_NEXT, "mlp_only_layers": [1], "attention_bias": True, "full_attention_interval": 2},
        (7, 100),
        {"attention_bias": False},
        changes=(
            {"norm_topk_prob": True},
            {"num_experts_per_tok": 2},
            {"partial_rotary_factor": 1.0},
            {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
        ),
    ),
    "qwen3_next_tied": Case(
        {
            **QWEN3_NEXT,
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "partial_rotary_factor": 0.5,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
        },
        (3, 70),
        {"rope_theta": 100.0},
        changes=({"norm_topk_prob": False}, {"partial_rotary_factor": 0.25}),
    ),
}
QWEN3_5 = {**EVERY, **DELTA_NET, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}


def mrope(theta: float, partial: float) -> dict:
    """`rope_parameters` of Qwen3.5."""
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial}
    return {"rope_parameters": {**rope, "mrope_section": [1, 1, 0], "mrope_interleaved": True}}


CASES |= {
    "qwen3_5": Case(
        {**{k: v for k, v in QWEN3_5.items() if k != "rope_theta"}, **mrope(300.0, 0.25), "num_hidden_layers": 6}
        | {"full_attention_interval": 3},
        (7, 100),
        mrope(1e4, 0.5),
        changes=(mrope(300.0, 1.0), mrope(5.0, 0.5)),
    ),
    "qwen3_5_tied": Case(
        {
            **QWEN3_5,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 1,
            "num_key_value_heads": 4,
        },
        (2, 40),
        {"attention_bias": False},
        changes=({"partial_rotary_factor": 0.75},),
    ),
}
QWEN3_5_MOE = {
    **{k: v for k, v in QWEN3_NEXT.items() if k not in ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")},
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_hidden_layers": 4,
}
CASES |= {
    "qwen3_5_moe": Case(
        QWEN3_5_MOE,
        (7, 100),
        {"num_experts_per_tok": 2},
        changes=({"num_experts_per_tok": 2}, {"partial_rotary_factor": 1.0}),
    ),
    "qwen3_5_moe_tied": Case(
        {**QWEN3_5_MOE, "tie_word_embeddings": True, "attention_bias": True, "num_experts": 5, "head_dim": 24}
        | {"full_attention_interval": 2, "linear_num_value_heads": 2},
        (5, 50),
        {"attention_bias": False},
        changes=({"num_experts_per_tok": 4}, {"partial_rotary_factor": 0.5}),
    ),
}
GRANITEMOEHYBRID = {
    **GRANITEMOE,
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 5,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
    "shared_intermediate_size": 72,
    "mamba_expand": 2,
    "mamba_n_heads": 16,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": True,
    "position_embedding_type": "rope",
    "pad_token_id": 0,
}
CASES |= {
    "granitemoehybrid": Case(
        GRANITEMOEHYBRID,
        (7, 100),
        {"mamba_conv_bias": False},
        changes=(*GRANITE_CHANGES, {"num_experts_per_tok": 2}, {"position_embedding_type": None}),
    ),
    "granitemoehybrid_tied": Case(
        {
            **{k: v for k, v in GRANITEMOEHYBRID.items() if k != "rope_theta"},
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_local_experts": 0,
            "position_embedding_type": "nope",
            "mamba_conv_bias": False,
            "mamba_proj_bias": False,
            "mamba_n_groups": 1,
            "mamba_n_heads": 8,
            "mamba_d_head": "auto",
            "mamba_d_conv": 2,
            "layer_types": ["attention", "mamba", "mamba", "mamba"],
            "num_hidden_layers": 4,
            "embedding_multiplier": 0.5,
        },
        (5, 60),
        {"attention_bias": False},
        changes=(*GRANITE_CHANGES, {"position_embedding_type": "rope"}),
    ),
}
LATENT = {
    **{k: v for k, v in EVERY.items() if k not in ("head_dim", "rope_theta")},
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 10,
    "v_head_dim": 18,
    "rope_theta": 1e4,
    "pad_token_id": 0,
}
YARN_MSCALE = {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6}
OTHER_MSCALES = (
    {"rope_scaling": {**YARN_MSCALE, "mscale": 0.6}},
    {"rope_scaling": {**YARN_MSCALE, "mscale": 3.0, "mscale_all_dim": 3.0}},
)
YOUTU = {**LATENT, "model_type": "youtu", "architectures": ["YoutuForCausalLM"], "rope_interleave": True}
CASES |= {
    "youtu": Case(
        {**YOUTU, "rope_scaling": YARN_MSCALE, "attention_bias": True},
        (7, 41),
        {"rope_interleave": False},
        changes=({"rope_interleave": False}, *OTHER_MSCALES),
    ),
    "youtu_tied": Case(
        {**YOUTU, "tie_word_embeddings": True, "q_lora_rank": None, "rope_interleave": False},
        (9, 37),
        {"rope_interleave": True},
        changes=({"rope_interleave": True}, {"rope_theta": 100.0}),
    ),
}
MINICPM3 = {
    **LATENT,
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
    "model_type": "minicpm3",
    "architectures": ["MiniCPM3ForCausalLM"],
    "scale_emb": 2.5,
    "scale_depth": 1.7,
    "dim_model_base": 28,
}
CASES |= {
    "minicpm3": Case(
        {**MINICPM3, "rope_scaling": YARN_MSCALE, "tie_word_embeddings": True},
        (9, 41),
        {"scale_emb": 1.0},
        changes=({"scale_emb": 1.0}, {"scale_depth": 2.0}, {"dim_model_base": 56}, *OTHER_MSCALES),
    ),
    "minicpm3_untied": Case(
        {**MINICPM3, "q_lora_rank": None, "v_head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 4},
        (10, 36),
        {"dim_model_base": 56},
        changes=({"scale_emb": 1.0}, {"scale_depth": None}, {"dim_model_base": None}),
    ),
}
DEEPSEEK = {
    **LATENT,
    "moe_intermediate_size": 36,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
DEEPSEEK_V2 |= {"num_attention_heads": 7, "num_key_value_heads": 7}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.2,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "rope_scaling": YARN_MSCALE,
}
V3_CHANGES = (
    {"rope_interleave": False},
    {"n_group": 1, "topk_group": 1},
    {"topk_group": 3},
    {"norm_topk_prob": False},
    {"routed_scaling_factor": 1.0},
    {"num_experts_per_tok": 4},
)
CASES |= {
    "deepseek_v2": Case(
        {
            **DEEPSEEK_V2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 5.0,
            "rope_scaling": YARN_MSCALE,
        },
        (7, 41),
        {"topk_method": "greedy"},
        changes=({"topk_method": "greedy"}, {"topk_group": 1}, {"routed_scaling_factor": 1.0}, *OTHER_MSCALES),
    ),
    "deepseek_v2_tied": Case(
        {
            **DEEPSEEK_V2,
            "topk_method": "greedy",
            "q_lora_rank": None,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 4.0,
        },
        (10, 36),
        {"routed_scaling_factor": 1.0},
        changes=({"routed_scaling_factor": 1.0}, {"num_experts_per_tok": 4}, {"rope_theta": 100.0}),
    ),
    "deepseek_v3": Case(DEEPSEEK_V3, (7, 41), {"rope_interleave": False}, changes=(*V3_CHANGES, *OTHER_MSCALES)),
    "deepseek_v3_tied": Case(
        {
            **DEEPSEEK_V3,
            "tie_word_embeddings": True,
            "q_lora_rank": None,
            "attention_bias": True,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "rope_scaling": None,
        },
        (10, 36),
        {"rope_interleave": True},
        changes=({"rope_interleave": True}, {"norm_topk_prob": True}, {"routed_scaling_factor": 1.0}),
    ),
    "kimi_k2": Case(
        {**DEEPSEEK_V3, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
        (8, 41),
        {"routed_scaling_factor": 1.0},
        changes=({"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}, *OTHER_MSCALES),
    ),
}
GLM4_MOE_LITE = {
    **{k: v for k, v in DEEPSEEK_V3.items() if k != "first_k_dense_replace"},
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    "n_shared_experts": 1,
}
CASES |= {
    "glm4_moe_lite": Case(
        {**GLM4_MOE_LITE, "tie_word_embeddings": True, "rope_scaling": None},
        (7, 41),
        {"rope_interleave": False},
        changes=V3_CHANGES,
    ),
    "glm4_moe_lite_untied": Case(
        {**GLM4_MOE_LITE, "n_group": 1, "topk_group": 1, "mlp_layer_types": None},
        (10, 36),
        {"rope_interleave": False},
        changes=({"rope_interleave": False}, {"routed_scaling_factor": 1.0}, *OTHER_MSCALES),
    ),
}
OLMO = {
    **{k: v for k, v in EVERY.items() if k not in ("rms_norm_eps", "head_dim")},
    "model_type": "olmo",
    "architectures": ["OlmoForCausalLM"],
    "pad_token_id": 0,
}
CASES |= {
    "olmo": Case(
        {**OLMO, "clip_qkv": 0.7, "rope_scaling": YARN},
        (7, 41),
        {"clip_qkv": None},
        changes=({"clip_qkv": None}, {"rope_scaling": None}),
    ),
    "olmo_tied": Case(
        {**OLMO, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4, "head_dim": 24},
        (11, 38),
        {"attention_bias": False},
        changes=({"rope_theta": 100.0}, {"clip_qkv": 0.7}),
    ),
}
APERTUS = {
    **{k: v for k, v in EVERY.items() if k not in ("head_dim", "rope_theta")},
    "model_type": "apertus",
    "architectures": ["ApertusForCausalLM"],
    "hidden_act": "xielu",
    "pad_token_id": 0,
}
CASES |= {
    "apertus": Case(
        {**APERTUS, "rope_scaling": LLAMA3_ROPE, "rope_theta": 2e4},
        (7, 60),
        {"rope_scaling": None, "rope_theta": 12e6},
        changes=({"rope_scaling": {**LLAMA3_ROPE, "factor": 1.0}}, {"rope_theta": 100.0}),
    ),
    "apertus_tied": Case(
        {**APERTUS, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1, "head_dim": 16},
        (11, 38),
        {"attention_bias": False},
        changes=({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},),
    ),
}
GPT_NEOX = {
    **{
        k: v
        for k, v in EVERY.items()
        if k not in ("rms_norm_eps", "head_dim", "rope_theta", "num_key_value_heads", "attention_dropout")
    },
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_size": 80,
    "num_attention_heads": 5,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-3,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "classifier_dropout": 0.1,
}
CASES |= {
    "gpt_neox": Case(
        {**GPT_NEOX, "rope_scaling": {"type": "linear", "factor": 4.0}},
        (16, 39),
        {"use_parallel_residual": False},
        changes=(
            {"use_parallel_residual": False},
            {"rotary_pct": 1.0},
            {"rotary_emb_base": 10},
            {"hidden_act": "relu"},
            {"rope_scaling": None},
        ),
    ),
    "gpt_neox_tied": Case(
        {
            **GPT_NEOX,
            "tie_word_embeddings": True,
            "use_parallel_residual": False,
            "rotary_pct": 0.5,
            "rotary_emb_base": 100,
            "hidden_act": "gelu_fast",
            "attention_bias": False,
            "layer_norm_eps": 0.05,
        },
        (9, 36),
        {"layer_norm_eps": 1e-5},
        changes=({"use_parallel_residual": True}, {"rotary_pct": 0.25}, {"rotary_emb_base": 10000}),
    ),
}
GPT2 = {
    "vocab_size": 256,
    "n_embd": 60,
    "n_inner": None,
    "n_layer": 3,
    "n_head": 5,
    "n_positions": 192,
    "n_ctx": 192,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-3,
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
CASES |= {
    "gpt2": Case(
        GPT2,
        (13, 44),
        {"activation_function": "relu"},
        changes=({"activation_function": "relu"}, {"scale_attn_weights": False}),
    ),
    "gpt2_untied": Case(
        {
            **GPT2,
            "tie_word_embeddings": False,
            "n_inner": 88,
            "n_layer": 4,
            "activation_function": "silu",
            "scale_attn_weights": False,
            "layer_norm_epsilon": 0.05,
        },
        (9, 36),
        {"layer_norm_epsilon": 1e-5},
        changes=({"scale_attn_weights": True}, {"activation_function": "gelu"}),
    ),
}
PHI = {
    **{k: v for k, v in EVERY.items() if k not in ("rms_norm_eps", "head_dim")},
    "model_type": "phi",
    "architectures": ["PhiForCausalLM"],
    "hidden_size": 80,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-3,
}
CASES |= {
    "phi": Case(
        {**PHI, "qk_layernorm": True},
        (8, 45),
        {"partial_rotary_factor": 1.0},
        changes=({"partial_rotary_factor": 1.0}, {"hidden_act": "relu"}, {"rope_theta": 10.0}),
    ),
    "phi_tied": Case(
        {**PHI, "tie_word_embeddings": True, "num_key_value_heads": None, "num_attention_heads": 5}
        | {"layer_norm_eps": 0.05, "rope_theta": 100.0},
        (11, 38),
        {"layer_norm_eps": 1e-5},
        changes=({"partial_rotary_factor": 1.0}, {"rope_theta": 1e4}),
    ),
}
STARCODER2 = {
    **{k: v for k, v in EVERY.items() if k not in ("rms_norm_eps", "head_dim")},
    "model_type": "starcoder2",
    "architectures": ["Starcoder2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-3,
    "norm_type": "layer_norm",
    "mlp_type": "default",
    "residual_dropout": 0.1,
    "embedding_dropout": 0.1,
}
CASES |= {
    "starcoder2": Case(
        {**STARCODER2, "tie_word_embeddings": True, "sliding_window": 6, "hidden_size": 48, "num_attention_heads": 6},
        (14, 29),
        {"sliding_window": 7},
        changes=(NO_WINDOWS, {"hidden_act": "relu"}, {"rope_theta": 100.0}),
    ),
    "starcoder2_untied": Case(
        {**STARCODER2, "use_bias": False, "num_attention_heads": 7, "num_key_value_heads": 1, "norm_epsilon": 0.05},
        (10, 36),
        {"norm_epsilon": 1e-5},
        changes=({"rope_theta": 100.0}, {"sliding_window": 6}),
    ),
}
GLM = {**GLM4, "model_type": "glm", "architectures": ["GlmForCausalLM"]}
CASES |= {
    "glm": Case(
        GLM,
        (7, 41),
        {"partial_rotary_factor": 1.0},
        changes=({"partial_rotary_factor": 1.0}, {"rope_theta": 100.0}),
    ),
    "glm_tied": Case(
        {**GLM, "tie_word_embeddings": True, "attention_bias": False, "partial_rotary_factor": 0.25},
        (10, 36),
        {"partial_rotary_factor": 0.5},
        changes=({"partial_rotary_factor": 0.5},),
    ),
}
HELIUM = {
    **{k: v for k, v in EVERY.items() if k != "head_dim"},
    "model_type": "helium",
    "architectures": ["HeliumForCausalLM"],
    "hidden_size": 64,
    "head_dim": 16,
    "pad_token_id": 0,
}
CASES |= {
    "helium": Case(
        {**HELIUM, "attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3_ROPE},
        (7, 60),
        {"attention_bias": False},
        changes=({"rope_scaling": None}, {"rope_theta": 100.0}),
    ),
    "helium_tied": Case(
        {**{k: v for k, v in HELIUM.items() if k != "rope_theta"}, "tie_word_embeddings": True, "rms_norm_eps": 0.02},
        (10, 36),
        {"rms_norm_eps": 1e-5},
        changes=({"rope_theta": 100.0},),
    ),
}
ARCEE = {**EVERY, "model_type": "arcee", "architectures": ["ArceeForCausalLM"], "hidden_act": "relu2"}
CASES |= {
    "arcee": Case(
        {**ARCEE, "attention_bias": True, "mlp_bias": True, "rope_scaling": YARN},
        (7, 60),
        {"mlp_bias": False},
        changes=({"rope_scaling": None}, {"hidden_act": "silu"}),
    ),
    "arcee_tied": Case(
        {**ARCEE, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24},
        (10, 36),
        {"hidden_act": "relu"},
        changes=({"hidden_act": "relu"}, {"rope_theta": 100.0}),
    ),
}
NEMOTRON = {
    **{k: v for k, v in EVERY.items() if k != "rms_norm_eps"},
    "model_type": "nemotron",
    "architectures": ["NemotronForCausalLM"],
    "hidden_act": "relu2",
    "norm_eps": 1e-3,
}
CASES |= {
    "nemotron": Case(
        {**NEMOTRON, "attention_bias": True, "mlp_bias": True},
        (7, 41),
        {"partial_rotary_factor": 1.0},
        changes=({"partial_rotary_factor": 1.0}, {"hidden_act": "silu"}, {"rope_theta": 10.0}),
    ),
    "nemotron_tied": Case(
        {**NEMOTRON, "tie_word_embeddings": True, "partial_rotary_factor": 1.0, "norm_eps": 0.05},
        (10, 36),
        {"norm_eps": 1e-5},
        changes=({"partial_rotary_factor": 0.5}, {"rope_theta": 100.0}),
    ),
}
STABLELM = {
    **{k: v for k, v in EVERY.items() if k not in ("rms_norm_eps", "head_dim")},
    "model_type": "stablelm",
    "architectures": ["StableLmForCausalLM"],
    "hidden_size": 80,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "layer_norm_eps": 1e-3,
}
CASES |= {
    "stablelm": Case(
        {**STABLELM, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "num_key_value_heads": 5},
        (7, 41),
        {"use_qkv_bias": False},
        changes=({"partial_rotary_factor": 1.0}, {"rope_theta": 10.0}),
    ),
    "stablelm_tied": Case(
        {**STABLELM, "tie_word_embeddings": True, "use_parallel_residual": True, "layer_norm_eps": 0.05},
        (10, 36),
        {"layer_norm_eps": 1e-5},
        changes=({"partial_rotary_factor": 1.0}, {"rope_theta": 10.0}),
    ),
}
FALCON_H1 = {
    **{k: v for k, v in EVERY.items() if k != "head_dim"},
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "mamba_rms_norm": False,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.6, 1.5, 0.7, 1.3, 0.8],
    "mlp_multipliers": [0.7, 1.4],
    "pad_token_id": 0,
}
FALCON_CHANGES = (
    *({f"{key}_multiplier": 1.0} for key in ("embedding", "lm_head", "key", "attention_in", "attention_out")),
    *({f"{key}_multiplier": 1.0} for key in ("ssm_in", "ssm_out")),
    *({"ssm_multipliers": [1.0 if i == j else m for j, m in enumerate([0.6, 1.5, 0.7, 1.3, 0.8])]} for i in range(5)),
    {"mlp_multipliers": [1.0, 1.4]},
    {"mlp_multipliers": [0.7, 1.0]},
)
CASES |= {
    "falcon_h1": Case(FALCON_H1, (7, 100), {"key_multiplier": 1.0}, changes=FALCON_CHANGES),
    "falcon_h1_tied": Case(
        {
            **FALCON_H1,
            "tie_word_embeddings": True,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "key_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_multipliers": None,
            "mamba_d_ssm": None,
            "mamba_expand": 2,
            "mamba_d_head": "auto",
            "mamba_n_heads": 16,
        },
        (5, 60),
        {"mlp_bias": False},
        changes=({"mamba_norm_before_gate": False}, {"mlp_multipliers": None}, {"ssm_out_multiplier": 1.0}),
    ),
}
