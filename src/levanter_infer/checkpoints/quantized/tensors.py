"""Weights that are stored as codes and scales, read as the floats that they stand for."""

import concurrent.futures
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from levanter_infer.checkpoints.quantized import codes
from levanter_infer.checkpoints.weights import DTYPES, StoredTensor, read_raw
from levanter_infer.runtime.processor import usable_processors

Arrays = Mapping[str, np.ndarray]
Decode = Callable[[Arrays, int, int], np.ndarray]
_CHUNK = 2**19
"""Numbers that a thread computes at a time, so that they stay in its cache meanwhile."""
_BATCH_BYTES = 2**28
"""Bytes of the parts that are read, and held, at a time; at least those of one tensor."""


@dataclass(frozen=True)
class DequantizedTensor(StoredTensor):
    """A tensor of floats, computed from the parts of a quantized one when it is read."""

    parts: Mapping[str, StoredTensor]
    by_row: frozenset[str]
    """The parts whose first axis is that of the tensor. Of these, no more is read than the rows that are needed."""
    decode: Decode
    """`decode(arrays, start, stop)` computes rows of the whole tensor, as float32. Parts that are `by_row` hold these
    rows alone."""
    start: int
    stop: int
    """The rows of the whole tensor that this one is."""
    within: tuple[int, int] | None = None
    """The rows of one entry of the first axis, which `shape` then leaves out. None: whole entries."""

    @staticmethod
    def of(
        name: str,
        shape: tuple[int, ...],
        parts: Mapping[str, StoredTensor],
        by_row: Sequence[str],
        decode: Decode,
    ) -> "DequantizedTensor":
        first = next(iter(parts.values()))
        whole = DequantizedTensor(
            first.path, name, "BF16", shape, first.offset, 0, parts, frozenset(by_row), decode, 0, shape[0]
        )
        return whole.counted_as("BF16")

    def counted_as(self, dtype: str) -> "DequantizedTensor":
        """The tensor with another dtype, which says what it is read as if none is asked for."""
        return replace(self, dtype=dtype, num_bytes=math.prod(self.shape) * DTYPES[dtype].itemsize)

    def rows(self, start: int, stop: int) -> "DequantizedTensor":
        """As `StoredTensor.rows`."""
        size = self.num_bytes // self.shape[0]
        first = self.start if self.within is None else self.within[0]
        own = (first + start, first + stop)
        where = {"start": own[0], "stop": own[1]} if self.within is None else {"within": own}
        return replace(self, shape=(stop - start, *self.shape[1:]), num_bytes=(stop - start) * size, **where)

    def entry(self, index: int) -> "DequantizedTensor":
        """As `StoredTensor.entry`."""
        found = self.rows(index, index + 1)
        return replace(found, shape=found.shape[1:], within=None if len(found.shape) == 1 else (0, found.shape[1]))

    @staticmethod
    def read_all(pieces: "Sequence[tuple[DequantizedTensor, np.ndarray]]") -> None:
        """As `read_tensors`. Beside the arrays, the memory holds the parts of one tensor, or of several small ones."""
        with concurrent.futures.ThreadPoolExecutor(usable_processors()) as pool:
            for batch in _batches(pieces):
                needed = [tensor._needed_parts() for tensor, _ in batch]
                arrays = iter(read_raw([part for parts in needed for part in parts.values()]))
                tasks = [
                    task
                    for (tensor, out), parts in zip(batch, needed, strict=True)
                    for task in tensor._tasks(dict(zip(parts, arrays, strict=False)), out)
                ]
                list(pool.map(lambda task: task(), tasks))

    def _needed_parts(self) -> dict[str, StoredTensor]:
        own = {name: part.rows(self.start, self.stop) for name, part in self.parts.items() if name in self.by_row}
        return {**self.parts, **own}

    def _tasks(self, arrays: Arrays, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Functions that each compute some rows."""
        by_row = out.reshape(self.stop - self.start, -1)
        step = max(1, _CHUNK // max(1, by_row.shape[1]))
        for first in range(0, len(by_row), step):
            end = min(first + step, len(by_row))

            def task(first: int = first, end: int = end) -> None:
                own = {name: array[first:end] if name in self.by_row else array for name, array in arrays.items()}
                try:
                    found = self.decode(own, self.start + first, self.start + end)
                except ValueError as error:
                    raise ValueError(f"{self.path}: {self.name}: {error}; download the checkpoint again") from error
                found = found if self.within is None else found[:, slice(*self.within)]
                by_row[first:end] = found.reshape(end - first, -1).astype(out.dtype, copy=False)

            yield task


def _batches(
    pieces: Sequence[tuple[DequantizedTensor, np.ndarray]],
) -> Iterator[list[tuple[DequantizedTensor, np.ndarray]]]:
    batch: list[tuple[DequantizedTensor, np.ndarray]] = []
    held = 0
    for piece in pieces:
        size = sum(part.num_bytes for part in piece[0]._needed_parts().values())
        if batch and held + size > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(piece)
        held += size
    if batch:
        yield batch


def numbers(part: StoredTensor, array: np.ndarray) -> np.ndarray:
    """The floats of a part, as float32; scales of U8 are powers of two. Args: array: rows of what `read_raw` gave."""
    tables = {"F8_E4M3": codes.E4M3, "F8_E8M0": codes.E8M0, "U8": codes.E8M0}
    table = tables.get(part.dtype)
    return array.astype(np.float32) if table is None else np.take(table, array)


@dataclass(frozen=True)
class Scales:
    """Scales and zero points of a matrix [out, in]: each value belongs to a block of the matrix."""

    shape: tuple[int, int]
    """Shape of the arrays of scales and of zero points."""
    block: tuple[int, int]
    """Rows and columns of a block. The last ones may be smaller."""

    @staticmethod
    def fit(stored: tuple[int, ...], matrix: tuple[int, int], block: tuple[int, int] | None) -> "Scales | None":
        """The scales of an array of this shape: one for the matrix, one for each row or for equal parts of it, or one
        for each block; None if the array has another shape.

        Args:
            block: rows and columns of a block; None: there are no blocks of several rows.
        """
        rows, columns = matrix
        if block is not None:
            height, width = min(block[0], rows), min(block[1], columns)
            counts = -(-rows // height), -(-columns // width)
            if stored in (counts, (counts[0], 1, counts[1], 1)):
                return Scales(counts, (height, width))
        if stored in ((), (1,), (1, 1)):
            return Scales((1, 1), matrix)
        if stored == (rows,):
            return Scales((rows, 1), (1, columns))
        is_grouped = len(stored) == 2 and stored[0] == rows and stored[1] > 0 and columns % stored[1] == 0
        return Scales((rows, stored[1]), (1, columns // stored[1])) if is_grouped else None

    def rows(self, start: int, stop: int) -> slice:
        """The rows of the arrays that rows of the matrix need."""
        return slice(start // self.block[0], -(-stop // self.block[0]))

    def part(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Those rows of an array, [rows, columns]. Only they are computed with: a matrix is read in many parts."""
        return array.reshape(self.shape)[self.rows(start, stop)]

    def apply(
        self,
        values: np.ndarray,
        start: int,
        scales: np.ndarray,
        zeros: np.ndarray | int | None = None,
        columns: np.ndarray | None = None,
    ) -> np.ndarray:
        """(values - zeros) * scales, in place.

        Args:
            values: f32[n, in], rows of the matrix from `start` on.
            scales, zeros: `part` of the arrays for these rows; a number is the zero point of all.
            columns: i32[in], the column of `scales` of each column of the matrix; None: as they follow each other.
        Raises: ValueError if `columns` holds others than there are.
        """
        count, width = values.shape
        if columns is not None and not ((columns >= 0) & (columns < self.shape[1])).all():
            raise ValueError(f"group indices range from {columns.min()} to {columns.max()} for {self.shape[1]} groups")
        rows = np.arange(start, start + count) // self.block[0] - start // self.block[0]

        def each(array: np.ndarray) -> np.ndarray:
            return codes.spread(array[rows], width, self.block[1], columns)

        if isinstance(zeros, int):
            values -= np.float32(zeros)
        elif zeros is not None:
            values -= each(zeros.astype(np.float32))
        values *= each(scales)
        return values
