"""Cycles of the parts of a step on TPUs, without a TPU: docs/tpu_budgets.csv.

    python scripts/tpu_budget.py [--targets v5e-4,v6e-4,v5p-8,v4-8] [--seqs 64,256] [--model llama-3.1-8b]
                                 [--numerics batch_invariant] [--weight-dtype int8] [--out FILE]

The engine's own round is compiled for each target, with tensor parallelism over its chips, pages of 64 tokens for 64
sequences and of 16 for more, and steps of at most 512 tokens. Counts are estimates of the compiler
(`plan.step_budget`). Lines that the file has for these targets, sequences, numerics and dtypes of weights are
replaced.
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.csv_lines import replace_lines  # noqa: E402

from levanter_infer.plan.compiled import compile_programs  # noqa: E402
from levanter_infer.plan.report import budget_lines  # noqa: E402
from levanter_infer.plan.spec import EngineSpec  # noqa: E402
from levanter_infer.plan.step_budget import PARTS  # noqa: E402
from levanter_infer.plan.targets import parse_target  # noqa: E402
from levanter_infer.policies import Numerics, WeightDtype  # noqa: E402

DTYPE = "bfloat16"
ENGINE = ("target", "model", "seqs", "numerics", "weights")
KEYS = (*ENGINE, "page", "tokens", "step", "sampled")
FIELDS: tuple[str, ...] = (*KEYS, "total", *PARTS, "copied_bytes", "libtpu")


def main() -> int:
    parser = argparse.ArgumentParser(description="Cycles of the parts of a step on TPUs.")
    parser.add_argument("--targets", default="v5e-4,v6e-4,v5p-8,v4-8")
    parser.add_argument("--seqs", default="64,256")
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in configs/shapes")
    parser.add_argument("--numerics", default="default", choices=list(Numerics))
    parser.add_argument(
        "--weight-dtype", choices=list(WeightDtype), help="engine.weight_dtype; default that of the model"
    )
    parser.add_argument("--out", default=str(ROOT / "docs" / "tpu_budgets.csv"))
    arguments = parser.parse_args()
    shape = json.loads((ROOT / "configs" / "shapes" / f"{arguments.model}.json").read_text())
    failed = 0
    for target in arguments.targets.split(","):
        for seqs in map(int, arguments.seqs.split(",")):
            rows = budgets(target, seqs, arguments.model, shape, arguments.numerics, arguments.weight_dtype)
            failed += not rows
            replace_lines(Path(arguments.out), FIELDS, rows, ENGINE)
    return 1 if failed else 0


def budgets(target: str, seqs: int, model: str, shape: dict, numerics: str, weight_dtype: str | None) -> list[dict]:
    """Lines of the file for one engine; none if it is refused."""
    page = 64 if seqs <= 64 else 16
    engine = {"page_size": page, "max_seqs": seqs, "max_seq_len": 8192, "max_step_tokens": 512, "numerics": numerics}
    engine |= {"max_pages": 2**18 // page, "weight_dtype": weight_dtype}
    spec = EngineSpec(target, shape, DTYPE, engine, {"model": parse_target(target).num_chips})
    program = compile_programs(spec, timeout_s=1800)[0]
    if program.error is not None or not program.budgets:
        print(f"{target}, {seqs} sequences: {program.error or program.no_budget or 'no estimates'}", file=sys.stderr)
        return []
    rows = []
    for each in program.budgets:
        step = "decode and prompts" if each.has_chunks else "decode"
        values = (target, model, seqs, numerics, weight_dtype or DTYPE, page, each.bucket, step, each.sampled)
        known = dict(zip(KEYS, values, strict=True))
        counts = {"total": each.total, **each.cycles, "copied_bytes": each.copied_bytes}
        rows.append(known | counts | {"libtpu": importlib.metadata.version("libtpu")})
        print(f"{target}, {seqs} sequences:", *budget_lines(each), sep="\n  ", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
