"""Arithmetic of quantized weights in NumPy: codes are unpacked, and multiplied by their scales, in float32."""

import ml_dtypes
import numpy as np

_BYTES = np.arange(256, dtype=np.uint8)
E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The number of each byte as float8_e4m3fn."""
E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
"""The number of each byte as a power of two, 2 ** (byte - 127)."""
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""The number of each of the 16 codes of a four-bit float (OCP Microscaling Formats 1.0)."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each four bits of a word stand for, among eight, lowest bits first."""


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of words of 32 bits, lowest bits first: i32[..., n] to u8[..., n * 32 / bits].

    Requires: `bits` divides 8.
    """
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return octets
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((octets[..., None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(*octets.shape[:-1], -1)


def unpack_pairs(octets: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """The two codes of four bits of each byte: u8[..., n] to u8[..., 2 n]."""
    pair = (octets >> 4, octets & 15) if high_first else (octets & 15, octets >> 4)
    return np.stack(pair, axis=-1).reshape(*octets.shape[:-1], -1)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """As `unpack` with four bits, in AutoAWQ's order."""
    codes = unpack(words, 4).reshape(*words.shape, 8)
    return codes[..., np.argsort(AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def spread(values: np.ndarray, width: int, group: int, columns: np.ndarray | None = None) -> np.ndarray:
    """Values of groups of columns, [rows, groups], as one for each column, [rows, width] or [rows, 1].

    Args:
        group: columns per group; the last group may be smaller.
        columns: the group of each column; None: they follow each other.
    """
    if columns is not None:
        return values[:, columns]
    return values if values.shape[1] == 1 else np.repeat(values, group, axis=1)[:, :width]
