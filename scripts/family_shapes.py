"""Attention shapes of released models, by family: what `scripts/sweep_tpu.py --families` compiles.

Facts of the models' `config.json`. Sizes of one model that differ in layers and widths alone stand there once, and
layers of one model that differ in their attention have a shape each.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionShape:
    """The attention of some layers of a model, as far as kernels depend on it."""

    heads: tuple[int, int, int]
    """Query heads, kv heads and head size; of latents one kv head, of the size of a latent with its rotated part."""
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    attention_chunk: int | None = None
    value_dim: int | None = None
    """Numbers of a latent that are its value; None: keys and values are stored."""
    index_dim: int = 0
    """Numbers of the index key of sparse attention."""
    chosen: bool = False
    """Whether an indexer chooses the keys."""

    def share(self, parts: int) -> "AttentionShape":
        """The shape on each device of a model axis of `parts`, as `layers.layout` shards heads."""
        num_q_heads, num_kv_heads, head_dim = self.heads
        if self.value_dim is not None:
            return replace(self, heads=(math.ceil(num_q_heads / parts), 1, head_dim))
        copies = parts // math.gcd(num_kv_heads, parts)
        kv_heads, group = num_kv_heads * copies // parts, math.ceil(num_q_heads // num_kv_heads / copies)
        rules = self.window, self.soft_cap, self.sinks, self.attention_chunk
        return AttentionShape((kv_heads * group, kv_heads, head_dim), *rules)


def _heads(*heads: tuple[int, int, int], **rules) -> tuple[AttentionShape, ...]:
    return tuple(AttentionShape(each, **rules) for each in heads)


def _with_and_without(window: int, *heads: tuple[int, int, int], **rules) -> tuple[AttentionShape, ...]:
    """Layers with a window and layers without."""
    return (*_heads(*heads, window=window, **rules), *_heads(*heads, **rules))


def _latents(*num_heads: int, size: int = 576, value_dim: int = 512, **index) -> tuple[AttentionShape, ...]:
    return _heads(*((heads, 1, size) for heads in num_heads), value_dim=value_dim, **index)


SHAPES: dict[str, tuple[AttentionShape, ...]] = {
    # Llama 2 7B and 13B, 3.1 8B to 405B, 3.2 1B and 3B; TinyLlama, SmolLM2 135M and 1.7B
    "llama": _heads((32, 32, 128), (40, 40, 128), (32, 8, 128), (64, 8, 128), (128, 8, 128), (32, 8, 64), (24, 8, 128),
                    (32, 4, 64), (9, 3, 64), (32, 32, 64)),
    # 7B 0.1; Nemo and Small; Large
    "mistral": (*_heads((32, 8, 128), window=4096), *_heads((32, 8, 128), (96, 8, 128))),
    "ministral3": _heads((32, 8, 128)),
    # 0.5B, 1.5B, 7B, 14B and 32B, 72B
    "qwen2": _heads((14, 2, 64), (12, 2, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128)),
    "qwen3": _heads((16, 8, 128), (32, 8, 128), (40, 8, 128), (64, 8, 128)),
    "qwen3_moe": _heads((32, 4, 128), (64, 4, 128)),
    "grug_moe": _with_and_without(2048, (20, 5, 128), (48, 12, 128), (48, 6, 128)),
    "olmo": _heads((16, 16, 128), (32, 32, 128)),
    "olmo2": _heads((16, 16, 128), (32, 32, 128), (40, 40, 128), (40, 8, 128)),
    "olmo3": _with_and_without(4096, (32, 32, 128), (40, 8, 128)),
    # 2B, 7B
    "gemma": _heads((8, 1, 256), (16, 16, 256)),
    # 2B, 9B, 27B
    "gemma2": _with_and_without(4096, (8, 4, 256), (16, 8, 256), (32, 16, 128), soft_cap=50.0),
    # 270M and 1B; 4B, 12B, 27B
    "gemma3_text": (*_with_and_without(512, (4, 1, 256)),
                    *_with_and_without(1024, (8, 4, 256), (16, 8, 256), (32, 16, 128))),
    # E2B, E4B; 26B-A4B, 31B
    "gemma4_text": (*_heads((8, 1, 256), (8, 2, 256), window=512), *_heads((16, 8, 256), (32, 16, 256), window=1024),
                    *_heads((8, 1, 512), (8, 2, 512), (16, 2, 512), (32, 4, 512))),
    # Phi-3-mini and -medium; Phi-4, Phi-4-mini
    "phi3": (*_heads((32, 32, 96), (40, 10, 128), window=2047), *_heads((40, 10, 128), (24, 8, 128))),
    "phimoe": _heads((32, 8, 128), window=131072),
    "smollm3": _heads((16, 4, 128)),
    "granite": _heads((32, 8, 64), (32, 8, 128)),
    "granitemoe": _heads((16, 8, 64), (24, 8, 64)),
    "granitemoeshared": _heads((16, 8, 64)),
    # h-micro, h-tiny, h-small
    "granitemoehybrid": _heads((32, 8, 64), (12, 4, 128), (32, 8, 128)),
    "seed_oss": _heads((80, 8, 128)),
    "exaone4": (*_heads((32, 8, 64)), *_with_and_without(4096, (40, 8, 128))),
    "mixtral": _heads((32, 8, 128), (48, 8, 128)),
    "olmoe": _heads((16, 16, 128)),
    "qwen2_moe": _heads((16, 16, 128), (28, 4, 128)),
    "cohere": _heads((64, 64, 128), (64, 8, 128), (96, 8, 128)),
    "cohere2": _with_and_without(4096, (32, 8, 128), (96, 8, 128)),
    "glm": _heads((32, 2, 128)),
    "glm4": _heads((32, 2, 128), (48, 8, 128)),
    "glm4_moe": _heads((96, 8, 128)),
    "ernie4_5": _heads((16, 2, 128)),
    "ernie4_5_moe": _heads((20, 4, 128), (64, 8, 128)),
    "gpt_oss": _with_and_without(128, (64, 8, 64), sinks=True),
    "minimax_m2": _heads((48, 8, 128)),
    "hunyuan_v1_dense": _heads((16, 4, 128), (32, 8, 128)),
    "hunyuan_v1_moe": _heads((32, 8, 128)),
    "llama4_text": (*_heads((40, 8, 128), attention_chunk=8192), *_heads((40, 8, 128))),
    "lfm2": _heads((16, 8, 64), (32, 8, 64)),
    "lfm2_moe": _heads((32, 8, 64)),
    "olmo_hybrid": _heads((30, 30, 128)),
    "qwen3_next": _heads((16, 2, 256)),
    "qwen3_5_text": _heads((8, 2, 256), (16, 4, 256), (24, 4, 256)),
    "qwen3_5_moe_text": _heads((16, 2, 256), (32, 2, 256)),
    "falcon_h1": _heads((8, 2, 64), (8, 2, 128), (12, 2, 128), (20, 4, 128)),
    "nemotron_h": _heads((32, 8, 128), (40, 8, 128), (32, 2, 128)),
    # V2-Lite, V2
    "deepseek_v2": _latents(16, 128),
    "deepseek_v3": _latents(128),
    "kimi_k2": _latents(64),
    "kimi_linear": _latents(32),
    "glm4_moe_lite": _latents(20),
    # Sequences of which all keys are chosen, and longer ones
    "deepseek_v32": (*_latents(128, index_dim=128), *_latents(128, index_dim=128, chosen=True)),
    "glm_moe_dsa": (
        *(*_latents(64, index_dim=128), *_latents(64, index_dim=128, chosen=True)),
        *(*_latents(64), *_latents(64, chosen=True)),
    ),
    "minicpm3": _latents(40, size=288, value_dim=256),
    "youtu": _latents(16),
    "mistral4": _latents(32, size=320, value_dim=256),
    "arcee": _heads((20, 4, 128)),
    "helium": _heads((20, 20, 128)),
    # Minitron 4B and 8B; 340B
    "nemotron": _heads((24, 8, 128), (48, 8, 128), (96, 8, 192)),
    # 2 1.6B and 12B; 3B
    "stablelm": _heads((32, 32, 64), (32, 8, 160), (32, 32, 80)),
    "apertus": _heads((32, 8, 128), (64, 8, 128)),
    # Pythia 160M, 1B, 2.8B and 6.9B; 20B
    "gpt_neox": _heads((12, 12, 64), (8, 8, 256), (32, 32, 80), (32, 32, 128), (64, 64, 96)),
    "gpt2": _heads((12, 12, 64), (16, 16, 64), (20, 20, 64), (25, 25, 64)),
    # Phi-1.5, Phi-2
    "phi": _heads((32, 32, 64), (32, 32, 80)),
    "starcoder2": _heads((24, 2, 128), (36, 4, 128), (48, 4, 128), window=4096),
}  # fmt: skip
"""Shapes of the released models of each family, by `model_type`."""
PARTS = (1, 8)
"""Devices of the model axis that each shape is compiled for."""


def family_shapes() -> list[AttentionShape]:
    """The distinct shapes of a device. All windows count as one, because their size is data to the kernels."""

    def kernel(shape: AttentionShape) -> tuple:
        rules = shape.soft_cap, shape.sinks, shape.attention_chunk, shape.value_dim, shape.index_dim, shape.chosen
        return shape.heads, shape.window is None, *rules

    shapes = [shape.share(parts) for family in SHAPES.values() for shape in family for parts in PARTS]
    return list({kernel(shape): shape for shape in shapes}.values())
