"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped gate."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import ClampedSwiglu
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router, Score
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import check_chosen, expert_tensors
from levanter_infer.models.family import Family, common_to_hf, read_sizes, rope_to_hf, windows_to_hf
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.mixtral import local_experts_to_hf
from levanter_infer.models.tensors import Order, Tensor

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ROUTER = Router(Score.SOFTMAX_OF_CHOSEN, bias=True)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw = {**raw, "rope_parameters": DEFAULT_ROPE}
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=64, max_positions=131072, norm_eps=1e-5, theta=150000.0)
    experts, bias = hf.count("num_local_experts", 128), hf.flag("attention_bias", True)
    chosen = check_chosen(hf, "num_experts_per_tok", hf.count("num_experts_per_tok", 4), experts)
    gate = ClampedSwiglu(hf.number("swiglu_alpha", 1.702), hf.number("swiglu_limit", 7.0))
    window = hf.optional_count("sliding_window", 128)
    windows = hf.windows(sizes.num_layers, window, lambda layer: layer % 2 == 0)
    # Of OpenAI's own files: the same again.
    hf.only("experts_per_token", chosen)
    hf.optional_count("initial_context_length")
    hf.finish()
    norm = sizes.norm()
    feed_forward = ExpertsBlock(experts, chosen, sizes.intermediate_size, ROUTER, gate, bias=True)
    mixers = [sizes.attention(qkv_bias=bias, out_bias=bias, sinks=True, window=window) for window in windows]
    return sizes.decoder("gpt_oss", [Block(mixer, feed_forward, norm) for mixer in mixers])


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None and isinstance(experts.activation, ClampedSwiglu)
    rope = rope_to_hf(config.ropes[0], config.max_position_embeddings)
    if rope["rope_scaling"] is None:  # without either key, HF takes `DEFAULT_ROPE`
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return {
        **common_to_hf(config, rope),
        **windows_to_hf(config),
        **local_experts_to_hf(config),
        "attention_bias": config.kv_attention[0].qkv_bias,
        "swiglu_alpha": experts.activation.alpha,
        "swiglu_limit": experts.activation.limit,
    }


def _lines(kind: str, suffix: str, **options) -> tuple[Tensor, Tensor]:
    """The parameters of this kind, of all experts of a layer."""
    gate, up, down = (f"layers.mlp.{name}_proj.{kind}" for name in ("gate", "up", "down"))
    experts = "model.layers.{layer}.mlp.experts"
    return (
        Tensor(f"{experts}.gate_up_proj{suffix}", (gate, up), order=Order.ALTERNATING, stacked_experts=True, **options),
        Tensor(f"{experts}.down_proj{suffix}", (down,), stacked_experts=True, **options),
    )


GPT_OSS_TENSORS = expert_tensors(
    "mlp",
    Tensor("model.layers.{layer}.self_attn.sinks", ("layers.attention.sinks",)),
    *_lines("weight", "", transposed=True),
    *_lines("bias", "_bias"),
    router="router",
)
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", config_from_hf, config_to_hf, GPT_OSS_TENSORS)
