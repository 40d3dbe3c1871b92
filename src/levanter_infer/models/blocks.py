"""The layers of a decoder as frozen values: one `Block` per layer, and where its parameters are stored.

Everything here is static: it changes shapes or code, never values.
"""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from levanter_infer.cache.memory import Memory
from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.branch_conv import BranchConvBlock
from levanter_infer.layers.delta_net import DeltaNetBlock
from levanter_infer.layers.kimi_delta import KimiDeltaBlock
from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.layers.layer_input import LayerInputBlock
from levanter_infer.layers.mamba2 import Mamba2Block
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.short_conv import ShortConvBlock

RecurrentBlock = ShortConvBlock | DeltaNetBlock | KimiDeltaBlock | Mamba2Block
"""Mixers that remember a state of fixed size per sequence (`SlotState`)."""


@dataclass(frozen=True)
class ParallelMixer:
    """Attention and a recurrence of the same input side by side, whose results are added (Falcon-H1)."""

    unscaled_attention: AttentionBlock
    """Attention without `key_multiplier`."""
    recurrent: RecurrentBlock
    key_multiplier: float = 1.0
    """Factor of the keys, which is one of the scale."""
    attention_multiplier: float = 1.0
    recurrent_multiplier: float = 1.0
    """Factors of the results."""

    @property
    def attention(self) -> AttentionBlock:
        plain = self.unscaled_attention
        scale = plain.head_dim**-0.5 if plain.scale is None else plain.scale
        return dataclasses.replace(plain, scale=scale * self.key_multiplier)

    @property
    def stored(self) -> "ParallelMixer":
        """The mixer with neutral options that no parameter depends on: layers of equal ones share a stack."""
        return ParallelMixer(self.unscaled_attention.stored, self.recurrent.stored)

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        return self.unscaled_attention.num_parameters(hidden) + self.recurrent.num_parameters(hidden)


Mixer = AttentionBlock | LatentAttentionBlock | RecurrentBlock | ParallelMixer
"""Mixers of positions."""


class Placement(enum.Enum):
    """Positions of a layer's norms around its mixer and its feed-forward block, both written f."""

    BEFORE = "x + f(norm(x))"
    """Llama."""
    AFTER = "x + norm(f(x))"
    """OLMo 2."""
    BOTH = "x + norm(f(norm(x)))"
    """Gemma 2."""
    PARALLEL = "x + mixer(norm(x)) + feed_forward(norm(x)), one norm"
    """Cohere."""
    PARALLEL_TWO = "x + mixer(norm(x)) + feed_forward(norm(x)), two norms"
    """GPT-NeoX."""

    @property
    def is_parallel(self) -> bool:
        return self in (Placement.PARALLEL, Placement.PARALLEL_TWO)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms that a layer has, by the names of `DecoderLayer`."""
        before, after = ("input_norm", "mlp_norm"), ("mixer_out_norm", "mlp_out_norm")
        if self is Placement.PARALLEL:
            return before[:1]
        return {Placement.AFTER: after, Placement.BOTH: before + after}.get(self, before)


@dataclass(frozen=True)
class Block:
    """One layer, without its parameters."""

    mixer: Mixer | None
    """Mixer of positions; None: the layer has none."""
    feed_forward: DenseBlock | ExpertsBlock | None
    """None: the layer is its mixer alone."""
    norm: NormConfig
    """All its norms but those inside the mixer."""
    placement: Placement = Placement.BEFORE
    residual_multiplier: float = 1.0
    """Factor of what the mixer and the feed-forward block add to the residual stream."""
    layer_input: LayerInputBlock | None = None
    """The layer's own input beside the residual stream (`LayerInput`); None: it has none."""
    layer_scalar: bool = False
    """Whether the residual stream is multiplied by a learnt number after the layer (Gemma 4)."""
    convs: BranchConvBlock | None = None
    """Short convolutions of keys and of what is added to the residual stream; None: there are none."""

    def __post_init__(self):
        if self.convs is not None and (self.recurrent is not None or len(self.parts) < 2):
            raise ValueError("short convolutions beside a recurrence, or in half a layer, are not implemented")
        if len(self.parts) < 1 + self.placement.is_parallel:
            raise ValueError(f"a layer has {len(self.parts)} of a mixer and a feed-forward block, expected more")

    @property
    def parts(self) -> tuple[Mixer | DenseBlock | ExpertsBlock, ...]:
        """The mixer and the feed-forward block, as far as the layer has them."""
        return tuple(part for part in (self.mixer, self.feed_forward) if part is not None)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of the layer, by the names of `DecoderLayer`."""
        missing = ("input_norm", "mixer_out_norm") if self.mixer is None else ()
        missing = ("mlp_norm", "mlp_out_norm") if self.feed_forward is None else missing
        return tuple(name for name in self.placement.norms if name not in missing)

    @property
    def stored(self) -> "Block":
        """The block with neutral options that no parameter depends on: layers of equal ones share a stack."""
        mixer, feed_forward = self.mixer and self.mixer.stored, self.feed_forward and self.feed_forward.stored
        own = self.layer_input and self.layer_input.stored
        neutral = dict(mixer=mixer, feed_forward=feed_forward, layer_input=own)
        return dataclasses.replace(self, **neutral, residual_multiplier=1.0)

    @property
    def attention(self) -> AttentionBlock | LatentAttentionBlock | None:
        """The mixer, if it is attention, or its attention."""
        if isinstance(self.mixer, ParallelMixer):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, AttentionBlock | LatentAttentionBlock) else None

    @property
    def shares_kv(self) -> bool:
        """Whether the layer attends to keys and values of an earlier one (`AttentionBlock.shares_kv`)."""
        return isinstance(self.attention, AttentionBlock) and self.attention.shares_kv

    @property
    def recurrent(self) -> RecurrentBlock | None:
        """The mixer, if it remembers a state of fixed size, or its recurrence."""
        if isinstance(self.mixer, ParallelMixer):
            return self.mixer.recurrent
        return self.mixer if isinstance(self.mixer, RecurrentBlock) else None

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The memories of the layer: at most one with pages, unless that is an earlier layer's, and one with slots."""
        parts = (None if self.shares_kv else self.attention, self.recurrent, self.convs)
        return tuple(part.memory for part in parts if part is not None)

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        norms = len(self.norms) * self.norm.num_parameters(hidden)
        own = 0 if self.layer_input is None else self.layer_input.num_parameters(hidden, self.norm)
        convs = 0 if self.convs is None else self.convs.num_parameters()
        blocks = sum(part.num_parameters(hidden) for part in self.parts)
        return blocks + norms + convs + own + self.layer_scalar


@dataclass(frozen=True)
class Stack:
    """Layers whose parameters have the same shapes: they are stored in one array per parameter."""

    block: Block
    """Block that decides the parameters (`Block.stored`)."""
    layers: tuple[int, ...]
    """Numbers of the layers, ascending."""


def find_stacks(blocks: Sequence[Block]) -> tuple[Stack, ...]:
    """The stacks that hold the parameters of all layers, in the order of their first layers."""
    layers: dict[Block, list[int]] = {}
    for number, block in enumerate(blocks):
        layers.setdefault(block.stored, []).append(number)
    return tuple(Stack(block, tuple(numbers)) for block, numbers in layers.items())


def describe(blocks: Sequence[Block]) -> list[str]:
    """Every block by the fields in which they differ, or by all of them where they do not."""
    parts = {block: _flat(block) for block in set(blocks)}
    names = dict.fromkeys(name for part in parts.values() for name in part)
    differing = [name for name in names if len({repr(part.get(name)) for part in parts.values()}) > 1]
    texts = {
        block: f"({', '.join(f'{name}={part[name]!r}' for name in differing or names if name in part)})"
        for block, part in parts.items()
    }
    return [texts[block] for block in blocks]


def differences(old, new, name: str = "") -> list[str]:
    """Fields in which two frozen values differ, each as `mixer.window was 4 and is 8`. Of layers, the first."""
    if isinstance(old, tuple) and isinstance(new, tuple) and all(map(dataclasses.is_dataclass, (*old, *new))):
        if len(old) != len(new):
            return [f"number of {name} was {len(old)} and is {len(new)}"]
        first = next((i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]), None)
        return [] if first is None else differences(old[first], new[first], f"{name}[{first}]")
    if type(old) is not type(new) or not dataclasses.is_dataclass(old):
        return [] if old == new else [f"{name} was {old!r} and is {new!r}"]
    prefix = f"{name}." if name else ""
    fields = [field.name for field in dataclasses.fields(old)]
    return [each for n in fields for each in differences(getattr(old, n), getattr(new, n), f"{prefix}{n}")]


def _flat(value, prefix: str = "") -> dict[str, object]:
    """The fields of a frozen value and of those inside, by their dotted names."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(value):
        part, name = getattr(value, field.name), f"{prefix}{field.name}"
        found |= _flat(part, f"{name}.") if dataclasses.is_dataclass(part) else {name: part}
    return found
