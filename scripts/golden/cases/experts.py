"""Golden cases of families with experts: gpt-oss and those after it."""

from scripts.golden.cases.base import (
    EVERY,
    GRANITE_CHANGES,
    GRANITEMOE,
    LLAMA3_ROPE,
    LONG_FACTOR,
    NO_WINDOWS,
    SHORT_FACTOR,
    YARN,
    Case,
    longrope,
)

CASES: dict[str, Case] = {}
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
PHIMOE = {
    **{k: v for k, v in EVERY.items() if k not in ("head_dim", "rms_norm_eps")},
    "model_type": "phimoe",
    "architectures": ["PhimoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_local_experts": 7,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-3,
    "router_jitter_noise": 0.3,
    "input_jitter_noise": 0.01,
}


def phimoe_rope(short: float, long: float, original: int = 96, **keys) -> dict:
    keys = {"short_mscale": short, "long_mscale": long, "original_max_position_embeddings": original, **keys}
    return {"rope_scaling": longrope(**keys), "original_max_position_embeddings": original}


PHIMOE_MSCALES = phimoe_rope(1.2, 1.7, 48, long_factor=SHORT_FACTOR)
PHIMOE_ONE_MSCALE = phimoe_rope(1.2, 1.2, 48, long_factor=SHORT_FACTOR)


CASES |= {
    "phimoe": Case(
        {**PHIMOE, "sliding_window": 12, "attention_bias": True, "lm_head_bias": True, **phimoe_rope(1.3, 1.6)},
        (7, 47),
        {"router_jitter_noise": 0.01},
        changes=(
            {"router_jitter_noise": 1e-6},
            {"router_jitter_noise": 100.0},
            {"sliding_window": 500},
            phimoe_rope(1.0, 1.6),
            phimoe_rope(1.3, 1.6, short_factor=LONG_FACTOR),
        ),
    ),
    "phimoe_tied": Case(  # beyond the original length transformers keeps the short divisors
        {
            **PHIMOE,
            "tie_word_embeddings": True,
            **PHIMOE_MSCALES,
        },
        (14, 49, 100),
        PHIMOE_ONE_MSCALE,
        changes=(PHIMOE_ONE_MSCALE, {"router_jitter_noise": 1e-6}),
        length_threshold=48,
    ),
}
