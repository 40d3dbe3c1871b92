"""Target machines: chips and their number, with memory and rates from data sheets.

The usable memory of TPUs is the limit that libtpu 0.0.51 names when a program exceeds it.
"""

import dataclasses
import difflib
import re

from levanter_infer.runtime.memory import available_bytes

_GIB = 2**30
_TPU_NAME = re.compile(r"(v4|v5e|v5litepod|v5p|v6e)-(\d+)")
_GPU_NAME = re.compile(r"([a-z0-9-]+?)(?:x([1-9]\d*))?")
_CPU_NAME = re.compile(r"cpu(?:x([1-9]\d?))?")
_CORES_COUNT = ("v4", "v5p")
"""Generations whose slices are named by the number of cores, two on a chip."""
_FLAT = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
}
_GPU_POOL = 0.75
"""Share of a GPU's memory that JAX allocates (XLA_PYTHON_CLIENT_MEM_FRACTION)."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Memory and rates of one device. For shapes alone it replaces a `jax.Device`."""

    platform: str
    """cpu, gpu or tpu."""
    kind: str
    memory_bytes: int
    """Memory that programs can use."""
    memory_gbps: float = 0.0
    """Memory bandwidth in GB/s; 0: measured on the planning machine."""
    tflops: float = 0.0
    """Rate of bfloat16 matmuls in 10¹² operations per second; 0: measured."""
    link_gbps: float = 0.0
    """Bandwidth of a ring of such devices, both directions together, in GB/s; 0: unknown."""
    hop_us: float = 0.0
    """Latency of a message to the next device, in microseconds."""
    compute_capability: str = ""
    """Compute capability of a GPU."""


# Links of TPUs: both directions of one axis of the torus, 45 GB/s each on v4 and v5e, 90 on v5p and v6e. Of GPUs:
# NVLink, one way; PCIe on an L4.
TPUS = {
    "v4": Chip("tpu", "TPU v4", int(30.75 * _GIB), 1230, 275, 90, 1.0),
    "v5e": Chip("tpu", "TPU v5e", int(15.75 * _GIB), 820, 197, 90, 1.0),
    "v5p": Chip("tpu", "TPU v5p", int(95.74 * _GIB), 2765, 459, 180, 1.0),
    "v6e": Chip("tpu", "TPU v6e", int(31.25 * _GIB), 1640, 918, 180, 1.0),
}
GPUS = {
    "a100-40": Chip("gpu", "NVIDIA A100 40GB", int(40e9 * _GPU_POOL), 1555, 312, 300, 3.0, "8.0"),
    "a100": Chip("gpu", "NVIDIA A100 80GB", int(80e9 * _GPU_POOL), 2039, 312, 300, 3.0, "8.0"),
    "l4": Chip("gpu", "NVIDIA L4", int(24e9 * _GPU_POOL), 300, 121, 32, 5.0, "8.9"),
    "h100": Chip("gpu", "NVIDIA H100 SXM", int(80e9 * _GPU_POOL), 3350, 989, 450, 3.0, "9.0"),
    "h200": Chip("gpu", "NVIDIA H200", int(141e9 * _GPU_POOL), 4800, 989, 450, 3.0, "9.0"),
    "b200": Chip("gpu", "NVIDIA B200", int(180e9 * _GPU_POOL), 8000, 2250, 900, 3.0, "10.0"),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Connected devices of one kind."""

    name: str
    chip: Chip
    num_chips: int
    generation: str = ""
    """Generation of a TPU."""
    topology: str | None = None
    """Name of the topology for libtpu, such as v5e:4x4; it may have more chips than the target."""


def parse_target(name: str) -> Target:
    """A machine by its name: v5e-16, v5p-16 (8 chips), v6e-4, h100, h100x8, cpu, cpux4 (forced devices that share it).

    Raises: ValueError naming known targets.
    """
    if match := _CPU_NAME.fullmatch(name):
        return Target(name, Chip("cpu", "this machine's processor", available_bytes()), int(match[1] or 1))
    if match := _TPU_NAME.fullmatch(name):
        generation = "v5e" if match[1] == "v5litepod" else match[1]
        chips = int(match[2]) // (2 if generation in _CORES_COUNT else 1)
        sizes = _CUBES if generation in _CORES_COUNT else _FLAT
        if chips not in sizes:
            raise ValueError(f"target {name!r}: no such slice; expected {', '.join(slices(generation))}")
        return Target(name, TPUS[generation], chips, generation, f"{generation}:{sizes[chips]}")
    match = _GPU_NAME.fullmatch(name)
    if match and match[1] in GPUS:
        return Target(name, GPUS[match[1]], int(match[2] or 1))
    known = [*(slice for generation in TPUS for slice in slices(generation)), *GPUS, "cpu"]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    examples = ", ".join(near or ("v5e-16", "v5p-16", "v6e-4", *GPUS, "h100x8", "cpu"))
    raise ValueError(f"target {name[:80]!r} is not known; expected a machine such as {examples}")


def slices(generation: str) -> list[str]:
    """Slices of a TPU generation by name, the smallest first."""
    by_cores = generation in _CORES_COUNT
    return [f"{generation}-{chips * 2 if by_cores else chips}" for chips in (_CUBES if by_cores else _FLAT)]


def larger(target: Target) -> list[Target]:
    """Targets of the same kind with more chips, the smallest first."""
    if target.chip.platform == "tpu":
        found = [parse_target(name) for name in slices(target.generation)]
    elif target.chip.platform == "gpu":
        found = [parse_target(f"{target.name.split('x')[0]}x{n}") for n in (2, 4, 8)]
    else:
        found = []
    return [each for each in found if each.num_chips > target.num_chips]
