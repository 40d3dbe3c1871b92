"""`DecodeState` and `GenState`: everything that a generation depends on, as one pytree on the device."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from levanter_infer.cache.arrays import replace
from levanter_infer.cache.cache import Cache
from levanter_infer.cache.memory import PoolSizes
from levanter_infer.cache.page_table import PageTable
from levanter_infer.cache.prefix_table import PrefixTable
from levanter_infer.cache.score_pages import ScorePages
from levanter_infer.cache.state_snapshots import StateSnapshots
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.beam_table import BeamTable, NoBeams
from levanter_infer.decode.constraints import ConstraintTable
from levanter_infer.decode.logits_mod import LogitsMod
from levanter_infer.decode.routes import RouteTable
from levanter_infer.decode.sampling import SamplingTable
from levanter_infer.decode.sequence_table import SequenceTable
from levanter_infer.decode.shapes import Shapes
from levanter_infer.kernels.backend import Backend


class Counters(eqx.Module):
    """Totals since the last reset. They wrap at 2^31; the host adds up differences."""

    steps: Int32[Array, ""]
    preemptions: Int32[Array, ""]
    """Preempted sequences."""
    recomputed: Int32[Array, ""]
    """Tokens whose stored K/V were lost by preemption."""
    prompt_tokens: Int32[Array, ""]
    """Tokens computed in chunks of more than one, recomputation included."""
    prompt_steps: Int32[Array, ""]
    """Steps that computed prompt chunks."""
    generated: Int32[Array, ""]
    draft_tokens: Int32[Array, ""]
    """Tokens proposed by speculative decoding."""
    accepted_tokens: Int32[Array, ""]
    """Those of them that were sampled, but for one that ended its sequence: each saved a step."""
    copied_pages: Int32[Array, ""]
    """Pages copied on write."""
    forks: Int32[Array, ""]
    prefix_hits: Int32[Array, ""]
    """Pages found by prefix caching instead of computed."""
    prefix_misses: Int32[Array, ""]
    """Full pages that were computed in chunks of more than one token."""
    prefix_evictions: Int32[Array, ""]
    """Pages with a new owner whose contents could still be found."""
    snapshots_kept: Int32[Array, ""]
    """States of fixed size that were kept for prefix caching."""
    snapshots_restored: Int32[Array, ""]
    """Sequences that went on from one of them."""
    snapshot_evictions: Int32[Array, ""]
    """Snapshots that were replaced while their page could still be found."""
    pages_touched: Int32[Array, ""]
    """Pages that attention reads: those of the context of every row, added up over steps."""
    pages_peak: Int32[Array, ""]
    """Most pages held at once."""

    def plus(self, **more: Array) -> "Counters":
        """These counters with `more` added, i32[] by name."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})

    @staticmethod
    def init() -> "Counters":
        return Counters(**{name: jnp.int32(0) for name in Counters.__annotations__})


class DecodeState(eqx.Module):
    """Tables without storage: sequences, their sampling parameters, and the pages they hold."""

    sequences: SequenceTable
    sampling: SamplingTable
    page_table: PageTable
    prefix: PrefixTable | None
    """None: the prefix cache is off."""
    beams: NoBeams
    """A `BeamTable` once a request has asked for beam search."""
    generated_share: Float32[Array, ""]
    """Share of the tokens it may generate that a sequence does generate: mean over recent ones; 1 at first."""
    counters: Counters
    windows: tuple[WindowPages, ...] = ()
    """As `Shapes.windows`."""
    snapshots: StateSnapshots | None = None
    """None: no states of fixed size are kept."""
    constraints: ConstraintTable | None = None
    """None: no request has asked for structured output."""

    @staticmethod
    def init(shapes: Shapes) -> "DecodeState":
        num_pages, size = shapes.num_pages, shapes.page_size
        return DecodeState(
            sequences=SequenceTable.init(shapes.num_slots, shapes.max_seq_len, shapes.num_pages, shapes.page_size),
            sampling=SamplingTable.empty(shapes.num_slots, shapes.limits),
            page_table=PageTable.init(shapes.num_pages, shapes.page_size),
            prefix=PrefixTable.init(shapes.num_pages, shapes.page_size) if shapes.prefix_cache else None,
            beams=_init_beams(shapes),
            generated_share=jnp.float32(1.0),
            counters=Counters.init(),
            windows=tuple(WindowPages.init(each.window, each.num_pages, num_pages, size) for each in shapes.windows),
            snapshots=StateSnapshots.init(shapes.num_snapshots, num_pages) if shapes.num_snapshots else None,
            constraints=shapes.constraints
            and ConstraintTable.init(shapes.constraints, shapes.limits.vocab_size, shapes.num_slots),
        )

    @property
    def num_free(self) -> Array:
        """Pages that can be allocated, i32[]: each needs a window page of every window."""
        free = self.page_table.num_free
        for each in self.windows:
            free = jnp.minimum(free, each.num_free)
        return free


def _init_beams(shapes: Shapes) -> NoBeams:
    if shapes.max_beams == 0:
        return NoBeams()
    return BeamTable.init(shapes.num_slots, shapes.max_seq_len)


def empty_cache(config, shapes: Shapes, backend: Backend, *, dtype, local_heads: Callable[[int], int] = int) -> Cache:
    """The pools of the model that `config` (a `DecoderConfig`) describes; `local_heads`: key and value heads of one
    device from those of the model, where they are sharded."""
    sizes = PoolSizes(
        num_pages=shapes.num_pages,
        page_size=shapes.page_size,
        num_slots=shapes.num_slots,
        num_snapshots=shapes.num_snapshots,
        dtype=jnp.dtype(dtype),
        backend=backend,
        local_heads=local_heads,
        windows=tuple((each.window, each.num_pages) for each in shapes.windows),
    )
    return Cache.init(config.pools, sizes)


class GenState(eqx.Module):
    """`DecodeState` and the pools that it indexes."""

    decode: DecodeState
    cache: Cache
    scores: ScorePages | None
    """None: prompts are not scored."""
    routes: RouteTable | None
    """None: the experts of tokens are not recorded."""
    logits_mod: LogitsMod | None = None

    @staticmethod
    def init(shapes: Shapes, cache: Cache, logits_mod: LogitsMod | None = None) -> "GenState":
        """Empty tables over these pools."""
        scores = shapes.scoring and ScorePages.init(
            **dataclasses.asdict(shapes.scoring),
            num_pages=shapes.num_pages,
            page_size=shapes.page_size,
            num_slots=shapes.num_slots,
            max_seq_len=shapes.max_seq_len,
        )
        routes = shapes.routing and RouteTable.init(
            shapes.routing, num_slots=shapes.num_slots, max_seq_len=shapes.max_seq_len, page_size=shapes.page_size
        )
        return GenState(DecodeState.init(shapes), cache, scores, routes, logits_mod)

    def extended(self, shapes: Shapes) -> "GenState":
        """The same state, with fresh tables for the features that `shapes` adds."""

        def is_absent(old) -> bool:
            return old is None or type(old) is NoBeams

        fresh = GenState.init(shapes, self.cache, self.logits_mod)
        return jax.tree.map(lambda old, new: new if is_absent(old) else old, self, fresh, is_leaf=is_absent)
