"""The backends by name, and the platforms that they were written for. A new platform adds its line to `BACKENDS`."""

from levanter_infer.kernels.backend import Backend, Platform
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.kernels.gpu.backend import GpuBackend
from levanter_infer.kernels.tpu.backend import TpuBackend
from levanter_infer.kernels.xla.backend import ReferenceBackend, XlaBackend

BACKENDS: dict[str, type[Backend]] = {
    "reference": ReferenceBackend,
    "xla": XlaBackend,
    "cpu": CpuBackend,
    "gpu": GpuBackend,
    "tpu": TpuBackend,
}
PLATFORMS: dict[str, Platform] = {each.home.name: each.home for each in BACKENDS.values() if each.home is not None}

_INTERPRETED = "_interpret"
IMPLEMENTATIONS = (*BACKENDS, f"gpu{_INTERPRETED}", f"tpu{_INTERPRETED}")
"""Names that `make_backend` knows: the backends, and those of Pallas in its interpreter, for tests."""


def platform_of(name: str) -> Platform:
    """The platform with JAX's name for it; one without particulars for others."""
    return PLATFORMS.get(name, Platform(name))


def make_backend(name: str, platform: str | None = None) -> Backend:
    """The backend of that name, on a platform; None: on the one that it was written for.

    Raises: ValueError for a name that is not known.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f'impl="{name}" is unknown; use one of: {", ".join(IMPLEMENTATIONS)}')
    kind = BACKENDS[name.removesuffix(_INTERPRETED)]
    options: dict = {"interpret": True} if name.endswith(_INTERPRETED) else {}
    if platform is not None:
        options["platform"] = platform_of(platform)
    return kind(**options)
