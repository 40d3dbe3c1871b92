"""Checkpoints that fsspec reads, such as gs://bucket/model: small files whole, tensors by ranges of bytes.

Nothing is copied to a disk. At most `IN_FLIGHT` requests of at most `CHUNK` bytes are under way at a time, and each
arrives in the array that it is for. Trying again after an error is the filesystem's own affair.
"""

import concurrent.futures
import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

IN_FLIGHT = 8
"""Requests under way at a time."""
CHUNK = 2**23
"""Bytes of one request."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_CHECKSUMS = ("md5Hash", "content_md5", "sha256", "ETag", "etag")
"""Entries of a filesystem's `info` that change with a file's content. A time of writing is none."""


def is_url(name: str) -> bool:
    return _URL.match(name) is not None


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote directory."""

    directory: "RemoteDirectory"
    name: str
    size: int

    def __str__(self) -> str:
        return self.directory.where(self.name)

    def read(self, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end`. Raises: ValueError if there are fewer, or they cannot be read."""
        return self.directory.read(self.name, begin, end)

    def chunks(self) -> Iterator[bytes]:
        """All of it in order, a few chunks ahead."""
        begins = range(0, self.size, CHUNK)
        with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as pool:
            for i in range(0, len(begins), IN_FLIGHT):
                ends = ((at, min(at + CHUNK, self.size)) for at in begins[i : i + IN_FLIGHT])
                yield from pool.map(lambda piece: self.read(*piece), ends)


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory of a filesystem. What is there is asked for once."""

    url: str
    fs: "AbstractFileSystem"
    root: str
    _infos: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def where(self, name: str) -> str:
        """URL of a file, or of the directory if `name` is empty."""
        return "/".join(part for part in (self.url.rstrip("/"), name) if part)

    def info(self, name: str) -> dict[str, Any] | None:
        """What the filesystem says about a file; None if there is none. Raises: ValueError if it does not answer."""
        with self._lock:
            if name in self._infos:
                return self._infos[name]
        try:
            info = self.fs.info(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            info = None
        except Exception as e:  # each backend has its own
            raise self._failed(name, e) from e
        found = info if info is not None and info.get("type", "file") == "file" else None
        with self._lock:
            return self._infos.setdefault(name, found)

    def file(self, name: str) -> RemoteFile | None:
        info = self.info(name)
        if info is None:
            return None
        size = info.get("size")
        if not isinstance(size, int):
            raise ValueError(
                f"{self.where(name)}: its filesystem does not say how long it is, so no ranges can be read"
            )
        return RemoteFile(self, name, size)

    def read(self, name: str, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        try:
            data = bytes(self.fs.cat_file(self._path(name), start=begin, end=end))  # type: ignore[arg-type]
        except Exception as e:
            raise self._failed(name, e) from e
        if len(data) != end - begin:
            raise ValueError(f"{self.where(name)}: {len(data)} of {end - begin} bytes from {begin} came; is it whole?")
        return data

    def names(self) -> list[str]:
        """Names of what is there; empty where the filesystem does not list. For messages."""
        try:
            return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in self.fs.ls(self.root, detail=False))
        except Exception:
            return []

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def _failed(self, name: str, error: Exception) -> ValueError:
        text = " ".join(str(error).split())[:300]
        return ValueError(
            f"cannot read {self.where(name)}: {type(error).__name__}: {text}; check the name, the network and the "
            "credentials"
        )


def open_directory(url: str) -> RemoteDirectory | Path:
    """The directory at a URL; a path if it is on this machine.

    Raises: ValueError if the URL's filesystem is not known, or its package is not installed.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.registry import known_implementations

    protocol = re.split("://|::", url)[0]
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as e:
        package = known_implementations.get(protocol, {}).get("class", "").split(".")[0]
        remedy = f"install the package {package}" if package else "install its package"
        raise ValueError(f"model {url!r}: {protocol}:// cannot be read here ({e}); {remedy}") from e
    except Exception as e:
        text = " ".join(str(e).split())[:300]
        raise ValueError(f"model {url!r}: {type(e).__name__}: {text}; expected a URL that fsspec knows") from e
    if type(fs) is LocalFileSystem:
        return Path(root)
    return RemoteDirectory(url, fs, root)


def read_ranges(pieces: Iterable[tuple[RemoteFile, int, memoryview]]) -> None:
    """Fill each buffer with its file's bytes from an offset, at most `IN_FLIGHT` chunks at a time.

    Raises: ValueError if a file ends early or cannot be read; other requests under way are awaited.
    """
    tasks = (
        (file, offset + at, buffer[at : at + CHUNK])
        for file, offset, buffer in pieces
        for at in range(0, len(buffer), CHUNK)
    )

    def fill(task: tuple[RemoteFile, int, memoryview]) -> None:
        file, begin, buffer = task
        buffer[:] = file.read(begin, begin + len(buffer))

    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as pool:
        under_way: set[concurrent.futures.Future] = set()
        for task in tasks:
            if len(under_way) >= IN_FLIGHT:
                done, under_way = concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    future.result()
            under_way.add(pool.submit(fill, task))
        for future in under_way:
            future.result()


def identity(file: RemoteFile) -> tuple[str, bool]:
    """What stands for a file's content, and whether that is its SHA-256.

    A checksum that the filesystem keeps, with the length; where it keeps none, the content is read.
    """
    info = file.directory.info(file.name) or {}
    for name in _CHECKSUMS:
        if info.get(name):
            return f"{name} {info[name]} {file.size}", False
    digest = hashlib.sha256()
    for chunk in file.chunks():
        digest.update(chunk)
    return digest.hexdigest(), True
