"""Small records of measurements on this machine, stored beside the compile cache."""

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from levanter_infer.runtime.compile_cache import VARIABLE, cache_directory

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 16


def read_record(name: str) -> Any:
    """The record with this name; None if there is none, or none that can be trusted: the directory or the file belongs
    to another user, others may write it, or it holds no JSON."""
    directory = _directory()
    if directory is None:
        return None
    try:
        return json.loads(_own_bytes(directory / name))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.info("%s is ignored: %s", directory / name, error)
        return None


def keep_record(name: str, content: Any, is_good: Callable[[Any], bool]) -> Any:
    """Store `content`, which JSON can hold, for other processes, unless one of them has stored a good record before.

    Args:
        is_good: whether a record from `read_record` may stay.
    Returns: the record that is stored now; `content` where nothing can be stored.
    """
    directory = _directory()
    if directory is None:
        return content
    try:
        with _locked(directory / f".{name}.lock"):
            kept = read_record(name)
            if is_good(kept):
                return kept
            _write(directory / name, content)
    except OSError as error:
        logger.info("%s cannot be kept: %s", directory / name, error)
    return content


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file, which stays. Raises: OSError if it cannot be created or locked."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, content: Any) -> None:
    """Write a file atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")  # of mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _directory() -> Path | None:
    if os.environ.get(VARIABLE) == "off":
        return None
    try:
        return cache_directory()
    except (OSError, RuntimeError) as error:
        logger.info("no records are kept: %s", error)
        return None


def _own_bytes(path: Path) -> bytes:
    """Content of a file. Raises: OSError unless it is a small file that this user alone may write."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError("it is no file that this user alone can write")
        if status.st_size > _MAX_BYTES:
            raise OSError(f"it has {status.st_size} bytes, expected at most {_MAX_BYTES}")
        return file.read(_MAX_BYTES)
