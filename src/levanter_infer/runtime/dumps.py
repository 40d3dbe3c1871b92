"""Texts that XLA's compilers write about a program."""

from pathlib import Path


def dump_options(directory: str) -> dict[str, str | bool]:
    """Compiler options that write a program, as text, into a directory."""
    return {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}


def last_written(directory: str, pattern: str) -> str:
    """The newest text whose file name fits a glob pattern. Raises: FileNotFoundError if there is none, as with another
    version of the compiler."""
    found = list(Path(directory).glob(pattern))
    if not found:
        raise FileNotFoundError(f"the compiler wrote no {pattern} into {directory}")
    return max(found, key=lambda path: path.stat().st_mtime_ns).read_text()
