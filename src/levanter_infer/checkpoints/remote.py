"""Checkpoints that fsspec reads, such as gs://bucket/model: small files whole, tensors by byte ranges.

Nothing is copied to a disk. At most `IN_FLIGHT` requests of at most `CHUNK` bytes are in flight, and each writes into
its array. The filesystem itself retries after an error.
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
"""Largest number of requests in flight."""
CHUNK = 2**23
"""Largest size of a request in bytes."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_CHECKSUMS = ("md5Hash", "content_md5", "sha256", "ETag", "etag")
"""Keys of a filesystem's `info` that change with a file's content, unlike a modification time."""


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
        """The whole content in order; reads a few chunks ahead."""
        begins = range(0, self.size, CHUNK)
        with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as pool:
            for i in range(0, len(begins), IN_FLIGHT):
                ends = ((at, min(at + CHUNK, self.size)) for at in begins[i : i + IN_FLIGHT])
                yield from pool.map(lambda piece: self.read(*piece), ends)


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory of a filesystem. Metadata of a file are requested once."""

    url: str
    fs: "AbstractFileSystem"
    root: str
    _infos: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def where(self, name: str) -> str:
        """URL of a file, or of the directory if `name` is empty."""
        return "/".join(part for part in (self.url.rstrip("/"), name) if part)

    def info(self, name: str) -> dict[str, Any] | None:
        """The filesystem's metadata of a file; None if there is none. Raises: ValueError if it does not answer."""
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
            raise ValueError(
                f"{self.where(name)}: {len(data)} of {end - begin} bytes came from byte {begin} on; "
                "the file may be truncated"
            )
        return data

    def names(self, folder: str = "") -> list[str]:
        """Names of the files, or of those in a folder; empty if the filesystem does not list it."""
        path = self._path(folder) if folder else self.root
        try:
            return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in self.fs.ls(path, detail=False))
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
    """The directory at a URL; a local one as a path.

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
    """Read bytes of files from an offset on into buffers, with at most `IN_FLIGHT` requests.

    Raises: ValueError if a file ends early or cannot be read, after the other requests in flight have ended.
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
        in_flight: set[concurrent.futures.Future] = set()
        for task in tasks:
            if len(in_flight) >= IN_FLIGHT:
                done, in_flight = concurrent.futures.wait(in_flight, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    future.result()
            in_flight.add(pool.submit(fill, task))
        for future in in_flight:
            future.result()


def identity(file: RemoteFile) -> tuple[str, bool]:
    """A fingerprint of a file's content, and whether that is its SHA-256.

    The fingerprint is a checksum of the filesystem with the file's size; without one, the content is read and hashed.
    """
    info = file.directory.info(file.name) or {}
    for name in _CHECKSUMS:
        if info.get(name):
            return f"{name} {info[name]} {file.size}", False
    digest = hashlib.sha256()
    for chunk in file.chunks():
        digest.update(chunk)
    return digest.hexdigest(), True
