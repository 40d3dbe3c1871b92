"""`BackendChoice`: which backends suit the device that the engine runs on."""

import dataclasses
import functools
import inspect
import logging
import math
import os
from collections.abc import Mapping
from platform import machine

import jax
from jax.sharding import Mesh

from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.instructions import Choice, choose, usable_isas
from levanter_infer.engine.row_audit import audit_rows, library_matmul
from levanter_infer.engine.sizes import kv_dtype, max_seq_len_of, page_bytes
from levanter_infer.kernels.backend import Backend, Platform, Task, Work
from levanter_infer.kernels.registry import BACKENDS, make_backend, platform_of
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.layers.layout import Layout
from levanter_infer.policies import CpuIsa, MatmulImpl, Numerics, PreemptionPolicy, WeightDtype
from levanter_infer.runtime.hosts import Hosts

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """The parts that an engine computes with: a backend for matmuls, one for attention, and the devices."""

    platform: Platform
    """The kind of the devices."""
    matmul_backend: Backend
    """Stores weights and computes matmuls; the model carries it."""
    attention_backend: Backend
    """Stores keys and values and computes attention; the pool carries it."""
    layout: Layout
    """Sharding of model and state over the mesh, which may have one device."""
    quantizes: bool = False
    """Whether weights of layers and of the head are stored as int8."""
    isa_choice: Choice | None = None
    """Instruction set of the kernels for CPUs; None where they compute nothing."""

    @staticmethod
    def of(platform: str, layout: Layout, *, matmul: str, attention: str) -> "BackendChoice":
        """Backends by name. Raises: ValueError for unknown names."""
        return BackendChoice(
            platform_of(platform), make_backend(matmul, platform), make_backend(attention, platform), layout
        )

    @staticmethod
    def choose(
        config: EngineConfig, model, *, has_mods: bool, mesh: Mesh | None = None, device=None
    ) -> "BackendChoice":
        """The kernels written for the platform where they can do the work, and XLA's own code otherwise.

        Args:
            has_mods: whether there is a `score_mod` or a `mask_mod`, which the kernels for CPUs cannot call.
            mesh: the devices, with some of the axes `data`, `model` and `expert`; None for a mesh of one device.
            device: a device of a topology that programs are compiled for, needed with an abstract mesh; None: the first
                of the mesh.
        Raises: ValueError if the configuration asks for something that this machine or this model does not allow.
        """
        is_invariant = config.numerics == Numerics.BATCH_INVARIANT
        layout = dataclasses.replace(Layout.of(mesh, model.config, device), sums_in_order=is_invariant)
        device = layout.mesh.devices.flat[0] if device is None else device

        def task(work: Work, dtype) -> Task:
            return Task(
                work=work,
                device=device,
                dtype=dtype,
                num_devices=layout.mesh.size,
                is_sharded=not layout.is_replicated,
                has_mods=has_mods,
                chooses_keys=model.config.chooses_keys(max_seq_len_of(config, model.config)),
            )

        matmul = task(Work.MATMUL, model.dtype)
        attention = task(Work.ATTENTION, kv_dtype(config, model))
        if not matmul.is_sharded:
            _warn_of_missing_kernels(device.platform)
        chosen = BackendChoice.of(
            device.platform,
            layout,
            matmul=_resolve(config.matmul, matmul),
            attention=_resolve(config.attention, attention),
        )
        chosen = chosen._configured(config, matmul.dtype, attention.dtype, device)
        chosen = dataclasses.replace(chosen, quantizes=config.weight_dtype == WeightDtype.INT8)
        if chosen.quantizes and "quantizes" not in inspect.signature(model.prepare).parameters:
            raise ValueError(
                f'engine.weight_dtype="int8": {type(model).__name__}.prepare takes no `quantizes`; leave it out'
            )
        if layout.mesh.size > 1 and config.preempt == PreemptionPolicy.OFFLOAD:
            raise ValueError(
                f'engine.preempt="offload" moves pages of one device, and the mesh has {layout.mesh.size}; '
                'use "recompute"'
            )
        return chosen._invariant(model, matmul, attention) if is_invariant else chosen

    def _invariant(self, model, *tasks: Task) -> "BackendChoice":
        """The same, if bits do not depend on the batch with it: in blocks of one size (`decode.blocks`), or because
        kernels compute everything but rows that XLA computes one by one.

        Args: tasks: of the backends of matmuls and of attention.
        Raises: ValueError with the reason why they do.
        """
        backends = self.matmul_backend, self.attention_backend
        refusals = [why for each, task in zip(backends, tasks, strict=True) if (why := each.why_not_invariant(task))]
        if refusals and self.platform == BACKENDS["cpu"].home and {self.matmul, self.attention} != {"cpu"}:
            raise ValueError(
                'engine.numerics="batch_invariant" needs the kernels for CPUs, for matmuls and for attention; here '
                f"matmul={self.matmul} and attention={self.attention}: "
                f"{BACKENDS['cpu'].refusal(tasks[1]) or 'set to cpu or auto'}"
            )
        if refusals:
            raise ValueError(
                f'engine.numerics="batch_invariant" is not possible with matmul={self.matmul} and '
                f"attention={self.attention} on {self.platform.name}: {refusals[0]}; use default"
            )
        if self.matmul_backend.block_tokens is not None:
            place = None
            if self.matmul_backend.has_library:
                place = library_matmul(model.config, model.dtype, *backends, quantizes=self.quantizes)
            if place is not None:
                raise ValueError(
                    f'engine.numerics="batch_invariant" is not possible for {model.config.model_type} on a GPU: XLA '
                    f"computes {place}, and its libraries may sum a row in an order that depends on its place; use "
                    "default"
                )
            return self
        audit = audit_rows(model.config, model.dtype, *backends, quantizes=self.quantizes)
        if audit.joint is not None:
            raise ValueError(
                f'engine.numerics="batch_invariant" is not possible for {model.config.model_type}: XLA computes '
                f"{audit.joint} for all tokens of a step together, and rounds by their number; use default"
            )
        if audit.by_row is None:
            return self
        if machine() not in ("x86_64", "AMD64"):
            raise ValueError(
                f'engine.numerics="batch_invariant" is not possible for {model.config.model_type} on '
                f"{machine()}: XLA computes {audit.by_row} row by row, and rounds alike in every program on "
                "x86-64 alone; use default"
            )
        return self._with_options(uses_vectors=False)

    def _configured(self, config: EngineConfig, weights, pages, device) -> "BackendChoice":
        """The same with the options of its backends: instruction set, tiles, what the device has. Args: the dtypes
        of weights and pages, and the device."""
        options: dict = {
            "rows_apart": config.numerics == Numerics.BATCH_INVARIANT,
            "compute_capability": getattr(device, "compute_capability", None),
        }
        if "tiles" in self.attention_backend.options:
            options["tiles"] = config.tiles
        elif config.tiles is not None:
            raise ValueError(
                f"engine.tiles is for the attention of TPUs, and here attention={self.attention}; leave it out"
            )
        choice = None
        if "cpu_isa" in self.matmul_backend.options | self.attention_backend.options:
            choice = choose(config.cpu_isa, weights if "cpu_isa" in self.matmul_backend.options else pages)
            options["cpu_isa"] = choice.isa
        elif config.cpu_isa != CpuIsa.AUTO:
            raise ValueError(
                f'engine.cpu_isa="{config.cpu_isa}" is for the kernels for CPUs, and here matmul={self.matmul} '
                f"and attention={self.attention} ({self.isa_reason}); leave it out"
            )
        return dataclasses.replace(self._with_options(**options), isa_choice=choice)

    def _with_options(self, **options) -> "BackendChoice":
        return dataclasses.replace(
            self,
            matmul_backend=self.matmul_backend.configured(**options),
            attention_backend=self.attention_backend.configured(**options),
        )

    @property
    def matmul(self) -> str:
        """Name of the backend of matmuls."""
        return self.matmul_backend.name

    @property
    def attention(self) -> str:
        """Name of the backend of attention."""
        return self.attention_backend.name

    def agreed(self, hosts: Hosts | None) -> "BackendChoice":
        """The same with the instruction set of process 0, whatever this one has measured: a job has one.

        Raises: ValueError if this processor does not have it.
        """
        decided = self.isa if hosts is None else hosts.broadcast("engine.cpu_isa", self.isa)
        if decided == self.isa or self.isa is None or decided is None:
            return self
        if decided not in usable_isas():
            raise ValueError(
                f"process 0 computes with engine.cpu_isa={decided}, and this processor has {', '.join(usable_isas())}; "
                "set engine.cpu_isa to one that all processors of the job have"
            )
        return dataclasses.replace(self._with_options(cpu_isa=decided), isa_choice=Choice(decided))

    @property
    def isa(self) -> str | None:
        """The instruction set of the kernels for CPUs; None where they compute nothing."""
        return None if self.isa_choice is None else self.isa_choice.isa

    @property
    def isa_reason(self) -> str:
        """Why `isa` is what it is, in words."""
        if self.isa_choice is not None:
            return self.isa_choice.reason
        home = BACKENDS["cpu"]
        missing = home.why_unavailable() if self.platform == home.home else None
        return "the kernels for CPUs are not used" if missing is None else f"the kernels cannot be used: {missing}"

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """XLA's options for the round: those of the backend that computes all of it, if there is one. What XLA_FLAGS
        says of an option holds, but for `required_options`."""
        if self.matmul_backend != self.attention_backend:
            return {}
        said = {flag.lstrip("-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
        said -= set(self.required_options)
        return {name: value for name, value in self.matmul_backend.compiler_options.items() if name not in said}

    @property
    def required_options(self) -> Mapping[str, str | bool]:
        """Those of `compiler_options` without which results do not keep the promise of `engine.numerics`."""
        return self.matmul_backend.required_options

    def prepare(self, model, *, donate: bool = False):
        """The model on the devices, stored as the backend of matmuls reads it. `donate`: its arrays may be freed."""
        if self.layout.is_replicated:
            return self.layout.place(self.as_read(model, donate), donate=donate)
        fitted = model.shard_as(self.layout) if model.is_sharded else self.layout.fit_model(model, donate=donate)
        return self.as_read(fitted, donate)

    def prepared_types(self, types):
        """The types of `prepare`'s result, of those of the model."""
        fitted = types if self.layout.is_replicated else self.layout.fit_model(types)
        return self.layout.types(jax.eval_shape(self.as_read, fitted))

    def as_read(self, model, donate: bool = False):
        """The model as the backend of matmuls reads it, wherever its arrays are; they may be traced."""
        how = {"quantizes": True} if self.quantizes else {}
        return model.prepare(self.matmul_backend, donate=donate, **how)

    def weight_dtype(self, types) -> str:
        """Dtype of the stored weights of a model, which may be quantized already."""
        is_narrow = self.quantizes or any(leaf.dtype == WeightDtype.INT8 for leaf in jax.tree.leaves(types))
        return str(WeightDtype.INT8) if is_narrow else str(types.dtype)

    def weights_bytes(self, types) -> int:
        """Bytes of the parameters of a model, quantized as here, without what a backend fills up or has twice."""
        stored = jax.eval_shape(lambda model: model.prepare(XLA, quantizes=True), types) if self.quantizes else types
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices by axis of a mesh of several devices; empty for one device."""
        return dict(self.layout.mesh.shape) if self.layout.mesh.size > 1 else {}

    @property
    def num_ranks(self) -> int:
        """Engines side by side, along `data`."""
        return self.layout.num_ranks

    @property
    def spans_hosts(self) -> bool:
        """Whether the mesh has devices of several processes."""
        return self.layout.spans_hosts

    def put(self, tree):
        """Arrays of the host on the devices of the mesh."""
        return self.layout.place(tree, stacked=True)

    def attention_spec(self, shapes: Shapes, score_mod, mask_mod) -> AttentionSpec:
        """The caller's additions to attention. The functions see the heads' numbers in the model on every device."""
        head_index = self.layout.head_index
        score_mod = score_mod and (lambda s, q, kv, head, own=score_mod: own(s, q, kv, head_index(head)))
        mask_mod = mask_mod and (lambda q, kv, head, own=mask_mod: own(q, kv, head_index(head)))
        return AttentionSpec(score_mod=score_mod, mask_mod=mask_mod, max_seq_len=shapes.max_seq_len)

    def page_bytes(self, config, page_size: int, dtype) -> dict[int | None, int]:
        """`sizes.page_bytes` in the memory of one device; the devices of a CPU share it."""
        found = page_bytes(config, page_size, dtype, self.attention_backend, self.layout.local_kv_heads)
        return {window: each * self._sharers for window, each in found.items()}

    def device_bytes(self, tree) -> int:
        """Bytes that arrays of these types take in the memory of one device. The devices of a CPU share it."""

        def size(leaf) -> int:
            share = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            return share * self._sharers

        return sum(map(size, jax.tree.leaves(tree)))

    @property
    def _sharers(self) -> int:
        """Devices of the mesh that share the memory of one: this process's, or all of a mesh that is not there."""
        if not self.platform.shares_memory:
            return 1
        mesh = self.layout.mesh
        return len(mesh.local_devices) if isinstance(mesh, Mesh) else mesh.size

    def adapt(self, shapes: Shapes) -> Shapes:
        """The sizes as the device runs them fastest, or as `engine.numerics` asks for."""
        speculation = shapes.speculation
        if speculation is not None:
            speculation = dataclasses.replace(speculation, rows=self.platform.draft_rows)
        return dataclasses.replace(
            shapes,
            speculation=speculation,
            sampled_rows=self.platform.sampled_rows,
            mixed_tokens=self.platform.mixed_tokens,
            block_tokens=self.matmul_backend.block_tokens,
        )


@functools.cache  # once
def _warn_of_missing_kernels(platform: str) -> None:
    """Log why the kernels of the platform cannot be used, if so."""
    for backend in BACKENDS.values():
        reason = backend.why_unavailable() if backend.home == platform_of(platform) else None
        if reason is not None:
            logger.warning(
                "the C++ kernels for CPUs cannot be used, and without them decoding is 3 to 6 times slower: %s", reason
            )


def _resolve(wanted: str, task: Task) -> str:
    """The name of the backend that `wanted`, a backend or auto, stands for.

    Raises: ValueError if that cannot do the work, with the reason.
    """
    key = task.work.value
    if wanted != MatmulImpl.AUTO:
        reason = BACKENDS[wanted].refusal(task)
        if reason is not None:
            raise ValueError(f'engine.{key}="{wanted}" is not possible: {reason}')
        return wanted
    refusals = {name: each.refusal(task) for name, each in BACKENDS.items() if task.work in each.kernels}
    chosen = next((name for name, reason in refusals.items() if reason is None), "xla")
    reasons = "; ".join(f"not {name}: {reason}" for name, reason in refusals.items() if reason is not None)
    logger.info("engine.%s=auto is %s%s", key, chosen, reasons and f" ({reasons})")
    return chosen
