"""Compare this engine with others on the same prompts and weights, in turn. See README.md beside this file."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from levanter_infer.bench.report import digest, emit, provenance, spread
from levanter_infer.bench.workload import SHAPES, random_model, random_prompts
from levanter_infer.checkpoints.save import save_model

HERE = Path(__file__).resolve().parent


class Side:
    """One engine in its own process."""

    def __init__(self, python: str, script: str, setup: dict):
        self.process = subprocess.Popen(
            [python, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._send(setup)

    def _send(self, message: dict) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def measure(self, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        assert self.process.stdout is not None
        self._send({"prompts": prompts, "count": count})
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with status {self.process.wait()}; run it by hand to see why")
        answer = json.loads(line)
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def compare(sides: dict[str, Side], args, batch: int) -> dict:
    prompts = random_prompts(SHAPES[args.shape]["vocab"], [args.prompt] * batch, seed=batch)
    rates = {name: {"prefill": [], "decode": []} for name in sides}
    tokens = {}
    for repeat in range(args.repeats + 1):
        for name, side in sides.items():
            first, _ = side.measure(prompts, 1)
            whole, tokens[name] = side.measure(prompts, 1 + args.output)
            if repeat > 0:  # the first one warms up
                rates[name]["prefill"].append(batch * args.prompt / first)
                rates[name]["decode"].append(batch * args.output / max(whole - first, 1e-9))
    case = {
        "bench": "peers", "shape": args.shape, "dtype": args.dtype, "batch": batch, "prompt": args.prompt,
        "output": args.output, "workload_hash": digest(prompts),
    }  # fmt: skip
    for name in sides:
        case[name] = {kind: spread(values, 1) for kind, values in rates[name].items()}
        case[name]["output_hash"] = digest(tokens[name])
    for name in sides:
        if name != "ours":
            case[f"ours/{name}"] = ratio(rates["ours"], rates[name], tokens["ours"], tokens[name], args.dtype)
    return case


def ratio(ours: dict, peer: dict, our_tokens, peer_tokens, dtype: str) -> dict:
    agreed = [common_prefix(a, b) for a, b in zip(our_tokens, peer_tokens, strict=True)]
    needed = len(our_tokens[0]) if dtype == "float32" else 1
    agreement = {"tokens_agreed": statistics.mean(agreed), "tokens": len(our_tokens[0])}
    if min(agreed) < needed:
        return {**agreement, "refused": f"the outputs differ: only {min(agreed)} tokens agree, expected {needed}"}
    medians = {kind: statistics.median(ours[kind]) / statistics.median(peer[kind]) for kind in ours}
    return {**agreement, **{kind: round(value, 2) for kind, value in medians.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", required=True, help="NAME=PYTHON; NAME.py lies beside this script")
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    pythons = {"ours": sys.executable, **dict(peer.split("=", 1) for peer in args.peer)}
    with tempfile.TemporaryDirectory() as checkpoint:
        save_model(random_model(SHAPES[args.shape], args.dtype), checkpoint)
        for batch in (int(part) for part in args.batch.split(",")):
            setup = dict(checkpoint=checkpoint, dtype=args.dtype, batch=batch, prompt=args.prompt, output=args.output)
            sides = {name: Side(python, f"{name}.py", setup) for name, python in pythons.items()}
            try:
                emit({**compare(sides, args, batch), **provenance()})
            finally:
                for side in sides.values():
                    side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
