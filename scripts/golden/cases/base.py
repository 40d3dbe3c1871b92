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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
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


CASES: dict[str, Case] = {}
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
        GLM4, (7, 41), {"partial_rotary_factor": 1.0}, changes=({"partial_rotary_factor": 1.0}, {"rope_theta": 100.0})
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
        reference="levanter",
    ),
}
GRUG_MOE_2 = {
    **GRUG_MOE,
    "grugmoe_artifact_schema_version": 2,
    "hidden_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "local_kv_heads": 4,
    "global_kv_heads": 2,
    "global_every": 3,
    "head_dim": 16,
    "shared_expert_intermediate_size": 40,
    "num_shared_experts": 2,
    "latent_dim": 28,
    "rope_fused": True,
    "sconv": True,
    "sconv_kernel": 4,
    "sconv_sites": ["k", "attn", "mlp"],
}
CASES |= {
    "grug_moe_hero": Case(
        GRUG_MOE_2,
        (7, 60),
        {"sliding_window": 7},
        changes=(
            NO_WINDOWS,
            {"qk_mult": 1.0},
            {"rope_theta": 1e4},
            {"rope_fused": False},
            {"num_experts_per_tok": 2},
            {"global_kv_heads": 4},
            {"global_every": 7},
        ),
        zeroed=(
            *("router.bias", "shared_experts.0.down_proj.weight", "shared_experts.1.down_proj.weight"),
            *("attn_gate.weight", "latent_up_proj.weight", "sconv_k.weight", "sconv_attn.weight", "sconv_mlp.weight"),
        ),
        reference="levanter",
    ),
    "grug_moe_hero_plain": Case(
        {
            **GRUG_MOE_2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 3,
            "local_kv_heads": None,
            "global_kv_heads": None,
            "global_every": 2,
            "latent_dim": None,
            "num_shared_experts": 1,
            "num_experts_per_tok": 1,
            "rope_fused": False,
            "sconv_kernel": 3,
            "sconv_sites": ["mlp"],
            "sliding_window": 9,
            "rms_norm_eps": 1e-5,
        },
        (7, 60),
        {"qk_mult": 1.0},
        changes=({"sliding_window": 500}, {"rope_fused": True}, {"global_every": 3}, {"rope_theta": 1e4}),
        zeroed=("sconv_mlp.weight", "shared_experts.0.down_proj.weight"),
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
