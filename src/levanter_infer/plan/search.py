"""Does a job fit, and if not, which smallest change of one thing would make it?

Values are tried, nearest first, with the engine's own sizes; nothing is guessed from formulas.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from levanter_infer.plan.figures import Figures, figures_of
from levanter_infer.plan.job import Job
from levanter_infer.plan.targets import larger


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing to do otherwise."""

    key: str
    """Of the configuration, or `target`."""
    before: Any
    after: Any
    factor: float
    """How many times more or less it is, at least 1: the size of the change."""
    job: Job
    """With the change."""

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def misfit(job: Job, extra_bytes: int = 0) -> str | None:
    """Why a job does not fit, as far as shapes tell; None if it does.

    Args:
        extra_bytes: of a device, beside what shapes tell: workspace and code of programs.
    """
    try:
        figures = figures_of(job)
    except ValueError as error:
        return str(error)
    return misfit_of(figures, extra_bytes)


def misfit_of(figures: Figures, extra_bytes: int = 0) -> str | None:
    """`misfit`, of a job whose figures are there."""
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


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def smallest_changes(job: Job, extra_bytes: int = 0) -> list[Change]:
    """Changes of one thing with which the job fits, the smallest first; of each thing the smallest that does.

    Args:
        extra_bytes: as of `misfit`, of programs that were compiled for the job as it is.
    """
    found = [change for search in _SEARCHES if (change := search(job, extra_bytes)) is not None]
    return sorted(found, key=lambda change: change.factor)


def _fits(job: Job, extra_bytes: int) -> bool:
    return misfit(job, extra_bytes) is None


def _first(changes: Iterator[Change], extra_bytes: int) -> Change | None:
    return next((change for change in changes if _fits(change.job, extra_bytes)), None)


def _engine_change(job: Job, name: str, before: Any, after: Any, factor: float) -> Change:
    changed = dataclasses.replace(job, engine=job.engine | {name: after})
    return Change(f"engine.{name}", before, after, factor, changed)


def _now(job: Job, name: str) -> int | None:
    """The size of something, as the engine would choose it; None if it could not even do that."""
    given = job.engine.get(name)
    if given is not None:
        return given
    try:
        figures = figures_of(job)
    except ValueError:
        return getattr(job.engine_config, name)
    return figures.num_pages if name == "max_pages" else getattr(figures, name)


def _fewer(job: Job, extra_bytes: int, *, name: str, step: int = 1, least: int = 1) -> Change | None:
    """The largest multiple of `step` below what is there now with which the job fits."""
    now = _now(job, name)
    if now is None or now <= least:
        return None

    def change(count: int) -> Change:
        return _engine_change(job, name, now, count * step, now / (count * step))

    low, high = -(-least // step), (now - 1) // step
    if high < low or not _fits(change(low).job, extra_bytes):
        return None  # fewer of it never suffice, as far as the least tells
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(change(middle).job, extra_bytes) else (low, middle - 1)
    return change(low)


def _fewer_pages(job: Job, extra_bytes: int) -> Change | None:
    now = _now(job, "max_pages")
    if job.engine.get("max_pages") is None or now is None:
        return None  # the engine takes what there is
    config = job.engine_config
    length = _now(job, "max_seq_len") or 1
    least = max(config.max_seqs, math.ceil(length / (config.page_size or 16)))
    return _fewer(job, extra_bytes, name="max_pages", least=least)


def _shorter(job: Job, extra_bytes: int) -> Change | None:
    page_size = job.engine_config.page_size or 16
    return _fewer(job, extra_bytes, name="max_seq_len", step=page_size, least=page_size)


def _smaller_steps(job: Job, extra_bytes: int) -> Change | None:
    return _fewer(job, extra_bytes, name="max_step_tokens", step=16, least=job.engine_config.max_seqs)


def _more_parts(job: Job, extra_bytes: int) -> Change | None:
    now, chips = job.mesh_config, job.machine.num_chips

    def changes() -> Iterator[Change]:
        for model in (2, 4, 8, 16):
            if now.model < model and model * now.expert <= chips:
                data = min(now.data, chips // (model * now.expert))
                mesh = job.mesh | {"data": data, "model": model}
                before = {"data": now.data, "model": now.model}
                changed = dataclasses.replace(job, mesh=mesh)
                yield Change("mesh", before, {"data": data, "model": model}, model / now.model, changed)

    return _first(changes(), extra_bytes)


def _narrower_weights(job: Job, extra_bytes: int) -> Change | None:
    if job.dtype != "float32":
        return None
    changed = dataclasses.replace(job, dtype="bfloat16")
    return _first(iter([Change("model.dtype", "float32", "bfloat16", 2.0, changed)]), extra_bytes)


def _narrower_pages(job: Job, extra_bytes: int) -> Change | None:
    now = job.engine.get("kv_dtype") or job.dtype
    if now != "float32":
        return None
    return _first(iter([_engine_change(job, "kv_dtype", now, "bfloat16", 2.0)]), extra_bytes)


def _larger_target(job: Job, extra_bytes: int) -> Change | None:
    """More chips, with as many of them for a copy of the model as it takes."""
    now = job.machine

    def changes() -> Iterator[Change]:
        for target in larger(now):
            factor = target.num_chips / now.num_chips
            changed = dataclasses.replace(job, target=target.name)
            if job.mesh_config.num_devices <= target.num_chips:
                yield Change("target", now.name, target.name, factor, changed)
            more = _more_parts(changed, extra_bytes)
            if more is not None:
                after = f"{target.name} with mesh {more.after}"
                yield Change("target", now.name, after, factor * more.factor, more.job)

    return _first(changes(), extra_bytes)


_SEARCHES: tuple[Callable[[Job, int], Change | None], ...] = (
    _fewer_pages,
    functools.partial(_fewer, name="max_seqs"),
    _smaller_steps,
    _shorter,
    _more_parts,
    _narrower_pages,
    _narrower_weights,
    _larger_target,
)
"""In the order of preference among changes of one size."""
