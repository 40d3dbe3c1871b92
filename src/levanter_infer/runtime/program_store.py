"""Compiled programs on disk, whole: a start that finds its programs neither traces nor compiles.

JAX's own cache saves the compilation alone; tracing and lowering, which it needs to know what to look for, take longer
than loading the program.
"""

import functools
import hashlib
import logging
import os
import platform
import tempfile
import zlib
from importlib import metadata
from pathlib import Path

from levanter_infer.runtime.compile_cache import enable_compile_cache, why_unsafe

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("jax", "jaxlib", "equinox", "haliax", "numpy")
_BESIDE_THE_POINT = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_debug_log")
"""Settings of JAX that decide where programs are kept and what is said, not what they compute."""


class ProgramStore:
    """Programs by what they compute and by everything that made them what they are.

    Args:
        directory: of this user alone, because programs are executable code.
    Raises: ValueError if others may write there; OSError if there is no such directory.
    """

    def __init__(self, directory: Path):
        reason = why_unsafe(directory)
        if reason is not None:
            raise ValueError(f"compiled programs are not kept where others could change them: {reason}")
        self._directory = directory

    def load(self, description: str) -> bytes | None:
        """A program that an equal process has saved."""
        path = self._path(description)
        try:
            return zlib.decompress(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, zlib.error) as error:
            logger.warning("%s cannot be read and is made anew: %s", path, error)
            return None

    def save(self, description: str, program: bytes) -> None:
        """Keep a program. A disk that does not take it costs the next start its time, and nothing else."""
        path = self._path(description)
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(zlib.compress(program, 1))
            os.replace(file.name, path)
        except OSError as error:
            logger.warning("%s cannot be written, so that the next start compiles again: %s", path, error)

    def _path(self, description: str) -> Path:
        digest = hashlib.sha256(f"{description}\n{_environment()}".encode()).hexdigest()
        return self._directory / f"{digest[:40]}.program"


def default_store() -> ProgramStore | None:
    """The store of the commands, in the directory of the compilation cache; None where that is not ours alone."""
    directory = enable_compile_cache()
    try:
        return None if directory is None else ProgramStore(directory)
    except (ValueError, OSError) as error:
        logger.warning("programs are traced anew at every start: %s", error)
        return None


@functools.cache
def _environment() -> str:
    """What else a program depends on: our sources, the libraries, the processor, the settings of XLA and JAX."""
    import jax

    sources = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        sources.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    settings = {k: v for k, v in jax.config.values.items() if not k.startswith(_BESIDE_THE_POINT)}
    return "\n".join(
        [
            sources.hexdigest(),
            *(f"{name} {metadata.version(name)}" for name in _LIBRARIES),
            platform.python_version(),
            f"{[(d.platform, d.device_kind) for d in jax.devices()]}",
            os.environ.get("XLA_FLAGS", ""),
            f"{sorted(settings.items())}",
        ]
    )
