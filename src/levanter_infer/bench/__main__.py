"""`levanter-infer bench COMMAND`: prints one JSON line per case."""

import argparse
import importlib
import sys

from levanter_infer.cli import start
from levanter_infer.runtime.compile_cache import enable_compile_cache

COMMANDS = {
    "control": "a step without a model: tables, allocation, stop rules",
    "attention": "the attention kernels alone: gather, write, attend; time, GB/s and FLOP/s per layer",
    "memory": "peak memory of a process; what pages waste on mixes of lengths",
    "page-size": "tokens/s, step times and waste over page sizes and batches",
    "open-loop": "requests that come at any time: latencies, phases, continuous against static batches",
    "preemption": "pools too small for their load: tokens/s of computing again and of moving pages to the host",
    "matmul": "the matmuls of a step alone: what a step takes at least",
    "scenarios": "long contexts, mixed lengths, a growing chat, with and without a cache",
    "step": "a decode step on a CPU beside the limits of memory and arithmetic, and where its time goes",
    "startup": "from the start of a process to its first token; compilation over the layers",
    "throughput": "prefill and decode tokens/s of a random model",
}
"""Each is a module of this package with `add_arguments(parser)` and `run(args)`; - in a name is _ in the module's."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    prog = "levanter-infer bench"
    listing = "\n".join(f"  {name:12} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=f"commands:\n{listing}\n\nCOMMAND --help lists its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of: " + ", ".join(COMMANDS))
    command = parser.parse_args(argv[:1]).command

    enable_compile_cache()
    bench = importlib.import_module(f"levanter_infer.bench.{command.replace('-', '_')}")
    options = argparse.ArgumentParser(prog=f"{prog} {command}", description=COMMANDS[command])
    bench.add_arguments(options)
    arguments = options.parse_args(argv[1:])
    try:
        bench.run(arguments)
    except ValueError as error:
        options.error(str(error))
    return 0


if __name__ == "__main__":
    start(main)
