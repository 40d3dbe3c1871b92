"""`Store`: a job's directory, on a disk or in an object store.

Writes are atomic and durable: on a disk a file is written under another name, synchronised and renamed; an object store
does that itself. No process reads a file of rows before the record that names it exists.
"""

import abc
import contextlib
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any

from levanter_infer.io.output import lock_file, write_error

_WAIT_S = 10.0
"""Seconds to wait for another process that is writing the same small file."""
_VERSIONS = ("etag", "generation")
"""Properties of an object that change with each write in object stores; times are too coarse."""
_BLOCK = 1 << 23
"""Bytes per read of an object."""


def open_store(url: str) -> "Store":
    """The store at a path or fsspec URL. Raises: ValueError if it cannot be opened."""
    fs, path = file_system(url)
    if "file" in protocols(fs):
        return LocalStore(Path(path))
    return ObjectStore(fs, path)


def file_system(url: str) -> tuple[Any, str]:
    """(file system, path on it). Raises: ValueError for a protocol that is not installed."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(str(Path(url).expanduser()) if "://" not in url else url)
    except (ImportError, ValueError) as e:
        raise ValueError(f"cannot open {url!r}: {e}") from e


def protocols(fs) -> tuple[str, ...]:
    """Protocol names of a file system, such as `file` or `s3`."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


class Store(abc.ABC):
    """Files by name; a name may include folders."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """Contents; None if there is no such file."""

    @abc.abstractmethod
    def version(self, name: str) -> str | None:
        """A value that changes with each write of the file; None if there is no such file, or no such value."""

    @abc.abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes; None if there is no such file."""

    @abc.abstractmethod
    def sha256(self, name: str) -> str | None:
        """Digest of a file's contents, in hexadecimal; None if there is no such file."""

    @abc.abstractmethod
    def names(self, folder: str) -> list[str]:
        """Sorted names of the files in a folder, without unfinished writes; empty if there is no such folder."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically and durably; replaces an older one."""

    @abc.abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """`put`, unless the file exists; returns whether it was written."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def remove_leftovers(self, folder: str, own: re.Pattern[str] | None = None) -> None:
        """Remove unfinished writes of killed processes in a folder, of the files whose whole names match `own`: others
        may keep files there too. None: remove all files, and the folder.

        Requires: no process works on the job.
        """
        for name in self.names(folder) if own is None else ():
            self.remove(f"{folder}/{name}")

    @abc.abstractmethod
    def claim(self, name: str) -> "Journal | None":
        """Claim a journal for this process, with the content that earlier processes left; None if another has it."""

    @property
    def has_claims(self) -> bool:
        """Whether `claim` keeps processes apart."""
        return False


class Journal(abc.ABC):
    """A file to which results are appended; a killed process may leave an incomplete last one."""

    content: bytes
    """Content when it was claimed."""

    @abc.abstractmethod
    def keep(self, num_bytes: int) -> None:
        """Truncate to the first `num_bytes` of `content`. To be called before the first `add`."""

    @abc.abstractmethod
    def add(self, data: bytes) -> None:
        """Append; the data outlive this process."""

    @abc.abstractmethod
    def close(self, *, remove: bool) -> None:
        """Release the claim, and make the journal durable or remove it."""

    @abc.abstractmethod
    def release(self) -> None:
        """Release the claim without another write."""


class LocalStore(Store):
    """A directory on a disk, or on a network file system with `flock`."""

    def __init__(self, root: Path):
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"cannot make the output directory {root}: {e.strerror}") from e

    def read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._root / name).read_bytes()
        return None

    def version(self, name: str) -> str | None:
        with contextlib.suppress(FileNotFoundError), open(self._root / name, "rb") as file:  # a network file system's
            found = os.fstat(file.fileno())  # client asks its server when a file is opened, and need not for a `stat`
            return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
        return None

    def size(self, name: str) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._root / name).stat().st_size
        return None

    def sha256(self, name: str) -> str | None:
        with contextlib.suppress(FileNotFoundError), open(self._root / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return None

    def names(self, folder: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(n for n in os.listdir(self._root / folder) if not n.endswith(".partial"))
        return []

    def put(self, name: str, data: bytes) -> None:
        self._write(name, data, replace=True)

    def create(self, name: str, data: bytes) -> bool:
        return self._write(name, data, replace=False)

    def _write(self, name: str, data: bytes, *, replace: bool) -> bool:
        path = self._root / name
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock_soon(partial)
        try:
            with os.fdopen(descriptor, "wb") as file:  # closing it releases the lock
                if not replace and path.exists():
                    partial.unlink()
                    return False
                file.truncate()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
                _sync_directory(path.parent)
        except OSError as e:
            raise OSError(write_error(path, e)) from e
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).unlink()

    def remove_leftovers(self, folder: str, own: re.Pattern[str] | None = None) -> None:
        path = self._root / folder
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(path):
                if own is None:
                    (path / name).unlink(missing_ok=True)
                elif name.endswith(".partial") and own.fullmatch(name.removesuffix(".partial")):
                    _remove_unlocked(path / name)
            if own is None:
                with contextlib.suppress(OSError):  # another worker has just opened a file there
                    path.rmdir()

    def claim(self, name: str) -> "Journal | None":
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return LocalJournal(path, lock_file(path))
        except (BlockingIOError, FileNotFoundError):  # the latter: the job is complete, and its folder was just removed
            return None

    @property
    def has_claims(self) -> bool:
        return True


def _lock_soon(path: Path) -> int:
    """`lock_file`; waits while another process holds the lock."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            return lock_file(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise ValueError(f"another process has been writing {path} for {_WAIT_S:.0f} s") from None
            time.sleep(0.01)


def _remove_unlocked(path: Path) -> None:
    """Remove a file, unless another process is writing it, or it cannot be removed."""
    with contextlib.suppress(OSError):
        descriptor = lock_file(path)
        path.unlink()
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    """Make a rename in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalJournal(Journal):
    """A locked file: the lock is the claim, and the system releases it when the process ends."""

    def __init__(self, path: Path, descriptor: int):
        self._path, self._file = path, os.fdopen(descriptor, "r+b", buffering=0)
        self.content = self._file.read()

    def keep(self, num_bytes: int) -> None:
        self._file.truncate(num_bytes)
        self._file.seek(num_bytes)
        self.content = b""

    def add(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as e:
            raise OSError(write_error(self._path, e)) from e

    def close(self, *, remove: bool) -> None:
        with self._file:
            if remove:
                self._path.unlink(missing_ok=True)
            else:
                os.fsync(self._file.fileno())

    def release(self) -> None:
        self._file.close()


class ObjectStore(Store):
    """Any other file system of fsspec: no renames, no appends."""

    def __init__(self, fs, root: str):
        self._fs, self._root = fs, root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._fs.cat_file(self._path(name))
        return None

    def version(self, name: str) -> str | None:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            info = self._fs.info(self._path(name))
            known = {key: value for key, value in info.items() if key.lower() in _VERSIONS and value}
            return str(sorted(known.items())) if known else None
        return None

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return self._fs.size(self._path(name))
        return None

    def sha256(self, name: str) -> str | None:
        digest = hashlib.sha256()
        with contextlib.suppress(FileNotFoundError), self._fs.open(self._path(name), "rb") as file:
            while data := file.read(_BLOCK):
                digest.update(data)
            return digest.hexdigest()
        return None

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()  # it would not show what others have written meanwhile
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.rsplit("/", 1)[-1] for path in self._fs.ls(self._path(folder), detail=False))
        return []

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        self._fs.invalidate_cache()
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def claim(self, name: str) -> "Journal | None":
        return ObjectJournal(self, name)


class ObjectJournal(Journal):
    """Kept in memory, and written when the process ends in order; rows of a killed process are computed again."""

    def __init__(self, store: ObjectStore, name: str):
        self._store, self._name = store, name
        self.content = store.read(name) or b""
        self._parts: list[bytes] = []
        self._stored = bool(self.content)

    def keep(self, num_bytes: int) -> None:
        self._parts, self.content = [self.content[:num_bytes]], b""

    def add(self, data: bytes) -> None:
        self._parts.append(data)

    def close(self, *, remove: bool) -> None:
        if not remove:
            self._store.put(self._name, b"".join(self._parts))
        elif self._stored:
            self._store.remove(self._name)

    def release(self) -> None:
        pass
