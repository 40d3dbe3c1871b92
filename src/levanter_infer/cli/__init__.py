"""The console script `levanter-infer` and `python -m levanter_infer`: dispatch to the commands.

Help and the version come from source and package metadata and import nothing but the standard library, so that they
answer at once.
"""

import difflib
import importlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from levanter_infer.keys import SECTIONS, keys_text, read_constant, read_section

PROGRAM = "levanter-infer"
COMMANDS = {
    "sample": ("sample", "sample completions of prompts"),
    "batch": ("batch.__main__", "sample the rows of files in shards, and resume after an interruption"),
    "serve": ("serve.__main__", "an HTTP server with OpenAI's completion endpoints"),
    "score": ("score", "log probabilities and perplexity of texts"),
    "plan": ("plan.__main__", "capacity planning: does a job fit on another machine, and how fast can it be?"),
    "check": ("check", "the machine, the numerics of an engine, and where they start to differ"),
    "audit": ("audit", "check --level numerics"),
    "doctor": ("doctor", "check --level diagnosis; without options: --level machine"),
    "bench": ("bench.__main__", "benchmarks"),
}
"""Commands: the module, which has `main(argv)`, and a description."""
EXIT_STATUS = (
    "exit status: 0 success; 1 some requests failed, results differ (check), or the job does not fit (plan); 2 wrong "
    "usage or configuration; 3 another process of the job was lost or failed; 130 interrupted; 141 standard output "
    "was closed"
)
COMPILER_THREADS = "compile"
"""Prefix of the names of threads that compile a program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv[0] if argv else ""
    if name in ("--help", "-h"):
        return _print(overview())
    if name == "--version":
        return _print(version_line())
    if name not in COMMANDS:
        return _refuse(name)
    if name != "bench" and argv[1:] in (["--help"], ["-h"]):
        return _print(command_help(name))
    return importlib.import_module(f"levanter_infer.{COMMANDS[name][0]}").main(argv[1:])


def run() -> NoReturn:
    """The console script."""
    start(main)


def run_command(name: str) -> NoReturn:
    """Run one command whose module is run as a program; an interrupt during its import is handled."""
    start(lambda: main([name, *sys.argv[1:]]))


def start(command: Callable[[], int]) -> NoReturn:
    """Run a command as this process, and end the process with its status.

    SIGTERM has Python's own handler of SIGINT: partial output files are removed. The process ends without waiting for a
    compilation, which the interpreter would do.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = command()
    except KeyboardInterrupt:  # while modules were imported, before the command handles it
        print("interrupted", file=sys.stderr)
        status = 130
    if any(thread.name.startswith(COMPILER_THREADS) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
    sys.exit(status)


def overview() -> str:
    """Help about the commands and the sections of a configuration."""
    lines = [
        f"usage: {PROGRAM} COMMAND [--config FILE] [--KEY VALUE ...]",
        "",
        "LLM inference on JAX: paged KV cache, prefix caching and continuous batching inside one jitted loop.",
        "",
        "commands:",
        *(f"  {name:8} {what}" for name, (_, what) in COMMANDS.items()),
        "",
        f"  {PROGRAM} sample --model models/tiny --prompts '17+25='",
        "",
        f"options: --help, --version; {PROGRAM} COMMAND --help lists the options of a command and every key",
        "",
        "sections of a configuration (FILE is YAML), whose keys are also options, such as --sampling.temperature 0:",
    ]
    for name, place in SECTIONS.items():
        doc = read_section(place).doc
        lines += textwrap.wrap(f"{name:10} {doc}", 100, initial_indent="  ", subsequent_indent=" " * 13)
    return "\n".join([*lines, "", *textwrap.wrap(EXIT_STATUS, 100)])


def command_help(name: str) -> str:
    """Usage of a command, and every key of its configuration with its default."""
    if name not in ("check", "audit", "doctor"):
        usage = read_constant(COMMANDS[name][0], "USAGE")
    else:
        usage = read_constant("check", "USAGE").format(**read_constant("check", "MAX_DELTA"))
        alias = f"usage: {PROGRAM} {name} [OPTIONS], which is {COMMANDS[name][1]}\n\n"
        usage = usage if name == "check" else alias + usage
    return "\n".join([usage, *textwrap.wrap(EXIT_STATUS, 100), "", keys_text(name)])


def version_line() -> str:
    from levanter_infer.fingerprint import package_version

    return f"{PROGRAM} {package_version()}"


def _refuse(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.7)
    if not name:
        problem = "no command"
    elif name.startswith("-"):
        problem = f"{name} before a command; the command comes first: {PROGRAM} sample {name} ..."
    else:
        problem = f"unknown command {name[:80]!r}" + (f"; did you mean {near[0]}?" if near else "")
    known = "" if near else f"; commands: {', '.join(COMMANDS)}"
    print(f"error: {problem}{known}; see {PROGRAM} --help", file=sys.stderr)
    return 2


def _print(text: str) -> int:
    """Print on standard output, which may be closed, full or without a reader; returns the exit status."""
    try:
        print(text, flush=True)
        return 0
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no flush fails at exit
        if isinstance(e, BrokenPipeError):
            return 141
        print(f"error: {e.strerror}", file=sys.stderr)
        return 2
