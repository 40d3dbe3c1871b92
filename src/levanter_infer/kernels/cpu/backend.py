"""The `cpu` backend: C++ kernels that XLA calls, for matmuls, attention and sampling.

Weights are stored in *panels* (`kernels.cpu.bindings.to_panels`), and all layers stay in one array.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.experimental.multihost_utils import process_allgather

from levanter_infer.kernels import MIN_ROWS
from levanter_infer.kernels.backend import DrawKey, DrawRules, Fuse, LogitChanges, Platform, RowKernels, Task, Work
from levanter_infer.kernels.call import AttentionCall, GroupedCall, KvWrite, LinearCall
from levanter_infer.kernels.cpu import bindings
from levanter_infer.kernels.loops import one_by_one
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.kernels.xla.index import SCORES_TOGETHER
from levanter_infer.kernels.xla.linear import as_floats

CPU = Platform("cpu", integers_for_floats=True, sampled_rows=MIN_ROWS, draft_rows=32, shares_memory=True)


@dataclass(frozen=True)
class CpuBackend(XlaBackend):
    """The C++ kernels compute in float32 and read weights and pages of float32 and bfloat16. Matmuls read panels; rows
    beyond those in use cost nothing."""

    platform: Platform = CPU
    isa: str | None = None
    """Instruction set that panels are laid out for and that computes; None: the widest (`bindings.isa`)."""
    uses_vectors: bool = True
    """Whether XLA compiles what it computes itself with vectors, and with multiplications and additions in one."""

    name = "cpu"
    home = CPU
    kernels = frozenset({Work.MATMUL, Work.ATTENTION})
    options = frozenset({"cpu_isa"})
    fuses = frozenset(Fuse)

    @classmethod
    def refusal(cls, task: Task) -> str | None:
        if task.is_sharded:
            return "the mesh shards the model, and they read full weights and pages"
        if task.device.platform != "cpu":
            return f"this engine runs on {task.device.platform}"
        missing = bindings.why_unavailable()
        if missing is not None:
            return f"the kernels cannot be used: {missing}"
        if not bindings.supports_dtype(task.dtype):
            return f"{task.stored} are {task.dtype}; the kernels read float32 and bfloat16"
        return "score_mod and mask_mod run in XLA only" if task.has_mods and task.work is Work.ATTENTION else None

    @classmethod
    def why_unavailable(cls) -> str | None:
        return bindings.why_unavailable()

    def configured(self, **options) -> "CpuBackend":
        names = {"cpu_isa": "isa", "rows_apart": "is_apart", "uses_vectors": "uses_vectors"}
        return dataclasses.replace(self, **{names[name]: value for name, value in options.items() if name in names})

    @property
    def block_tokens(self) -> int | None:
        """None: the kernels sum every row in one order, whatever the number of rows."""
        return None

    def why_not_invariant(self, task: Task) -> str | None:
        if task.work is Work.ATTENTION and task.chooses_keys:
            return SCORES_TOGETHER
        return None

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """XLA's own code is control and sampling only, hundreds of small loops that are no faster for what costs a
        third of the compilation (docs/performance.md)."""
        options: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False, **self.required_options}
        if not self.uses_vectors:
            options["xla_cpu_experimental_ynn_fusion_type"] = ""  # no library computes sums and functions of a row
        if not jax.config.read("jax_disable_most_optimizations"):
            options["xla_backend_optimization_level"] = "1"
        return options

    @property
    def required_options(self) -> Mapping[str, str | bool]:
        # No vector is as narrow, and instruction sets up to AVX have no fused multiplication and addition
        return {} if self.uses_vectors else {"xla_cpu_prefer_vector_width": "64", "xla_cpu_max_isa": "AVX"}

    @property
    def step_tokens(self) -> int:
        """Twice as many in tiles, where reading the weights takes a fifth of the time of 256 tokens' matmuls."""
        return (2 if (self.isa or bindings.isa()) == "amx_bf16" else 1) * super().step_tokens

    def activation_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """float32, which spares the kernels conversions."""
        return jnp.dtype(jnp.float32)

    def store(self, weight: Array, num_outs: int, num_ins: int) -> Array:
        if not (bindings.supports_dtype(weight.dtype) or weight.dtype == jnp.int8):
            raise ValueError(f'matmul="cpu" reads weights of float32 or bfloat16, not {weight.dtype}; use "xla"')
        lead = _lead(weight.shape, num_outs * num_ins)
        matrices = readable(weight)
        matrices = matrices if isinstance(matrices, Tracer) else np.asarray(matrices)  # JAX would copy to reshape
        return bindings.to_panels(matrices.reshape(*lead, num_outs, num_ins), isa_name=self.isa)

    def store_tables(self, embeddings: Array, head: Array | None) -> tuple[Array, Array | None]:
        """The head is stored in panels, of which rows can be taken too: a tied one is stored once."""
        if head is None:
            return self.store(embeddings, *embeddings.shape), None
        return XlaBackend(self.platform).store(embeddings, *embeddings.shape), self.store(head, *head.shape)

    def linear(self, call: LinearCall) -> list[Array]:
        return bindings.stacked_matmul(call, isa_name=self.isa)

    def grouped_linear(self, call: GroupedCall) -> list[Array]:
        return bindings.grouped_matmul(call, isa_name=self.isa)

    def combine(self, values: Array, places: Array, weights: Array, num_rows: Array | None) -> Array:
        used = jnp.int32(places.shape[0]) if num_rows is None else num_rows
        return bindings.weighted_sum(values, places, weights, used, isa_name=self.isa)

    def by_rows(self, compute: Callable, num_rows: Array | None, *rows: Array) -> Any:
        """One row after the other, because XLA's code for many may round one as it does not round another. Rows that
        do not count give zeros."""
        return one_by_one(compute, num_rows, *rows) if self.is_apart and num_rows is not None else compute(*rows)

    def take_rows(self, table: Array, indices: Array, num_ins: int, dtype) -> Array:
        if table.shape[1] == num_ins:  # of a model with a head of its own; a panel holds rows side by side
            return super().take_rows(table, indices, num_ins, dtype)
        rows = bindings.panel_rows(table, indices.reshape(-1), num_ins, isa_name=self.isa)
        return as_floats(rows, dtype).reshape(*indices.shape, num_ins)

    def bucketed(self, compute: Callable[[int], Array], num_rows: Array, buckets: Sequence[int], zeros: Array) -> Array:
        """The largest, whose rows beyond `num_rows` cost nothing."""
        return compute(buckets[-1])

    def logit_stats(self, logits: Array, num_rows: Array) -> tuple[Array, Array, Array] | None:
        return bindings.logit_stats(logits, num_rows, isa_name=self.isa)

    def changed_logits(self, logits: Array, changes: LogitChanges, num_rows: Array) -> Array | None:
        return bindings.changed_logits(logits, changes, num_rows, isa_name=self.isa)

    def masked_best(self, logits: Array, masks: Array, masked: Array, num_rows: Array) -> tuple[Array, Array] | None:
        return bindings.masked_best(logits, masks, masked, num_rows, isa_name=self.isa)

    def likeliest(self, logits: Array, counts: Array, most: int) -> tuple[Array, Array] | None:
        return bindings.likeliest(logits, counts, most, isa_name=self.isa)

    def sampling_kernels(self, logits: Array) -> RowKernels | None:
        return CpuSampling(self.isa)

    def write_kv(self, pool: Array, write: KvWrite) -> tuple[Array | None, Array]:
        """Norms, rotation and write in one call."""
        if write.rotation is None:
            return super().write_kv(pool, write)
        return bindings.place_tokens(pool, write, isa_name=self.isa)

    def _attend(self, call: AttentionCall) -> Array:
        """Attention to chosen keys is XLA's."""
        if call.chosen is not None:
            return super()._attend(call)
        return bindings.cpu_attention(_with_index_part(call), isa_name=self.isa)


@dataclass(frozen=True)
class CpuSampling:
    """`RowKernels` in C++."""

    isa: str | None = None
    """As `CpuBackend.isa`."""

    def as_read(self, logits: Array) -> Array:
        return logits

    def thresholds(self, logits: Array, rules: DrawRules) -> Array:
        return bindings.thresholds(logits, rules, isa_name=self.isa)

    def draw(
        self, logits: Array, rules: DrawRules, threshold: Array, key: DrawKey, sizes: Sequence[int]
    ) -> tuple[Array, Array]:
        return bindings.draw(logits, rules, threshold, key, sizes, isa_name=self.isa)


def readable(array: Array) -> Array:
    """The same, where this process can read all of it: what several processes have in parts, all of them gather."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array
    return array if array.is_fully_addressable or array.is_fully_replicated else process_allgather(array, tiled=True)


def _lead(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The axes before the last ones, which hold `size` entries."""
    last = len(shape)
    while math.prod(shape[last:]) < size:
        last -= 1
    return shape[:last]


def _with_index_part(call: AttentionCall) -> AttentionCall:
    """The call with zeros behind its queries for the index keys of the pool: for kernels that read whole tokens, which
    these zeros then leave out of the scores."""
    if not call.index_dim:
        return call
    return dataclasses.replace(call, q=jnp.pad(call.q, [(0, 0), (0, 0), (0, call.index_dim)]), index_dim=0)
