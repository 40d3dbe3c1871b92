"""Plant one-line bugs in cache/ and decode/, and see which of them the fast tier of the tests catches.

    python scripts/mutants.py run                # all of scripts/mutants.yaml; one JSON line each, then a summary
    python scripts/mutants.py run --only 3,17    # some of them
    python scripts/mutants.py check              # does the list still fit the source?
    python scripts/mutants.py draw --seed 1      # new mutants, drawn at random with cosmic-ray (pip install cosmic-ray)

The fast tier is tests/cache and tests/decode. It runs in a copy of the repository; nothing here is changed. A mutant is
caught if a test fails, or if the tier takes three times as long as without a bug.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutants.yaml"
PACKAGE = Path("src") / "levanter_infer"
TABLES = ("tests/decode/test_state_machine.py",)
OTHERS = ("tests/decode", "tests/cache", "--deselect=tests/decode/test_state_machine.py")
"""The fast tier, in the two parts that take about equally long."""
_TABLES = ("page_table", "prefix_table", "paging", "sharing", "packing", "sequence_table", "invariants")
"""Files whose bugs the first part finds soonest; for the others it runs last."""
_COPIED = ("src", "tests", "scripts", "models", "pyproject.toml")
_OPERATORS = ("BinaryOperator_", "ComparisonOperator_", "UnaryOperator_", "With", "NumberReplacer")
"""Kinds of cosmic-ray's operators, drawn equally often."""


def read_list() -> list[dict[str, Any]]:
    import yaml

    return yaml.safe_load(LIST.read_text())


def mutated(entry: dict[str, Any], root: Path) -> str:
    """The text of the entry's file with its bug in it.

    The bug is found by its text within a function, so that lines may come and go around it.
    Raises: ValueError if the text does not stand there, or more than once and the entry does not say which.
    """
    source = (root / PACKAGE / entry["file"]).read_text()
    begin, end = _span(source, entry["function"])
    body, old = source[begin:end], entry["old"]
    count, which = body.count(old), entry.get("which", 1)
    if count < which or (count > 1 and "which" not in entry):
        raise ValueError(f"{entry['file']}, {entry['function']}: {old!r} stands there {count} times")
    place = begin
    for _ in range(which):
        place = source.index(old, place) + 1
    text = source[: place - 1] + entry["new"] + source[place - 1 + len(old) :]
    ast.parse(text)
    return text


def _span(source: str, name: str) -> tuple[int, int]:
    """Where a function (`function`, `Class.method`, `function.inner`) begins and ends in its file."""
    nodes: list[ast.AST] = [ast.parse(source)]
    for part in name.split("."):
        inside = [child for node in nodes for child in ast.walk(node) if child is not node]
        kinds = (ast.FunctionDef, ast.ClassDef)
        nodes = [child for child in inside if isinstance(child, kinds) and child.name == part][:1]
    if not nodes:
        raise ValueError(f"there is no function {name}")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    (node,) = nodes
    return starts[node.lineno - 1], starts[node.end_lineno]  # type: ignore[attr-defined]


def run(args: argparse.Namespace) -> int:
    entries = list(enumerate(read_list(), 1))
    only = [int(number) for number in args.only.split(",")] if args.only else [number for number, _ in entries]
    texts = {number: mutated(entry, ROOT) for number, entry in entries}  # before an hour of work, not in the middle
    results = {}
    with tempfile.TemporaryDirectory(prefix="mutants") as directory:
        copy = Path(directory)
        for name in _COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        caught, by, seconds = test(copy, "", args, limit=3600.0)
        limit = max(3 * seconds, 60)
        print(json.dumps({"mutant": None, "failed": by, "seconds": seconds}), flush=True)
        if caught:
            print("the tier fails without any bug", file=sys.stderr)
            return 2
        for number, entry in entries:
            if number not in only:
                continue
            path = copy / PACKAGE / entry["file"]
            original = path.read_text()
            path.write_text(texts[number])
            caught, by, seconds = test(copy, entry["file"], args, limit)
            path.write_text(original)
            results[number] = caught
            about = {"file": entry["file"], "function": entry["function"], "why": entry["why"]}
            equivalent = {"equivalent": entry["equivalent"]} if "equivalent" in entry else {}
            line = {"mutant": number, "caught": caught, "by": by, "seconds": seconds, **about, **equivalent}
            print(json.dumps(line), flush=True)
    missed = [number for number, caught in results.items() if not caught]
    print(json.dumps({"mutants": len(results), "caught": len(results) - len(missed), "missed": missed}))
    return 0


def test(copy: Path, file: str, args: argparse.Namespace, limit: float) -> tuple[bool, list[str], float]:
    """Run the tier. Returns: whether it failed, the first tests that did, and how long it took."""
    start = time.perf_counter()
    parts = [TABLES, OTHERS] if Path(file).stem in _TABLES else [OTHERS, TABLES]
    together = [parts] if args.processes > 1 else [[part] for part in parts]
    for group in together:
        running = [_begin(copy, part, args.without) for part in group]
        try:
            while running:
                ended = _first_to_end(running, until=start + limit)
                if ended is None:
                    return True, [f"not done after {limit:.0f} s"], limit
                running.remove(ended)
                process, log = ended
                if process.returncode:
                    return True, _failures(log.read_text()), round(time.perf_counter() - start, 1)
        finally:
            for process, _ in running:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return False, [], round(time.perf_counter() - start, 1)


def _first_to_end(running: list[tuple[subprocess.Popen, Path]], until: float) -> tuple[subprocess.Popen, Path] | None:
    """The first of these processes that has ended, or None if the time is up before."""
    while time.perf_counter() < until:
        for one in running:
            if one[0].poll() is not None:
                return one
        time.sleep(0.1)
    return None


def _begin(copy: Path, tests: Sequence[str], without: Sequence[str]) -> tuple[subprocess.Popen, Path]:
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--no-header", "--hypothesis-profile=mutants", *tests]
    command += [f"--deselect={name}" for name in without]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log = copy / f"{'tables' if tests is TABLES else 'others'}.log"
    with log.open("w") as file:
        output = {"stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **output), log


def _failures(output: str) -> list[str]:
    lines = output.splitlines()
    found = [line.split(" - ")[0].split(maxsplit=1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return found[:3] or lines[-1:]


def check(args: argparse.Namespace) -> int:
    wrong = 0
    for number, entry in enumerate(read_list(), 1):
        try:
            mutated(entry, ROOT)
        except (ValueError, SyntaxError) as e:
            print(f"{number}: {e}")
            wrong += 1
    return 1 if wrong else 0


def draw(args: argparse.Namespace) -> int:
    """Print entries for random mutations of random functions."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    rng = random.Random(args.seed)
    files = sorted(p for folder in ("cache", "decode") for p in (ROOT / PACKAGE / folder).glob("*.py"))
    lines = [path for path in files for _ in path.read_text().splitlines()]
    kinds = [[name for name in operator_names() if part in name] for part in _OPERATORS]
    drawn = 0
    while drawn < args.count:
        path, name = rng.choice(lines), rng.choice(rng.choice(kinds))
        source = path.read_text()
        text = mutate_code(source, get_operator(name)(), rng.randrange(12))
        changed = text is not None and [
            (number, a, b)
            for number, (a, b) in enumerate(zip(source.splitlines(), text.splitlines(), strict=False), 1)
            if a != b
        ]
        function = changed and _function_at(source, changed[0][0])
        if not function or len(changed) != 1:
            continue
        (_, old, new), drawn = changed[0], drawn + 1
        entry = {
            "file": path.relative_to(ROOT / PACKAGE).as_posix(),
            "function": function,
            "old": old.strip(),
            "new": new.strip(),
            "why": f"cosmic-ray, {name.split('/')[1]}, seed {args.seed}",
        }
        print("\n".join(("- " if i == 0 else "  ") + f"{k}: {json.dumps(v)}" for i, (k, v) in enumerate(entry.items())))
    return 0


def _function_at(source: str, line: int) -> str | None:
    """The innermost function around a line of its body, with the classes and functions around it."""
    found: list[str] = []
    node: ast.AST = ast.parse(source)
    while True:
        kinds = (ast.FunctionDef, ast.ClassDef)
        inner = [n for n in ast.walk(node) if n is not node and isinstance(n, kinds)]
        inner = [n for n in inner if n.body[0].lineno <= line <= (n.end_lineno or 0)]
        if not inner:
            return ".".join(found) if isinstance(node, ast.FunctionDef) else None
        node = min(inner, key=lambda n: n.lineno)
        found.append(node.name)  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="plant all, one after the other")
    runs.set_defaults(do=run)
    runs.add_argument("--only", help="numbers of mutants, separated by commas")
    runs.add_argument("--processes", type=int, default=2)
    runs.add_argument("--without", nargs="*", default=[], help="tests to leave out")
    commands.add_parser("check", help="does the list fit the source?").set_defaults(do=check)
    draws = commands.add_parser("draw", help="draw new ones at random")
    draws.set_defaults(do=draw)
    draws.add_argument("--seed", type=int, default=0)
    draws.add_argument("--count", type=int, default=16)
    args = parser.parse_args()
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main())
