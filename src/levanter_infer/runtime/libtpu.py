"""libtpu as a compiler, which needs no TPU: the environment of its process, and its out-of-memory errors."""

import os
import re

from levanter_infer.runtime.dumps import last_written

TARGETS = {
    "v4": ("v4:2x2x1", "v4-8"),
    "v5e": ("v5e:2x2", "v5litepod-4"),
    "v5p": ("v5p:2x2x1", "v5p-8"),
    "v6e": ("v6e:2x2", "v6e-4"),
}
"""The smallest topology of each generation, and its accelerator type for libtpu."""
_UNITS = {"": 2**-20, "B": 2**-20, "K": 2**-10, "M": 1, "G": 2**10}
_SIZE = r"([\d.]+)([KMGB]?)"
_OUT_OF_MEMORY = (
    rf"memory space (?P<space>\w+) while allocating on stack[\s\S]*?size {_SIZE} and limit {_SIZE}",
    rf"Used {_SIZE} of {_SIZE} (?P<space>\w+)\. Exceeded",
    rf"required[^()]*\({_SIZE}\) exceeds available (?P<space>\w+) \({_SIZE}\)",
)


def compiler_environment(generation: str) -> dict[str, str]:
    """Environment of a process that compiles for an absent TPU and needs no other device. A process of its own, because
    the compiler may end it."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": TARGETS[generation][1],
        "TPU_WORKER_HOSTNAMES": "localhost",
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def topology_devices(topology: str) -> list:
    """The `jax.Device`s of a topology such as v4:2x2x1 to compile for, one for each chip, in a process with
    `compiler_environment`."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, "tpu", **topology_options(topology)).devices)


def topology_options(topology: str) -> dict[str, str]:
    """Options of a topology with which a chip is one device, as on a machine. A v4 has one for each of its two cores
    otherwise."""
    return {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}


def hlo_flags(directory: str, *, llo: bool = False) -> str:
    """LIBTPU_INIT_ARGS that write the optimised HLO of every program into a directory, for `read_hlo`."""
    return f"--xla_jf_dump_to={directory} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text={str(llo).lower()}"


def schedule_flags(directory: str, *passes: str) -> str:
    """`hlo_flags` that write the schedule of every instruction as well, for `plan.bundles.Schedules`. Args: passes: of
    the compiler, whose results they write too."""
    return (
        f"{hlo_flags(directory, llo=True)} --xla_jf_emit_annotations=true "
        f"--xla_jf_dump_llo_pass_label_regex={'|'.join(['final_bundles', *passes])}"
    )


def read_hlo(directory: str) -> str:
    """The last HLO that libtpu has written there.

    XLA's own `as_text` of a compiled program fails on some for v5p and v6e, whose asynchronous
    instructions jaxlib 0.10.2 does not read ("async-update instruction should have 1 operands but sees 3").

    Raises: FileNotFoundError if there is none.
    """
    return last_written(directory, "*-TLP-hlo.txt")


def read_estimates(directory: str) -> str:
    """The last program that was written there with `dumps.dump_options`. Raises: FileNotFoundError if there is none."""
    return last_written(directory, "*.after_codegen.txt")


def short_of(error: str) -> tuple[str, float, float] | None:
    """(memory space, MiB requested, MiB available) of an out-of-memory error of libtpu; None for another error."""
    for pattern in _OUT_OF_MEMORY:
        if match := re.search(pattern, error):
            wanted, unit, limit, limit_unit = (group for group in match.groups() if group != match["space"])
            return match["space"].lower(), float(wanted) * _UNITS[unit], float(limit) * _UNITS[limit_unit]
    if match := re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\) :: .*?space=(\w+)", error):
        return match[3], int(match[1]) / 2**20, int(match[2]) / 2**20
    return None
