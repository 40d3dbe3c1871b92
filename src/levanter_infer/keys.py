"""The keys of a configuration, read from the source of its dataclasses, for help and hints without an import.

A dataclass is the one owner of name, type, default and documentation of its keys. Importing it may import NumPy or JAX,
which takes seconds; reading its source takes milliseconds.
"""

import ast
import difflib
import functools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter_infer.engine.config import NAMES_ELSEWHERE as ENGINE_NAMES
from levanter_infer.engine.params import NAMES_ELSEWHERE

RUN = ("config", "RunConfig")
SECTIONS = {
    "model": ("config", "ModelSource"),
    "sampling": ("engine.params", "SamplingParams"),
    "engine": ("engine.config", "EngineConfig"),
    "mesh": ("engine.mesh", "MeshConfig"),
    "multihost": ("runtime.multihost", "MultihostConfig"),
    "output": ("config", "OutputConfig"),
    "batch": ("batch.config", "BatchConfig"),
    "plan": ("plan.__main__", "PlanConfig"),
    "serve": ("serve.config", "ServeConfig"),
}
"""Sections of a configuration, each with the module and class that define its keys."""
OWN_SECTIONS = {"batch": ("batch",), "plan": ("plan",), "serve": ("serve",)}
"""Sections of a single command."""
_ONE_PROCESS = dict.fromkeys(("score", "check", "audit", "doctor"), ("multihost",))
REFUSED = {"batch": ("prompts",), "serve": ("prompts", "prompts_file", "chat", "multihost", "output"), **_ONE_PROCESS}
"""Keys and sections that a command refuses, so that its help does not show them."""

OTHER_NAMES = {
    # vLLM and SGLang
    "tensor_parallel_size": "mesh.model",
    "data_parallel_size": "mesh.data",
    "expert_parallel_size": "mesh.expert",
    "tp_size": "mesh.model",
    "dp_size": "mesh.data",
    "ep_size": "mesh.expert",
    "input_file": "prompts_file",
    "output_file": "output.path",
    "model_path": "model.path",
    "tokenizer_path": "tokenizer",
    # Hugging Face transformers
    "torch_dtype": "model.dtype",
    "pretrained_model_name_or_path": "model.path",
    # this engine, before
    "products": "engine.matmul",
    **{theirs: f"engine.{ours}" for theirs, ours in ENGINE_NAMES.items()},
    **{theirs: f"sampling.{ours}" for theirs, ours in NAMES_ELSEWHERE.items()},
}
"""Keys by the names of other engines."""
RENAMED = {"engine.tiles.chunk": "prefill"}
"""New names of keys within a key of a section, by their former dotted names."""
REMARKS = {
    "gpu_memory_utilization": "the KV cache takes the free memory of the device, or engine.max_pages pages",
    "mem_fraction_static": "the KV cache takes the free memory of the device, or engine.max_pages pages",
    "enable_expert_parallel": "experts are sharded over mesh.expert devices",
    "enable_chunked_prefill": "chunked prefill is always on, with prompt chunks of at most engine.max_step_tokens",
    "disable_hybrid_kv_cache_manager": "engine.window_cache: false lets layers with a sliding window keep all pages",
    "disable_radix_cache": "prefix caching is switched off with engine.prefix_cache: false",
    "do_sample": "sampling.temperature: 0 is greedy, any other value samples",
    "enforce_eager": "there is one compiled program and no other way to run it; leave it out",
    "trust_remote_code": "code that comes with a model is never run; leave it out",
    "speculative_config": "engine.num_speculative_tokens is speculative decoding by prompt lookup (method ngram)",
    "enable_lora": "one adapter is merged into the weights when they are read: model.adapter; leave it out",
    "stream": "results are written when they are complete; leave it out",
}
"""Hints for settings of other engines that this one has no key for."""
_CLOSE, _CLOSE_ELSEWHERE = 0.6, 0.75
"""Similarity (difflib's ratio) of a hint, at least: in the section itself, and in another one."""


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    default: str | None
    """Its text; None without one worth showing."""
    doc: str


@dataclass(frozen=True)
class Section:
    """The keys of one dataclass."""

    doc: str
    """The first sentence of its docstring."""
    keys: tuple[Key, ...]

    @property
    def names(self) -> list[str]:
        return [key.name for key in self.keys]


def read_constant(module: str, name: str) -> Any:
    """A constant of a module of this package, such as its `USAGE`, without importing the module."""
    return _constants(module)[name]


def read_section(place: tuple[str, str]) -> Section:
    """The keys that the class at (module, name) defines, from its source."""
    module, name = place
    body = _parsed(module).body
    cls = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    keys = []
    for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        doc = str(after.value.value) if is_doc else ""  # type: ignore[union-attr]
        keys.append(Key(node.target.id, _default(module, node.value), " ".join(doc.split())))
    text = " ".join((ast.get_docstring(cls) or "").split("\n\n")[0].split())
    return Section(text, tuple(keys))


@functools.cache
def _parsed(module: str) -> ast.Module:
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _constants(module: str) -> dict[str, Any]:
    """Literal constants of a module, by name."""
    found: dict[str, Any] = {}
    for node in _parsed(module).body:
        if not isinstance(node, ast.Assign):
            continue
        try:
            value = ast.literal_eval(node.value)
        except ValueError:
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                found[target.id] = value
            elif isinstance(target, ast.Tuple):
                found.update(zip((ast.unparse(name) for name in target.elts), value, strict=True))
    return found


def _default(module: str, node: ast.expr | None) -> str | None:
    if node is None or isinstance(node, ast.Call):
        return None
    if isinstance(node, ast.Name):
        return str(_constants(module).get(node.id, node.id))
    value = ast.literal_eval(node)
    return None if value in (None, ()) else str(value)


# Help


def keys_text(command: str) -> str:
    """Every key of a command's configuration, in groups, with defaults."""
    top, hidden = read_section(RUN).keys, {*SECTIONS, *REFUSED.get(command, ())}
    about = {key.name: key.doc for key in top}
    lines = ["keys (and defaults), in the file as KEY: VALUE or SECTION: {KEY: VALUE}, here as --KEY or --SECTION.KEY:"]
    lines += ["", *_key_lines("", (key for key in top if key.name not in hidden))]
    for name in sections_for(command):
        section = read_section(SECTIONS[name])
        lines += ["", *textwrap.wrap(f"{name}: {section.doc} {about.get(name, '')}", 100, subsequent_indent="  ")]
        lines += _key_lines(f"{name}.", section.keys)
    return "\n".join(lines)


def _key_lines(prefix: str, keys: Iterable[Key]) -> list[str]:
    lines = []
    for key in keys:
        lines.append(f"  {prefix}{key.name}" + ("" if key.default is None else f" ({key.default})"))
        lines += textwrap.wrap(key.doc, 100, initial_indent="      ", subsequent_indent="      ")
    return lines


def sections_for(command: str) -> list[str]:
    """Sections that a command reads."""
    others = {name for names in OWN_SECTIONS.values() for name in names} - set(OWN_SECTIONS.get(command, ()))
    return [name for name in SECTIONS if name not in others and name not in REFUSED.get(command, ())]


# Hints


def hint_for(name: str, known: Sequence[str], path: str = "", *, prefix: str = "") -> str:
    """Hint for a name that is no key.

    Args:
        known: the keys of its section.
        path: the section; empty for the outermost level.
        prefix: prefix of each suggested key, such as `--` on a command line.
    """
    near = certain_hint(name, known, path, prefix=prefix)
    if near is None:
        close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
        leaves = _elsewhere(known, path)
        others = difflib.get_close_matches(name, leaves, n=1, cutoff=_CLOSE_ELSEWHERE)
        if others and (not close or _likeness(name, others[0]) > _likeness(name, close[0])):
            return f"did you mean {_one_of(leaves[others[0]], prefix)}?"
        near = f"did you mean {prefix}{close[0]}?" if close else None
    return near or f"known keys: {', '.join(known)}"


def certain_hint(name: str, known: Sequence[str], path: str = "", *, prefix: str = "") -> str | None:
    """`hint_for` a name that certainly means a key: another spelling, a key of another section, or a name of another
    engine. None for all others."""
    if path and path not in SECTIONS:
        renamed = RENAMED.get(f"{path}.{name}")
        return renamed and f"did you mean {prefix}{renamed}?"
    plain = name.replace("-", "_").lower()
    if plain in known:
        return f"did you mean {prefix}{plain}?"
    places = _elsewhere(known, path).get(plain)
    if places:
        return f"did you mean {_one_of(places, prefix)}?"
    if plain in OTHER_NAMES and (path or OTHER_NAMES[plain].split(".")[0] in known):
        section, _, leaf = OTHER_NAMES[plain].rpartition(".")
        return f"did you mean {prefix}{leaf if path and section == path else OTHER_NAMES[plain]}?"
    return REMARKS.get(plain)


def _elsewhere(known: Sequence[str], path: str) -> dict[str, list[str]]:
    """Keys of other sections, each with its dotted names.

    At the outermost level these are the sections that it has; within a section all others.
    """
    found: dict[str, list[str]] = {}
    if path and path not in SECTIONS:
        return found
    for section in sections_for(path) if path in SECTIONS else [name for name in SECTIONS if name in known]:
        if section == path:
            continue
        for name in read_section(SECTIONS[section]).names:
            found.setdefault(name, []).append(f"{section}.{name}")
    if path in SECTIONS:
        for name in read_section(RUN).names:
            found.setdefault(name, []).append(f"{name} outside of {path}")
    return found


def _one_of(places: Sequence[str], prefix: str) -> str:
    return " or ".join(f"{prefix}{place}" for place in places)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
