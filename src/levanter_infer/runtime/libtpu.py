"""The compiler for TPUs, which needs no TPU: how a process is started for it, and what it says of too little memory."""

import os
import re
from pathlib import Path

TARGETS = {
    "v4": ("v4:2x2x1", "v4-8"),
    "v5e": ("v5e:2x2", "v5litepod-4"),
    "v5p": ("v5p:2x2x1", "v5p-8"),
    "v6e": ("v6e:2x2", "v6e-4"),
}
"""The smallest topology of each generation, and the accelerator type that libtpu expects."""
_UNITS = {"": 2**-20, "B": 2**-20, "K": 2**-10, "M": 1, "G": 2**10}
_SIZE = r"([\d.]+)([KMGB]?)"
_OUT_OF_MEMORY = (
    rf"memory space (?P<space>\w+) while allocating on stack[\s\S]*?size {_SIZE} and limit {_SIZE}",
    rf"Used {_SIZE} of {_SIZE} (?P<space>\w+)\. Exceeded",
    rf"required[^()]*\({_SIZE}\) exceeds available (?P<space>\w+) \({_SIZE}\)",
)


def compiler_environment(generation: str) -> dict[str, str]:
    """Of a process that compiles for a TPU that is not there, and needs no other device. A process of its own, because
    the compiler may end it."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": TARGETS[generation][1],
        "TPU_WORKER_HOSTNAMES": "localhost",
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def hlo_flags(directory: str) -> str:
    """Of LIBTPU_INIT_ARGS: write the optimised HLO of every program into a directory, for `read_hlo`."""
    return f"--xla_jf_dump_to={directory} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false"


def read_hlo(directory: str) -> str:
    """The HLO that was written last there.

    As libtpu writes it: XLA's own `as_text` of a compiled program fails on some for v5p and v6e, whose asynchronous
    instructions jaxlib 0.10.2 does not read ("async-update instruction should have 1 operands but sees 3").

    Raises: FileNotFoundError if there is none.
    """
    written = list(Path(directory).glob("*-TLP-hlo.txt"))
    if not written:
        raise FileNotFoundError(f"libtpu wrote no HLO into {directory}")
    return max(written, key=lambda path: path.stat().st_mtime_ns).read_text()


def short_of(error: str) -> tuple[str, float, float] | None:
    """(memory, MiB wanted, MiB there) of an error of libtpu; None if it is none of too little memory."""
    for pattern in _OUT_OF_MEMORY:
        if match := re.search(pattern, error):
            wanted, unit, limit, limit_unit = (group for group in match.groups() if group != match["space"])
            return match["space"].lower(), float(wanted) * _UNITS[unit], float(limit) * _UNITS[limit_unit]
    if match := re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\) :: .*?space=(\w+)", error):
        return match[3], int(match[1]) / 2**20, int(match[2]) / 2**20
    return None
