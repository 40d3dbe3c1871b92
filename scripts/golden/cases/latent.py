"""Golden cases of families with latent attention."""

from scripts.golden.cases.base import EVERY, YARN, Case

CASES: dict[str, Case] = {}
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
MISTRAL4 = {
    **{k: v for k, v in DEEPSEEK.items() if k != "rope_theta"},
    "model_type": "mistral4",
    "architectures": ["Mistral4ForCausalLM"],
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.2,
    "rope_interleave": True,
    "rope_parameters": {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.7, "mscale_all_dim": 0.0},
}
MISTRAL4_ROPES = tuple(
    {"rope_parameters": {**MISTRAL4["rope_parameters"], **changed}}
    for changed in ({"llama_4_scaling_beta": 0.0}, {"factor": 2.0}, {"attention_factor": 2.0})
)
CASES |= {
    "mistral4": Case(MISTRAL4, (7, 41), {"rope_interleave": False}, changes=(*V3_CHANGES, *MISTRAL4_ROPES)),
    "mistral4_tied": Case(
        {
            **MISTRAL4,
            "tie_word_embeddings": True,
            "q_lora_rank": None,
            "attention_bias": True,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
        },
        (10, 36),
        {"rope_interleave": True},
        changes=({"rope_interleave": True}, {"norm_topk_prob": True}, {"routed_scaling_factor": 1.0}),
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
DEEPSEEK_V32 = {
    **{k: v for k, v in DEEPSEEK_V3.items() if k not in ("rope_scaling", "rope_theta")},
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "rope_parameters": {**YARN, "rope_theta": 1e4},
    "index_topk": 13,
    "index_n_heads": 18,
    "index_head_dim": 22,
}
GLM_MOE_DSA = {
    **DEEPSEEK_V32,
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "num_hidden_layers": 5,
    "indexer_types": ["full", "shared", "full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
}
DSA_CHANGES = ({"index_topk": 4}, {"index_topk": 512})
CASES |= {
    "deepseek_v32": Case(DEEPSEEK_V32, (7, 41), {"index_topk": 512}, changes=DSA_CHANGES),
    "glm_moe_dsa": Case(
        {**GLM_MOE_DSA, "n_group": 1, "topk_group": 1, "attention_bias": True},
        (10, 36),
        {"index_topk": 512},
        changes=DSA_CHANGES,
    ),
}
