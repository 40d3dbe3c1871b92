"""Golden cases of further dense families."""

from scripts.golden.cases.base import EVERY, GLM4, LLAMA3_ROPE, NO_WINDOWS, YARN, Case

CASES: dict[str, Case] = {}
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


def gemma4_ropes(partial: float = 0.25, theta: float = 1e3, local_theta: float = 100.0, **keys) -> dict:
    """`rope_parameters` of Gemma 4."""
    full = {"rope_type": "proportional", "partial_rotary_factor": partial, "rope_theta": theta, **keys}
    return {"rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local_theta}}}


FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4 = {
    **{k: v for k, v in EVERY.items() if k not in ("hidden_act", "rope_theta", "rms_norm_eps")},
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "num_hidden_layers": 7,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
    "use_bidirectional_attention": None,
    **gemma4_ropes(),
}
GEMMA4_CHANGES = (
    {"final_logit_softcapping": None},
    NO_WINDOWS,
    gemma4_ropes(1.0),
    gemma4_ropes(theta=10.0),
    gemma4_ropes(local_theta=1e3),
)
CASES |= {
    "gemma4": Case(GEMMA4, (7, 60), {"sliding_window": 7}, changes=GEMMA4_CHANGES, zeroed=("layer_scalar",)),
    "gemma4_untied": Case(
        {
            **GEMMA4,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attention_k_eq_v": False,
            "num_hidden_layers": 4,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
            "final_logit_softcapping": None,
            **gemma4_ropes(0.5, factor=4.0),
        },
        (10, 47),
        {"attention_bias": False},
        changes=(gemma4_ropes(0.5), NO_WINDOWS, gemma4_ropes(1.0, factor=4.0)),
    ),
    "gemma4_shared": Case(
        {
            **GEMMA4,
            "num_hidden_layers": 20,
            "layer_types": [*[SLIDING] * 4, FULL] * 4,
            "num_kv_shared_layers": 10,
            "use_double_wide_mlp": True,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
            "hidden_size": 40,
            "hidden_size_per_layer_input": 12,
        },
        (8, 45),
        {"sliding_window": 7},
        changes=(NO_WINDOWS, gemma4_ropes(1.0)),
        zeroed=("embed_tokens_per_layer.weight", "per_layer_projection.weight", "per_layer_model_projection.weight"),
    ),
    "gemma4_shared_untied": Case(
        {
            **GEMMA4,
            "tie_word_embeddings": False,
            "num_hidden_layers": 8,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, SLIDING, FULL, FULL],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 6,
        },
        (12, 41),
        {"sliding_window": 7},
        changes=(NO_WINDOWS, gemma4_ropes(1.0)),
    ),
}
GEMMA4_MOE = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_hidden_layers": 6,
}
GEMMA4_MOE_PARTS = ("experts.down_proj", "router.per_expert_scale", "mlp.down_proj.weight", "router.scale")
CASES |= {
    "gemma4_moe": Case(
        GEMMA4_MOE,
        (7, 60),
        {"top_k_experts": 2},
        changes=(*GEMMA4_CHANGES, {"top_k_experts": 2}),
        zeroed=GEMMA4_MOE_PARTS,
    ),
    "gemma4_moe_untied": Case(
        {
            **GEMMA4_MOE,
            "tie_word_embeddings": False,
            "num_experts": 5,
            "top_k_experts": 2,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 10,
            "use_double_wide_mlp": True,
        },
        (13, 38),
        {"top_k_experts": 3},
        changes=({"top_k_experts": 1}, NO_WINDOWS),
        zeroed=("layer_scalar",),
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
        (9, 50),
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
