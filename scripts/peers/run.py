"""Compare this engine with others on the same prompts and weights, in turn. See README.md beside this file."""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import mean

import jax
import jax.numpy as jnp
from side import Measurement, Side, SideError
from verdict import WIDTH, common_prefix, differs, differs_in_length, largest_shortfall, ratio, spaced, to_best

from levanter_infer.bench.report import digest, emit, provenance, summarize
from levanter_infer.bench.workload import SHAPES, numbers, random_model, random_prompts
from levanter_infer.checkpoints.save import save_model

HERE = Path(__file__).resolve().parent
QUANTIZES = ("llamacpp",)
"""Peers that have weights of int8."""
SAMPLES = ("vllm_cpu", "vllm_gpu")
"""Peers that take `--sampling`."""
MAX_DISTURBED = 0.05
"""Share of the machine that others may use during a measurement."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One engine: `--peer NAME[:DTYPE]=PYTHON`."""

    label: str
    """NAME[:DTYPE], as written"""
    python: str
    script: Path
    dtype: str | None = None
    """Dtype of the weights; None: the run's."""

    @staticmethod
    def parse(text: str) -> "Peer":
        label, _, python = text.partition("=")
        name, _, dtype = label.partition(":")
        script = HERE / f"{name}.py"
        if not name or not python or not script.is_file():
            raise argparse.ArgumentTypeError(f"{text!r}: expected NAME[:DTYPE]=PYTHON, with NAME.py in {HERE}")
        if dtype and dtype not in WIDTH:
            raise argparse.ArgumentTypeError(f"{text!r}: DTYPE is {dtype!r}, expected one of {', '.join(WIDTH)}")
        return Peer(label, python, script, dtype or None)


@dataclasses.dataclass
class Measured:
    """Measurements of a side: tokens/s and disturbance of every repeat, and the tokens of the last one."""

    dtype: str
    versions: dict[str, str]
    rates: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"prefill": [], "decode": []})
    disturbed: list[float] = dataclasses.field(default_factory=list)
    tokens: list[list[int]] = dataclasses.field(default_factory=list)

    def add(self, first: Measurement, whole: Measurement, args: argparse.Namespace) -> None:
        """A call for one token, and one for `args.output` more."""
        batch, decoding = len(whole.tokens), max(whole.seconds - first.seconds, 1e-9)
        self.rates["prefill"].append(batch * args.prompt / first.seconds)
        self.rates["decode"].append(batch * args.output / decoding)
        self.disturbed.append(max(first.disturbed, whole.disturbed))
        self.tokens = whole.tokens

    def report(self) -> dict:
        rates = {kind: summarize(values, 1) for kind, values in self.rates.items()}
        return {
            "dtype": self.dtype, "versions": self.versions, **rates, "disturbed": summarize(self.disturbed, 2),
            "output_hash": digest(self.tokens),
        }  # fmt: skip


def measure(
    peers: list[Peer], args: argparse.Namespace, prompts: list[list[int]], directory: Path
) -> tuple[dict[str, Measured], dict[str, str]]:
    """All sides in turn, `repeats` times after one that warms up.

    Returns: what each side has shown, and the errors of those that could not start or ended.
    """
    sides: dict[str, Side] = {}
    found: dict[str, Measured] = {}
    errors: dict[str, str] = {}
    setup = dict(
        checkpoint=str(directory), batch=len(prompts), prompt=args.prompt, output=args.output, threads=args.threads,
        sampling=args.sampling,
    )  # fmt: skip
    with ExitStack() as stack:
        for peer in peers:
            dtype = peer.dtype or args.dtype
            try:
                side = Side([peer.python, peer.script], {**setup, "dtype": dtype}, directory / f"{peer.label}.log")
            except SideError as error:
                errors[peer.label] = str(error)
                continue
            sides[peer.label], found[peer.label] = side, Measured(dtype, side.versions)
            stack.callback(side.close)
        for repeat in range(args.repeats + 1):
            for label in [label for label in sides if label not in errors]:
                try:
                    first, whole = measure_side(sides[label], prompts, args)
                except SideError as error:
                    errors[label] = str(error)
                    del found[label]
                    continue
                if repeat > 0:
                    found[label].add(first, whole, args)
    return found, errors


def measure_side(side: Side, prompts: list[list[int]], args: argparse.Namespace) -> tuple[Measurement, Measurement]:
    """A call for one token and one for `args.output` more, again if others disturbed it."""
    for _ in range(args.tries):
        first, whole = side.measure(prompts, 1), side.measure(prompts, 1 + args.output)
        if max(first.disturbed, whole.disturbed) <= MAX_DISTURBED:
            break
    return first, whole


def compare(peers: list[Peer], args: argparse.Namespace, batch: int, directory: Path) -> dict:
    """One line: the rates of every side, ratios between those that did the same work, errors of those that failed."""
    prompts = random_prompts(SHAPES[args.shape]["vocab"], [args.prompt] * batch, seed=batch)
    found, errors = measure(peers, args, prompts, directory)
    case = {
        "bench": "peers", "shape": args.shape, "dtype": args.dtype, "batch": batch, "prompt": args.prompt,
        "output": args.output, "threads": args.threads, "sampling": args.sampling, "workload_hash": digest(prompts),
    }  # fmt: skip
    case |= {label: side.report() for label, side in found.items()}
    case |= {label: {"error": error} for label, error in errors.items()}
    if "ours" not in found:
        return case
    ours, ratios = found["ours"], {}
    shortfalls = {} if args.dtype == "float32" or args.sampling else shortfalls_of(found, args, prompts)
    for label, peer in found.items():
        if label == "ours":
            continue
        pair = {name: shortfalls[name] for name in ("ours", label)} if shortfalls else {}
        both = ours.tokens, peer.tokens
        refusal = differs_in_length(*both) if args.sampling else differs(*both, pair)
        if refusal is None:
            ratios[label] = ratio(ours.rates, peer.rates)
        agreed = mean(common_prefix(a, b) for a, b in zip(ours.tokens, peer.tokens, strict=True))
        case[f"ours/{label}"] = {
            "tokens_agreed": agreed,
            "tokens": 1 + args.output,
            **({f"shortfall_{name}": round(value, 4) for name, value in pair.items()}),
            **({"refused": refusal} if refusal else ratios[label]),
        }
    if ratios:
        case["ours/best"] = to_best(ratios)
    return case


def shortfalls_of(found: dict[str, Measured], args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, float]:
    """`largest_shortfall` of each side, over some of the sequences."""
    weights = random_model(SHAPES[args.shape], stored_dtype(args))
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    rows = spaced(len(prompts), args.check)
    return {
        label: largest_shortfall(model, [prompts[i] for i in rows], [side.tokens[i] for i in rows])
        for label, side in found.items()
    }


def stored_dtype(args: argparse.Namespace) -> str:
    """Dtype of the checkpoint."""
    return "bfloat16" if args.dtype == "int8" else args.dtype


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peer", action="append", required=True, type=Peer.parse, metavar="NAME[:DTYPE]=PYTHON",
        help="NAME.py beside this script, in PYTHON's environment; DTYPE: of the run's width, if it is faster there",
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "int8"), default="bfloat16")
    parser.add_argument("--batch", type=numbers, default=(1, 8, 32))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tries", type=int, default=3, help="of a measurement that others disturb")
    parser.add_argument("--check", type=int, default=4, help="sequences read again to judge outputs in 8 and 16 bits")
    parser.add_argument(
        "--sampling", type=json.loads, default={}, metavar="JSON",
        help='sampling parameters in place of greedy ones, as {"temperature": 1.0, "top_p": 0.95}; '
        "outputs differ then, and their lengths alone are compared",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each peer")
    args = parser.parse_args()
    for peer in args.peer:
        if peer.dtype and WIDTH[peer.dtype] != WIDTH[args.dtype]:
            parser.error(f"--peer {peer.label}: {peer.dtype} is not as wide as --dtype {args.dtype}")
        if args.dtype == "int8" and peer.script.stem not in QUANTIZES:
            parser.error(f"--peer {peer.label}: expected one of {', '.join(QUANTIZES)} with --dtype int8")
        if args.sampling and peer.script.stem not in SAMPLES:
            parser.error(f"--peer {peer.label}: expected one of {', '.join(SAMPLES)} with --sampling")
    peers = [Peer("ours", sys.executable, HERE / "ours.py"), *args.peer]
    with tempfile.TemporaryDirectory() as directory:
        save_model(random_model(SHAPES[args.shape], stored_dtype(args)), directory)
        for batch in args.batch:
            emit({**compare(peers, args, batch, Path(directory)), **provenance()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
