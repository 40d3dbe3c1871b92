"""Time from the start of a process to its first token, cold and warm, by parts; and compile time over the layers.

Every run is a process of its own. Cold means an empty compile cache, warm one that an earlier run has filled.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from levanter_infer.bench.one_start import PROMPT
from levanter_infer.bench.report import add_plot_argument, digest, draw, emit, provenance, summarize
from levanter_infer.bench.workload import add_model_arguments, count, model_sizes, names, numbers, random_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.runtime.compile_cache import VARIABLE

CASES = ("start", "sample", "layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=names(CASES), default=",".join(CASES), help=f"of {', '.join(CASES)}; default all"
    )
    parser.add_argument("--model", type=Path, help="a checkpoint; default: a random one of --shape, made for the run")
    parser.add_argument("--repeats", type=count, default=3, help="runs of each case; the median is reported")
    parser.add_argument(
        "--layer-counts", type=numbers, default=(2, 8, 30), help="compile models of these; default 2,8,30"
    )
    add_model_arguments(parser, "tiny")
    add_plot_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Print two lines, cold and warm, for starts of the library and of the command; and one per number of layers."""
    about = provenance()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, start in (("start", _start), ("sample", _sample)):
            if case in args.cases:
                for line in _cold_and_warm(args, folder, case, start):
                    emit({"bench": "startup", **line, **about})
        if "layers" in args.cases:
            medians = []
            for layers in args.layer_counts:
                line = _compilation(args, folder, layers)
                emit({"bench": "startup", **line, **about})
                medians.append(line["compile_s"]["median"])
            curve = {"without a cache": (args.layer_counts, medians)}
            draw(args.plot, curve, title="Time to the compiled round", x="layers", y="seconds")


def _cold_and_warm(args: argparse.Namespace, folder: Path, case: str, start: Callable) -> Iterator[dict]:
    model = args.model or _checkpoint(folder / case / "model", args)
    config = {"model": str(args.model) if args.model else model_sizes(args), "dtype": args.dtype}
    cold = [start(model, folder / case / str(i)) for i in range(args.repeats)]
    warm = [start(model, folder / case / "0") for _ in range(args.repeats)]
    for name, runs in (("cold", cold), ("warm", warm)):
        yield {
            "case": f"{case} {name}",
            **{part: summarize([run[part] for run in runs], 3) for part in runs[0] if part.endswith("_s")},
            "config": config,
            "workload_hash": digest(PROMPT),
            "output_hash": digest(runs[0]["output"]),
            "outputs_equal": all(run["output"] == cold[0]["output"] for run in runs),
        }


def _compilation(args: argparse.Namespace, folder: Path, layers: int) -> dict:
    model = _checkpoint(folder / f"layers{layers}", args, layers=layers)
    runs = [_start(model, None) for _ in range(args.repeats)]
    return {
        "case": "layers",
        "layers": layers,
        "compile_s": summarize([run["compile_s"] for run in runs], 3),
        "workload_hash": digest([list(PROMPT), layers]),
        "output_hash": digest(runs[0]["output"]),
        "config": {"model": {**model_sizes(args), "layers": layers}, "dtype": args.dtype},
    }


def _checkpoint(path: Path, args: argparse.Namespace, **changes: int) -> Path:
    save_model(random_model(model_sizes(args) | changes, args.dtype), path)
    return path


def _environment(cache: Path | None) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return environment | {VARIABLE: "off" if cache is None else str(cache)}


def _start(model: Path, cache: Path | None) -> dict:
    """One start of the library in a new process. Returns: what `one_start` prints."""
    command = [sys.executable, "-m", "levanter_infer.bench.one_start", str(model), repr(time.time())]
    done = subprocess.run(command, env=_environment(cache), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the start of {model} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def _sample(model: Path, cache: Path) -> dict:
    """One run of the command, timed until its completion is printed."""
    rows = cache.with_name(f"{cache.name}.jsonl")
    rows.parent.mkdir(exist_ok=True)
    rows.write_text(json.dumps({"prompt_token_ids": PROMPT}) + "\n")
    options = {"model": model, "prompts_file": rows, "sampling.max_tokens": 1, "sampling.temperature": 0}
    command = [sys.executable, "-m", "levanter_infer.sample"]
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    begin = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, env=_environment(cache), stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.readline()
        seconds = time.perf_counter() - begin
        rest = process.stdout.read()
        if process.wait() != 0:
            errors.seek(0)
            raise SystemExit(f"the command failed:\n{errors.read().decode()}")
    return {"total_s": seconds, "output": (first + rest).decode()}
