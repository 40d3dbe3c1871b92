"""`Plan`: the figures, compiled programs and modelled speed of an engine, as values; `report` prints them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from levanter_infer.plan.compiled import CompiledProgram, compile_programs
from levanter_infer.plan.figures import Figures, figures_of, tile_shape_of
from levanter_infer.plan.roofline import Speed, Workload, model_speed, step_collectives
from levanter_infer.plan.search import Change, misfit, misfit_of, smallest_changes
from levanter_infer.plan.spec import EngineSpec
from levanter_infer.plan.targets import Chip

_MAX_TRIES = 4
_PAGE_SIZES = (16, 32, 64, 128, 256, 8)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and speed of an engine on a target."""

    spec: EngineSpec
    why_not: str | None
    """Reason why it does not fit; None if it fits."""
    figures: Figures | None
    """None: the engine refuses the configuration before sizes are known."""
    programs: tuple[CompiledProgram, ...]
    """Empty if nothing was compiled."""
    speed: Speed | None
    changes: tuple[Change, ...] = ()
    """Changes, each of which would make it fit, the smallest first."""
    checked: bool = False
    """Whether the first change was compiled."""

    @property
    def extra_bytes(self) -> int:
        """Memory of a device beyond that known from shapes; 0 if nothing was compiled."""
        return 0 if self.figures is None else _extra_bytes(self.figures, self.programs)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the spec has the key `job`."""
        fields = dataclasses.asdict(dataclasses.replace(self, changes=()))
        fields = {"job": fields.pop("spec"), **fields}
        figures, memory = self.figures, None
        if figures is not None:
            memory = {
                "known_bytes": figures.known_bytes,
                "programs_bytes": self.extra_bytes,
                "free_bytes": figures.memory_bytes - figures.known_bytes - self.extra_bytes,
            }
        changes = [{"key": c.key, "before": c.before, "after": c.after} for c in self.changes]
        chip = dataclasses.asdict(self.spec.machine)
        return fields | {"fits": self.why_not is None, "memory": memory, "changes": changes, "target": chip}

    def sent_in(self, bucket: int):
        """Collectives of a step of `bucket` tokens."""
        assert self.figures is not None and self.programs
        return step_collectives(self.programs[0].collectives, self.figures, bucket)


def make_plan(
    spec: EngineSpec,
    workload: Workload,
    *,
    compiles: bool,
    timeout_s: float = 3600,
    on_program: Callable[[CompiledProgram], None] = lambda _: None,
) -> Plan:
    """Plan an engine.

    Args:
        compiles: whether the programs are compiled; else figures come from shapes alone.
        timeout_s: time limit of compiling the programs of one spec.
        on_program: called with each compiled program.
    Raises: NoCompiler; ValueError for a spec that is invalid on every machine.
    """
    spec.model_types()  # an unknown model is an error, and no misfit
    compile_one = functools.partial(compile_programs, timeout_s=timeout_s, on_program=on_program)
    try:
        figures = figures_of(spec)
    except ValueError as error:
        figures, why_not = None, str(error)
    else:
        why_not = misfit_of(figures)
    programs: tuple[CompiledProgram, ...] = ()
    extra = 0
    if figures is not None and why_not is None and compiles:
        programs = tuple(compile_one(spec))
        extra = _extra_bytes(figures, programs)
        why_not = _refusal(programs) or misfit_of(figures, extra)
    one_round = next(iter(programs), None)
    collectives = one_round.collectives if one_round is not None and one_round.error is None else None
    speed = None if figures is None else model_speed(figures, _with_rates(spec), workload, collectives)
    plan = Plan(spec, why_not, figures, programs, speed)
    return plan if why_not is None else _with_changes(plan, extra, compile_one if compiles else None)


def _with_changes(plan: Plan, extra: int, compile_one: Callable[[EngineSpec], list[CompiledProgram]] | None) -> Plan:
    """The plan with changes that would make it fit; the first is compiled if `compile_one` is given."""
    too_large = plan.programs and plan.programs[-1].error and not plan.programs[-1].is_too_large
    if too_large and compile_one is not None:
        changes = _other_tiles(plan, compile_one) or _other_pages(plan.spec, compile_one)
        return dataclasses.replace(plan, changes=changes, checked=True)
    for _ in range(_MAX_TRIES):
        changes = tuple(smallest_changes(plan.spec, extra))
        if not changes or compile_one is None:
            return dataclasses.replace(plan, changes=changes)
        spec = changes[0].spec
        figures, programs = figures_of(spec), tuple(compile_one(spec))
        now = _extra_bytes(figures, programs)
        if _refusal(programs) is None and misfit(spec, now) is None:
            return dataclasses.replace(plan, changes=changes, checked=True)
        if programs[-1].error and not programs[-1].is_too_large:
            break
        extra = max(now, extra + (64 << 20))  # more than estimated
    return plan


def _other_tiles(plan: Plan, compile_one: Callable[[EngineSpec], list[CompiledProgram]]) -> tuple[Change, ...]:
    """Tiles that the compiler accepts, first for the kernels alone and then in the program, for a kernel that exceeds
    its scratch memory."""
    from levanter_infer.engine.tile_search import find_tiles

    spec, figures, short = plan.spec, plan.figures, plan.programs[-1].short_of
    if figures is None or not figures.tiles or short is None or short[0] not in ("vmem", "smem"):
        return ()
    try:
        tiles = find_tiles(tile_shape_of(spec, spec.blueprint()), max_tokens=max(figures.buckets), q_dtype=spec.dtype)
    except ValueError:  # none fits: a page of another size may
        return ()
    after = dataclasses.asdict(tiles)
    changed = dataclasses.replace(spec, engine=spec.engine | {"tiles": after})
    if after == figures.tiles or _refusal(tuple(compile_one(changed))) is not None:
        return ()
    return (Change("engine.tiles", figures.tiles, after, 1.0, changed),)


def _other_pages(spec: EngineSpec, compile_one: Callable[[EngineSpec], list[CompiledProgram]]) -> tuple[Change, ...]:
    """Another page size that compiles, for a program that is refused for another reason than the device's memory."""
    now = spec.engine_config.page_size or 16
    for size in sorted((size for size in _PAGE_SIZES if size != now), key=lambda size: max(size / now, now / size)):
        changed = dataclasses.replace(spec, engine=spec.engine | {"page_size": size})
        if misfit(changed) is None and _refusal(tuple(compile_one(changed))) is None:
            return (Change("engine.page_size", now, size, max(size / now, now / size), changed),)
    return ()


def _refusal(programs: tuple[CompiledProgram, ...]) -> str | None:
    """The compiler's reason to refuse a program, in a line."""
    last = programs[-1]
    if last.error is None:
        return None
    short = last.short_of
    if short is not None:
        space, wanted, there = short
        return f"program {last.name}: needs {wanted:.1f} MiB of {space} and has {there:.1f} MiB, says the compiler"
    return f"program {last.name} was refused: {' '.join(last.error.split())[:400]}"


def _extra_bytes(figures: Figures, programs: tuple[CompiledProgram, ...]) -> int:
    """Memory of a device for the code of all programs, workspace and results of the largest, and padding of arrays."""
    if not programs:
        return 0
    arguments = figures.known_bytes - figures.upload_bytes // 2
    short = programs[-1].short_of
    if short is not None and short[0] == "hbm":
        return max(0, int(short[1] * 2**20) - arguments)
    padding = max(0, programs[0].argument_bytes - arguments)
    work = max(program.workspace_bytes + max(0, program.output_bytes) for program in programs[:1])
    return padding + work + sum(program.code_bytes for program in programs)


def _with_rates(spec: EngineSpec) -> Chip:
    """The target's chip; the rates of this machine are measured."""
    chip = spec.machine.chip
    if chip.memory_gbps:
        return chip
    from levanter_infer.plan import probe

    return dataclasses.replace(chip, memory_gbps=probe.memory_gbps(), tflops=probe.tflops(spec.dtype))
