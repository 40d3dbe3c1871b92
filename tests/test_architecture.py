"""The layers, and what each may do, read from the source with `ast`.

docs/architecture.md draws the picture. A rule that is broken names file, line and rule.
"""

import ast
import functools
import importlib
from pathlib import Path

import pytest

from levanter_infer import axes

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "levanter_infer"

LAYERS = [
    {"axes", "policies"},
    {"kernels", "runtime"},
    {"cache"},
    {"layers"},
    {"models"},
    {"checkpoints"},
    {"decode"},
    {"structured"},
    {"engine"},
    {"columns"},
    {"keys"},
    {"config"},
    {"io"},
    {"fingerprint"},
    {"cli"},
]
"""From the bottom up; a part imports parts below its own line only. All other modules are commands, above them."""
DEVICE = {"axes", "policies", "kernels", "cache", "layers", "models", "decode"}
HOST_ONLY_MODULES = {
    "argparse", "asyncio", "datetime", "io", "json", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
    "rich", "secrets", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "tqdm",
    "urllib", "warnings",
}  # fmt: skip
FORBIDDEN_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve", "torch", "transformers"}
ARRAY_LIBRARIES = {"jax", "jaxlib", "haliax", "equinox"}
WITHOUT_JAX = ("engine.scheduler", "engine.validation")
"""Modules that are imported, with all that they import, where JAX is not installed."""
PUBLIC = {"EngineConfig", "InferenceEngine", "Request", "SamplingParams", "generate", "load_model"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 700, 80


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def python_files() -> list[Path]:
    return [path for folder in ("src", "scripts", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[len(parts) - 1 - parts[::-1].index("levanter_infer") :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: `levanter_infer.cache.kv_pages` -> `cache`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, full name) of everything that a file imports; names imported from a package are completed."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def own_imports(path: Path) -> list[tuple[int, str]]:
    return [(line, name) for line, name in imports(path) if name.split(".")[0] == "levanter_infer"]


def rank(part: str) -> int:
    return next((i for i, layer in enumerate(LAYERS) if part in layer), len(LAYERS))


def where(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def parts_of_files(parts: set[str]) -> list[Path]:
    return [path for path in sources() if part_of(module_name(path)) in parts]


def uses(path: Path):
    """(line, dotted name) of every name that is used: called, passed on, or put before a function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, dotted(node)


def dotted(node: ast.expr) -> str:
    """`ast.unparse`, in a hundredth of its time for names and their attributes, which most are."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def test_imports_go_strictly_down():
    wrong = []
    for path in sources():
        part = part_of(module_name(path))
        if not part:
            continue  # the package itself: a list of names that load on first use
        for line, name in own_imports(path):
            target = part_of(name)
            same_part = target == part
            if not same_part and rank(target) >= rank(part) and rank(part) < len(LAYERS):
                wrong.append(where(path, line, f"{part} imports {name}"))
    assert not wrong, "\n".join(wrong)


def test_device_parts_import_device_parts_only():
    wrong = []
    for path in parts_of_files(DEVICE):
        wrong += [
            where(path, line, f"device code imports {name}")
            for line, name in own_imports(path)
            if part_of(name) not in DEVICE
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", ["axes", "policies", "kernels", "runtime"])
def test_the_lowest_parts_import_nothing_of_ours(part):
    wrong = []
    for path in parts_of_files({part}):
        wrong += [where(path, line, name) for line, name in own_imports(path) if part_of(name) != part]
    assert not wrong, "\n".join(wrong)


def test_modules_form_no_cycle():
    graph: dict[str, set[str]] = {}
    known = {module_name(path) for path in sources()}
    for path in sources():
        name = module_name(path)
        targets = set()
        for _, target in own_imports(path):
            targets.add(target if target in known else target.rpartition(".")[0])
        graph[name] = (targets & known) - {name, "levanter_infer"} if name != "levanter_infer" else set()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_device_parts_have_no_io_clock_environment_or_logging():
    wrong = []
    for path in parts_of_files(DEVICE):
        wrong += [
            where(path, line, f"imports {name}")
            for line, name in imports(path)
            if name.split(".")[0] in HOST_ONLY_MODULES
        ]
        wrong += [where(path, line, f"uses {name}") for line, name in uses(path) if name in {"print", "open", "input"}]
        wrong += [where(path, line, f"uses {name}") for line, name in uses(path) if "callback" in name.split(".")[-1]]
    assert not wrong, "\n".join(wrong)


def imports_when_loaded(path: Path) -> list[tuple[int, str]]:
    """Imports among `imports` that are executed with the module: not in functions, and not for type checkers only."""
    skipped: set[int] = set()
    for node in ast.walk(parsed(path)):
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if inner or (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            skipped |= {inside.lineno for line in node.body for inside in ast.walk(line) if hasattr(inside, "lineno")}
    return [(line, name) for line, name in imports(path) if line not in skipped]


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_the_scheduler_and_all_that_it_imports_do_without_jax(module):
    files = {module_name(path): path for path in sources()}
    waiting, seen, wrong = [f"levanter_infer.{module}"], set(), []
    while waiting:
        name = waiting.pop()
        if name in seen or name not in files:
            continue
        seen.add(name)
        waiting.append(name.rpartition(".")[0])  # a package is imported before its modules
        for line, target in imports_when_loaded(files[name]):
            if target.split(".")[0] in ARRAY_LIBRARIES:
                wrong.append(where(files[name], line, f"imports {target}, and {module} imports it without JAX"))
            waiting += [target, target.rpartition(".")[0]]
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 5  # it was followed


def test_jit_stands_in_programs_only():
    wrong = []
    for path in sources():
        if path == SOURCE / "decode" / "programs.py":
            continue
        wrong += [
            where(path, line, name)
            for line, name in uses(path)
            if name.split(".")[-1] in {"jit", "filter_jit", "pjit", "pmap", "filter_pmap", "named_jit"}
        ]
        wrong += [where(path, line, name) for line, name in imports(path) if name.endswith((".jit", ".filter_jit"))]
    assert not wrong, "\n".join(wrong)


def test_no_branch_can_carry_the_pool():
    # `lax.cond` and `lax.switch` copy what they carry on a CPU. Sampling never sees the pool and may use them;
    # `kernels/loops.py` does for platforms where they copy nothing.
    wrong = []
    for path in parts_of_files(DEVICE):
        if path == SOURCE / "kernels" / "loops.py":
            continue
        if part_of(module_name(path)) in ("decode", "kernels") and path.name.startswith("sampling"):
            continue
        wrong += [
            where(path, line, name)
            for line, name in uses(path)
            if name.split(".")[-1] in {"cond", "switch"} and name.split(".")[0] in {"jax", "lax"}
        ]
    assert not wrong, "\n".join(wrong)


def test_control_path_has_no_counted_loop():
    # Vectorised over sequences, tokens and pages. `while_loop` remains for rounds, optional work and blocks of pages;
    # what is done to every layer of the pool may be counted out.
    wrong = []
    for path in parts_of_files({"cache", "decode"}):
        if path.name.startswith("sampling"):
            continue
        over_layers = loops_over_layers(path)
        wrong += [
            where(path, line, name)
            for line, name in uses(path)
            if (name.split(".")[-1] == "fori_loop" and line not in over_layers)
            or name in {"jax.lax.map", "lax.map", "jax.lax.scan", "lax.scan"}
        ]
    assert not wrong, "\n".join(wrong)


def loops_over_layers(path: Path) -> set[int]:
    """Lines of `fori_loop(0, ….num_layers, …)`: of the loops that run over all layers and over nothing else."""
    return {
        node.lineno
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] == "fori_loop"
        and [ast.unparse(bound).split(".")[-1] for bound in node.args[:2]] == ["0", "num_layers"]
    }


def test_no_unsafe_loader_and_no_heavy_framework():
    wrong = []
    for path in python_files():
        if {ROOT / "scripts" / "golden", ROOT / "scripts" / "peers"} & set(path.parents):
            continue  # run HF transformers, in environments of their own
        wrong += [
            where(path, line, f"imports {name}")
            for line, name in imports_of_any(path)
            if name.split(".")[0] in FORBIDDEN_MODULES
        ]
        wrong += [
            where(path, line, f"uses {name}")
            for line, name in uses(path)
            if name in {"yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}
        ]
        wrong += [where(path, line, "yaml.load without a safe loader") for line in unsafe_yaml_loads(path)]
    assert not wrong, "\n".join(wrong)


def imports_of_any(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
    return found


def unsafe_yaml_loads(path: Path) -> list[int]:
    """Lines that call `yaml.load` with a loader other than SafeLoader or a subclass of it in the same file."""
    nodes = list(ast.walk(parsed(path)))
    safe = {"yaml.SafeLoader"}
    safe |= {n.name for n in nodes if isinstance(n, ast.ClassDef) and "yaml.SafeLoader" in map(ast.unparse, n.bases)}
    found = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "yaml.load"]
    return [call.lineno for call in found if len(call.args) != 2 or ast.unparse(call.args[1]) not in safe]


def test_files_and_functions_stay_short():
    wrong = []
    for path in python_files():
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(where(path, lines, f"{lines} lines, at most {MAX_FILE_LINES}"))
    for path in sources():
        if part_of(module_name(path)) == "kernels":
            continue  # the body of a kernel is one function
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = code_lines(node)
                if length > MAX_FUNCTION_LINES:
                    wrong.append(where(path, node.lineno, f"{node.name}: {length} lines, at most {MAX_FUNCTION_LINES}"))
    assert not wrong, "\n".join(wrong)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def axis_names() -> set[str]:
    return {value for name, value in vars(axes).items() if name.isupper() and isinstance(value, str)}


def test_axis_names_are_all_different():
    names = [value for name, value in vars(axes).items() if name.isupper() and isinstance(value, str)]
    assert len(names) == len(set(names))


def test_axis_names_are_written_in_axes_only():
    # Annotations like `Int32[Array, "seq position"]` are the exception; their names must exist.
    names, wrong = axis_names(), []
    for path in sources():
        if part_of(module_name(path)) == "axes":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func).split(".")[-1]
                if function in {
                    "named",
                    "Axis",
                    "NamedArray",
                    "full",
                    "axis_size",
                    "resolve_axis",
                    "take",
                    "rearrange",
                }:
                    for argument in ast.walk(ast.Tuple(elts=[*node.args], ctx=ast.Load())):
                        if isinstance(argument, ast.Constant) and argument.value in names:
                            wrong.append(where(path, argument.lineno, f"axis name {argument.value!r} as a literal"))
            elif (
                isinstance(node, ast.Subscript)
                and ast.unparse(node.slice).startswith(("(NamedArray, ", "(Array, "))
                and ast.unparse(node.value) != "tuple"
            ):
                written = node.slice.elts[1]  # type: ignore[attr-defined]
                if isinstance(written, ast.Constant):
                    unknown = set(written.value.replace("...", "").split()) - names
                    wrong += [where(path, node.lineno, f"axis {name!r} is not in axes.py") for name in unknown]
    assert not wrong, "\n".join(wrong)


def test_public_names_can_be_imported():
    package = importlib.import_module("levanter_infer")
    assert set(package.__all__) >= PUBLIC
    for name in package.__all__:
        assert callable(getattr(package, name)), name
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_the_readers_above_see_what_they_look_for(tmp_path):
    bad = tmp_path / "levanter_infer" / "cache" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "import os.path\nfrom levanter_infer.engine.config import EngineConfig\nfrom . import named\nf = jax.jit(g)\n"
        "yaml.load(text, yaml.Loader)\nfori_loop(0, self.num_layers, f, x)\nfori_loop(0, num_pages, f, x)\n"
        "fori_loop(1, num_layers, f, x)\n"
    )
    assert module_name(bad) == "levanter_infer.cache.bad"
    assert imports(bad)[0] == (1, "os.path")
    assert own_imports(bad) == [
        (2, "levanter_infer.engine.config.EngineConfig"),
        (3, "levanter_infer.cache.named"),
    ]
    assert (4, "jax.jit") in uses(bad)
    lazy = bad.with_name("lazy.py")
    lazy.write_text("import jax\nif TYPE_CHECKING:\n    import haliax\ndef f():\n    import equinox\nimport numpy\n")
    assert imports_when_loaded(lazy) == [(1, "jax"), (6, "numpy")]
    assert unsafe_yaml_loads(bad) == [5]
    assert loops_over_layers(bad) == {6}
    assert rank("axes") < rank("kernels") < rank("cache") < rank("engine") < rank("sample")
