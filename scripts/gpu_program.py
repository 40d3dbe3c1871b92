"""Kernels and host conditions of a step on GPUs, without a GPU: docs/gpu_launches.csv.

    python scripts/gpu_program.py [--targets h100] [--seqs 1,64,256] [--model llama-3.1-8b] [--layers N] [--out FILE]

The engine's own round is compiled for each target, with pages of 16 tokens and steps of at most 2,048, and its launches
are counted (`plan.launches`). Needs the packages of `runtime.gpu_compiler.NEEDS`. Lines that the file has for these
targets and sequences are replaced; without `--out` nothing is written.
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.csv_lines import replace_lines  # noqa: E402

from levanter_infer.plan.compiled import NoCompiler, compile_programs  # noqa: E402
from levanter_infer.plan.launches import PARTS  # noqa: E402
from levanter_infer.plan.report import launch_line  # noqa: E402
from levanter_infer.plan.spec import EngineSpec  # noqa: E402

KEYS = ("target", "model", "seqs", "tokens", "step", "sampled")
COUNTS = ("layer_kernels", "host_launches", "host_conditions", "graph_conditions")
FIELDS: tuple[str, ...] = (*KEYS, "total", *PARTS, *COUNTS, "workspace MiB", "jaxlib")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels and host conditions of a step on GPUs.")
    parser.add_argument("--targets", default="h100")
    parser.add_argument("--seqs", default="1,64,256")
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in configs/shapes")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--out", help="CSV file")
    arguments = parser.parse_args()
    shape = json.loads((ROOT / "configs" / "shapes" / f"{arguments.model}.json").read_text())
    if arguments.layers is not None:
        shape["num_hidden_layers"] = arguments.layers
    failed = 0
    for target in arguments.targets.split(","):
        for seqs in map(int, arguments.seqs.split(",")):
            rows = launches(target, seqs, arguments.model, shape)
            failed += not rows
            if arguments.out is not None:
                replace_lines(Path(arguments.out), FIELDS, rows)
    return 1 if failed else 0


def launches(target: str, seqs: int, model: str, shape: dict) -> list[dict]:
    """Lines of the file for one engine; none if it is refused."""
    engine = {"page_size": 16, "max_seqs": seqs, "max_seq_len": 8192, "max_step_tokens": 2048, "max_pages": 16384}
    try:
        program = compile_programs(EngineSpec(target, shape, "bfloat16", engine, {"model": 1}), timeout_s=900)[0]
    except NoCompiler as error:
        raise SystemExit(str(error)) from error
    if program.error is not None or not program.launches:
        print(f"{target}, {seqs} sequences: {program.error or program.no_budget}", file=sys.stderr)
        return []
    rows = []
    for each in program.launches:
        step = "decode and prompts" if each.has_chunks else "decode"
        known = dict(zip(KEYS, (target, model, seqs, each.bucket, step, each.sampled), strict=True))
        known |= {"total": each.total, **each.kernels, **{name: getattr(each, name) for name in COUNTS}}
        known |= {"workspace MiB": program.workspace_bytes >> 20, "jaxlib": importlib.metadata.version("jaxlib")}
        rows.append(known)
        print(f"{target}, {seqs} sequences: {launch_line(each)}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
