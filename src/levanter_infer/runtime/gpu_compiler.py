"""XLA's compiler for NVIDIA GPUs, which needs no GPU and no driver: the environment of its process, the description of
a GPU that is not there, and what it writes about a program."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from levanter_infer.runtime.dumps import last_written

NEEDS = "jax-cuda12-plugin and jax-cuda12-pjrt of jax's version, and nvidia-cuda-nvcc-cu12"
"""Packages; none of them needs a GPU."""
DRIVER = "12.8.0"
"""Version of CUDA that the absent driver is taken to support. From 12.3 on graphs hold loops and branches."""
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


class Multiprocessors(NamedTuple):
    """Sizes of a GPU that XLA's choices depend on."""

    count: int
    shared_memory: int
    """Bytes of one multiprocessor."""
    l2_cache: int
    fpus: int
    threads: int
    clock_ghz: float


GPUS = {
    "8.0": Multiprocessors(108, 167_936, 41_943_040, 64, 2048, 1.41),
    "8.9": Multiprocessors(58, 102_400, 50_331_648, 128, 1536, 2.04),
    "9.0": Multiprocessors(132, 233_472, 52_428_800, 128, 2048, 1.98),
    "10.0": Multiprocessors(148, 233_472, 132_120_576, 128, 2048, 1.965),
}
"""By compute capability: A100, L4, H100 and H200, B200; the last only with a jaxlib that knows it."""
_RESERVED = 1024
"""Bytes of shared memory that a block cannot have."""


def why_missing() -> str | None:
    """Why programs for GPUs cannot be compiled here; None if they can."""
    if not any(_exists(name) for name in _PLUGINS):
        return f"jax has no plugin for CUDA here: pip install {NEEDS} (they need no GPU)"
    if _ptxas() is None:
        return f"there is no ptxas here: pip install {NEEDS} (they need no GPU)"
    return None


def compiler_environment() -> dict[str, str]:
    """Environment of a process that compiles for an absent GPU. Requires: nothing is missing."""
    ptxas = _ptxas()
    assert ptxas is not None, why_missing()
    # Without autotuning: there is nothing to tune on.
    flags = f"--xla_gpu_cuda_data_dir={ptxas.parents[1]} --xla_gpu_autotune_level=0"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}


def describe(kind: str, capability: str, memory_bytes: int, memory_gbps: float) -> str:
    """A GPU as XLA takes it, for `jax.experimental.topologies.get_topology_desc` (`target_config`).

    Raises: ValueError for a compute capability that is not among `GPUS`.
    """
    if capability not in GPUS:
        raise ValueError(f"compute capability {capability} is not known here; expected {', '.join(GPUS)}")
    major, minor = capability.split(".")
    sizes = GPUS[capability]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {sizes.shared_memory}
  shared_memory_per_block_optin: {sizes.shared_memory - _RESERVED}
  threads_per_core_limit: {sizes.threads}
  core_count: {sizes.count}
  fpus_per_core: {sizes.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(memory_gbps * 1e9)}
  l2_cache_size: {sizes.l2_cache}
  clock_rate_ghz: {sizes.clock_ghz}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "{DRIVER}"
  runtime_version: "{DRIVER}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{kind}"
"""


class Written(NamedTuple):
    """Texts that the compiler has written about one program."""

    launches: str
    """The tree of kernels, copies, loops, branches and graphs that the host runs ("thunks")."""
    names: str
    """The HLO instruction of each of them."""
    hlo: str
    """The optimised program."""


def read_written(directory: str, name: str) -> Written:
    """The files written last about the program `name` with `dumps.dump_options`.

    Raises: FileNotFoundError if a text is missing, as with another version of the compiler.
    """

    endings = "thunk_sequence_after_thunk_passes.txt", "thunk_metadata.txt", "*gpu_after_optimizations.txt"
    return Written(*(last_written(directory, f"*.{name}.{ending}") for ending in endings))


def _ptxas() -> Path | None:
    parts = (path for part in sys.path if part for path in Path(part).glob("nvidia/cu*/bin/ptxas"))
    return next(parts, None)


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # no plugin of any platform
        return False
