"""Compressed files of several streams, as parallel compressors write them."""

import bz2
import io
import lzma
import os
from collections.abc import Callable
from types import MappingProxyType
from typing import IO

_BYTES_AT_ONCE = 2**17


class StreamReader(io.RawIOBase):
    """The decompressed bytes of a .bz2 or .xz file. Seeking backward reads the file again from its start.

    Unlike `bz2.BZ2File` and `lzma.LZMAFile`, which end silently where a later stream is damaged or anything else
    follows, it raises an error there. Zeros between and behind streams are padding.

    Raises: OSError or lzma.LZMAError for damaged data, EOFError for a truncated file.
    """

    def __init__(self, file: IO[bytes], decompressor: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]):
        super().__init__()
        self._file, self._make = file, decompressor
        self._decompressor, self._position = decompressor(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer) -> int:
        data, at_end = b"", False
        while not (data or at_end):
            data, at_end = self._decompress(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the size of a compressed file is not known")
        target = offset + (self._position if whence == os.SEEK_CUR else 0)
        if target < self._position:
            self._file.seek(0)
            self._decompressor, self._position = self._make(), 0
        while self._position < target and self.read(min(target - self._position, _BYTES_AT_ONCE)):
            pass
        return self._position

    def _decompress(self, most: int) -> tuple[bytes, bool]:
        """(up to `most` of the next bytes, possibly none; whether the file ends)."""
        if self._decompressor.eof:
            stored = self._next_stream()
            if not stored:
                return b"", True
        else:
            stored = self._file.read(_BYTES_AT_ONCE) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not stored:
                raise EOFError("the file ends within a compressed stream")
        return self._decompressor.decompress(stored, most), False

    def _next_stream(self) -> bytes:
        """The first stored bytes of another stream; empty at the end of the file."""
        stored = self._decompressor.unused_data
        while not (stored := stored.lstrip(b"\0")):
            stored = self._file.read(_BYTES_AT_ONCE)
            if not stored:
                return b""
        self._decompressor = self._make()
        return stored


DECOMPRESSORS = MappingProxyType({".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor})
"""The decompressor of one stream, by the end of a file's name."""
