"""Arguments, streams and exit status (`cli.EXIT_STATUS`) of every command."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from levanter_infer.cli import command_help, version_line
from levanter_infer.config import AnyRunConfig, RunConfig, load_config
from levanter_infer.io.terminal import one_line, say
from levanter_infer.keys import hint_for
from levanter_infer.runtime.aborts import LOST
from levanter_infer.runtime.hosts import HostLost
from levanter_infer.runtime.processor import limit_threads
from levanter_infer.runtime.progress import lines_written_with


def guarded(command: Callable[[], int]) -> int:
    """Run a command; returns its exit status. Errors go to standard error and become an exit status."""
    threads = limit_threads()
    try:
        with _standard_streams(), lines_written_with(say):
            if threads is not None:
                say(f"threads   PJRT_NPROC={threads}, the CPU quota of this process's control group, rounded up")
            return _status(command)
    except BrokenPipeError:
        return 141


def run_config(
    command: str,
    argv: Sequence[str] | None,
    run: Callable[[AnyRunConfig], int],
    kind: type[AnyRunConfig] = RunConfig,
    options: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a command with the configuration of its arguments, or print its help; returns the exit status.

    Args:
        argv: the arguments; None: those of the process.
        kind: type of the configuration.
        options: short names of keys.
    """
    return guarded(lambda: run(load_config(*parse_arguments(command, argv, kind, options), kind)))


class Answered(Exception):
    """Ends a command with a text for standard output."""


def _status(command: Callable[[], int]) -> int:
    status, said = _outcome(command)
    if said:
        with contextlib.suppress(OSError):  # it may be standard error that takes nothing
            say(said)
    return status


def _outcome(command: Callable[[], int]) -> tuple[int, str]:
    """(exit status, what to say of it)."""
    try:
        try:
            return command(), ""
        except Answered as e:
            print(e, flush=True)
            return 0, ""
    except ValueError as e:
        return 2, one_line(f"error: {e}")
    except HostLost as e:
        return LOST, one_line(f"error: {e}")
    except BrokenPipeError:
        raise
    except OSError as e:
        return 2, one_line(f"error: {e.strerror or e}" + (f": {e.filename}" if e.filename else ""))
    except KeyboardInterrupt:
        return 130, "interrupted"


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Standard streams that take any text, may be closed, and never fail to be flushed at exit."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the parent process
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                setattr(sys, name, nowhere)
                stack.callback(setattr, sys, name, None)
        with contextlib.suppress(AttributeError):
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    with contextlib.suppress(OSError, ValueError):
                        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parse_arguments(
    command: str,
    argv: Sequence[str] | None,
    kind: type[RunConfig] = RunConfig,
    options: Mapping[str, str] = MappingProxyType({}),
    own: Sequence[str] = (),
) -> tuple[str | None, list[tuple[str, str]]]:
    """(configuration file, overrides). Args: as in `run_config`; own: options of the command that are no keys, which
    stand among the overrides.

    Raises: ValueError for a malformed option, or an unknown one with the nearest known one; Answered.
    """
    path, overrides, rest = None, [], list(sys.argv[1:] if argv is None else argv)
    known = (*(f.name for f in dataclasses.fields(kind)), "config", "overwrite", "help", "version", *own)
    while rest:
        option = rest.pop(0)
        if option in ("--help", "-h"):
            raise Answered(command_help(command))
        if option == "--version":
            raise Answered(version_line())
        if not option.startswith("--") or option == "--":
            raise ValueError(f"unexpected {option!r}: expected --config FILE and --key value; see --help")
        key, has_value, value = option[2:].partition("=")
        key = options.get(key, key)
        name = key.split(".")[0]
        if name not in known:
            name = name if len(name) <= 80 else f"{name[:80]}..."
            raise ValueError(f"unknown option --{name}; {hint_for(name, known, prefix='--')}")
        if key == "overwrite" and not has_value:
            value = "true"
        elif not has_value:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{key} needs a value; one that starts with -- is written --{key}=VALUE")
            value = rest.pop(0)
        if key == "config":
            if path is not None:
                raise ValueError("--config is given twice; expected one configuration")
            path = value
        else:
            overrides.append(("output.overwrite" if key == "overwrite" else key, value))
    return path, overrides
