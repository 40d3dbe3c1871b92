"""Programs as compiled by libtpu, without a TPU: memory, spills, and the bundles of every loop.

    python scripts/tpu_schedule.py scripts/tpu_builders.py:decode --generation v6e page=64 seqs=64
    python scripts/tpu_schedule.py scripts/tpu_builders.py:program --topology v5e:4x4 --mesh model=8 model=8b

A builder is a function `builder(mesh, **keywords)` that gives `(function, arguments)` or `(function, arguments,
keywords of jax.jit)`. Arguments are a pytree of `jax.ShapeDtypeStruct`; those without a sharding are on every device.
It runs in a process of its own, because the compiler may end the process it runs in.

The counts are exact for a version of libtpu; `cycles` is a model (`plan/cycles.py`). Nothing here is measured: waits
for DMAs, the efficiency of HBM, time between chips and trip counts are not known.
"""

import argparse
import ast
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.tpu.bundles import Kernel, read_kernels  # noqa: E402

from levanter_infer.plan.hlo import collectives, large_moves  # noqa: E402
from levanter_infer.runtime.libtpu import (  # noqa: E402
    TARGETS,
    compiler_environment,
    hlo_flags,
    read_hlo,
    schedule_flags,
    short_of,
    topology_devices,
)

PASSES = "final_hlo-static-per-bundle", "post-delay-converter"
"""Passes of the compiler that `read_kernels` reads beside the schedule."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A compiled program, or the reason why it was refused."""

    generation: str
    seconds: float
    """Seconds of the whole process."""
    error: str | None = None
    short_of: tuple[str, float, float] | None = None
    """Memory that was exceeded (vmem, smem, hbm), MiB requested, MiB available; None for other errors."""
    kernels: tuple[Kernel, ...] = ()
    """The longest first."""
    argument_bytes: int = 0
    """Bytes per device, as the next two."""
    temporary_bytes: int = 0
    alias_bytes: int = 0
    """Bytes of arguments that are updated in place."""
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    moves: tuple[tuple[int, str, str, int], ...] = ()
    """`large_moves`"""

    def kernel(self, part: str) -> Kernel:
        """The longest kernel whose name contains `part`. Raises: ValueError if there is none."""
        found = next((kernel for kernel in self.kernels if part in kernel.name), None)
        if found is None:
            raise ValueError(f"no kernel {part!r} among {', '.join(kernel.name for kernel in self.kernels) or 'none'}")
        return found


def compile_builder(
    builder: str,
    generation: str = "v5e",
    *,
    topology: str | None = None,
    mesh: dict[str, int] | None = None,
    keep: str | None = None,
    schedules: bool = True,
    timeout_s: float = 900,
    **keywords,
) -> Schedule:
    """Compile `FILE.py:NAME` for a generation of TPU.

    Args:
        topology: such as v5e:4x4; None for the smallest one.
        mesh: size of each mesh axis, over the first devices of the topology; None for one device.
        keep: a directory that receives what libtpu writes.
        schedules: whether to have it write schedules; a whole model writes much.
        keywords: of the builder, as JSON has them.
    """
    smallest = TARGETS[generation][0]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tpu_schedule_") as scratch:
        directory = os.path.abspath(keep or scratch)
        os.makedirs(directory, exist_ok=True)
        job = dict(builder=builder, topology=topology or smallest, mesh=mesh or {"x": 1}, keywords=keywords)
        job["directory"] = directory
        report = os.path.join(directory, "report.json")
        Path(report).unlink(missing_ok=True)
        environment = compiler_environment(generation)
        environment["LIBTPU_INIT_ARGS"] = schedule_flags(directory, *PASSES) if schedules else hlo_flags(directory)
        command = [sys.executable, "-W", "ignore", __file__, "--compile", json.dumps(job), "--report", report]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Schedule(generation, time.perf_counter() - start, error=f"not compiled within {timeout_s} s")
        seconds = round(time.perf_counter() - start, 2)
        if not os.path.exists(report):
            return Schedule(generation, seconds, error=f"the compiler ended its process: {done.stderr[-3000:]}")
        fields = json.loads(Path(report).read_text())
        if "error" in fields:
            return Schedule(generation, seconds, fields["error"], short_of(fields["error"]))
        fields["moves"] = tuple(tuple(move) for move in fields["moves"])
        kernels = read_kernels(directory, generation) if schedules else []
        return Schedule(generation, seconds, kernels=tuple(kernels), **fields)


def _compile(job: dict) -> dict:
    """Fields of `Schedule` from a compiled program; runs in a process of its own."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    path, name = job["builder"].rsplit(":", 1)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    sizes = tuple(job["mesh"].values())
    devices = topology_devices(job["topology"])[: math.prod(sizes)]
    mesh = Mesh(np.asarray(devices).reshape(sizes), tuple(job["mesh"]))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or everywhere)

    try:
        with jax.set_mesh(mesh):
            function, arguments, *options = getattr(module, name)(mesh, **job["keywords"])
            traced = jax.jit(function, **(options[0] if options else {})).trace(*jax.tree.map(placed, arguments))
            compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:  # what the compiler says is the result
        return {"error": f"{type(error).__name__}: {error}"[:20_000]}
    memory, hlo = compiled.memory_analysis(), read_hlo(job["directory"])
    assert memory is not None
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "collectives": collectives(hlo),
        "moves": large_moves(hlo),
    }


def describe(schedule: Schedule, most: int = 4) -> str:
    """The schedule as text, with its `most` longest kernels."""
    lines = [f"{schedule.generation}: {'refused' if schedule.error else 'compiled'} in {schedule.seconds} s"]
    if schedule.error:
        if schedule.short_of is not None:
            space, wanted, there = schedule.short_of
            lines.append(f"{space}: {wanted:.2f} MiB wanted, {there:.2f} MiB there, {wanted - there:.2f} MiB short")
        return "\n".join([*lines, schedule.error[:1500]])
    mib = 2**20
    share = schedule.temporary_bytes / max(1, schedule.argument_bytes)
    lines.append(
        f"arguments {schedule.argument_bytes / mib:.1f} MiB ({schedule.alias_bytes / mib:.1f} in place), "
        f"temporaries {schedule.temporary_bytes / mib:.2f} MiB ({share:.2%}), "
        f"collectives {schedule.collectives or 'none'}"
    )
    for size, operation, kind, count in schedule.moves:
        lines.append(f"move: {size / mib:.1f} MiB, {operation}, {kind}, {count} times")
    for kernel in schedule.kernels[:most]:
        memory = [
            f"{space} {sizes['total'] / 2**10:.0f} KiB ({sizes.get('spill slots', 0) / 2**10:.0f} of spill slots)"
            for space, sizes in kernel.memory.items()
            if sizes
        ]
        lines.append(f"{kernel.name}: {kernel.bundles} bundles, {kernel.spills} spills, {kernel.fills} fills; "
                     + ", ".join(memory))  # fmt: skip
        main = kernel.main_loop()
        for loop in kernel.loops:
            slots = " ".join(f"{slot}={count}" for slot, count in loop.slots.items() if count)
            mark = "  " * loop.depth + ("*" if loop is main else "-")
            lines.append(
                f"{mark} {loop.first:#x}-{loop.last:#x}: {loop.bundles} bundles, {loop.cycles} cycles, "
                f"{loop.own_bundles} own, {loop.skippable} skippable, {loop.dmas} DMAs; {slots}"
            )
    return "\n".join(lines)


def literal(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile a program for a TPU and show its schedule; * = main loop.")
    parser.add_argument("builder", nargs="?", help="FILE.py:FUNCTION")
    parser.add_argument("keywords", nargs="*", help="NAME=VALUE for the builder")
    parser.add_argument("--generation", choices=TARGETS, help="default: that of the topology, or v5e")
    parser.add_argument("--topology", help="such as v5e:4x4; default: the smallest of the generation")
    parser.add_argument("--mesh", help="AXIS=SIZE,...; default: one device")
    parser.add_argument("--keep", help="directory for what libtpu writes")
    parser.add_argument("--no-schedules", action="store_true", help="memory, moves and collectives only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def main() -> int:
    arguments = _arguments()
    if arguments.compile:
        Path(arguments.report).write_text(json.dumps(_compile(json.loads(arguments.compile))))
        return 0
    generation = arguments.generation or (arguments.topology or "v5e").split(":")[0]
    mesh = arguments.mesh and {name: int(size) for name, size in (p.split("=") for p in arguments.mesh.split(","))}
    keywords: dict[str, Any] = {name: literal(value) for name, value in (w.split("=", 1) for w in arguments.keywords)}
    schedule = compile_builder(
        arguments.builder,
        generation,
        topology=arguments.topology,
        mesh=mesh,
        keep=arguments.keep,
        schedules=not arguments.no_schedules,
        **keywords,
    )
    print(json.dumps(dataclasses.asdict(schedule), indent=1) if arguments.json else describe(schedule))
    return 1 if schedule.error else 0


if __name__ == "__main__":
    sys.exit(main())
