"""The `gpu` backend: Pallas on Triton, for NVIDIA GPUs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.backend import Fuse, LogitChanges, Platform, Task, Work
from levanter_infer.kernels.call import AttentionCall, GroupedCall, IndexQueries, KvWrite, LinearCall
from levanter_infer.kernels.gpu import attention, linear, logit_changes, plt, sampling
from levanter_infer.kernels.gpu.kv_write import rotate_and_write
from levanter_infer.kernels.gpu.logits import logit_stats
from levanter_infer.kernels.gpu.page_copies import copy_pages
from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.kernels.xla.index import SCORES_TOGETHER, Turns, xla_choose_keys

_INDEX_TURNS = Turns(4096, 64, 64)
"""Long ones, because the host decides whether there is another; scores of all heads are 64 MiB."""

GPU = Platform("gpu", step_tokens=2048, mixed_tokens=256, branches=True)


@dataclass(frozen=True)
class GpuBackend(XlaBackend):
    """Attention, and matmuls that read a layer's weights out of the stack without copying them. The pool is that of
    `xla`."""

    platform: Platform = GPU
    shared_memory: int = linear.LEAST_SHARED_MEMORY
    """Bytes of shared memory that a program can have."""
    interpret: bool = False
    """Run by Pallas' interpreter, on any platform, slowly; for tests."""

    name = "gpu"
    home = GPU
    kernels = frozenset({Work.MATMUL, Work.ATTENTION})
    fuses = frozenset(Fuse) - {Fuse.GATE, Fuse.SWIGLU}
    has_library = True

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

    def configured(self, **options) -> "GpuBackend":
        chosen, capability = super().configured(**options), options.get("compute_capability")
        if capability is None:
            return chosen
        return dataclasses.replace(chosen, shared_memory=linear.shared_memory(float(capability)))

    def why_not_invariant(self, task: Task) -> str | None:
        """All matmuls are the kernel's, in one tile, and all of attention is in one lane."""
        if task.work is Work.ATTENTION and task.chooses_keys:
            return SCORES_TOGETHER
        return None

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        # Where pool and weights take most of the memory, XLA would compute small arrays again wherever they are read,
        # in launches of their own.
        return {**self.required_options, "xla_disable_hlo_passes": "rematerialization"}

    @property
    def required_options(self) -> Mapping[str, str | bool]:
        # No atomic additions, and the same code whenever the round is compiled
        return {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": "0"} if self.is_apart else {}

    def linear(self, call: LinearCall) -> list[Array]:
        """A single matrix, the head's or that of a layer which a scan has picked, is XLA's, unless rows are apart: its
        libraries may sum a row in an order that depends on its place."""
        if call.layer is None and self.is_apart:
            norm = None if call.norm is None else (call.norm[0][None], call.norm[1])
            weights, scales = ([each[None] for each in all_] for all_ in (call.weights, call.scales))
            call = dataclasses.replace(call, weights=weights, scales=scales, norm=norm, layer=jnp.int32(0))
        if call.layer is not None:
            return linear.stacked_matmul(call, shared_memory=self.shared_memory, interpret=self.interpret)
        results = super().linear(dataclasses.replace(call, x=_normed(call), norm=None, residual=None))
        if call.is_gated_pair:
            gate, x = (each.astype(call.dtype) for each in results)
            return [linear.gated(x, gate)]
        return results if call.residual is None else [call.residual.astype(jnp.float32) + each for each in results]

    def grouped_linear(self, call: GroupedCall) -> list[Array]:
        """The norm is computed once for all groups."""
        return super().grouped_linear(dataclasses.replace(call, x=_normed(call), norm=None))

    def bucketed(self, compute: Callable[[int], Array], num_rows: Array, buckets: Sequence[int], zeros: Array) -> Array:
        """The largest: fewer rows would read the same weights, and the results of several would be copied."""
        return compute(buckets[-1])

    def logit_stats(self, logits: Array, num_rows: Array) -> tuple[Array, Array, Array] | None:
        return logit_stats(logits, interpret=self.interpret)

    def changed_logits(self, logits: Array, changes: LogitChanges, num_rows: Array) -> Array | None:
        return logit_changes.changed_logits(logits, changes, num_rows, interpret=self.interpret)

    def sampling_kernels(self, logits: Array) -> sampling.GpuSampling | None:
        return sampling.GpuSampling(self.interpret) if sampling.supports(logits) else None

    def scale_in_queries(self, rules: ScoreRules) -> tuple[float, ScoreRules]:
        return rules.with_scale_in_queries()

    def write_kv(self, pool: Array, write: KvWrite) -> tuple[Array | None, Array]:
        """Norms, rotation and write in one launch."""
        if write.rotation is None:
            return super().write_kv(pool, write)
        return rotate_and_write(pool, write, interpret=self.interpret)

    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        return copy_pages(pool, source, target, interpret=self.interpret)

    def _choose_keys(self, call: AttentionCall, queries: IndexQueries) -> Array:
        return xla_choose_keys(call, queries, _INDEX_TURNS)

    def _attend(self, call: AttentionCall) -> Array:
        return attention.gpu_attention(call, invariant=self.is_apart, interpret=self.interpret)


def _normed(call: LinearCall | GroupedCall) -> Array:
    """The input of a matmul with its norm, by XLA."""
    if call.norm is None:
        return call.x
    weight, eps = call.norm
    return linear.normed(call.x, weight if call.layer is None else weight[call.layer], eps)
