"""Prompts with a common prefix, with and without a prefix cache, beside vLLM. See README.md beside this file.

Prompts of many lengths begin alike and come `--samples` times each, all at once. Every repeat has new prompts, so that
only what is shared within one call is found. Each side answers two calls: one for a token of each, whose time is the
time to the last first token, and, with other prompts, one for `--output` tokens.
"""

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from run import HERE, MAX_DISTURBED, Peer
from side import Side
from verdict import differs

from levanter_infer.bench.report import digest, emit, provenance, summarize
from levanter_infer.bench.workload import SHAPES, numbers, random_model
from levanter_infer.checkpoints.save import save_model


def prompts_of(args: argparse.Namespace, seed: int) -> list[list[int]]:
    """`--lens` prompts that agree in their first `--common` tokens, or in all but the last if they are shorter."""
    rng = np.random.default_rng(seed)
    vocab = SHAPES[args.shape]["vocab"]
    common = rng.integers(0, vocab, args.common).tolist()
    prompts = []
    for length in args.lens:
        begin = common[: length - 1]
        prompts += [begin + rng.integers(0, vocab, length - len(begin)).tolist()] * args.samples
    return prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], type=Peer.parse, metavar="NAME[:DTYPE]=PYTHON")
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--lens", type=numbers, default=tuple(range(64, 1025, 64)), help="default 64, 128 … 1024")
    parser.add_argument("--common", type=int, default=512, help="tokens with which all prompts begin; default 512")
    parser.add_argument("--samples", type=int, default=2, help="times that each prompt comes; default 2")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each peer")
    args = parser.parse_args()
    ours = Peer("ours", sys.executable, HERE / "ours.py")
    sides = [("ours", ours, True), ("ours, no cache", ours, False), *((peer.label, peer, True) for peer in args.peer)]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        save_model(random_model(SHAPES[args.shape], args.dtype), directory)
        setup = dict(
            checkpoint=directory, batch=len(args.lens) * args.samples, prompt=max(args.lens), output=args.output,
            threads=args.threads,
        )  # fmt: skip
        running = {}
        for label, peer, cache in sides:
            own = {**setup, "dtype": peer.dtype or args.dtype, "prefix_cache": cache}
            running[label] = Side([peer.python, peer.script], own, Path(directory) / f"{len(running)}.log")
            stack.callback(running[label].close)
        emit({**measure(running, args), **provenance()})
    return 0


def measure(running: dict[str, Side], args: argparse.Namespace) -> dict:
    """One line: what each side took, and ratios between those whose tokens are equal."""
    seconds: dict[str, dict[str, list[float]]] = {label: {"first": [], "whole": []} for label in running}
    disturbed: list[float] = []
    tokens: dict[str, list] = {label: [] for label in running}
    for repeat in range(args.repeats + 1):
        first, whole = prompts_of(args, 2 * repeat), prompts_of(args, 2 * repeat + 1)
        for label, side in running.items():
            answers = side.measure(first, 1), side.measure(whole, args.output)
            if repeat == 0:
                continue  # warms up
            disturbed += [answer.disturbed for answer in answers]
            seconds[label]["first"].append(answers[0].seconds)
            seconds[label]["whole"].append(answers[1].seconds)
            tokens[label] += answers[1].tokens
    generated = len(args.lens) * args.samples * args.output
    line = {
        "bench": "shared", "shape": args.shape, "dtype": args.dtype, "lens": list(args.lens), "common": args.common,
        "samples": args.samples, "output": args.output, "threads": args.threads,
        "workload_hash": digest(prompts_of(args, 1)), "disturbed": summarize(disturbed, 2),
        "disturbed_calls": sum(share > MAX_DISTURBED for share in disturbed),
    }  # fmt: skip
    for label, times in seconds.items():
        refusal = differs(tokens["ours"], tokens[label], {})
        rates = [generated / s for s in times["whole"]]
        line[label] = {
            "first_tokens_s": summarize(times["first"], 3),
            "tokens_per_s": summarize(rates, 1),
            "versions": running[label].versions,
        }
        if label != "ours":
            best = statistics.median(times["whole"]) / statistics.median(seconds["ours"]["whole"])
            line[label]["ours/it"] = {"refused": refusal} if refusal else round(best, 2)
    return line


if __name__ == "__main__":
    sys.exit(main())
