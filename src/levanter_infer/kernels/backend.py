"""`Backend`: the kernels of one platform behind one interface, on plain arrays.

An engine has a backend for matmuls, which the model carries, and one for attention, which the pool carries; as a rule
they are the same object. The code above asks the backend it holds and never for its name. A platform is a folder of
this package with a `backend.py`, and a line in `registry.py`.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import (
    AttentionCall,
    GroupedCall,
    IndexQueries,
    KvWrite,
    LinearCall,
    PoolShape,
    Rotation,
)
from levanter_infer.kernels.rules import ScoreRules


class Work(enum.Enum):
    """Kinds of computation of a backend."""

    MATMUL = "matmul"
    ATTENTION = "attention"


class Fuse(enum.Enum):
    """Computations that a kernel can fuse with its matmul, or with its write of keys and values."""

    NORM = "norm"
    """RMSNorm of a matmul's input."""
    GATE = "gate"
    """SwiGLU's gate of a matmul's input."""
    GATED_PAIR = "gated pair"
    """SwiGLU's gate of the results of two matmuls of one input."""
    SWIGLU = "swiglu"
    """The matmul of a gated pair's result, in the call of the pair."""
    RESIDUAL = "residual"
    """A sum with a matmul's result."""
    ROTATION = "rotation"
    """Norms and rotation of queries and keys, before keys and values are written."""


@dataclass(frozen=True)
class Platform:
    """Particulars of the devices of one kind, whichever kernels compute on them."""

    name: str = ""
    """JAX's name: cpu, gpu or tpu."""
    integers_for_floats: bool = False
    """Whether XLA's code reads parts of 16- and 8-bit floats better as integers of their width (decision 0006)."""
    sampled_rows: int | None = None
    """Rows that XLA samples together; None: all (`decode.shapes.Shapes.sampled_rows`)."""
    step_tokens: int = 256
    """Tokens of a step for which the devices need not wait for the weights, as far as is known: the default of
    `engine.max_step_tokens` follows from it."""
    mixed_tokens: int | None = None
    """Capacity of a bucket for steps of decode tokens and a short prompt, below the largest; None: there is none."""
    draft_rows: int = 128
    """Rows of a step up to which drafts are computed (`decode.speculation`): for so many it reads all weights anyway,
    and takes little longer than for one."""
    branches: bool = False
    """Whether optional work is a branch (`loops.branching`): devices decide branches by themselves, and not loops."""
    shares_memory: bool = False
    """Whether all devices of a process, and the compiler, use the same memory."""


@dataclass(frozen=True)
class Task:
    """Work that a backend is wanted for, and the circumstances that it may not be able to do it in."""

    work: Work
    device: Any
    """A `jax.Device`, or one of a topology."""
    dtype: jnp.dtype
    """Dtype of the weights, or of the pages."""
    num_devices: int = 1
    """Devices of the mesh."""
    is_sharded: bool = False
    """Whether the model is sharded over the mesh."""
    has_mods: bool = False
    """Whether there is a `score_mod` or `mask_mod`."""
    chooses_keys: bool = False
    """Whether an indexer chooses the keys of attention (`Backend.choose_keys`)."""

    @property
    def stored(self) -> str:
        """Name of what is read in `dtype`, for messages."""
        return "weights" if self.work is Work.MATMUL else "pages"


class SamplingKernels(Protocol):
    """Passes over logits f32[row, vocab], a device's part of the vocabulary, for all rows of a step together.

    Of the results only the first `num_rows` i32[] rows mean anything.
    """

    def as_read(self, logits: Array) -> Array:
        """The same logits, stored as the kernels read them. A branch or a loop that does other things with them might
        have XLA store them a second time."""
        ...

    def candidates(self, logits: Array, parts: int, num_rows: Array) -> tuple[Array, Array]:
        """Large logits of each row, f32[row, n], the largest among them, and a bound of the others, f32[row].

        Args: parts: of the vocabulary, whose candidates are taken together.
        """
        ...

    def thresholds(self, values: Array, rules: Array, num_rows: Array) -> Array:
        """The smallest logit that passes top_k and then top_p, f32[row]; NaN where the candidates do not show it.

        Args:
            values: f32[row, n], the candidates of all parts.
            rules: f32[row, 7]: peak, inverse and floor as in `weight_sums`, the bound of other logits, the weight of
                all tokens (where top_p applies without top_k), top_k (0: off) and top_p (1: off).
        """
        ...

    def reached(self, logits: Array, terms: Array, pivots: Array, rows: Array) -> Array:
        """The weight of the logits from each pivot up, f32[row, n], of rows in the mask `rows`.

        Args:
            terms: as in `weight_sums`.
            pivots: i32[row, n], keys in the order of logits (`sampling_filters.signed_keys`).
        """
        ...

    def total_weights(self, logits: Array, terms: Array, num_rows: Array) -> Array:
        """The weight of all logits of each row, f32[row]; `terms` as in `weight_sums`, without a threshold."""
        ...

    def weight_sums(self, logits: Array, terms: Array, widths: Sequence[int], num_rows: Array) -> tuple[Array, Array]:
        """Levels of sums of each row's weights e^((logit - peak) * inverse), 0 below a threshold or a floor.

        Args:
            terms: f32[row, 4]: peak, inverse, threshold of the logit and floor of the exponent.
            widths: sizes of the levels (`sampling_draw.level_widths`).
        Returns: the levels but the first, of which the last is the last column but 127, and the first; both for
            `descend`.
        """
        ...

    def descend(
        self, upper: Array, lower: Array, clocks: Array, widths: Sequence[int], num_rows: Array
    ) -> tuple[Array, Array]:
        """The choices of `sampling_draw.draw` but the last two: an entry of the second level, i32[row], and the entries
        of the first that it is the sum of, f32[row, FAN]."""
        ...


class DrawRules(NamedTuple):
    """How each row is drawn. A logit weighs e^((logit - peak) * inverse)."""

    peak: Any
    """f32[row], the largest logit."""
    inverse: Any
    """f32[row], of the temperature."""
    floor: Any
    """f32[row], the least exponent of a token that may be drawn, `MIN_EXPONENT` or more."""
    top_k: Any
    """i32[row]; 0: off."""
    top_p: Any
    """f32[row]; 1: off."""
    draws: Any
    """i32[row], 1 for rows that are drawn; the results of the others are 0."""


class DrawKey(NamedTuple):
    """The arguments of `sampling_draw.random_words`, by which the draw of each row is random."""

    seed: Any
    """u32[row, 2], high word first."""
    sample_index: Any
    """i32[row]"""
    position: Any
    """i32[row]"""


class LogitChanges(NamedTuple):
    """Changes of each row's logits before its token is chosen, in the order in which they are made: bias, penalties of
    known tokens, tokens that are impossible, masks."""

    bias_ids: Any
    """i32[row, n]; ids from the vocabulary's size on are none."""
    bias_values: Any
    """f32[row, n]"""
    repetition: Any
    """f32[row]; logits above 0 are divided by it, others multiplied, if the token is in the prompt or the output."""
    frequency: Any
    """f32[row], taken off for each occurrence in the output."""
    presence: Any
    """f32[row], taken off if the token is in the output."""
    tokens: Any
    """i32[slot, position], the known tokens of all sequences."""
    slot_ids: Any
    """i32[row]"""
    prompt_lens: Any
    """i32[row]"""
    seq_lens: Any
    """i32[row], known tokens, prompt included; 0 in rows without penalties."""
    banned_ids: Any
    """i32[row, n], tokens that are impossible; ids from the vocabulary's size on are none."""
    masks: Any
    """u32[row, word], a bit for each token that is possible, as `structured.automaton.packed`; no words: no masks."""
    masked: Any
    """bool[row], the rows that have a mask."""
    changed: Any
    """bool[row], the rows that have any change; others need not be written."""


@runtime_checkable
class RowKernels(Protocol):
    """Sampling of logits f32[row, vocab] of the whole vocabulary, with few launches: rows that want nothing of one are
    skipped within it, so that it needs no condition."""

    def as_read(self, logits: Array) -> Array:
        """The same as `SamplingKernels.as_read`."""
        ...

    def thresholds(self, logits: Array, rules: DrawRules) -> Array:
        """The smallest logit that passes top_k and then top_p, f32[row]; -inf where both are off."""
        ...

    def draw(
        self, logits: Array, rules: DrawRules, threshold: Array, key: DrawKey, sizes: Sequence[int]
    ) -> tuple[Array, Array]:
        """The token of each row, i32[row], and its log probability among the tokens that may be drawn, f32[row].

        Args:
            threshold: f32[row], the least logit of a token that may be drawn.
            sizes: of the levels of the tree of `sampling_draw.draw`, the tokens first.
        """
        ...


@dataclass(frozen=True)
class Backend(ABC):
    """One platform's kernels. Frozen and hashable: models and pools hold it as a static field."""

    platform: Platform = Platform()
    """The platform that it runs on."""

    name: ClassVar[str]
    """Its name in the configuration (`engine.matmul`, `engine.attention`)."""
    home: ClassVar[Platform | None] = None
    """The platform that its kernels were written for; None: any."""
    kernels: ClassVar[frozenset[Work]] = frozenset()
    """The work that `auto` prefers it for on `home`."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Fields of the engine's configuration that are for this backend alone."""
    fuses: ClassVar[frozenset[Fuse]] = frozenset()
    """Computations that its kernels fuse; the layers compute the rest in XLA."""
    grouped_ins: ClassVar[int] = 1
    """`grouped_linear` reads weights whose inputs are filled up with zeros to a multiple of this, on each device."""
    merges_ins: ClassVar[bool] = False
    """Whether `linear` reads weights whose several input axes are stored as one."""
    compares_tables: ClassVar[bool] = False
    """Whether tables are read and written by comparing all pairs of an index and an entry (`cache.by_pairs`)."""
    ring_bytes: ClassVar[int | None] = None
    """Fewest bytes of a device's columns of the residual stream for which the sums of tensor parallelism go around a
    ring beside the matmuls (`layers.collective_matmul`); None: they never do."""
    has_library: ClassVar[bool] = False
    """Whether a library computes the matmuls that its kernels do not, which may sum a row in an order that depends on
    the index of the row."""
    pool_order: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 4)
    """Axes of the pool: 0 layer, 1 page, 2 page offset, 3 kv pair (or slab), 4 head size (or lanes)."""

    # Choice

    @classmethod
    @abstractmethod
    def refusal(cls, task: Task) -> str | None:
        """Why this backend cannot do the work; None if it can."""

    @classmethod
    def supports(cls, task: Task) -> bool:
        """Whether this backend can do the work."""
        return cls.refusal(task) is None

    @classmethod
    def why_unavailable(cls) -> str | None:
        """Why its kernels cannot be used on their own platform, and what to do about it; None if they can."""
        return None

    def configured(self, **options) -> "Backend":
        """The same with those of `options` (fields of the configuration, and what the engine knows of its device and
        numerics) that are for it."""
        return self

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """XLA's options for a round whose matmuls and attention are all this backend's."""
        return self.required_options

    @property
    def required_options(self) -> Mapping[str, str | bool]:
        """Those of `compiler_options` without which the round does not keep its promises."""
        return {}

    # Matmuls

    @property
    def step_tokens(self) -> int:
        """As `Platform.step_tokens`, for its matmuls."""
        return self.platform.step_tokens

    @abstractmethod
    def activation_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Dtype of the residual stream of a model with weights of `dtype`."""

    @abstractmethod
    def store(self, weight: Array, num_outs: int, num_ins: int) -> Array:
        """The form in which `linear` reads weights.

        Args:
            weight: [..., out..., in...], with any axes before; may be traced.
            num_outs, num_ins: total sizes of the last axes that are outputs, and of those that are inputs.
        Returns: an array of the same shape, or packed, [..., panels, panel size].
        """

    @abstractmethod
    def store_tables(self, embeddings: Array, head: Array | None) -> tuple[Array, Array | None]:
        """The forms in which `take_rows` reads the embeddings and `linear` the head, [vocab, embed] each.

        Args: head: None: the embeddings serve as head.
        Returns: the second is None where one array still serves as both.
        """

    @abstractmethod
    def linear(self, call: LinearCall) -> list[Array]:
        """The results of `call`, [rows, out] each, in f32 or, where the kernel rounds them, in `call.dtype`. Raises:
        ValueError for dtypes that it does not multiply."""

    def halves_ring_matmuls(self) -> bool:
        """Whether two matmuls are to give the halves of a result that go around a ring in both directions, because
        they take less time than one matmul and copies of both halves."""
        return False

    @abstractmethod
    def grouped_linear(self, call: GroupedCall) -> list[Array]:
        """The results of `call`, f32[result, out] each. A group without results costs nothing. Where the weights are no
        stacks and as they were loaded, it has a gradient."""

    @abstractmethod
    def combine(self, values: Array, places: Array, weights: Array, num_rows: Array | None) -> Array:
        """`sum over i of weights[row, i] · values[places[row, i]]`, one after the other: f32[row, out].

        Args:
            values: f32[n, out]
            places: i32[row, chosen]
            weights: f32[row, chosen]
            num_rows: i32[], how many rows count; the others may give anything finite. None: all.
        """

    @abstractmethod
    def by_rows(self, compute: Callable, num_rows: Array | None, *rows: Array) -> Any:
        """`compute(*rows)`, which gives a list of arrays [row, …] for arrays [row, …] and leaves rows apart. With
        `rows_apart` a row has the same bits for any number of rows.

        Args: num_rows: i32[], how many rows count; the others may give anything. None: all, without `rows_apart`.
        """

    @property
    def rows_apart(self) -> bool:
        """Whether XLA's code computes one row after the other, so that its bits are those of the row alone
        (`engine.numerics: batch_invariant`)."""
        return False

    @property
    def block_tokens(self) -> int | None:
        """Tokens that the forward computes at a time in that mode (`decode.blocks`); None: all of a step."""
        return None

    def why_not_invariant(self, task: Task) -> str | None:
        """Why results of this work depend on what else is in the batch, with `rows_apart` and in blocks of
        `block_tokens`; None if they do not, to the bit (docs/numerics.md)."""
        return f"{self.name} rounds by the shapes of a step"

    def put_numbers(self, table: Array, row: Array, column: Array, values: Array) -> Array:
        """i32[rows, columns] with one number in each of some rows; absent rows are dropped.

        Args: row, column, values: i32[n]. Requires: no row occurs twice, but for absent ones.
        """
        return table.at[row, column].set(values, mode="drop")

    @abstractmethod
    def take_rows(self, table: Array, indices: Array, num_ins: int, dtype) -> Array:
        """Rows of stored embeddings, [..., num_ins] of `dtype`; zeros for an index out of range."""

    @abstractmethod
    def bucketed(self, compute: Callable[[int], Array], num_rows: Array, buckets: Sequence[int], zeros: Array) -> Array:
        """`compute(n)`, a matmul's first n results, for the smallest of the ascending `buckets` that holds `num_rows`;
        other rows may be anything. zeros: of the shape of `compute(buckets[-1])`."""

    @abstractmethod
    def logit_stats(self, logits: Array, num_rows: Array) -> tuple[Array, Array, Array] | None:
        """The largest logit of each row of f32[row, vocab], for which NaN is passed over; the sum of e^(logit -
        largest), which is NaN where a logit is NaN or +inf, and 0 where all are -inf; and the first index of the
        largest. None: there is no kernel for it, and sampling computes them in XLA."""

    def changed_logits(self, logits: Array, changes: LogitChanges, num_rows: Array) -> Array | None:
        """Logits f32[row, vocab] with the changes of rows that have any, of the first `num_rows`; others may be
        anything. None: there is no kernel for it, and XLA computes it."""
        return None

    def masked_best(self, logits: Array, masks: Array, masked: Array, num_rows: Array) -> tuple[Array, Array] | None:
        """The largest logit that the mask of each row allows, and the first index of it. NaN is passed over. None:
        there is no kernel for it, and XLA computes it. Args: as of `changed_logits`."""
        return None

    def likeliest(self, logits: Array, counts: Array, most: int) -> tuple[Array, Array] | None:
        """The `counts` i32[row] largest logits of each row of f32[row, vocab], the largest first and the first of equal
        ones first, f32[row, most], and their tokens, i32[row, most]; anything beyond. None: there is no kernel for it,
        and XLA computes it."""
        return None

    def sampling_kernels(self, logits: Array) -> "SamplingKernels | RowKernels | None":
        """Kernels that sample from these logits f32[row, vocab]; None: there are none, and XLA computes it."""
        return None

    # Attention and the pool

    @abstractmethod
    def pool_shape(self, shape: PoolShape) -> tuple[int, int, int, int, int]:
        """Sizes of the pool's axes, in `pool_order`."""

    @abstractmethod
    def init_pool(self, shape: PoolShape) -> Array:
        """A pool of zeros."""

    def rotates(self, rotation: Rotation, q: Array, k: Array, kv_dtype: jnp.dtype) -> bool:
        """Whether `write_kv` takes this rotation of queries and keys, [T, heads, D] each. Requires:
        `Fuse.ROTATION`."""
        return Fuse.ROTATION in self.fuses

    def scale_in_queries(self, rules: ScoreRules) -> tuple[float, ScoreRules]:
        """A factor that queries are to hold when `attend` gets them, and the rules of their scores then.

        A layer that rotates queries in float32 multiplies it in before they are rounded, so that it costs no bits; any
        other layer leaves it out, and calls `attend` with the rules as they were.
        """
        return 1.0, rules

    def write_plan(self, pool: Array, dests: Array) -> Any:
        """Data that `write_kv` derives from the destinations of a step's tokens, for `KvWrite.plan`. It is
        the same in every layer, and computed once. None: nothing.

        Args: dests: as in `KvWrite`.
        """
        return None

    @abstractmethod
    def write_kv(self, pool: Array, write: KvWrite) -> tuple[Array | None, Array]:
        """Store keys and values, in place where the pool is donated.

        Returns: the queries that `write` holds, rotated, in f32 or their dtype; and the pool.
        """

    @abstractmethod
    def read_kv(self, pool: Array, shape: PoolShape, pages: Array, offsets: Array) -> Array:
        """Stored keys and values of all layers, f32[layers, n, 2 * Hkv, D], heads interleaved k0, v0, k1, v1, …; of
        latents f32[layers, n, Hkv, D].
        Args: pages, offsets: i32[n], where each token is stored; anything where a page is none.
        """

    @abstractmethod
    def copy_pages(self, pool: Array, source: Array, target: Array) -> Array:
        """The pool with the pages `source` copied to `target`, i32[n] each, in all layers; absent targets are ignored.

        Requires: no page is a target twice, or both source and target.
        """

    @abstractmethod
    def choose_keys(self, call: AttentionCall, queries: IndexQueries) -> Array:
        """The keys that an indexer chooses for each token, as `AttentionCall.chosen` takes them; what padding tokens
        choose means nothing. As a rule i32[T, n] with n = `num_chosen`, or all positions that pages hold if those are
        fewer.

        Raises: ValueError for shapes or dtypes that do not fit together.
        """

    @abstractmethod
    def choice_type(
        self, num_tokens: int, max_pages: int, page_size: int, num_chosen: int, kv_dtype: jnp.dtype
    ) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the result of `choose_keys`.

        Args:
            num_tokens: of the call.
            max_pages: columns of its page table.
            num_chosen: as in `IndexQueries`; for choices that are positions.
            kv_dtype: of the pool; for choices that are copied beside its pages.
        """

    @abstractmethod
    def attend(self, call: AttentionCall) -> Array:
        """Attention, `AttentionCall.out_shape` in q's dtype, accumulated in f32; padding tokens give zeros.

        Raises: ValueError for shapes or dtypes that do not fit together, and for what this backend does not compute.
        """
