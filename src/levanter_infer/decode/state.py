"""`DecodeState` and `GenState`: everything that a generation depends on, as one pytree on the device."""

import dataclasses

import equinox as eqx
import haliax.haxtyping as ht
import jax
import jax.numpy as jnp
from haliax import NamedArray

from levanter_infer.axes import SEQ
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.named import scalar
from levanter_infer.cache.page_table import PageTable
from levanter_infer.cache.prefix_table import PrefixTable
from levanter_infer.cache.score_pages import ScorePages
from levanter_infer.decode.beam_table import BeamTable
from levanter_infer.decode.sampling import SamplingTable
from levanter_infer.decode.sequence_table import SequenceTable
from levanter_infer.decode.shapes import Shapes
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import PoolShape


class Counters(eqx.Module):
    """What has happened since the last reset. Totals wrap at 2^31; the host adds up differences."""

    steps: ht.i32[NamedArray, ""]
    preemptions: ht.i32[NamedArray, ""]
    """Times that a sequence lost its pages."""
    recomputed: ht.i32[NamedArray, ""]
    """Tokens whose stored K/V were given up by preemption."""
    prompt_tokens: ht.i32[NamedArray, ""]
    """Tokens computed in chunks of more than one, recomputation included."""
    prompt_steps: ht.i32[NamedArray, ""]
    """Steps that computed such chunks."""
    generated: ht.i32[NamedArray, ""]
    copied_pages: ht.i32[NamedArray, ""]
    """Pages copied because a shared one was to be written."""
    forks: ht.i32[NamedArray, ""]
    prefix_hits: ht.i32[NamedArray, ""]
    """Pages that were found instead of computed."""
    prefix_misses: ht.i32[NamedArray, ""]
    """Full pages that were computed in chunks of more than one token."""
    prefix_evictions: ht.i32[NamedArray, ""]
    """Pages taken for something else whose contents could still be found."""
    pages_touched: ht.i32[NamedArray, ""]
    """Pages of the context of every row, added up over steps: what attention reads."""
    pages_peak: ht.i32[NamedArray, ""]
    """Most pages held at once."""

    @staticmethod
    def init() -> "Counters":
        return Counters(**{name: scalar(0) for name in Counters.__annotations__})


class DecodeState(eqx.Module):
    """Tables without storage: sequences, how to sample them, and who holds which page."""

    sequences: SequenceTable
    sampling: SamplingTable
    page_table: PageTable
    prefix: PrefixTable | None
    """None: nothing is looked for."""
    beams: BeamTable | None
    """None: nobody searches."""
    generated_share: ht.f32[NamedArray, ""]
    """Of the tokens that it might generate, how many a sequence does: mean of recent ones; 1 at first."""
    counters: Counters

    @staticmethod
    def init(shapes: Shapes) -> "DecodeState":
        return DecodeState(
            sequences=SequenceTable.init(shapes.num_slots, shapes.max_seq_len, shapes.num_pages, shapes.page_size),
            sampling=SamplingTable.empty(SEQ, shapes.num_slots, shapes.limits),
            page_table=PageTable.init(shapes.num_pages, shapes.page_size),
            prefix=PrefixTable.init(shapes.num_pages, shapes.page_size) if shapes.prefix_cache else None,
            beams=BeamTable.init(shapes.num_slots, shapes.max_seq_len) if shapes.max_beams else None,
            generated_share=scalar(1.0, jnp.float32),
            counters=Counters.init(),
        )


def empty_cache(config, shapes: Shapes, backend: Backend, *, dtype, num_kv_heads: int | None = None) -> KvPages:
    """A pool of `shapes.num_pages` pages for the model that `config` (a `DecoderConfig`) describes; `num_kv_heads`:
    those of one device, where they are sharded."""
    shape = PoolShape(
        num_layers=config.num_layers,
        num_pages=shapes.num_pages,
        page_size=shapes.page_size,
        kv_heads=num_kv_heads or config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype(dtype),
    )
    return KvPages.init(shape, backend)


class GenState(eqx.Module):
    """`DecodeState` and the pool that it indexes."""

    decode: DecodeState
    kv: KvPages
    scores: ScorePages | None
    """None: prompts are not scored."""

    @staticmethod
    def init(shapes: Shapes, kv: KvPages) -> "GenState":
        scores = shapes.scoring and ScorePages.init(
            **dataclasses.asdict(shapes.scoring),
            num_pages=shapes.num_pages,
            page_size=shapes.page_size,
            num_slots=shapes.num_slots,
            max_seq_len=shapes.max_seq_len,
        )
        return GenState(decode=DecodeState.init(shapes), kv=kv, scores=scores)

    def extended(self, shapes: Shapes) -> "GenState":
        """The same state, with fresh tables where `shapes` has some and it has None."""
        fresh = GenState.init(shapes, self.kv)
        return jax.tree.map(lambda old, new: new if old is None else old, self, fresh, is_leaf=lambda old: old is None)
