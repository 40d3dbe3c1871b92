"""The persistent compilation cache: a second start loads programs instead of compiling them."""

import hashlib
import logging
import os
import platform
import stat
from pathlib import Path

from levanter_infer.runtime.processor import features

logger = logging.getLogger(__name__)

VARIABLE = "LEVANTER_INFER_COMPILE_CACHE"
"""Environment variable with another directory, which may begin with ~; `off` disables the cache."""
_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.1),
    "jax_persistent_cache_min_entry_size_bytes": (0, -1),
}
"""JAX's thresholds: its default, and ours, which replaces the default and no other value."""
_refused: set[str] = set()
"""Warnings that this process has already written."""


def enable_compile_cache() -> Path | None:
    """Store compiled programs in a directory that only this user can write.

    Commands call it when they start, `InferenceEngine` and `load_model` when they are called. It affects programs that
    are compiled afterwards, and a second call changes nothing. Entries are executable code: a directory is used only if
    no other user could have written there, which depends on every directory above it, up to the user's home or the
    root.

    Settings of the user stay: a directory given to JAX (jax_compilation_cache_dir), a cache that is switched off
    (jax_enable_compilation_cache), and its thresholds where they differ from JAX's defaults.

    Returns: the directory; None without a cache, which a warning explains unless the user has disabled it.
    """
    import jax  # here, because commands check their configuration without it

    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is not None:
        return Path(settings["jax_compilation_cache_dir"])
    if os.environ.get(VARIABLE) == "off" or not settings["jax_enable_compilation_cache"]:
        return None
    try:
        directory = cache_directory()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        if str(error) not in _refused:
            logger.warning(
                "programs are compiled anew at every start: %s. Set %s to a directory of yours, or to off",
                error,
                VARIABLE,
            )
        _refused.add(str(error))
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    for name, (default, ours) in _THRESHOLDS.items():
        if settings[name] == default and name.upper() not in os.environ:
            jax.config.update(name, ours)
    return directory


def cache_directory() -> Path:
    """The directory of compiled programs for this processor, which only this user can write; created if absent.

    Raises: OSError if it cannot be created, or others may write it or a directory above it; RuntimeError without a
        home, or if the directory begins with the home of an unknown user.
    """
    wanted = os.environ.get(VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = (Path(wanted).expanduser() if wanted else home / "levanter_infer" / "xla").absolute() / _machine()
    _make_private(directory)
    directory = directory.resolve(strict=True)  # a link on the way may be changed after it was looked at
    reason = _unsafe(directory)
    if reason is not None:
        raise PermissionError(reason)
    return directory


def _make_private(directory: Path) -> None:
    """Create a directory and its missing parents, each for this user alone, whatever the umask is."""
    if not directory.exists():
        _make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _unsafe(directory: Path) -> str | None:
    """The reason why code from this directory must not be run; None if it may.

    Args:
        directory: without links.
    """
    reason = _unsafe_one(directory, owners={os.getuid()}, is_shared=False)
    home = _home()
    for parent in directory.parents:
        if reason is not None:
            break
        reason = _unsafe_one(parent, owners={0, os.getuid()}, is_shared=True)
        if parent == home:  # directories above the home could change every file of the user anyway
            break
    return reason


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):
        return None


def _unsafe_one(directory: Path, *, owners: set[int], is_shared: bool) -> str | None:
    """`_unsafe` of one directory alone.

    Args:
        is_shared: others may write in it if they cannot rename other users' files (the sticky bit, as of /tmp).
    """
    status = directory.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in owners:
        return f"{directory} belongs to another user"
    if mode & 0o022 and not (is_shared and mode & stat.S_ISVTX):
        return f"{directory} can be written by others (chmod go-w)"
    return None


def _machine() -> str:
    """A name of the processor's features: programs compiled for one CPU may not run on another that shares the home."""
    return hashlib.sha256(f"{platform.machine()} {features()}".encode()).hexdigest()[:16]
