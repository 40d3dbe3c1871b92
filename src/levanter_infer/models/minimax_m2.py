"""MiniMax-M2: experts chosen by sigmoids and a selection bias, norms over all heads together, a partial rope."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Router, Score, SelectionBias
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import MIXTRAL_ROUTER, SELECTION_BIAS, check_chosen, expert_tensors
from levanter_infer.models.family import Family, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.mixtral import local_experts_to_hf
from levanter_infer.models.tensors import Tensor

ROUTER = Router(Score.SIGMOID, normalize=True, selection_bias=SelectionBias.ON_SCORES)


def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    """Published files say `rotary_dim`, and HF writes `partial_rotary_factor`."""
    share = hf.count("rotary_dim", head_dim) / head_dim
    return one_rope(hf, head_dim, max_positions, theta=5e6, partial=True, default_partial=share)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=128, max_positions=196608, ropes=ropes)
    experts = hf.count("num_local_experts", 256)
    chosen = check_chosen(hf, "num_experts_per_tok", hf.count("num_experts_per_tok", 8), experts)
    read_published_keys(hf)
    hf.finish()
    norm = sizes.norm()
    attention = sizes.attention(qk_norm=norm, qk_norm_whole=True)
    feed_forward = ExpertsBlock(experts, chosen, sizes.intermediate_size, ROUTER, sizes.activation)
    return sizes.decoder("minimax_m2", [Block(attention, feed_forward, norm)] * sizes.num_layers)


def read_published_keys(hf: HfConfig) -> None:
    """The keys of MiniMax' own files that HF's class does not have: they have to say what HF computes."""
    hf.own_code("configuration_minimax_m2", "modeling_minimax_m2")
    hf.only("use_qk_norm", True)
    hf.only("qk_norm_type", "per_layer")
    hf.only("scoring_func", "sigmoid")
    hf.only("use_routing_bias", True)
    hf.only("attn_type_list", None, [1] * hf.count("num_hidden_layers"))
    hf.only("shared_intermediate_size", 0)
    hf.only("sliding_window", None)
    for key in ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"):
        hf.only(key, 1.0)
    hf.optional_count("mlp_intermediate_size")  # nothing has it
    hf.only("shared_moe_mode", "sigmoid", "softmax")  # of the shared expert, which there is none of
    for key in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):  # the files have none of these layers
        hf.only(key, *range(16))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    partial = {"partial_rotary_factor": config.ropes[0].partial}
    return {**common_to_hf(config), **local_experts_to_hf(config), **partial}


MINIMAX_M2_TENSORS = expert_tensors(
    "block_sparse_moe",
    Tensor("model.layers.{layer}.block_sparse_moe.e_score_correction_bias", (SELECTION_BIAS,)),
    names=("w1", "w3", "w2"),
)
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    config_from_hf,
    config_to_hf,
    MINIMAX_M2_TENSORS,
    renamed=(MIXTRAL_ROUTER,),
)
