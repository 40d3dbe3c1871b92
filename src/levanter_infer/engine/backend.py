"""`Backend`: which implementations suit the device that the engine runs on."""

import dataclasses

import jax

from levanter_infer.engine.config import EngineConfig, kv_dtype
from levanter_infer.kernels import cpu


@dataclasses.dataclass(frozen=True)
class Backend:
    """What `auto` stands for on this machine."""

    on_cpu: bool
    products: str
    """Of weights and activations: xla or cpu."""
    attention: str
    """xla, reference or cpu."""

    @staticmethod
    def choose(config: EngineConfig, model, *, has_mods: bool) -> "Backend":
        """The kernels written for CPUs where they can do the work, and XLA's own code otherwise.

        Args:
            has_mods: whether there is a `score_mod` or a `mask_mod`, which only XLA can call.
        Raises: ValueError if the configuration asks for something that this machine or this model does not allow.
        """
        on_cpu = jax.default_backend() == "cpu"
        attention_misfit = _misfit(on_cpu, kv_dtype(config, model), "pages")
        if attention_misfit is None and has_mods:
            attention_misfit = "score_mod and mask_mod run in XLA only"
        return Backend(
            on_cpu=on_cpu,
            products=_resolve("products", config.products, _misfit(on_cpu, model.dtype, "weights")),
            attention=_resolve("attention", config.attention, attention_misfit),
        )

    def prepare(self, model, *, donate: bool = False):
        """The model in the form that the device reads fastest. `donate`: its arrays may be deleted for it."""
        return model.for_cpu(self.products, donate=donate) if self.on_cpu else model


def _misfit(on_cpu: bool, dtype, what: str) -> str | None:
    """Why the CPU kernels cannot be used, if so."""
    if not on_cpu:
        return f"this engine runs on {jax.default_backend()}"
    if not cpu.available():
        return "the kernels were not built, or cannot be loaded; install a C++17 compiler and then the package again"
    if not cpu.supports_dtype(dtype):
        return f"{what} are {dtype}; the kernels read float32 and bfloat16"
    return None


def _resolve(key: str, wanted: str, misfit: str | None) -> str:
    if wanted == "auto":
        return "cpu" if misfit is None else "xla"
    if wanted == "cpu" and misfit is not None:
        raise ValueError(f'engine.{key}="cpu" is not possible: {misfit}')
    return wanted
