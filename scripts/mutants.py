"""Plant one-line bugs in the package, and see which of them the tests catch.

    python scripts/mutants.py run                # all of scripts/mutants.yaml; one JSON line each, then a summary
    python scripts/mutants.py run --only 3,17    # some of them
    python scripts/mutants.py run --sample 10 --seed 1    # so many at random
    python scripts/mutants.py check              # does the list still fit the source? and what is known of it
    python scripts/mutants.py draw --seed 1 --count 16    # new mutants of random places

Bugs in cache/ and decode/ meet the fast tier, tests/cache and tests/decode; others the files that `TESTS` names for
theirs. Everything runs in a copy of the repository; nothing here is changed. A mutant is caught if a test fails, or if
they take three times as long as without a bug.
"""

import argparse
import ast
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutants.yaml"
PACKAGE = Path("src") / "levanter_infer"
TABLES = ("tests/decode/test_state_machine.py",)
OTHERS = ("tests/decode", "tests/cache", "--deselect=tests/decode/test_state_machine.py")
"""The fast tier, in the two parts that take about equally long."""
_TABLES = ("page_table", "prefix_table", "paging", "prefix", "schedule", "sequence_table", "invariants")
"""Files whose bugs the first part finds soonest; for the others it runs last."""
_COPIED = ("src", "tests", "scripts", "models", "configs", "docs", "pyproject.toml", "README.md")
_E, _B, _C, _K, _R = "tests/engine/", "tests/batch/", "tests/checkpoints/", "tests/kernels/", "tests/runtime/"
TESTS = {
    "engine/backend_choice.py": (_E + "test_sizes.py", _E + "test_gpu.py"),
    "engine/config.py": (_E + "test_sizes.py", "tests/test_config.py"),
    "engine/coordination.py": (_E + "test_coordination.py",),
    "engine/admission.py": (_E + "test_scheduler.py", _E + "test_params.py", _E + "test_faults.py"),
    "engine/engine.py": (_E + "test_faults.py", _E + "test_rounds.py", _E + "test_reset.py", _E + "test_warmup.py"),
    "engine/forks.py": (_E + "test_forks.py",),
    "engine/kv_offload.py": (_E + "test_kv_offload.py",),
    "engine/intake.py": (_E + "test_requests.py", _E + "test_faults.py", _E + "test_params.py", _E + "test_library.py"),
    "engine/memory_audit.py": (_E + "test_metrics.py",),
    "engine/metrics.py": (_E + "test_metrics.py",),
    "engine/round_length.py": (_E + "test_scheduler.py", _E + "test_rounds.py"),
    "engine/params.py": (_E + "test_params.py",),
    "engine/pure.py": (_E + "test_pure.py",),
    "engine/request.py": (_E + "test_requests.py", _E + "test_faults.py", _E + "test_library.py"),
    "engine/round_loop.py": tuple(_E + f"test_{name}.py" for name in ("rounds", "forks", "beams", "faults", "reset")),
    "engine/routing.py": (_E + "test_scheduler.py", _E + "test_mesh.py"),
    "engine/runner.py": (_E + "test_programs.py", _E + "test_mesh.py", _E + "test_sizes.py", _E + "test_warmup.py"),
    "engine/scheduler.py": (_E + "test_scheduler.py", _E + "test_faults.py", _E + "test_rounds.py"),
    "engine/scoring.py": (_E + "test_scoring.py",),
    "engine/request_state.py": (_E + "test_sequence.py", _E + "test_text.py", _E + "test_faults.py"),
    "engine/stats.py": (_E + "test_metrics.py",),
    "engine/text.py": (_E + "test_text.py",),
    "engine/tile_search.py": (_E + "test_tile_search.py",),
    "engine/validation.py": (_E + "test_scheduler.py", _E + "test_requests.py", _E + "test_faults.py"),
    "engine/weight_updates.py": (_E + "test_weight_updates.py",),
    "batch/": tuple(
        _B + f"test_{name}.py" for name in ("input", "tables", "openai", "drive", "identity", "processes", "run")
    ),
    "io/openai.py": (_B + "test_openai.py",),
    "checkpoints/chat_template.py": (_C + "test_chat_template.py",),
    "checkpoints/template_worker.py": (_C + "test_chat_template.py",),
    "checkpoints/chat.py": (_C + "test_chats.py",),
    "checkpoints/tokenizer": (_C + "test_tokenizer.py",),
    "checkpoints/": (_C + "test_load.py", _C + "test_save.py", "tests/models/test_hf_parity.py"),
    "kernels/cpu/bindings.py": (_K + "test_cpu.py", _K + "test_cpu_place.py"),
    "kernels/int8.py": (_K + "test_int8.py",),
    "kernels/xla/backend.py": ("tests/cache/test_kv_pages.py", _K + "test_attention.py"),
    "kernels/": tuple(
        _K + f"test_{name}.py"
        for name in ("attention", "ragged_paged_attention", "rpa_xla", "int8", "page_walk", "rpa_tpu")
    ),
    "runtime/compile_cache.py": (_R + "test_compile_cache.py",),
    "runtime/multihost.py": (_R + "test_multihost.py",),
    "layers/": ("tests/layers",),
    "decode/paging.py": (_E + "test_slot_state.py",),
    "bench/": ("tests/bench",),
    "runtime/": (_R.rstrip("/"),),
}  # fmt: skip
"""Tests that decide about the bugs of a file, or of all files that begin so; the first that fits."""
_UNTRIED = (
    "__init__",
    "__main__",
    "on_ray",
    "kv_write",
    "huge_pages",
    "libtpu",
    "processor",
    "instructions",
)
"""Files in which nothing is drawn: they need another machine, or are data."""
_DRAWN_IN = ("engine", "batch", "checkpoints", "kernels", "runtime")


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


def tests_of(entry: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """The tests that decide about an entry, in groups that may run side by side."""
    if "tests" in entry:
        return (tuple(entry["tests"]),)
    file = entry["file"]
    if file.startswith(("cache/", "decode/")):
        return (TABLES, OTHERS) if Path(file).stem in _TABLES else (OTHERS, TABLES)
    return (next(tests for begin, tests in TESTS.items() if file.startswith(begin)),)


def run(args: argparse.Namespace) -> int:
    entries = dict(enumerate(read_list(), 1))
    only = [int(number) for number in args.only.split(",")] if args.only else list(entries)
    if args.sample is not None:
        only = sorted(random.Random(args.seed).sample(only, min(args.sample, len(only))))
    texts = {number: mutated(entries[number], ROOT) for number in only}  # before an hour of work, not in the middle
    results, limits = {}, {}
    with tempfile.TemporaryDirectory(prefix="mutants") as directory:
        copy = Path(directory)
        for name in _COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        if (
            ROOT / ".pytest_cache"
        ).exists():  # programs that have been compiled; those of a mutant have keys of their own
            (copy / ".pytest_cache").symlink_to((ROOT / ".pytest_cache").resolve())
        for number in only:
            entry = entries[number]
            groups = tests_of(entry)
            if groups not in limits:
                caught, by, seconds = test(copy, groups, args, limit=3600.0)
                limits[groups] = max(3 * seconds, 60)
                print(json.dumps({"mutant": None, "failed": by, "seconds": seconds, "tests": groups}), flush=True)
                if caught:
                    print("the tests fail without any bug", file=sys.stderr)
                    return 2
            path = copy / PACKAGE / entry["file"]
            original = path.read_text()
            path.write_text(texts[number])
            caught, by, seconds = test(copy, groups, args, limits[groups])
            path.write_text(original)
            results[number] = caught or "equivalent" in entry
            about = {name: entry[name] for name in ("file", "function", "why", "equivalent") if name in entry}
            print(json.dumps({"mutant": number, "caught": caught, "by": by, "seconds": seconds, **about}), flush=True)
    missed = [number for number, caught in results.items() if not caught]
    print(json.dumps({"mutants": len(results), "caught": len(results) - len(missed), "missed": missed}))
    return 1 if missed else 0


def test(
    copy: Path, groups: Sequence[Sequence[str]], args: argparse.Namespace, limit: float
) -> tuple[bool, list[str], float]:
    """Run the tests. Returns: whether they failed, the first that did, and how long it took."""
    start = time.perf_counter()
    together = [groups] if args.processes > 1 else [[group] for group in groups]
    for part in together:
        running = [_begin(copy, tests, args.without) for tests in part]
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
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-rfE",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=mutants",
        *tests,
    ]
    command += [f"--deselect={name}" for name in without]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}",
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
    """Report entries that do not fit the source any more; and how many of the others were caught when they ran last."""
    entries, wrong = read_list(), 0
    for number, entry in enumerate(entries, 1):
        try:
            mutated(entry, ROOT)
            missing = [t for group in tests_of(entry) for t in group if "::" not in t and not t.startswith("-")]
            if missing := [t for t in missing if not (ROOT / t).exists()]:
                raise ValueError(f"{entry['file']}: there are no {', '.join(missing)}")
        except (ValueError, SyntaxError, OSError, StopIteration) as e:
            print(f"{number}: {e!r}")
            wrong += 1
    known = collections.Counter("equivalent" if "equivalent" in e else e.get("seen", "not run") for e in entries)
    print(f"{len(entries)} mutants, {wrong} of which do not fit; " + ", ".join(f"{n} {k}" for k, n in known.items()))
    return 1 if wrong else 0


def draw(args: argparse.Namespace) -> int:
    """Print entries for random changes of random places, as many lines of a file as likely as it is long."""
    rng = random.Random(args.seed)
    files = sorted(path for folder in _DRAWN_IN for path in (ROOT / PACKAGE / folder).glob("*.py"))
    files = [path for path in files if not path.stem.startswith(_UNTRIED) and "_tpu" not in path.stem]
    places = [(path, place) for path in files for place in changes(path.read_text())]
    by_kind = collections.defaultdict(list)
    for path, place in places:
        by_kind[place[3].split(":")[0]].append((path, place))
    known = {(entry["file"], entry["old"], entry.get("which", 1)) for entry in read_list()}
    drawn = 0
    while drawn < args.count:
        path, (function, old, new, what, which) = rng.choice(by_kind[rng.choice(sorted(by_kind))])
        file = path.relative_to(ROOT / PACKAGE).as_posix()
        if (file, old, which) in known:
            continue
        known.add((file, old, which))
        entry = {"file": file, "function": function, "old": old, "new": new}
        entry |= {"which": which} if which > 1 or source_count(path, function, old) > 1 else {}
        entry |= {"why": f"drawn, seed {args.seed}: {what}"}
        try:
            mutated(entry, ROOT)
        except (ValueError, SyntaxError):
            continue
        drawn += 1
        print("\n".join(("- " if i == 0 else "  ") + f"{k}: {json.dumps(v)}" for i, (k, v) in enumerate(entry.items())))
    return 0


def source_count(path: Path, function: str, old: str) -> int:
    source = path.read_text()
    begin, end = _span(source, function)
    return source[begin:end].count(old)


_FLIPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.FloorDiv: ("//", "*"), ast.Mult: ("*", "+")}


def changes(source: str) -> Iterator[tuple[str, str, str, str, int]]:
    """Every change of one line that can be drawn: (function, line, changed line, what, which of equal lines)."""
    lines = source.splitlines()
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments | ast.AnnAssign | ast.ExceptHandler)
        for inner in ast.walk(node)
        if inner is not node or not isinstance(node, ast.ExceptHandler | ast.arguments)
    } - {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        for statement in node.body
        for inner in ast.walk(statement)
        if not isinstance(statement, ast.Raise)
    }
    for node in ast.walk(tree):
        if id(node) in skipped or getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
            continue
        line = lines[node.lineno - 1]  # type: ignore[attr-defined]
        function = _function_at(source, node.lineno)  # type: ignore[attr-defined]
        if function is None or not line.isascii():
            continue
        for begin, end, text, what in _edits(node, line):
            changed = line[:begin] + text + line[end:]
            begin_line = _span(source, function)[0]
            earlier = source[begin_line : sum(len(each) + 1 for each in lines[: node.lineno - 1])]  # type: ignore[attr-defined]
            if changed != line:
                which = 1 + earlier.count(line.strip())
                yield function, line.strip(), changed.strip(), what, which


def _edits(node: ast.AST, line: str) -> Iterator[tuple[int, int, str, str]]:
    """(begin, end, text instead, what) of the changes of a node of one line."""

    def text(part: ast.expr) -> str:
        return line[part.col_offset : part.end_col_offset]

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        flipped = f"{text(node.left)} {_FLIPS[type(node.ops[0])]} {text(node.comparators[0])}"
        if text(node.left).count("(") == text(node.left).count(")"):
            yield node.col_offset, node.end_col_offset or 0, flipped, "comparison"
    elif isinstance(node, ast.Constant) and type(node.value) is int and text(node).isdecimal():
        yield node.col_offset, node.end_col_offset or 0, str(node.value + 1), "number: one more"
    elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        sign, other = _SIGNS[type(node.op)]
        begin = line.find(f" {sign} ", node.left.end_col_offset, node.right.col_offset + 1)
        if begin >= 0:
            yield begin, begin + len(sign) + 2, f" {other} ", "sign"
    elif isinstance(node, ast.BoolOp):
        word, other = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        begin = line.find(word, node.values[0].end_col_offset or 0, node.end_col_offset or 0)
        if begin >= 0:
            yield begin, begin + len(word), other, "and, or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.col_offset, node.operand.col_offset, "", "negation"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node.col_offset, node.end_col_offset or 0, "pass", "call: dropped"
    elif isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second = node.args[:2]
        if not any(isinstance(arg, ast.Starred) for arg in (first, second)) and type(first) is type(second):
            swapped = text(second) + line[first.end_col_offset : second.col_offset] + text(first)
            yield first.col_offset, second.end_col_offset or 0, swapped, "arguments: swapped"


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
    runs.add_argument("--sample", type=int, help="so many of them, at random")
    runs.add_argument("--seed", type=int, default=0, help="of the sample")
    runs.add_argument("--processes", type=int, default=2)
    runs.add_argument("--without", nargs="*", default=[], help="tests to leave out")
    commands.add_parser("check", help="does the list fit the source?").set_defaults(do=check)
    draws = commands.add_parser("draw", help="draw new ones at random")
    draws.set_defaults(do=draw)
    draws.add_argument("--seed", type=int, default=0)
    draws.add_argument("--count", type=int, default=16)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests under way end too
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main())
