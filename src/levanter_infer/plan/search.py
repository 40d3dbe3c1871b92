"""Whether an engine fits its target, and the smallest change of one value with which it would.

Values are tried, nearest first, with the engine's own sizes; no formula estimates them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from levanter_infer.plan.figures import Figures, figures_of
from levanter_infer.plan.spec import EngineSpec
from levanter_infer.plan.targets import larger
from levanter_infer.runtime.memory import gib


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of one value."""

    key: str
    """Key of the configuration, or `target`."""
    before: Any
    after: Any
    factor: float
    """Size of the change: quotient of the larger and the smaller value, at least 1."""
    spec: EngineSpec
    """The engine with the change."""

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def misfit(spec: EngineSpec, extra_bytes: int = 0) -> str | None:
    """Reason why an engine does not fit, as far as shapes tell; None if it fits.

    Args:
        extra_bytes: memory of a device for workspace and code of programs.
    """
    try:
        figures = figures_of(spec)
    except ValueError as error:
        return str(error)
    return misfit_of(figures, extra_bytes)


def misfit_of(figures: Figures, extra_bytes: int = 0) -> str | None:
    """`misfit` of known figures."""
    wanted, there = figures.known_bytes + extra_bytes, figures.memory_bytes
    if wanted > there:
        return (
            f"a device needs {gib(wanted)} and has {gib(there)}: weights {gib(figures.weights_bytes)}, pages "
            f"{gib(figures.pool_bytes)}, tables {gib(figures.tables_bytes + figures.upload_bytes)}, programs "
            f"{gib(extra_bytes)}"
        )
    if figures.num_pages < figures.seq_pages:
        return (
            f"a sequence of engine.max_seq_len={figures.max_seq_len} takes {figures.seq_pages} pages, and there are "
            f"{figures.num_pages}: requests of that length would be refused"
        )
    return None


def smallest_changes(spec: EngineSpec, extra_bytes: int = 0) -> list[Change]:
    """Changes of one value with which the engine fits, the smallest first; for each key the smallest that does.

    Args:
        extra_bytes: as in `misfit`, for the programs of the unchanged engine.
    """
    found = [change for search in _SEARCHES if (change := search(spec, extra_bytes)) is not None]
    return sorted(found, key=lambda change: change.factor)


def _fits(spec: EngineSpec, extra_bytes: int) -> bool:
    return misfit(spec, extra_bytes) is None


def _first(changes: Iterator[Change], extra_bytes: int) -> Change | None:
    return next((change for change in changes if _fits(change.spec, extra_bytes)), None)


def _engine_change(spec: EngineSpec, name: str, before: Any, after: Any, factor: float) -> Change:
    changed = dataclasses.replace(spec, engine=spec.engine | {name: after})
    return Change(f"engine.{name}", before, after, factor, changed)


def _now(spec: EngineSpec, name: str) -> int | None:
    """The size that the engine would choose; None if it cannot choose one."""
    given = spec.engine.get(name)
    if given is not None:
        return given
    try:
        figures = figures_of(spec)
    except ValueError:
        return getattr(spec.engine_config, name)
    return figures.num_pages if name == "max_pages" else getattr(figures, name)


def _fewer(spec: EngineSpec, extra_bytes: int, *, name: str, step: int = 1, least: int = 1) -> Change | None:
    """The largest multiple of `step` below the current value with which the engine fits."""
    now = _now(spec, name)
    if now is None or now <= least:
        return None

    def change(count: int) -> Change:
        return _engine_change(spec, name, now, count * step, now / (count * step))

    low, high = -(-least // step), (now - 1) // step
    if high < low or not _fits(change(low).spec, extra_bytes):
        return None  # not even the least value suffices
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(change(middle).spec, extra_bytes) else (low, middle - 1)
    return change(low)


def _fewer_pages(spec: EngineSpec, extra_bytes: int) -> Change | None:
    now = _now(spec, "max_pages")
    if spec.engine.get("max_pages") is None or now is None:
        return None  # the engine takes as many as fit
    config = spec.engine_config
    length = _now(spec, "max_seq_len") or 1
    least = max(config.max_seqs, math.ceil(length / (config.page_size or 16)))
    return _fewer(spec, extra_bytes, name="max_pages", least=least)


def _shorter(spec: EngineSpec, extra_bytes: int) -> Change | None:
    page_size = spec.engine_config.page_size or 16
    return _fewer(spec, extra_bytes, name="max_seq_len", step=page_size, least=page_size)


def _smaller_steps(spec: EngineSpec, extra_bytes: int) -> Change | None:
    return _fewer(spec, extra_bytes, name="max_step_tokens", step=16, least=spec.engine_config.max_seqs)


def _more_parts(spec: EngineSpec, extra_bytes: int) -> Change | None:
    now, chips = spec.mesh_config, spec.machine.num_chips

    def changes() -> Iterator[Change]:
        for model in (2, 4, 8, 16):
            if now.model < model and model * now.expert <= chips:
                data = min(now.data, chips // (model * now.expert))
                mesh = spec.mesh | {"data": data, "model": model}
                before = {"data": now.data, "model": now.model}
                changed = dataclasses.replace(spec, mesh=mesh)
                factor = max(model / now.model, now.data / data)
                yield Change("mesh", before, {"data": data, "model": model}, factor, changed)

    return _first(changes(), extra_bytes)


def _fewer_parts(spec: EngineSpec, extra_bytes: int) -> Change | None:
    """For a mesh larger than the target: one of its axes as long as there are chips for. Or no expert parallelism."""
    mesh, chips = spec.mesh_config, spec.machine.num_chips

    def changes() -> Iterator[Change]:
        for axis in ("data", "model", "expert"):
            now = getattr(mesh, axis)
            most = chips // (mesh.num_devices // now)
            if axis == "expert" and most >= now:
                most = 1
            if 0 < most < now:
                changed = dataclasses.replace(spec, mesh=spec.mesh | {axis: most})
                yield Change(f"mesh.{axis}", now, most, now / most, changed)

    return _first(changes(), extra_bytes)


def _narrower_weights(spec: EngineSpec, extra_bytes: int) -> Change | None:
    if spec.dtype != "float32":
        return None
    changed = dataclasses.replace(spec, dtype="bfloat16")
    return _first(iter([Change("model.dtype", "float32", "bfloat16", 2.0, changed)]), extra_bytes)


def _quantized_weights(spec: EngineSpec, extra_bytes: int) -> Change | None:
    if spec.engine.get("weight_dtype") is not None:
        return None
    factor = 4.0 if spec.dtype == "float32" else 2.0
    return _first(iter([_engine_change(spec, "weight_dtype", spec.dtype, "int8", factor)]), extra_bytes)


def _narrower_pages(spec: EngineSpec, extra_bytes: int) -> Change | None:
    now = spec.engine.get("kv_dtype") or spec.dtype
    if now != "float32":
        return None
    return _first(iter([_engine_change(spec, "kv_dtype", now, "bfloat16", 2.0)]), extra_bytes)


def _larger_target(spec: EngineSpec, extra_bytes: int) -> Change | None:
    """More chips, with as much tensor parallelism as the model needs."""
    now = spec.machine

    def changes() -> Iterator[Change]:
        for target in larger(now):
            factor = target.num_chips / now.num_chips
            changed = dataclasses.replace(spec, target=target.name)
            if spec.mesh_config.num_devices <= target.num_chips:
                yield Change("target", now.name, target.name, factor, changed)
            more = _more_parts(changed, extra_bytes)
            if more is not None:
                after = f"{target.name} with mesh {more.after}"
                yield Change("target", now.name, after, factor * more.factor, more.spec)

    return _first(changes(), extra_bytes)


_SEARCHES: tuple[Callable[[EngineSpec, int], Change | None], ...] = (
    _fewer_pages,
    functools.partial(_fewer, name="max_seqs"),
    _smaller_steps,
    _shorter,
    _more_parts,
    _fewer_parts,
    _narrower_pages,
    _narrower_weights,
    _larger_target,
    _quantized_weights,
)
"""Searches in order of preference among changes of equal size."""
