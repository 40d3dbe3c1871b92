"""Print the lines of `run.py` as a Markdown table: tokens per second of each engine. See README.md beside this file.

python scripts/peers/run.py … | python scripts/peers/table.py
"""

import json
import sys
from collections.abc import Iterable, Sequence

NAMES = {"ours": "levanter_infer", "llamacpp": "llama.cpp", "vllm_cpu": "vLLM (CPU build)", "hf": "HF transformers"}


def table(cases: Sequence[dict]) -> list[str]:
    """Rows of engines, columns of batch sizes, cells `decode / prefill` in tokens per second, medians.

    Args:
        cases: lines of `run.py` of one shape and precision, one a batch size.
    Raises: ValueError if they are of several shapes or precisions.
    """
    setups = {(case["shape"], case["dtype"], case["prompt"], case["output"]) for case in cases}
    if len(setups) != 1:
        raise ValueError(f"got cases of {len(setups)} setups {sorted(setups)}; expected those of one run")
    labels = list(dict.fromkeys(label for case in cases for label in case if isinstance(case[label], dict)))
    labels = [label for label in labels if any("decode" in case.get(label, {}) for case in cases) and "/" not in label]
    head = "| decode / prefill, tokens/s | " + " | ".join(f"batch {case['batch']}" for case in cases) + " |"
    lines = [head, "|---" * (len(cases) + 1) + "|"]
    for label in labels:
        name, _, dtype = label.partition(":")
        title = NAMES.get(name, name) + (f", {dtype}" if dtype else "")
        lines.append(f"| {title} | " + " | ".join(_cell(case.get(label)) for case in cases) + " |")
    return lines


def _cell(side: dict | None) -> str:
    if not side or "decode" not in side:
        return "–"
    return f"{_number(side['decode']['median'])} / {_number(side['prefill']['median'])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main(lines: Iterable[str]) -> int:
    cases = [json.loads(line) for line in lines if line.startswith("{")]
    if not cases:
        print("error: no lines of run.py on standard input", file=sys.stderr)
        return 2
    print("\n".join(table(cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.stdin))
