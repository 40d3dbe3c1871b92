"""A gated short convolution as a mixer (LFM2): it remembers the last inputs of a sequence, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import CHANNEL, PART
from levanter_infer.cache.memory import FixedState
from levanter_infer.cache.slot_state import SlotState
from levanter_infer.layers.causal_conv import CausalConv
from levanter_infer.layers.linear import Fusion, Linear, apply, split_key
from levanter_infer.layers.rows import RaggedRows


@dataclass(frozen=True)
class ShortConvBlock:
    """A gated short convolution, without its parameters."""

    channels: int
    taps: int
    """Inputs that an output sees, its own position's included."""
    bias: bool = False
    """Whether the convolution and both projections have one."""

    @property
    def stored(self) -> "ShortConvBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        return self

    @property
    def memory(self) -> FixedState:
        """Memory of a layer, for each sequence."""
        return FixedState((("conv", (self.taps - 1, self.channels)),))

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        biases = (4 * self.channels + hidden) * self.bias
        return 4 * hidden * self.channels + self.channels * self.taps + biases


class ShortConv(eqx.Module):
    """`out(c · conv(b · x))`, where b, c and x are three projections of the input. Source: LFM2, arXiv:2511.23404."""

    in_proj: Linear
    """[layers, part, channel, embed], of b, c and x"""
    conv: CausalConv
    out_proj: Linear
    """[layers, embed, channel]"""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: ShortConvBlock, *, key: Array | None, dtype) -> "ShortConv":
        """Random maps as in `Linear.init`; `batch`: axes of independent layers."""
        in_key, conv_key, out_key = split_key(key, 3)
        channel, part = Axis(CHANNEL, block.channels), Axis(PART, 3)
        return ShortConv(
            in_proj=Linear.init(batch, (part, channel), (embed,), key=in_key, dtype=dtype, bias=block.bias),
            conv=CausalConv.init(batch, block.channels, block.taps, key=conv_key, dtype=dtype, bias=block.bias),
            out_proj=Linear.init(batch, (embed,), (channel,), key=out_key, dtype=dtype, bias=block.bias),
        )

    def dense(self, x: NamedArray, around: Fusion, block: ShortConvBlock) -> tuple[NamedArray, None]:
        """Args: x: [..., position, embed], position 0 first. Returns: [..., position, embed], and no state."""
        gate, inputs = self._inputs(x, around)
        return self._gated(gate, self.conv.dense(inputs.array), x, around), None

    def paged(
        self,
        x: NamedArray,
        around: Fusion,
        block: ShortConvBlock,
        state: SlotState,
        layer: Array,
        rows: RaggedRows,
    ) -> tuple[NamedArray, SlotState]:
        """The packed tokens of a step, [token, embed], after the state of each row in `layer` of the pool, i32[]."""
        gate, inputs = self._inputs(x, around)
        stored = state.read(layer, rows.slots, rows.is_new)
        mixed, tail = self.conv.ragged(inputs.array, stored["conv"], rows, self.in_proj)
        return self._gated(gate, mixed, x, around), state.write(layer, rows.slots, {"conv": tail})

    def _inputs(self, x: NamedArray, around: Fusion) -> tuple[NamedArray, NamedArray]:
        """The gate c, and b · x; [..., channel] each."""

        def gated(parts: NamedArray) -> tuple[NamedArray, NamedArray]:
            array, axes = parts.array, (*parts.axes[:-2], parts.axes[-1])
            b, c, inputs = (NamedArray(array[..., part, :], axes) for part in range(3))
            return c, b * inputs

        (parts,) = apply(x, self.in_proj, norm=around.norm)
        return self.in_proj.by_rows(gated, parts)

    def _gated(self, gate: NamedArray, mixed: Array, x: NamedArray, around: Fusion) -> NamedArray:
        def gated(gate: NamedArray, mixed: NamedArray) -> NamedArray:
            return NamedArray((gate.array.astype(mixed.dtype) * mixed.array).astype(x.dtype), gate.axes)

        y = self.out_proj.by_rows(gated, gate, NamedArray(mixed, gate.axes))
        return apply(y, self.out_proj, residual=around.residual)[0]
