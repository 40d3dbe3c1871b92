"""`DecodeState` and `GenState`: everything that a generation depends on, as one pytree on the device."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.page_table import PageTable
from levanter_infer.cache.prefix_table import PrefixTable
from levanter_infer.cache.score_pages import ScorePages
from levanter_infer.decode.beam_table import BeamTable
from levanter_infer.decode.sampling import SamplingTable
from levanter_infer.decode.sequence_table import SequenceTable
from levanter_infer.decode.shapes import Shapes


class Counters(eqx.Module):
    """What has happened since the last reset. Totals wrap at 2^31; the host adds up differences."""

    steps: Int32[Array, ""]
    preemptions: Int32[Array, ""]
    """Times that a sequence lost its pages."""
    recomputed: Int32[Array, ""]
    """Tokens whose stored K/V were given up by preemption."""
    prompt_tokens: Int32[Array, ""]
    """Tokens computed in chunks of more than one, recomputation included."""
    prompt_steps: Int32[Array, ""]
    """Steps that computed such chunks."""
    generated: Int32[Array, ""]
    copied_pages: Int32[Array, ""]
    """Pages copied because a shared one was to be written."""
    forks: Int32[Array, ""]
    prefix_hits: Int32[Array, ""]
    """Pages that were found instead of computed."""
    prefix_misses: Int32[Array, ""]
    """Full pages that were computed in chunks of more than one token."""
    prefix_evictions: Int32[Array, ""]
    """Pages taken for something else whose contents could still be found."""
    pages_touched: Int32[Array, ""]
    """Pages of the context of every row, added up over steps: what attention reads."""
    pages_peak: Int32[Array, ""]
    """Most pages held at once."""

    @staticmethod
    def init() -> "Counters":
        return Counters(**{name: jnp.int32(0) for name in Counters.__annotations__})


class DecodeState(eqx.Module):
    """Tables without storage: sequences, how to sample them, and who holds which page."""

    sequences: SequenceTable
    sampling: SamplingTable
    page_table: PageTable
    prefix: PrefixTable | None
    """None: nothing is looked for."""
    beams: BeamTable | None
    """None: nobody searches."""
    generated_share: Float32[Array, ""]
    """Of the tokens that it might generate, how many a sequence does: mean of recent ones; 1 at first."""
    counters: Counters

    @staticmethod
    def init(shapes: Shapes) -> "DecodeState":
        return DecodeState(
            sequences=SequenceTable.init(shapes.num_slots, shapes.max_seq_len, shapes.num_pages, shapes.page_size),
            sampling=SamplingTable.empty(shapes.num_slots, shapes.limits),
            page_table=PageTable.init(shapes.num_pages, shapes.page_size),
            prefix=PrefixTable.init(shapes.num_pages, shapes.page_size) if shapes.prefix_cache else None,
            beams=BeamTable.init(shapes.num_slots, shapes.max_seq_len) if shapes.max_beams else None,
            generated_share=jnp.float32(1.0),
            counters=Counters.init(),
        )


def empty_cache(
    config, shapes: Shapes, *, dtype, as_bits: bool, num_kv_heads: int | None = None, for_tpu: bool = False
) -> KvPages:
    """A pool of `shapes.num_pages` pages for the model that `config` (a `DecoderConfig`) describes; `num_kv_heads`: of
    one device, where they are spread over several."""
    return KvPages.init(
        num_layers=config.num_layers,
        num_pages=shapes.num_pages,
        page_size=shapes.page_size,
        num_kv_heads=num_kv_heads or config.num_kv_heads,
        head_size=config.head_dim,
        dtype=dtype,
        as_bits=as_bits,
        for_tpu=for_tpu,
    )


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
