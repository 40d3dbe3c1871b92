"""Gemma 4, its text model: full layers with heads of another size, values that are keys, keys and values of earlier
layers, inputs of each layer, and experts beside the dense block."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.layers.layer_input import LayerInputBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import check_chosen
from levanter_infer.models.family import (
    Family,
    Sizes,
    read_sizes,
    renamed_keys,
    ropes_by_kind_to_hf,
    windows_to_hf,
)
from levanter_infer.models.gemma2 import GEMMA2_TENSORS
from levanter_infer.models.hf_config import FULL, SLIDING, HfConfig
from levanter_infer.models.multimodal import Parent
from levanter_infer.models.tensors import Tensor, tensor_table

DEFAULT_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_KEYS = {"hidden_act": "hidden_activation"}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    if raw.get("rope_parameters") is None:
        raw = {**raw, "rope_parameters": DEFAULT_ROPES}
    hf = HfConfig(raw, _KEYS)
    pattern = hf.raw.get("layer_types")
    if isinstance(pattern, list) and pattern:
        hf.raw["layer_types"] = [*pattern[:-1], FULL]  # as HF does
    full_head_dim, full_kv_heads = _full_heads(hf)

    def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
        by_kind = hf.raw["rope_parameters"]
        if not isinstance(by_kind, dict) or not {*by_kind} & {FULL, SLIDING}:
            raise hf.fail("rope_parameters", f"an object with {FULL} and {SLIDING}")
        return hf.ropes_by_kind(head_dim, max_positions, theta=1e6, local_theta=1e4, full_head_dim=full_head_dim)

    sizes = read_sizes(
        hf, kv_heads=4, head_dim=256, max_positions=131072, tied=True, activation=Activation.GELU_TANH, ropes=ropes
    )
    hf.only("use_bidirectional_attention", None, False, "vision")  # "vision": between the tokens of an image only
    full_kv_heads = full_kv_heads or sizes.num_kv_heads
    if sizes.num_heads % full_kv_heads:
        raise hf.fail("num_attention_heads", f"a multiple of num_global_key_value_heads={full_kv_heads}")
    bias, k_eq_v = hf.flag("attention_bias", False), hf.flag("attention_k_eq_v", False)
    window, last = hf.count("sliding_window", 512), sizes.num_layers - 1
    windows = hf.windows(sizes.num_layers, window, lambda layer: (layer + 1) % 6 != 0 and layer != last)
    final_cap = hf.optional_number("final_logit_softcapping", None)
    shared = hf.size("num_kv_shared_layers", 0)
    if shared >= sizes.num_layers or not {*windows[-shared:]} <= {*windows[: sizes.num_layers - shared]}:
        raise hf.fail("num_kv_shared_layers", "fewer layers, so that each of those has an earlier one of its kind")
    wide = hf.flag("use_double_wide_mlp", False)
    experts = _experts(hf, sizes)
    layer_input = _layer_input(hf, sizes)
    hf.finish()

    norm = sizes.norm()
    options = dict(scale=1.0, qk_norm=norm, v_norm=sizes.norm(weight=False), qkv_bias=bias, out_bias=bias)
    full_sizes = dataclasses.replace(sizes, num_kv_heads=full_kv_heads, head_dim=full_head_dim)

    def block(number: int) -> Block:
        shares = number >= sizes.num_layers - shared
        if (window := windows[number]) is None:
            mixer = full_sizes.attention(values_from_keys=k_eq_v, shares_kv=shares, **options)
        else:
            mixer = sizes.attention(window=window, shares_kv=shares, **options)
        dense = sizes.dense()
        if shares and wide:
            dense = dataclasses.replace(dense, width=2 * dense.width)
        feed_forward = dense if experts is None else dataclasses.replace(experts, shared_width=dense.width)
        return Block(mixer, feed_forward, norm, Placement.BOTH, layer_input=layer_input, layer_scalar=True)

    blocks = [block(number) for number in range(sizes.num_layers)]
    fields = dict(embedding_multiplier=sizes.hidden_size**0.5, logits_soft_cap=final_cap)
    return sizes.decoder("gemma4_text", blocks, **fields)


def _full_heads(hf: HfConfig) -> tuple[int, int | None]:
    """Head size of full layers, and their heads of keys and values; None: as many as others have.

    They are in keys of their own, or in `per_layer_config`, as transformers 5 writes it: what each full layer has.
    """
    each = hf.raw.get("per_layer_config")
    if each is None:
        hf.only("per_layer_config", None)
        size = hf.count("global_head_dim", 512, null=512)
        heads = hf.optional_count("num_global_key_value_heads", None)
        return size, heads if hf.raw.get("attention_k_eq_v") else None
    kinds = hf.raw.get("layer_types")
    given = list(each.values()) if isinstance(each, dict) else []
    full = {str(i) for i, kind in enumerate(kinds) if kind == FULL} if isinstance(kinds, list) else set()
    known = {"head_dim", "num_key_value_heads"}
    if {*map(str, each)} != full or any(part != given[0] or not {*part} <= known for part in given):
        raise hf.fail("per_layer_config", f"the same {' and '.join(sorted(known))} for each {FULL} of layer_types")
    hf.only("per_layer_config", each)
    for key in ("global_head_dim", "num_global_key_value_heads"):
        hf.only(key, None)
    own = HfConfig(given[0])
    return own.count("head_dim"), own.optional_count("num_key_value_heads", None)


def _experts(hf: HfConfig, sizes: Sizes) -> ExpertsBlock | None:
    """The experts, of which the dense block is the shared one, without its width."""
    if not hf.flag("enable_moe_block", False):
        hf.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    number = hf.count("num_experts")
    router = Router(normalize=True, norm=sizes.norm(), logits_scale=sizes.hidden_size**-0.5, expert_scale=True)
    chosen = check_chosen(hf, "top_k_experts", hf.count("top_k_experts"), number)
    width = hf.count("moe_intermediate_size")
    return ExpertsBlock(number, chosen, width, router, sizes.activation, norms=sizes.norm())


def _layer_input(hf: HfConfig, sizes: Sizes) -> LayerInputBlock | None:
    width = hf.size("hidden_size_per_layer_input", 256)
    if width == 0:
        hf.ignore("vocab_size_per_layer_input")
        return None
    if hf.count("vocab_size_per_layer_input", 262144) != sizes.vocab_size:
        raise hf.fail("vocab_size_per_layer_input", f"vocab_size={sizes.vocab_size}: no other is implemented")
    return LayerInputBlock(width, sizes.activation)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    full = next(mixer for mixer in config.kv_attention if mixer.window is None)
    local = next((mixer for mixer in config.kv_attention if mixer.window is not None), full)
    shared = sum(block.shares_kv for block in config.blocks)
    own, widths = config.blocks[0].layer_input, [_dense_width(block) for block in config.blocks]
    keys = {
        **renamed_keys(config, _KEYS, drop=("rope_theta", "rope_scaling", "partial_rotary_factor")),
        **ropes_by_kind_to_hf(config),
        **windows_to_hf(config),
        "num_key_value_heads": local.num_kv_heads,
        "head_dim": local.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads if full.values_from_keys else None,
        "attention_k_eq_v": full.values_from_keys,
        "attention_bias": full.qkv_bias,
        "final_logit_softcapping": config.logits_soft_cap,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": 0 if own is None else own.width,
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": config.experts is not None,
    }
    if (experts := config.experts) is not None:
        keys |= {"num_experts": experts.num_experts, "top_k_experts": experts.num_chosen}
        keys["moe_intermediate_size"] = experts.width
    return {**keys, "sliding_window": 512} if keys["sliding_window"] is None else keys


def _dense_width(block: Block) -> int:
    dense = block.feed_forward
    width = dense.shared_width if isinstance(dense, ExpertsBlock) else dense and dense.width
    assert width is not None
    return width


def shared_tensors(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Starts of the names of tensors that published files have and that layers without keys and values do not use."""
    raw = raw.get("text_config", raw)
    last, shared = raw.get("num_hidden_layers", 0), raw.get("num_kv_shared_layers") or 0
    names = [f"{kind}_{side}." for kind in "kv" for side in ("proj", "norm")]
    return tuple(f"model.layers.{i}.self_attn.{name}" for i in range(last - shared, last) for name in names)


def text_config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """The text model of Gemma 4 with vision and audio, whose files leave out keys that have HF's defaults."""
    sizes = {"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216}
    return config_from_hf({**sizes, "num_hidden_layers": 30, "num_attention_heads": 8, **raw})


_LAYER = "model.layers.{layer}"
_MAPS = ("gate", "up", "down")
_EXPERTS = tuple(f"layers.mlp.{name}_proj.weight" for name in _MAPS)
GEMMA4_TENSORS = (
    *GEMMA2_TENSORS,
    Tensor(f"{_LAYER}.experts.gate_up_proj", _EXPERTS[:2], stacked_experts=True),
    Tensor(f"{_LAYER}.experts.down_proj", _EXPERTS[2:], stacked_experts=True),
    *tensor_table(
        {
            **{f"layers.mlp.shared.{name}_proj.weight": f"{_LAYER}.mlp.{name}_proj.weight" for name in _MAPS},
            "layers.mlp.router.weight": f"{_LAYER}.router.proj.weight",
            "layers.mlp.router_norm.weight": f"{_LAYER}.router.scale",
            "layers.mlp.expert_scale": f"{_LAYER}.router.per_expert_scale",
            "layers.mlp.in_norm.weight": f"{_LAYER}.pre_feedforward_layernorm_2.weight",
            "layers.mlp.out_norm.weight": f"{_LAYER}.post_feedforward_layernorm_2.weight",
            "layers.mlp.shared_out_norm.weight": f"{_LAYER}.post_feedforward_layernorm_1.weight",
            "layers.layer_scalar": f"{_LAYER}.layer_scalar",
            "layers.layer_input.gate_proj.weight": f"{_LAYER}.per_layer_input_gate.weight",
            "layers.layer_input.up_proj.weight": f"{_LAYER}.per_layer_projection.weight",
            "layers.layer_input.norm.weight": f"{_LAYER}.post_per_layer_input_norm.weight",
            "layer_inputs.embeddings.weight": "model.embed_tokens_per_layer.weight",
            "layer_inputs.proj.weight": "model.per_layer_model_projection.weight",
            "layer_inputs.norm.weight": "model.per_layer_projection_norm.weight",
        }
    ),
)
GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", config_from_hf, config_to_hf, GEMMA4_TENSORS, unread=shared_tensors)
GEMMA4_WITH_VISION = Parent(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    (dataclasses.replace(GEMMA4, config_from_hf=text_config_from_hf),),
    others=(
        *("vision_config", "audio_config", "eoa_token_index", "eoa_token_id", "vision_soft_tokens_per_image"),
        *(f"{name}_token_id" for name in ("boi", "eoi", "image", "video", "boa", "audio")),
    ),
    unused=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)
