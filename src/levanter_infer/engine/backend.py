"""`Backend`: which implementations suit the device that the engine runs on."""

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.config import EngineConfig, kv_dtype
from levanter_infer.engine.instructions import AUTO, Choice, choose
from levanter_infer.kernels import TPU_POOL
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.gpu import attention as rpa_gpu
from levanter_infer.kernels.gpu import linear as linear_gpu
from levanter_infer.kernels.gpu.triton import plt
from levanter_infer.kernels.tiling import Tiles
from levanter_infer.kernels.tpu import attention as rpa_tpu
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.layers.layout import Layout
from levanter_infer.runtime.hosts import Hosts

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Backend:
    """What `auto` stands for on this machine."""

    platform: str
    """cpu, gpu or tpu."""
    matmul: str
    """Of weights and activations: xla, cpu or gpu."""
    attention: str
    """xla, reference, cpu, gpu or tpu."""
    layout: Layout | None = None
    """How model and state lie on a mesh; None: on one device."""
    isa_choice: Choice | None = None
    """What the kernels for CPUs compute with; None where they compute nothing."""

    @staticmethod
    def choose(config: EngineConfig, model, *, has_mods: bool, mesh: Mesh | None = None, device=None) -> "Backend":
        """The kernels written for the platform where they can do the work, and XLA's own code otherwise.

        Args:
            has_mods: whether there is a `score_mod` or a `mask_mod`, which the kernels for CPUs cannot call.
            mesh: the devices, with the axes `data`, `model` and `expert`; None for one.
            device: what they are like, if it is not this process's: one of a topology that programs are compiled for.
        Raises: ValueError if the configuration asks for something that this machine or this model does not allow.
        """
        device = jax.devices()[0] if device is None else device
        pages, weights = kv_dtype(config, model), model.dtype
        layout = None if mesh is None else Layout.of(mesh, model.config)
        on_mesh = None if mesh is None else f"the mesh has {mesh.size} devices, and it runs on one"
        in_parts = None if layout is None or layout.is_whole else "the mesh spreads the model, and they read whole ones"
        cpu_attention = in_parts or _cpu_misfit(device, pages, "pages")
        if cpu_attention is None and has_mods:
            cpu_attention = "score_mod and mask_mod run in XLA only"
        resolved = Backend(
            platform=device.platform,
            matmul=_resolve(
                "matmul",
                config.matmul,
                {
                    "cpu": in_parts or _cpu_misfit(device, weights, "weights"),
                    "gpu": on_mesh or _gpu_misfit(device, "weights", weights, linear_gpu.supports_dtype(weights)),
                },
            ),
            attention=_resolve(
                "attention",
                config.attention,
                {
                    "cpu": cpu_attention,
                    "gpu": on_mesh or _gpu_misfit(device, "pages", pages, rpa_gpu.supports_dtype(pages)),
                    "tpu": _tpu_misfit(device, pages),
                },
            ),
            layout=layout,
        )
        chosen = resolved._with_instructions(config, weights, pages)
        if config.tiles is not None and chosen.attention not in TPU_POOL:
            raise ValueError(
                f"engine.tiles is for the attention of TPUs, and here attention={chosen.attention}; leave it out"
            )
        if config.numerics == "batch_invariant" and model.config.num_experts is not None:
            raise ValueError(
                'engine.numerics="batch_invariant" is not possible for a model with experts: norms and routing in XLA '
                "round by the size of the step; use default"
            )
        if mesh is not None and config.preempt == "offload":
            raise ValueError(
                f'engine.preempt="offload" moves pages of one device, and the mesh has {mesh.size}; use "recompute"'
            )
        if config.numerics == "batch_invariant" and not chosen.is_batch_invariant:
            raise ValueError(
                'engine.numerics="batch_invariant" needs the kernels for CPUs, for matmuls and for attention; here '
                f"matmul={chosen.matmul} and attention={chosen.attention}: {cpu_attention or 'set to cpu or auto'}"
            )
        return chosen

    def _with_instructions(self, config: EngineConfig, weights, pages) -> "Backend":
        """The same with the instruction set for weights and pages of these dtypes."""
        if "cpu" not in (self.matmul, self.attention):
            if config.cpu_isa != AUTO:
                raise ValueError(
                    f'engine.cpu_isa="{config.cpu_isa}" is for the kernels for CPUs, and here matmul={self.matmul} '
                    f"and attention={self.attention} ({self.isa_reason}); leave it out"
                )
            return self
        choice = choose(config.cpu_isa, weights if self.matmul == "cpu" else pages)
        return dataclasses.replace(self, isa_choice=choice)

    def agreed(self, hosts: Hosts | None) -> "Backend":
        """The same with the instruction set of process 0, whatever this one has measured: a job has one.

        Raises: ValueError if this processor does not have it.
        """
        decided = self.isa if hosts is None else hosts.decide("engine.cpu_isa", self.isa)
        if decided == self.isa or self.isa is None or decided is None:
            return self
        if decided not in cpu.isas():
            raise ValueError(
                f"process 0 computes with engine.cpu_isa={decided}, and this processor has {', '.join(cpu.isas())}; "
                "set engine.cpu_isa to one that all processors of the job have"
            )
        return dataclasses.replace(self, isa_choice=Choice(decided))

    @property
    def isa(self) -> str | None:
        """The instruction set of the kernels for CPUs; None where they compute nothing."""
        return None if self.isa_choice is None else self.isa_choice.isa

    @property
    def isa_reason(self) -> str:
        """Why `isa` is what it is, in words."""
        if self.isa_choice is not None:
            return self.isa_choice.reason
        missing = cpu.why_unavailable() if self.on_cpu else None
        return "the kernels for CPUs are not used" if missing is None else f"the kernels cannot be used: {missing}"

    @property
    def is_batch_invariant(self) -> bool:
        """Whether what a sequence gets depends on it alone, to the bit (docs/numerics.md)."""
        return self.on_cpu and self.matmul == self.attention == "cpu"

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
        """The model where the devices have it, in the form that they read fastest. `donate`: its arrays may be deleted
        for it."""
        if self.layout is None:
            return self._as_read(model, donate)
        if self.layout.is_whole:
            return self.layout.place(self._as_read(model, donate), donate=donate)
        return self._as_read(model if model.is_sharded else self.layout.fit_model(model, donate=donate), donate)

    def prepared_types(self, types):
        """The types of `prepare`'s result, of those of the model."""
        if self.layout is None:
            return jax.eval_shape(self.prepare, types)
        fitted = types if self.layout.is_whole else self.layout.fit_model(types)
        return self.layout.types(jax.eval_shape(self._as_read, fitted))

    def _as_read(self, model, donate: bool = False):
        if not self.on_cpu:
            return model.for_gpu(self.matmul)
        return model.for_cpu(self.matmul, isa=self.isa, donate=donate)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices by axis of the mesh."""
        return {} if self.layout is None else dict(self.layout.mesh.shape)

    @property
    def num_shards(self) -> int:
        """Engines side by side, along `data`."""
        return 1 if self.layout is None else self.layout.num_shards

    @property
    def spans_hosts(self) -> bool:
        """Whether the mesh has devices of several processes."""
        return self.layout is not None and self.layout.spans_hosts

    def put(self, tree):
        """Arrays of the host on the device, or on all devices of the mesh."""
        return jax.device_put(tree) if self.layout is None else self.layout.place(tree, stacked=True)

    def attention_spec(self, shapes: Shapes, score_mod, mask_mod, tiles: Tiles | None = None) -> AttentionSpec:
        """How attention is computed. The functions see the heads' numbers in the model on every device."""
        if self.layout is not None:
            head_index = self.layout.head_index
            score_mod = score_mod and (lambda s, q, kv, head, own=score_mod: own(s, q, kv, head_index(head)))
            mask_mod = mask_mod and (lambda q, kv, head, own=mask_mod: own(q, kv, head_index(head)))
        return AttentionSpec(
            impl=self.attention,
            score_mod=score_mod,
            mask_mod=mask_mod,
            max_seq_len=shapes.max_seq_len,
            tiles=tiles,
            isa=self.isa if self.attention == "cpu" else None,
        )

    def token_values(self, config, dtype) -> int:
        """Numbers of `dtype` that one layer stores for a token in the memory of one device; the devices of a CPU share
        it."""
        heads = config.num_kv_heads if self.layout is None else self.layout.kv_heads
        values = KvPages.token_values(heads, config.head_dim, dtype, for_tpu=self.attention in TPU_POOL)
        return values * (self._local_parts if self.on_cpu else 1)

    def device_bytes(self, tree) -> int:
        """Bytes that arrays of these types take in the memory of one device. The devices of a CPU share it."""

        def size(leaf) -> int:
            if self.layout is None:
                return leaf.size * leaf.dtype.itemsize
            share = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            return share * self._local_parts if self.on_cpu else share

        return sum(map(size, jax.tree.leaves(tree)))

    @property
    def _local_parts(self) -> int:
        """Devices of the mesh that are this process's; all of one that is not there."""
        if self.layout is None:
            return 1
        mesh = self.layout.mesh
        return len(mesh.local_devices) if isinstance(mesh, Mesh) else mesh.size

    def adapt(self, shapes: Shapes) -> Shapes:
        """The sizes as the device runs them fastest."""
        return shapes if self.on_cpu else dataclasses.replace(shapes, sampled_rows=None)


def _cpu_misfit(device, dtype, what: str) -> str | None:
    """Why the CPU kernels cannot be used, if so."""
    if device.platform != "cpu":
        return f"this engine runs on {device.platform}"
    reason = cpu.why_unavailable()
    if reason is not None:
        _warn_of_missing_kernels(reason)
        return f"the kernels cannot be used: {reason}"
    if not cpu.supports_dtype(dtype):
        return f"{what} are {dtype}; the kernels read float32 and bfloat16"
    return None


@functools.cache  # once
def _warn_of_missing_kernels(reason: str) -> None:
    logger.warning(
        "the C++ kernels for CPUs cannot be used, and without them decoding is 3 to 6 times slower: %s", reason
    )


def _gpu_misfit(device, what: str, dtype, supported: bool) -> str | None:
    """Why a kernel for GPUs cannot be used, if so."""
    if device.platform != "gpu":
        return f"this engine runs on {device.platform}"
    if plt is None:
        return f"jax {jax.__version__} has no Triton backend for Pallas any more; use xla, or an older jax"
    capability = device.compute_capability
    if not capability.replace(".", "").isdigit() or float(capability) < rpa_gpu.MIN_CAPABILITY:
        return f"the device is {capability}; the kernel needs NVIDIA's compute capability {rpa_gpu.MIN_CAPABILITY}"
    if not supported:
        return f"{what} are {dtype}, which the kernel does not take"
    return None


def _tpu_misfit(device, pages) -> str | None:
    """Why the attention for TPUs cannot be used, if so."""
    if device.platform != "tpu":
        return f"this engine runs on {device.platform}"
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
