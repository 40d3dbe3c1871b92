"""The `gpu` backend: Pallas on Triton, for NVIDIA GPUs."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.backend import Platform, Task, Work
from levanter_infer.kernels.call import AttentionCall, LinearCall
from levanter_infer.kernels.gpu import attention, linear, plt
from levanter_infer.kernels.xla.backend import XlaBackend

GPU = Platform("gpu")


@dataclass(frozen=True)
class GpuBackend(XlaBackend):
    """Attention, and matmuls that read a layer's weights out of the stack without copying them. The pool is that of
    `xla`."""

    platform: Platform = GPU
    interpret: bool = False
    """Run by Pallas' interpreter, on any platform, slowly; for tests."""

    name = "gpu"
    home = GPU
    kernels = frozenset({Work.MATMUL, Work.ATTENTION})

    @classmethod
    def refusal(cls, task: Task) -> str | None:
        if task.num_devices > 1:
            return f"the mesh has {task.num_devices} devices, and it runs on one"
        if task.device.platform != "gpu":
            return f"this engine runs on {task.device.platform}"
        if plt is None:
            return f"jax {jax.__version__} has no Triton backend for Pallas any more; use xla, or an older jax"
        capability = task.device.compute_capability
        if not capability.replace(".", "").isdigit() or float(capability) < attention.MIN_CAPABILITY:
            return (
                f"the device is {capability}; the kernel needs NVIDIA's compute capability {attention.MIN_CAPABILITY}"
            )
        kernel = linear if task.work is Work.MATMUL else attention
        return (
            None
            if kernel.supports_dtype(task.dtype)
            else f"{task.stored} are {task.dtype}, which the kernel does not take"
        )

    def why_not_invariant(self, task: Task) -> str | None:
        """All matmuls are the kernel's, in one tile, and all of attention is in one lane."""
        return None

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        return self.required_options

    @property
    def required_options(self) -> Mapping[str, str | bool]:
        # No atomic additions, and the same code whenever the round is compiled
        return {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": "0"} if self.is_apart else {}

    def linear(self, call: LinearCall) -> list[Array]:
        """A single matrix, the head's or that of a layer which a scan has picked, is XLA's, unless rows are apart: its
        libraries may sum a row in an order that depends on its place."""
        if call.layer is None and self.is_apart:
            weights = [weight[None] for weight in call.weights]
            call = dataclasses.replace(call, weights=weights, layer=jnp.int32(0))
        return super().linear(call) if call.layer is None else linear.stacked_matmul(call, interpret=self.interpret)

    def _attend(self, call: AttentionCall) -> Array:
        return attention.gpu_attention(call, invariant=self.is_apart, interpret=self.interpret)
