"""The persistent compilation cache of the commands: a second start loads programs instead of compiling them."""

import hashlib
import logging
import os
import platform
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "LEVANTER_INFER_COMPILE_CACHE"
"""Names another directory; `off` does without a cache."""


def enable_compile_cache() -> Path | None:
    """Keep compiled programs in a directory that only this user can write.

    Entries are executable code, so a directory that others may write is not used. A directory that the user has given
    to JAX itself (JAX_COMPILATION_CACHE_DIR) is left as it is. Libraries do not call this; commands do, once, before
    anything is compiled.

    Returns: the directory; None if there is no cache, which a warning explains unless it was asked for.
    """
    import jax  # here, because commands check their configuration without it

    given = jax.config.values["jax_compilation_cache_dir"]
    if given is not None:
        return Path(given)
    if os.environ.get(VARIABLE) == "off":
        return None
    try:
        directory = cache_directory()
    except OSError as error:
        logger.warning("programs are compiled anew at every start: %s. Set %s to a directory", error, VARIABLE)
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


def cache_directory() -> Path:
    """The directory of compiled programs for this processor, which only this user can write; made if need be.

    Raises: OSError if it cannot be made, or others may write it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = os.environ.get(VARIABLE)
    directory = (Path(wanted) if wanted else home / "levanter_infer" / "xla") / _machine()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = _unsafe(directory)
    if reason is not None:
        raise PermissionError(reason)
    return directory


def _unsafe(directory: Path) -> str | None:
    """Why code from this directory must not be run, if so."""
    status = directory.stat()
    if status.st_uid != os.getuid():
        return f"{directory} belongs to another user"
    if stat.S_IMODE(status.st_mode) & 0o022:
        return f"{directory} can be written by others"
    return None


def _machine() -> str:
    """A name for the processor: programs compiled for one CPU may not run on another that shares the home."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:16]
