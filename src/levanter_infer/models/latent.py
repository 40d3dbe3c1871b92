"""Multi-head latent attention as its families share it: its keys, its scale and its tensors."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Sizes, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import Order, Tensor

LATENT_NORM = NormConfig(1e-6)
"""Norm of latents: HF's default epsilon, whatever `rms_norm_eps` says."""


def read_latent_attention(
    hf: HfConfig,
    *,
    q_rank: int | None = 1536,
    kv_rank: int = 512,
    nope: int = 128,
    rope: int = 64,
    value: int | None = 128,
    interleaved: bool | None = None,
    ropes: Callable[..., dict[str, RopeConfig]] = one_rope,
    **sizes: Any,
) -> tuple[Sizes, LatentAttentionBlock]:
    """Sizes, and the attention of every layer.

    Args:
        q_rank, kv_rank, nope, rope, value: HF's defaults of `q_lora_rank`, `kv_lora_rank`, `qk_nope_head_dim`,
            `qk_rope_head_dim` and `v_head_dim`; value None: hidden_size / num_attention_heads.
        interleaved: whether the rope's pairs are neighbours; None: `rope_interleave` says so, by default true.
        ropes: as in `read_sizes`, given `interleaved` too.
        sizes: as in `read_sizes`.
    """
    nope, rope_dim = hf.count("qk_nope_head_dim", nope), hf.count("qk_rope_head_dim", rope)
    if interleaved is None:
        interleaved = hf.flag("rope_interleave", True)
    if hf.raw.get("head_dim") not in (None, rope_dim):
        raise hf.fail("head_dim", f"qk_rope_head_dim={rope_dim}, or none")
    hf.only("qk_head_dim", None, nope + rope_dim)
    of_kinds = functools.partial(ropes, interleaved=interleaved)
    found = read_sizes(hf, kv_heads=None, head_dim=rope_dim, ropes=of_kinds, **sizes)
    if found.num_kv_heads != found.num_heads:
        raise hf.fail("num_key_value_heads", f"num_attention_heads={found.num_heads}: all heads read the same latents")
    if value is None:
        value = found.hidden_size // found.num_heads
    bias = hf.flag("attention_bias", False)
    block = LatentAttentionBlock(
        num_heads=found.num_heads,
        latent_dim=hf.count("kv_lora_rank", kv_rank),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=hf.count("v_head_dim", value, null=value),
        rope=found.rope,
        norm=LATENT_NORM,
        q_latent_dim=hf.optional_count("q_lora_rank", q_rank),
        scale=attention_scale(nope + rope_dim, found.rope),
        bias=bias,
    )
    return found, block


def attention_scale(size: int, rope: RopeConfig) -> float:
    """Factor of q · k: of `size` numbers, and with YaRN's mscale squared where `mscale_all_dim` says so.

    Source: DeepSeek-V2's own code, `softmax_scale`.
    """
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor is None or rope.factor <= 1:
        return size**-0.5
    mscale = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return size**-0.5 * mscale * mscale


def latent_attention_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys that these families write alike."""
    block = config.attention[0]
    assert isinstance(block, LatentAttentionBlock)
    return {
        **common_to_hf(config),
        "num_key_value_heads": block.num_heads,
        "head_dim": block.rope_dim,
        "q_lora_rank": block.q_latent_dim,
        "kv_lora_rank": block.latent_dim,
        "qk_nope_head_dim": block.nope_dim,
        "qk_rope_head_dim": block.rope_dim,
        "v_head_dim": block.value_dim,
        "attention_bias": block.bias,
    }


_ATTENTION = "model.layers.{layer}.self_attn"
_NAMES = {
    "q_proj.weight": "q_proj.weight",
    "q_a_proj.weight": "q_a_proj.weight",
    "q_a_proj.bias": "q_a_proj.bias",
    "q_a_norm.weight": "q_a_layernorm.weight",
    "q_b_proj.weight": "q_b_proj.weight",
    "kv_a_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_a_proj.bias": "kv_a_proj_with_mqa.bias",
    "kv_a_norm.weight": "kv_a_layernorm.weight",
    "o_proj.weight": "o_proj.weight",
    "o_proj.bias": "o_proj.bias",
}


def latent_tensors(table: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The lines of `table`, with those of latent attention in the stead of those of attention."""
    others = (line for line in table if not line.parameters[0].startswith("layers.attention."))
    own = (Tensor(f"{_ATTENTION}.{name}", (f"layers.attention.{path}",)) for path, name in _NAMES.items())
    both = ("layers.attention.k_proj.weight", "layers.attention.v_proj.weight")
    return (*others, *own, Tensor(f"{_ATTENTION}.kv_b_proj.weight", both, order=Order.BY_HEAD))
