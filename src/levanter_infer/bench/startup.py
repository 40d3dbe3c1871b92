"""From the start of a process to its first token, cold and warm, part by part; and compilation over the layers.

Every run is a process of its own. Cold means an empty cache of programs, warm one that an earlier run has filled.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from levanter_infer.bench.one_start import PROMPT
from levanter_infer.bench.plot import add_plot_argument, draw
from levanter_infer.bench.report import digest, emit, provenance, spread
from levanter_infer.bench.workload import add_model_arguments, model_sizes, numbers, random_model
from levanter_infer.checkpoints.save import save_model

_CACHE = "LEVANTER_INFER_COMPILE_CACHE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a checkpoint; default: a random one of --shape, made for the run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case; the median is reported")
    parser.add_argument("--layers", type=numbers, default=(2, 8, 30), help="compile models of these; default 2,8,30")
    add_model_arguments(parser, "tiny")
    add_plot_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Print a line for each of: starts cold and warm, the command `sample` cold and warm, and compilation by layers."""
    about = provenance()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or _checkpoint(Path(folder, "model"), args)
        config = {"model": str(args.model) if args.model else model_sizes(args), "dtype": args.dtype}
        for case, start in (("start", _start), ("sample", _sample)):
            cold = [start(model, Path(folder, f"{case}{i}")) for i in range(args.repeats)]
            warm = [start(model, Path(folder, f"{case}0")) for _ in range(args.repeats)]
            for name, runs in ((f"{case} cold", cold), (f"{case} warm", warm)):
                times = {part: spread([run[part] for run in runs], 3) for part in runs[0] if part.endswith("_s")}
                outputs = sorted({digest(run["output"]) for run in runs})
                emit(
                    {"bench": "startup", "case": name, **times, "config": config}
                    | {"workload_hash": digest(PROMPT), "output_hash": outputs, **about}
                )
        medians = []
        for layers in args.layers:
            path = _checkpoint(Path(folder, f"layers{layers}"), args, layers=layers)
            seconds = [_start(path, None)["compile_s"] for _ in range(args.repeats)]
            medians.append(spread(seconds, 3)["median"])
            sizes = {**model_sizes(args), "layers": layers}
            emit(
                {"bench": "startup", "case": "layers", "layers": layers, "compile_s": spread(seconds, 3)}
                | {"config": {"model": sizes, "dtype": args.dtype}, **about}
            )
    draw(
        args.plot,
        {"without a cache": (args.layers, medians)},
        title="Time to the compiled program",
        x="layers",
        y="seconds",
    )


def _checkpoint(path: Path, args: argparse.Namespace, **changes: int) -> Path:
    save_model(random_model(model_sizes(args) | changes, args.dtype), path)
    return path


def _environment(cache: Path | None) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return environment | {_CACHE: "off" if cache is None else str(cache)}


def _start(model: Path, cache: Path | None) -> dict:
    """One start of the library in a new process. Returns: what `one_start` prints."""
    command = [sys.executable, "-m", "levanter_infer.bench.one_start", str(model), repr(time.time())]
    done = subprocess.run(command, env=_environment(cache), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the start of {model} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def _sample(model: Path, cache: Path) -> dict:
    """One run of the command; the first token is there when its completion is printed."""
    rows = cache.with_name(f"{cache.name}.jsonl")
    rows.write_text(json.dumps({"prompt_token_ids": PROMPT}) + "\n")
    options = {"model": model, "prompts_file": rows, "sampling.max_tokens": 1, "sampling.temperature": 0}
    command = [sys.executable, "-m", "levanter_infer.sample"]
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=_environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        seconds = time.perf_counter() - begin
        rest, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the command failed:\n{errors.decode()}")
    return {"total_s": seconds, "output": (first + rest).decode()}
