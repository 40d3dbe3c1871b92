"""Golden cases of Llama, Mistral and Qwen, which transformers 4.57.6 answered."""

from scripts.golden.cases.base import BASE, LLAMA3_ROPE, SHORT_FACTOR, YARN, Case, longrope

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
YARN_ALL_KEYS = {
    **YARN,
    "beta_fast": 16.0,
    "beta_slow": 0.5,
    "mscale": 1.3,
    "mscale_all_dim": 0.6,
    "truncate": False,
}
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
