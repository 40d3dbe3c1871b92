"""Short convolutions inside a layer (GrugMoE 2): of its keys, and of what its branches add to the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.cache.memory import FixedState
from levanter_infer.layers.causal_conv import CausalConv
from levanter_infer.layers.linear import Linear, split_key
from levanter_infer.layers.rows import RaggedRows

KEYS, MIXER, FEED_FORWARD = "keys", "mixer", "feed_forward"
"""Sites of a convolution: keys before their norm, and the results of the mixer and of the feed-forward block before
they are added."""


@dataclass(frozen=True)
class BranchConvBlock:
    """Short convolutions of a layer, without their parameters."""

    taps: int
    """Inputs that an output sees, its own position's included."""
    channels: tuple[tuple[str, int], ...]
    """Channels of the convolution at each site that has one."""

    def __post_init__(self):
        if self.taps < 2 or not self.channels:
            raise ValueError(f"short convolutions of {self.taps} taps at {len(self.channels)} sites, expected 2 and 1")

    @property
    def memory(self) -> FixedState:
        """Memory of a layer, for each sequence."""
        return FixedState(tuple((site, (self.taps - 1, channels)) for site, channels in self.channels))

    def num_parameters(self) -> int:
        """From the sizes alone."""
        return self.taps * sum(channels for _, channels in self.channels)


class BranchConvs(eqx.Module):
    """The convolution of each site, or None."""

    keys: CausalConv | None
    """Channels are the numbers of all heads of keys."""
    mixer: CausalConv | None
    feed_forward: CausalConv | None

    @staticmethod
    def init(batch: Sequence[Axis], block: BranchConvBlock, *, key: Array | None, dtype) -> "BranchConvs":
        """Random weights as in `CausalConv.init`; `batch`: axes of independent layers."""
        channels, sites = dict(block.channels), (KEYS, MIXER, FEED_FORWARD)
        convs = {
            site: CausalConv.init(batch, channels[site], block.taps, key=part, dtype=dtype, latest_first=True)
            for site, part in zip(sites, split_key(key, 3), strict=True)
            if site in channels
        }
        return BranchConvs(**{site: convs.get(site) for site in sites})


class Convolve:
    """Applies the convolutions of one layer while it is traced, and keeps what they remember.

    Over plain sequences, or over the packed rows of a step after the state of each row.
    """

    def __init__(
        self,
        convs: BranchConvs,
        stored: dict[str, Array] | None = None,
        rows: RaggedRows | None = None,
        part: Linear | None = None,
    ):
        """
        Args:
            stored: the state before the step, by site; None: sequences are plain, position 0 first.
            part: a map of the layer, whose backend computes the rows of a step.
        """
        self._convs, self._stored, self._rows, self._part = convs, stored, rows, part
        self.state: dict[str, Array] = {}
        """The state after the step, by site."""

    def __call__(self, site: str, x: NamedArray) -> NamedArray:
        """`x` convolved, or as it is where the site has no convolution.

        Args: x: [..., position or token, channel], of keys [..., kv_head, head_size].
        """
        conv: CausalConv | None = getattr(self._convs, site)
        if conv is None:
            return x
        lead = x.array.ndim - (2 if site == KEYS else 1)
        flat = x.array.reshape(*x.array.shape[:lead], -1)
        if self._rows is None or self._stored is None or self._part is None:
            result = conv.dense(flat)
        else:
            result, self.state[site] = conv.ragged(flat, self._stored[site], self._rows, self._part)
        return NamedArray(result.reshape(x.array.shape).astype(x.dtype), x.axes)
