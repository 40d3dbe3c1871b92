"""Golden cases of families with a state of fixed size."""

from scripts.golden.cases.base import EVERY, GRANITE_CHANGES, GRANITEMOE, QWEN2_MOE, Case
from scripts.golden.cases.latent import LATENT

CASES: dict[str, Case] = {}
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
LFM2_MOE = {
    **{k: v for k, v in LFM2.items() if not k.startswith("block_") and k != "head_dim"},
    "model_type": "lfm2_moe",
    "architectures": ["Lfm2MoeForCausalLM"],
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "rope_theta": 300.0,
    "num_dense_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 36,
    "routed_scaling_factor": 1.9,
}
CASES |= {
    "lfm2_moe": Case(
        LFM2_MOE,
        (7, 60),
        {"routed_scaling_factor": 1.0},
        changes=({"rope_theta": 1e4}, {"norm_topk_prob": False}, {"num_experts_per_tok": 4}),
        zeroed=("feed_forward.expert_bias",),
    ),
    "lfm2_moe_untied": Case(
        {
            **LFM2_MOE,
            "tie_word_embeddings": False,
            "conv_bias": False,
            "conv_L_cache": 4,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "num_dense_layers": 0,
        },
        (3, 40),
        {"norm_topk_prob": True},
        changes=({"norm_topk_prob": True}, {"routed_scaling_factor": 1.0}),
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
    "key_multiplier": 3.0,
    "attention_in_multiplier": 1.4,
    "attention_out_multiplier": 2.5,
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
            "embedding_multiplier": 0.4,
            "mlp_multipliers": [2.5, 1.4],
            "ssm_out_multiplier": 2.0,
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
KIMI_LINEAR = {
    **{k: v for k, v in LATENT.items() if k not in ("rope_theta", "max_position_embeddings")},
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "model_max_length": 512,
    "num_hidden_layers": 6,
    "q_lora_rank": None,
    "moe_intermediate_size": 36,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "num_expert_group": 3,
    "topk_group": 2,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
KIMI_CHANGES = (
    {"topk_group": 3},
    {"num_experts_per_token": 2},
    {"moe_renormalize": False},
    {"routed_scaling_factor": 1.0},
)
CASES |= {
    "kimi_linear": Case(
        {
            **KIMI_LINEAR,
            "linear_attn_config": {
                "full_attn_layers": [4, 6],
                "kda_layers": [1, 2, 3, 5],
                "head_dim": 12,
                "num_heads": 5,
                "short_conv_kernel_size": 4,
            },
        },
        (8, 100),
        {"topk_group": 3},
        changes=KIMI_CHANGES,
        zeroed=("e_score_correction_bias", "dt_bias", "A_log", "f_b_proj.weight", "g_b_proj.weight"),
    ),
    "kimi_linear_biased": Case(
        {
            **KIMI_LINEAR,
            "q_lora_rank": 20,
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "num_hidden_layers": 4,
            "linear_head_dim": 10,
            "linear_num_heads": 3,
            "linear_conv_kernel_dim": 3,
            "num_shared_experts": 1,
            "moe_renormalize": False,
            "num_expert_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-3,
        },
        (5, 60),
        {"attention_bias": False},
        changes=({"moe_renormalize": True}, {"routed_scaling_factor": 1.0}, {"num_experts_per_token": 2}),
        zeroed=("shared_experts.down_proj.weight", "q_conv1d.weight"),
    ),
}
NEMOTRON_H = {
    **{k: v for k, v in EVERY.items() if k not in ("num_hidden_layers", "rms_norm_eps", "rope_theta", "hidden_act")},
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "layer_norm_epsilon": 1e-3,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 10,
    "conv_kernel": 4,
    "chunk_size": 16,
    "pad_token_id": 0,
}
NEMOTRON_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}
CASES |= {
    "nemotron_h": Case(
        {**NEMOTRON_H, **NEMOTRON_EXPERTS, "hybrid_override_pattern": "ME*EMM-*M-", "num_hidden_layers": 10}
        | {"use_bias": True, "moe_latent_size": 24, "n_group": 3, "topk_group": 2},
        (7, 100),
        {"use_bias": False},
        changes=(
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
            {"num_experts_per_tok": 1},
            {"topk_group": 3},
        ),
        zeroed=("e_score_correction_bias",),
    ),
    "nemotron_h_nano": Case(
        {**NEMOTRON_H, **NEMOTRON_EXPERTS, "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"]}
        | {"n_groups": 1, "use_conv_bias": False},
        (5, 60),
        {"layer_norm_epsilon": 0.1},
        changes=({"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
    ),
    "nemotron_h_dense": Case(
        {**NEMOTRON_H, "hybrid_override_pattern": "M-M-MM-*-M-M*--M*M-", "mlp_bias": True, "num_hidden_layers": 19}
        | {"conv_kernel": 2, "mamba_num_heads": 4, "mamba_head_dim": 12},
        (2, 40),
        {"mlp_bias": False},
    ),
}
OLMO_HYBRID = {
    **{k: v for k, v in EVERY.items() if k not in ("head_dim", "rope_theta")},
    "model_type": "olmo_hybrid",
    "architectures": ["OlmoHybridForCausalLM"],
    "num_hidden_layers": 5,
    "num_attention_heads": 14,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "pad_token_id": 0,
}
CASES |= {
    "olmo_hybrid": Case(
        {
            **OLMO_HYBRID,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
            + ["full_attention"],
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        },
        (8, 57),
        {"linear_allow_neg_eigval": False},
        changes=(
            {"linear_allow_neg_eigval": False},
            {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        ),
    ),
    "olmo_hybrid_tied": Case(
        {
            **OLMO_HYBRID,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_theta": 300.0, "rope_type": "default"},
        },
        (2, 41),
        {"linear_allow_neg_eigval": True},
        changes=(
            {"linear_allow_neg_eigval": True},
            {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        ),
    ),
}
