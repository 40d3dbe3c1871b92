"""`python -m levanter_infer.bench SUBCOMMAND`: prints one JSON line per case."""

import argparse
import sys

from levanter_infer.runtime.compile_cache import enable_compile_cache


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m levanter_infer.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    control = commands.add_parser("control", help="a step without a model: tables, allocation, stop rules")
    control.add_argument("--slots", type=_numbers, default=None, help="comma-separated; default 64,256,1024")
    control.add_argument("--pages", type=_numbers, default=None, help="comma-separated; default 4096 … 262144")
    control.add_argument("--steps", type=int, default=200)
    control.add_argument("--repeats", type=int, default=5)

    throughput = commands.add_parser("throughput", help="prefill and decode tokens/s of a random model")
    throughput.add_argument("--batch", type=_numbers, default=(1, 8, 32))
    throughput.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    throughput.add_argument("--output", type=int, default=64, help="generated tokens")
    throughput.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    throughput.add_argument("--repeats", type=int, default=5)
    throughput.add_argument("--modes", default="greedy,sampled")
    for name, value in (
        ("hidden", 576), ("layers", 30), ("heads", 9), ("kv-heads", 3), ("mlp", 1536), ("vocab", 49152)
    ):  # fmt: skip
        throughput.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(argv)
    enable_compile_cache()

    if args.command == "control":
        from levanter_infer.bench import control as bench

        bench.run(args.slots or bench.SLOTS, args.pages or bench.PAGES, steps=args.steps, repeats=args.repeats)
    else:
        from levanter_infer.bench import throughput as bench

        bench.run(args)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
