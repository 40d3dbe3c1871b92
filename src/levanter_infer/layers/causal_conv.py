"""A short causal convolution of every channel by itself, over plain sequences and over the rows of a packed batch."""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import CHANNEL, TAP
from levanter_infer.layers.linear import Linear, random_weight
from levanter_infer.layers.rows import RaggedRows


class CausalConv(eqx.Module):
    """`y[t, c] = Σ_j weight[c, j] · x[t - taps + 1 + j, c] + bias[c]`; inputs before the first token are zeros.

    The state of a sequence is its last `taps - 1` inputs, the latest one last. Computed in float32.
    """

    weight: NamedArray
    """[layers, channel, tap]"""
    bias: NamedArray | None
    """[layers, channel]"""
    latest_first: bool = eqx.field(static=True, default=False)
    """Whether the weights of a channel begin with that of the latest input, and not of the earliest."""

    @staticmethod
    def init(
        batch: Sequence[Axis],
        channels: int,
        taps: int,
        *,
        key: Array | None,
        dtype,
        bias: bool = False,
        latest_first: bool = False,
    ) -> "CausalConv":
        """Normal weights of variance 1 / taps, zero bias; `batch`: axes of independent layers. Zeros without a key."""
        axes = (*batch, Axis(CHANNEL, channels), Axis(TAP, taps))
        weight = random_weight(key, axes, taps**-0.5, dtype)
        return CausalConv(weight, hax.zeros(axes[:-1], dtype=dtype) if bias else None, latest_first)

    @property
    def num_taps(self) -> int:
        return self.weight.axis_size(TAP)

    def dense(self, x: Array) -> Array:
        """Args: x: [..., position, channel]. Returns: f32, of the same shape."""
        before = [(0, 0)] * (x.ndim - 2) + [(self.num_taps - 1, 0), (0, 0)]
        padded = jnp.pad(x.astype(jnp.float32), before)
        num = x.shape[-2]
        return self._weighted([padded[..., tap : tap + num, :] for tap in range(self.num_taps)])

    def ragged(self, x: Array, tail: Array, rows: RaggedRows, part: Linear) -> tuple[Array, Array]:
        """The packed tokens of a step, after the last inputs of each row.

        Args:
            x: [token, channel]
            tail: f32[row, taps - 1, channel], the inputs before the row's first token.
            part: a map of the same tokens, whose backend computes.
        Returns: f32[token, channel], anything for padding; and the new tails.
        """
        x, before = x.astype(jnp.float32), self.num_taps - 1
        token = jnp.arange(x.shape[0], dtype=jnp.int32)
        inputs = []
        for lag in range(before, 0, -1):
            stored = tail.at[rows.row, rows.item - lag + before].get(mode="fill", fill_value=0)
            inputs.append(jnp.where((rows.item >= lag)[:, None], x[jnp.maximum(token - lag, 0)], stored))
        # The last inputs of tail and row together
        place = rows.lens[:, None] + jnp.arange(before, dtype=jnp.int32)[None, :]
        row = jnp.arange(rows.num_rows, dtype=jnp.int32)[:, None]
        old = tail[row, jnp.minimum(place, before - 1)]
        new = x.at[rows.starts[:, None] + place - before].get(mode="clip")
        summed = part.backend.by_rows(lambda *each: [self._weighted(list(each))], part.num_rows, *inputs, x)[0]
        return summed, jnp.where((place < before)[:, :, None], old, new)

    def _weighted(self, inputs: list[Array]) -> Array:
        """Sum over taps, in their order."""
        lead = (1,) * (inputs[0].ndim - 1)
        weight = self.weight.array.astype(jnp.float32)
        weight = weight[:, ::-1] if self.latest_first else weight
        total = sum(weight[:, tap].reshape(*lead, -1) * each for tap, each in enumerate(inputs))
        assert not isinstance(total, int)
        return total if self.bias is None else total + self.bias.array.astype(jnp.float32).reshape(*lead, -1)


def joined(*convs: CausalConv) -> CausalConv:
    """The convolutions of one layer as one of all their channels, in this order."""
    channel, tap = convs[0].weight.axes
    weight = jnp.concatenate([conv.weight.array for conv in convs], axis=0)
    return CausalConv(NamedArray(weight, (channel.resize(weight.shape[0]), tap)), None)
