"""`compile_programs`: the compiled programs of an engine; `compiler` compiles them, in a process of its own."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from levanter_infer.plan.hlo import Collective
from levanter_infer.plan.launches import StepLaunches
from levanter_infer.plan.spec import EngineSpec
from levanter_infer.plan.step_budget import StepBudget
from levanter_infer.plan.targets import Target
from levanter_infer.runtime import gpu_compiler
from levanter_infer.runtime.libtpu import compiler_environment, schedule_flags, short_of

REFUSED = 3
"""Exit status of a compiler process that refuses the spec; Python's own for an exception is another."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Sizes of a compiled program on one device, or the error of the compiler."""

    name: str
    trace_s: float = 0.0
    """Seconds of tracing and lowering."""
    compile_s: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    """Bytes of results that do not reuse a donated argument."""
    workspace_bytes: int = 0
    """Peak bytes of temporary arrays."""
    code_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    copies: tuple[tuple[int, str, str, int], ...] = ()
    """`hlo.large_moves`"""
    budgets: tuple[StepBudget, ...] = ()
    """Cycles of the parts of a step, of the round for TPUs."""
    launches: tuple[StepLaunches, ...] = ()
    """Kernels and conditions of a step, of the round for GPUs."""
    no_budget: str | None = None
    """Why there are none, if the program should have some."""
    error: str | None = None

    @property
    def short_of(self) -> tuple[str, float, float] | None:
        """`libtpu.short_of` of its error."""
        return None if self.error is None else short_of(self.error)

    @property
    def is_too_large(self) -> bool:
        """Whether it exceeds the memory of the device."""
        return self.short_of is not None and self.short_of[0] == "hbm"


class NoCompiler(ValueError):
    """This machine has no compiler for the target."""


def compile_programs(
    spec: EngineSpec, *, timeout_s: float, on_program: Callable[[CompiledProgram], None] = lambda _: None
) -> list[CompiledProgram]:
    """Compile the programs that the engine compiles before its first request.

    The last of them has an error if the compiler refused it, or ended its own process.

    Args:
        timeout_s: time limit of all programs together.
        on_program: called with each program once it is compiled.
    Raises: NoCompiler without a compiler for the target; ValueError for an invalid spec.
    """
    programs: list[CompiledProgram] = []
    with (
        tempfile.TemporaryFile("w+") as asked,
        tempfile.TemporaryFile("w+") as errors,
        tempfile.TemporaryDirectory() as dumps,
    ):
        asked.write(spec.to_json())
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "levanter_infer.plan.compiler", dumps],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment_for(spec.machine, dumps),
        )
        assert child.stdout is not None
        with contextlib.closing(child.stdout), _killed_after(child, timeout_s) as timed_out:
            for line in child.stdout:
                if line.startswith("{"):
                    programs.append(_read(line))
                    on_program(programs[-1])
            status = child.wait()
        errors.seek(0)
        said = errors.read()[-4000:].strip()
    if status == REFUSED:
        raise ValueError(said)
    if status > 0:
        raise RuntimeError(f"compiling failed; please report this:\n{said}")
    if status < 0:  # a signal, from itself or from us
        why = f"not compiled within {timeout_s:.0f} s" if timed_out() else f"the compiler ended its process: {said}"
        programs.append(CompiledProgram("round", error=why))
        on_program(programs[-1])
    return programs


@contextlib.contextmanager
def _killed_after(child: subprocess.Popen, seconds: float):
    """Kill the child after `seconds`, or at the end of the context; yields whether it timed out, as a function."""
    import threading

    over = threading.Event()

    def end() -> None:
        over.set()
        child.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield over.is_set
    finally:
        timer.cancel()
        if child.poll() is None:
            child.kill()
            child.wait()


def _read(line: str) -> CompiledProgram:
    fields = json.loads(line)
    fields["collectives"] = tuple(Collective(**each) for each in fields.get("collectives", ()))
    fields["copies"] = tuple(tuple(each) for each in fields.get("copies", ()))
    fields["budgets"] = tuple(StepBudget(**each) for each in fields.get("budgets", ()))
    fields["launches"] = tuple(StepLaunches(**each) for each in fields.get("launches", ()))
    return CompiledProgram(**fields)


def environment_for(target: Target, dumps: str | None = None) -> dict[str, str]:
    """Environment of a process that compiles for a target.

    Args: dumps: a directory into which the compiler writes HLO and schedules; None: it writes none.
    Raises: NoCompiler.
    """
    package = str(Path(__file__).resolve().parents[2])  # the package as imported here
    path = {"PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if target.chip.platform == "tpu":
        if find_spec("libtpu") is None:
            raise NoCompiler(
                "programs for TPUs are compiled by libtpu, which is not installed: pip install libtpu (it needs no "
                "TPU), or say --no-compile for the figures that need no compiler"
            )
        flags = {} if dumps is None else {"LIBTPU_INIT_ARGS": schedule_flags(dumps)}
        return compiler_environment(target.generation) | path | flags
    if target.chip.platform == "gpu":
        missing = gpu_compiler.why_missing()
        if missing is not None:
            raise NoCompiler(f"{missing}, or say --no-compile for the figures that need no compiler")
        return gpu_compiler.compiler_environment() | path
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"} | path
    if target.chip.platform == "cpu":
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={target.num_chips}"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return environment
