"""MXFP4, as gpt-oss is published: blocks of 32 four-bit floats with a scale, read as bfloat16.

A tensor of experts `NAME` [expert, in, out] is two: `NAME_blocks` u8 [expert, out, in / 32, 16], two codes a byte, low
half first, and `NAME_scales` u8 [expert, out, in / 32], powers of two.
Source: OCP Microscaling Formats 1.0; the layout is that of transformers' integrations/mxfp4.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from levanter_infer.checkpoints.weights import StoredTensor, read_bytes

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""The numbers of codes 0 to 7; codes 8 to 15 are their negatives."""
EXPONENT_BIAS = 127
"""A scale s stands for 2 ** (s - 127)."""


@dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """A tensor of bfloat16 [expert, in, out] whose numbers are stored as blocks and scales."""

    blocks: StoredTensor
    scales: StoredTensor

    def rows(self, start: int, stop: int) -> "Mxfp4Tensor":
        parts = {"blocks": self.blocks.rows(start, stop), "scales": self.scales.rows(start, stop)}
        size = self.num_bytes // self.shape[0]
        return replace(self, shape=(stop - start, *self.shape[1:]), num_bytes=(stop - start) * size, **parts)

    def read_into(self, out: np.ndarray) -> None:
        """As `StoredTensor.read_into`, of one expert."""
        blocks, scales = read_bytes(self.blocks), read_bytes(self.scales)
        values = np.concatenate([VALUES, -VALUES])
        numbers = np.stack([values[blocks & 15], values[blocks >> 4]], axis=-1).reshape(*scales.shape, -1)
        numbers = np.ldexp(numbers, scales.astype(np.int32)[..., None] - EXPONENT_BIAS)
        out[...] = numbers.reshape(*self.shape[:-2], self.shape[-1], self.shape[-2]).swapaxes(-1, -2)


def dequantized(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, with one of bfloat16 for each pair of blocks and scales.

    Raises: ValueError for blocks without scales, or of other shapes, and for a tensor that is there in both forms.
    """
    found = dict(tensors)
    for name, blocks in tensors.items():
        if name.endswith(BLOCKS):
            own = name.removesuffix(BLOCKS)
            if own in tensors:
                raise ValueError(f"{blocks.path}: {own} is there as it is and as {name}; remove one of them")
            found[own] = _pair(own, found.pop(name), found.pop(own + SCALES, None))
    return found


def _pair(name: str, blocks: StoredTensor, scales: StoredTensor | None) -> Mxfp4Tensor:
    if scales is None or scales.shape != blocks.shape[:3] or blocks.shape[3:] != (16,):
        got = "absent" if scales is None else list(scales.shape)
        raise ValueError(
            f"{blocks.path}: {name}{BLOCKS} is {list(blocks.shape)} and {name}{SCALES} is {got}, expected [expert, "
            "out, in / 32, 16] and [expert, out, in / 32]; download the checkpoint again"
        )
    if (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise ValueError(f"{blocks.path}: {name} is stored as {blocks.dtype} and {scales.dtype}, expected U8")
    experts, outs, groups, _ = blocks.shape
    shape = (experts, 32 * groups, outs)
    num_bytes = 2 * experts * outs * 32 * groups
    return Mxfp4Tensor(blocks.path, name, "BF16", shape, blocks.offset, num_bytes, blocks, scales)
