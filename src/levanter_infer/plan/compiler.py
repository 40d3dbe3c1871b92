"""Compiles the programs of an engine: the spec on standard input, a JSON line for each program on standard output.

`compiled.compile_programs` starts it as a process of its own, because a compiler may end its process.
"""

import dataclasses
import json
import sys
import time

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from levanter_infer.decode.programs import Program
from levanter_infer.decode.shapes import Shapes
from levanter_infer.plan.bundles import Schedules
from levanter_infer.plan.compiled import REFUSED
from levanter_infer.plan.hlo import collectives_of, large_moves
from levanter_infer.plan.launches import step_launches
from levanter_infer.plan.spec import EngineSpec
from levanter_infer.plan.step_budget import step_budgets
from levanter_infer.plan.targets import Target
from levanter_infer.runtime import gpu_compiler
from levanter_infer.runtime.dumps import dump_options
from levanter_infer.runtime.libtpu import read_estimates, read_hlo, topology_devices

_LOWERED = {"gpu": "cuda"}
"""JAX's names of platforms for lowering, where they are others."""


def main() -> int:
    """Returns: the exit status: 0, also if the compiler refused a program; `REFUSED` for an invalid spec."""
    spec = EngineSpec.from_json(sys.stdin.read())
    try:
        devices = devices_of(spec.machine)
        blueprint = spec.blueprint(devices)
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    layout = blueprint.backend.layout
    mesh = layout.mesh
    model, _, admission = blueprint.round_types
    programs = blueprint.programs.needed(model, admission)
    order = sorted(programs, key=lambda name: name != "round")  # it takes longest, and is refused first
    for name in order:
        fields = {"name": name, **_compile(*programs[name], mesh, spec.machine, dumps=sys.argv[1])}
        if name == "round" and "error" not in fields:
            fields |= _of_a_step(spec.machine, blueprint.shapes, dumps=sys.argv[1])
        print(json.dumps(fields), flush=True)
        if "error" in fields:
            break
    return 0


def devices_of(target: Target) -> list:
    """Devices to compile for. Raises: ValueError if the target needs devices on this machine and there are none."""
    if target.topology is not None:
        return topology_devices(target.topology)
    devices, chip = jax.devices(), target.chip  # which makes plugins known
    if chip.platform == "gpu":
        described = gpu_compiler.describe(chip.kind, chip.compute_capability, chip.memory_bytes, chip.memory_gbps)
        shape = dict(topology=f"1x1x{target.num_chips}", target_config=described)
        return list(topologies.get_topology_desc("cuda", platform="cuda", **shape).devices)
    if devices[0].platform != target.chip.platform:
        raise ValueError(
            f"programs for {target.name} are compiled where there is a {target.chip.platform}, and here is a "
            f"{devices[0].platform}; say --no-compile for the figures that need no compiler"
        )
    return devices


def _of_a_step(target: Target, shapes: Shapes, *, dumps: str) -> dict:
    """The fields of `CompiledProgram` about the steps of the round that was compiled last."""
    try:
        if target.chip.platform == "tpu":
            cycles = Schedules(dumps, target.generation).cycles
            sizes = shapes.max_seqs, shapes.buckets
            found = {"budgets": step_budgets(read_estimates(dumps), *sizes, cycles, shapes.block_tokens)}
        elif target.chip.platform == "gpu" and shapes.block_tokens is None:
            written = gpu_compiler.read_written(dumps, "jit_one_round")
            found = {"launches": step_launches(written, shapes.max_seqs, shapes.forward_tokens)}
        elif target.chip.platform == "gpu":
            blocks = f"blocks of {shapes.block_tokens} tokens (numerics=batch_invariant)"
            return {"no_budget": f"launches are not counted for a step that is a loop over {blocks}"}
        else:
            found = {}
    except (FileNotFoundError, ValueError) as error:  # another compiler writes another text; the plan does without
        return {"no_budget": str(error)}
    return {name: [dataclasses.asdict(each) for each in counted] for name, counted in found.items()}


def _compile(program: Program, arguments: tuple, mesh: Mesh, target: Target, *, dumps: str) -> dict:
    """The fields of `CompiledProgram`."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    is_tpu = target.chip.platform == "tpu"
    options = {} if target.chip.platform == "cpu" else dump_options(dumps)

    def with_sharding(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or everywhere)

    begin = time.perf_counter()
    try:
        with jax.set_mesh(mesh):
            arguments = jax.tree.map(with_sharding, arguments)
            lowered = program.lower(*arguments, platform=_LOWERED.get(target.chip.platform, target.chip.platform))
            traced = time.perf_counter()
            compiled = program.compile_lowered(lowered, **options)
    except Exception as error:  # the compiler's error is the result
        return {"error": f"{type(error).__name__}: {error}"[:20_000]}
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    hlo = read_hlo(dumps) if is_tpu else compiled.as_text() or ""
    assert memory is not None
    return {
        "trace_s": round(traced - begin, 2),
        "compile_s": round(end - traced, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "workspace_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "collectives": [dataclasses.asdict(each) for each in collectives_of(hlo)],
        "copies": large_moves(hlo),
    }


if __name__ == "__main__":
    sys.exit(main())
