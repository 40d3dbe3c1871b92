"""`Backend`: which implementations suit the device that the engine runs on."""

import dataclasses
import logging
from collections.abc import Mapping

import jax

from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.config import EngineConfig, kv_dtype
from levanter_infer.kernels import cpu, linear_gpu, rpa_gpu, rpa_tpu

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Backend:
    """What `auto` stands for on this machine."""

    platform: str
    """cpu, gpu or tpu."""
    products: str
    """Of weights and activations: xla, cpu or gpu."""
    attention: str
    """xla, reference, cpu, gpu or tpu."""

    @staticmethod
    def choose(config: EngineConfig, model, *, has_mods: bool) -> "Backend":
        """The kernels written for the platform where they can do the work, and XLA's own code otherwise.

        Args:
            has_mods: whether there is a `score_mod` or a `mask_mod`, which the kernels for CPUs cannot call.
        Raises: ValueError if the configuration asks for something that this machine or this model does not allow.
        """
        pages, weights = kv_dtype(config, model), model.dtype
        cpu_attention = _cpu_misfit(pages, "pages")
        if cpu_attention is None and has_mods:
            cpu_attention = "score_mod and mask_mod run in XLA only"
        chosen = Backend(
            platform=jax.default_backend(),
            products=_resolve(
                "products",
                config.products,
                {
                    "cpu": _cpu_misfit(weights, "weights"),
                    "gpu": _gpu_misfit("weights", weights, linear_gpu.supports_dtype(weights)),
                },
            ),
            attention=_resolve(
                "attention",
                config.attention,
                {
                    "cpu": cpu_attention,
                    "gpu": _gpu_misfit("pages", pages, rpa_gpu.supports_dtype(pages)),
                    "tpu": _tpu_misfit(pages),
                },
            ),
        )
        if config.numerics == "batch_invariant" and not chosen.is_batch_invariant:
            raise ValueError(
                'engine.numerics="batch_invariant" needs the kernels for CPUs, for products and for attention; here '
                f"products={chosen.products} and attention={chosen.attention}: {cpu_attention or 'set to cpu or auto'}"
            )
        return chosen

    @property
    def is_batch_invariant(self) -> bool:
        """Whether what a sequence gets depends on it alone, to the bit (docs/numerics.md)."""
        return self.on_cpu and self.products == self.attention == "cpu"

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """How XLA compiles the round. With the kernels for CPUs its own code is control and sampling only, hundreds of
        small loops that are no faster for what costs a third of the compilation (docs/performance.md)."""
        if not self.is_batch_invariant:
            return {}
        fast = {"xla_cpu_use_fusion_emitters": False}
        return (
            fast
            if jax.config.read("jax_disable_most_optimizations")
            else {**fast, "xla_backend_optimization_level": "1"}
        )

    def prepare(self, model, *, donate: bool = False):
        """The model in the form that the device reads fastest. `donate`: its arrays may be deleted for it."""
        return model.for_cpu(self.products, donate=donate) if self.on_cpu else model.for_gpu(self.products)

    def adapt(self, shapes: Shapes) -> Shapes:
        """The sizes as the device runs them fastest."""
        return dataclasses.replace(shapes, sampled_rows=None) if self.platform == "gpu" else shapes


def _cpu_misfit(dtype, what: str) -> str | None:
    """Why the CPU kernels cannot be used, if so."""
    if jax.default_backend() != "cpu":
        return f"this engine runs on {jax.default_backend()}"
    if not cpu.available():
        return "the kernels were not built, or cannot be loaded; install a C++17 compiler and then the package again"
    if not cpu.supports_dtype(dtype):
        return f"{what} are {dtype}; the kernels read float32 and bfloat16"
    return None


def _gpu_misfit(what: str, dtype, supported: bool) -> str | None:
    """Why a kernel for GPUs cannot be used, if so."""
    if jax.default_backend() != "gpu":
        return f"this engine runs on {jax.default_backend()}"
    capability = jax.devices()[0].compute_capability
    if not capability.replace(".", "").isdigit() or float(capability) < rpa_gpu.MIN_CAPABILITY:
        return f"the device is {capability}; the kernel needs NVIDIA's compute capability {rpa_gpu.MIN_CAPABILITY}"
    if not supported:
        return f"{what} are {dtype}, which the kernel does not take"
    return None


def _tpu_misfit(pages) -> str | None:
    """Why the attention for TPUs cannot be used, if so."""
    if jax.default_backend() != "tpu":
        return f"this engine runs on {jax.default_backend()}"
    if not rpa_tpu.supports_dtype(pages):
        return f"pages are {pages}, which the kernel does not take"
    return None


def _resolve(key: str, wanted: str, misfits: dict[str, str | None]) -> str:
    """What `wanted` means, given why each kernel of our own cannot be used."""
    if wanted == "auto":
        chosen = next((name for name, misfit in misfits.items() if misfit is None), "xla")
        reasons = "; ".join(f"not {name}: {misfit}" for name, misfit in misfits.items() if misfit is not None)
        logger.info("engine.%s=auto is %s%s", key, chosen, reasons and f" ({reasons})")
        return chosen
    if misfits.get(wanted) is not None:
        raise ValueError(f'engine.{key}="{wanted}" is not possible: {misfits[wanted]}')
    return wanted
