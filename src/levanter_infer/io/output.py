"""Output files: rows and metrics, each of which appears complete or not at all."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # not a POSIX system: two runs are not kept apart there
    fcntl = None

from levanter_infer.columns import encode_row
from levanter_infer.config import RunConfig
from levanter_infer.io.paths import local_path

if TYPE_CHECKING:
    from levanter_infer.engine.engine import InferenceEngine

_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some of your quota, or write elsewhere",
    errno.ENOENT: "expected a directory {folder}; make it first (mkdir -p {folder}), or give another name",
    errno.ENOTDIR: "{folder} is no directory; give another name",
    errno.EFBIG: "the file system, or the limit of `ulimit -f`, allows no larger file; divide the input",
}


class RowWriter:
    """Writer of rows, or other text, to an output file that appears complete or not at all.

    Rows go to FILE.partial, which `commit` renames to FILE. A context manager: without a commit it removes the partial
    file. A partial file of a killed run is reused.

    Args:
        path: the output file, or its file:// URL.
        overwrite: replace an existing file.
    Raises: ValueError if the file exists, cannot be written, or another run is writing it.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False):
        self.path = local_path(path, "output")
        if not self.path.name:
            raise ValueError(f"output {str(path)!r} has no file name; expected a file")
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._overwrite = overwrite
        try:
            _check_replaceable(self.path, overwrite)
            self._file: IO[str] | None = _open_alone(self._partial)
        except BlockingIOError:
            raise ValueError(f"another run is writing {self._partial}; wait for it or give another name") from None
        except OSError as e:
            raise ValueError(write_error(self.path, e, "output ")) from e

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. Raises: ValueError if the disk does not take them."""
        for row in rows:
            self.write_text(encode_row(row) + "\n")

    def write_text(self, text: str) -> None:
        """Append text of another kind. Raises: ValueError if the disk does not take it."""
        assert self._file is not None, "written after commit"
        try:
            self._file.write(text)
        except OSError as e:
            raise ValueError(write_error(self.path, e, "output ")) from e

    def commit(self) -> None:
        """Make the file durable under its name. Raises: ValueError if another process has made one meanwhile."""
        assert self._file is not None, "committed twice"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._overwrite:
                os.replace(self._partial, self.path)
            else:
                rename_new(self._partial, self.path)
        except FileExistsError:
            self._close()
            raise ValueError(f"output {self.path} appeared meanwhile; the rows are in {self._partial}") from None
        except OSError as e:
            raise ValueError(write_error(self.path, e, "output ")) from e
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._partial)
            self._close()


def _check_replaceable(path: Path, overwrite: bool) -> None:
    """Raises: ValueError if rows may not replace an existing file; OSError if that is unknown."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and path.is_dir()):
        raise ValueError(f"output {path} is a directory; expected a file")
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise ValueError(f"output {path} is a device or a pipe; expected a file, which is replaced when all is done")
    if not overwrite:
        raise ValueError(f"output {path} exists; give another name, or --overwrite to replace it")


def rename_new(old: Path, new: Path) -> None:
    """Rename without replacing a file. Raises: FileExistsError; OSError."""
    try:
        os.link(old, new)  # unlike a rename, this fails if the name is taken
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: reserve the name first
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.replace(old, new)
    else:
        os.unlink(old)


def _open_alone(path: Path) -> IO[str]:
    """Open `path` empty, for this process alone. Raises: BlockingIOError if another has it; OSError."""
    descriptor = lock_file(path)
    os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "w", encoding="utf-8", newline="\n")


def lock_file(path: Path) -> int:
    """Open `path`, created if missing, for this process alone, until it is closed or the process has died.

    Returns: a file descriptor at offset 0.
    Raises: BlockingIOError if another process has it; OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock another run may have finished and renamed this very file to its output.
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise BlockingIOError
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_error(path: Path, e: OSError, what: str = "") -> str:
    """Message for a file that could not be written, with a remedy.

    Args:
        what: prefix of the path, with a space at its end.
    """
    remedy = _REMEDIES.get(e.errno or 0, "").format(folder=path.parent)
    return f"cannot write {what}{path}: {e.strerror or e}" + (f"; {remedy}" if remedy else "")


# Files of one run


@contextlib.contextmanager
def output_files(config: RunConfig) -> Iterator[tuple[RowWriter | None, RowWriter | None]]:
    """Writers of the rows and of the metrics; None for a file that is not configured. Raises: ValueError."""
    output = config.output
    with contextlib.ExitStack() as stack:

        def writer(path: str | None) -> RowWriter | None:
            if output is None or path is None:
                return None
            target = local_path(path, "output")
            if config.prompts_file is not None:
                _check_apart(target, local_path(config.prompts_file, "prompts_file"))
            return stack.enter_context(RowWriter(target, overwrite=output.overwrite))

        yield (writer(output.path), writer(output.metrics)) if output else (None, None)


def _check_apart(output: Path, prompts_file: Path) -> None:
    """Raises: ValueError if writing the output would destroy the prompts."""
    for name in (output, f"{output}.partial"):
        if os.path.exists(name) and os.path.samefile(name, prompts_file):
            raise ValueError(f"output {output} would replace the prompts_file {prompts_file}; give another name")


def write_files(
    rows: RowWriter | None, metrics: RowWriter | None, content: Iterable[Mapping[str, Any]], engine: "InferenceEngine"
) -> None:
    """Write and commit the files of `output_files`: the rows, and the engine's metrics."""
    if rows is not None:
        rows.write(content)
        rows.commit()
    if metrics is not None:
        metrics.write_text(metrics_text(engine, as_prometheus=metrics.path.suffix == ".prom"))
        metrics.commit()


def metrics_text(engine: "InferenceEngine", *, as_prometheus: bool) -> str:
    """The engine's metrics as Prometheus' text or as JSON."""
    if not engine.backend.spans_hosts:
        engine.memory()
    registry = engine.metrics()
    return registry.prometheus() if as_prometheus else json.dumps(registry.as_dict(), indent=1) + "\n"
