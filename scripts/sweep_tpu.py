"""Compiles the attention of TPUs for 1200 shapes, without a TPU, and keeps a record in docs/tpu_sweep.csv.

    python scripts/sweep_tpu.py [--gens v4,v5e,v5p,v6e] [--every N] [--out FILE] [--all] [--others | --families]

5 models × 5 page sizes × 4 context lengths × 3 numbers of sequences on 4 generations; each case is one program with
both paths, and tiles chosen automatically. How long the page tables are, how many sequences and how large the pool is,
is data to the kernels. So the largest case of the twelve that differ only there is compiled, and the kernels of the
smallest are traced and compared with its own: if they are the same, all twelve have the same (`same` in the record,
beside `compiled`); if not, each is compiled. `--all` compiles every case.

`--others` compiles shapes that are on no list instead, odd in heads, sizes and pages, and keeps no record of them.
`--families` compiles those of the released models of each family (scripts/family_shapes.py), on one chip and on each of
eight, with a record of their own, docs/tpu_families.csv.

Cases that the record holds for these sources are left out, and kernels that it holds are not compiled again.
Compiling happens in a process of its own, because the compiler may end it; then the case counts as failed and another
process goes on.
"""

import argparse
import ast
import csv
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.family_shapes import family_shapes  # noqa: E402

from levanter_infer.runtime.libtpu import (  # noqa: E402
    TARGETS,
    compiler_environment,
    short_of,
    topology_devices,
    topology_options,
)

HEADS = ((32, 8, 128), (64, 8, 128), (32, 8, 64), (16, 8, 128), (8, 4, 256))
PAGES, CONTEXTS, SEQUENCES = (16, 32, 64, 128, 256), (2048, 8192, 32768, 131072), (16, 64, 256)
OTHERS: tuple[tuple[tuple[int, int, int], int, dict], ...] = (
    ((8, 8, 96), 16, {}),
    ((16, 1, 128), 8, {}),
    ((7, 1, 256), 64, {}),
    ((32, 32, 128), 32, {}),
    ((28, 4, 64), 8, {}),
    ((64, 2, 96), 128, {}),
    ((32, 8, 160), 64, {}),
    ((32, 8, 192), 64, {}),
    ((16, 2, 512), 64, {}),
    ((8, 1, 512), 16, {}),
    ((64, 8, 64), 64, {"sinks": True, "window": 128}),
    ((8, 1, 64), 16, {"sinks": True}),
    ((40, 8, 128), 64, {"attention_chunk": 8192}),
    ((5, 1, 128), 16, {"attention_chunk": 6000}),
    ((20, 4, 128), 32, {"window": 512, "soft_cap": 50.0}),
    ((8, 2, 128), 16, {}),
    ((8, 2, 128), 64, {"sinks": True, "window": 128}),
    ((8, 4, 128), 128, {}),
    ((4, 2, 256), 32, {"soft_cap": 50.0}),
)
"""Heads, page and rules of `--others`: head sizes of 96 to 512, one query head for a kv head, 5, 7, 16 and 32, one kv
head and 32, pages of 8; gpt-oss and Llama 4, each on one chip and a share of one in eight; a window with a soft cap;
heads so few that the cores of v4 and v5p read the same rows of queries (`Sizes.sharing_parts`)."""
RULES = ("window", "sinks", "attention_chunk", "soft_cap", "value_dim", "index_dim", "chosen")
"""Fields of a `Case` that are neutral in the recorded ones."""
TOKENS = 512
MOST_COMPILED = 30
"""Compilations per process, about: each leaks 70 MB."""
RECORD, FAMILIES_RECORD = ROOT / "docs" / "tpu_sweep.csv", ROOT / "docs" / "tpu_families.csv"


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape on one generation."""

    gen: str
    heads: tuple[int, int, int]
    page: int
    context: int
    seqs: int
    window: int | None = None
    sinks: bool = False
    attention_chunk: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    index_dim: int = 0
    chosen: bool = False

    @property
    def kernel_shape(self) -> tuple:
        """Parameters on which the kernels depend."""
        return (self.gen, self.heads, self.page, *(getattr(self, name) for name in RULES))


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the record."""

    case: Case
    how: str
    """`compiled`, `same` (as the kernels of a case that was) or `failed`"""
    kernels: str
    """`kernel_digest`"""
    sources: str
    """Digest of the kernels' sources."""
    seconds: float
    error: str = ""

    FIELDS = ("gen", "q_heads", "kv_heads", "head_dim", "page", "context", "seqs", "how", "kernels", "sources",
              "seconds", "error", "rules")  # fmt: skip

    def values(self) -> list:
        case = self.case
        return [case.gen, *case.heads, case.page, case.context, case.seqs, self.how, self.kernels, self.sources,
                self.seconds, self.error, " ".join(options_of(case))]  # fmt: skip

    @staticmethod
    def read(values: dict[str, str]) -> "Row":
        q_heads, kv_heads, head_dim, page, context, seqs = (int(values[name]) for name in Row.FIELDS[1:7])
        pairs = (rule.split("=") for rule in values["rules"].split())
        rules = {name: ast.literal_eval(value) for name, value in pairs}
        case = Case(values["gen"], (q_heads, kv_heads, head_dim), page, context, seqs, **rules)
        how, kernels, sources = (values[name] for name in Row.FIELDS[7:10])
        return Row(case, how, kernels, sources, float(values["seconds"]), values["error"])


def all_cases(gens: Iterable[str]) -> list[Case]:
    return [Case(*sizes) for sizes in itertools.product(gens, HEADS, PAGES, CONTEXTS, SEQUENCES)]


def other_cases(gens: Iterable[str]) -> list[Case]:
    return [Case(gen, heads, page, 8192, 64, **rules) for gen in gens for heads, page, rules in OTHERS]


def family_cases(gens: Iterable[str]) -> list[Case]:
    return [Case(gen, page=64, context=8192, seqs=64, **vars(shape)) for gen in gens for shape in family_shapes()]


def options_of(case: Case) -> list[str]:
    """The rules of a case that are not neutral, as NAME=VALUE."""
    rules = {name: getattr(case, name) for name in RULES}
    return [f"{name}={value}" for name, value in rules.items() if value]


_SHARED = ("call", "int8", "rules")
"""Modules beside the `tpu` folder that the kernels and tiles for TPUs come from."""


def sources() -> str:
    """Digest of the sources that kernels and tiles come from."""
    digest = hashlib.sha256()
    kernels = ROOT / "src" / "levanter_infer" / "kernels"
    for path in [*sorted((kernels / "tpu").glob("*.py")), *(kernels / f"{name}.py" for name in _SHARED)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def read(path: Path) -> dict[Case, Row]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [Row.read(values) for values in csv.DictReader(file)]
    return {row.case: row for row in rows}


def write(path: Path, rows: dict[Case, Row], cases: Iterable[Case]) -> None:
    """All rows, in the order of `cases`; those of others are left out."""
    order = {case: place for place, case in enumerate(cases)}
    temporary = path.with_suffix(".new")
    with temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.FIELDS)
        writer.writerows(rows[case].values() for case in sorted(rows.keys() & order, key=lambda case: order[case]))
    temporary.replace(path)


def kernel_digest(gen: str, jaxpr) -> str:
    """Digest of the kernels of a traced program, without the sizes of what they read from HBM and of tables of scalars,
    and of what compiles them."""
    digest = hashlib.sha256(gen.encode())
    for option in topology_options(TARGETS[gen][0]).items():
        digest.update("=".join(option).encode())
    digest.update(" ".join(importlib.metadata.version(name) for name in ("jax", "libtpu")).encode())
    for kernel in _kernels(jaxpr):
        body = " ".join(str(kernel.params["jaxpr"]).split())
        body = re.sub(r"Ref<any>\{(\w+)\[[\d,]*?,(\d+)\]\}", r"Ref<any>{\1[*,\2]}", body)
        body = re.sub(r"Ref<smem>\{i32\[\d+\]\}", "Ref<smem>{i32[*]}", body)
        grid = kernel.params["grid_mapping"].grid
        digest.update(f"{kernel.params['name']} {grid} {kernel.params['compiler_params']} {body}".encode())
    return digest.hexdigest()[:10]


def _kernels(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _kernels(inner)


def sweep(gen: str, cases: list[Case], known: set[str] | None) -> Iterator[Row]:
    """Compile `cases` in processes of their own, a new one after each that dies.

    Args:
        known: digests of kernels that need not be compiled; None to compile every case.
    """
    groups = [list(group) for _, group in itertools.groupby(cases, lambda case: case.kernel_shape)]
    stamp = sources()
    while groups:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--child", gen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=compiler_environment(gen),
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(None if known is None else sorted(known)) + "\n")
        child.stdin.write("".join(json.dumps([dataclasses.asdict(c) for c in group]) + "\n" for group in groups))
        child.stdin.close()
        for line in child.stdout:
            if line.startswith("{"):
                yield Row(case=groups[0].pop(), sources=stamp, **json.loads(line))
                if not groups[0]:
                    groups.pop(0)
        if child.wait() != 0 and groups:
            error = f"the compiler ended its process with {child.returncode}"
            yield Row(groups[0].pop(), "failed", "", stamp, 0, error)
            groups = [group for group in groups if group]


class _Compiler:
    """Traces and compiles cases for one generation."""

    def __init__(self, gen: str):
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from scripts.tpu_builders import mixed

        devices = topology_devices(TARGETS[gen][0])
        self._gen, self._builder = gen, mixed
        self._mesh = Mesh(np.asarray(devices[:1]), ("x",))
        self._placed = NamedSharding(self._mesh, PartitionSpec())
        jax.sharding.set_mesh(self._mesh)

    def trace(self, case: dict):
        """The traced program of a case, and the digest of its kernels."""
        import jax

        function, types = self._builder(self._mesh, **{**case, "tokens": TOKENS})
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._placed) for a in types]
        traced = jax.jit(function).trace(*types)
        return traced, kernel_digest(self._gen, traced.jaxpr.jaxpr)

    def row(self, case: dict, known: set[str] | None) -> dict:
        """Compile a case, unless its kernels are known, to which they are added. Returns: fields of its `Row`."""
        start = time.time()

        def done(how: str, kernels: str, error: str = "") -> dict:
            return dict(how=how, kernels=kernels, seconds=round(time.time() - start, 1), error=error)

        try:
            traced, kernels = self.trace(case)
            if known is not None and kernels in known:
                return done("same", kernels)
            traced.lower(lowering_platforms=("tpu",)).compile()
            (set() if known is None else known).add(kernels)
            return done("compiled", kernels)
        except Exception as problem:  # the error is the result
            text = " ".join(f"{type(problem).__name__}: {problem}".split())
            return done("failed", "", str(short_of(str(problem)) or text[:300]))


def _compile(gen: str) -> None:
    """The child: on stdin the known kernels, and groups of cases, one line each; on stdout a line for each case, those
    of a group from the last to the first."""
    compiler, compiled = _Compiler(gen), 0
    listed = json.loads(sys.stdin.readline())
    known = None if listed is None else set(listed)
    for line in sys.stdin:
        if compiled >= MOST_COMPILED:
            return
        cases = json.loads(line)
        for case in cases:
            case.pop("gen")
        largest = compiler.row(cases.pop(), known)
        compiled += largest["how"] == "compiled"
        print(json.dumps(largest), flush=True)
        same = bool(cases) and known is not None and compiler.trace(cases[0])[1] == largest["kernels"]
        for case in reversed(cases):
            row = {**largest, "how": "same", "seconds": 0} if same else compiler.row(case, known)
            compiled += row["how"] == "compiled"
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gens", default=",".join(TARGETS))
    parser.add_argument("--every", type=int, default=1, help="take each Nth case")
    parser.add_argument("--out", type=Path, help="the record, if not that in docs/")
    parser.add_argument("--all", action="store_true", help="compile every case by itself")
    parser.add_argument("--others", action="store_true", help="shapes that are on no list")
    parser.add_argument("--families", action="store_true", help="shapes of the released models of each family")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _compile(options.child)
    listed = other_cases if options.others else family_cases if options.families else all_cases
    record = options.out or {all_cases: RECORD, family_cases: FAMILIES_RECORD}.get(listed)
    rows, stamp = {} if record is None else read(record), sources()
    good = {"compiled"} if options.all else {"compiled", "same"}
    gens = options.gens.split(",")
    wanted = listed(gens)[:: options.every]
    left = [case for case in wanted if case not in rows or rows[case].sources != stamp or rows[case].how not in good]
    known = None if options.all else {row.kernels for row in rows.values() if row.how == "compiled"}
    for gen in gens:
        for row in sweep(gen, [case for case in left if case.gen == gen], known):
            before = rows.get(row.case)
            if before is not None and (row.how, row.kernels, before.how) == ("same", before.kernels, "compiled"):
                row = dataclasses.replace(row, how="compiled", seconds=before.seconds)  # it was, with other sources
            rows[row.case] = row
            if record is not None:
                write(record, rows, listed(TARGETS))
            print(*row.values(), flush=True)
    failed = [rows[case] for case in wanted if rows[case].how == "failed"]
    for row in failed:
        print(*row.values())
    print(f"{len(wanted)} cases, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
