"""Weight updates while sequences are running.

The prefix cache finds pages by their tokens under a root, and a root stands for the version of the weights too
(`engine/intake.py`), so pages computed with one version are found under that version only. Pages computed with two
versions, or with one after keys and values of another, are never found: their sequence gets a private root.
"""

import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, replace
from levanter_infer.decode.codes import FINISHED, FREE, WAITING, private_root
from levanter_infer.decode.paging import release
from levanter_infer.decode.state import DecodeState


def on_weight_update(state: DecodeState, roots: Array, swapped: Array, recompute: Array) -> DecodeState:
    """Continue with new weights.

    A sequence without pages starts under the new version. One that holds pages keeps them, and from now on shares no
    pages; or, with `recompute`, it keeps its tokens and computes them again. The beams of a search recompute in any
    case, because they continue one another page by page. Samples that were about to share a prompt that another one has
    started compute it themselves.

    Args:
        roots: i32[seq], root of each slot under the new version.
        swapped: bool[seq], slots whose pages are in host memory and will be swapped in.
        recompute: bool[].
    """
    table = state.sequences
    live = (table.status > FREE) & (table.status < FINISHED)
    holds = live & (table.num_computed > 0)
    recomputes = holds & recompute
    recomputes = state.beams.must_recompute(holds, recomputes)
    lost = jnp.sum(jnp.where(recomputes, table.num_computed, 0), dtype=jnp.int32)
    keeps = (holds & ~recomputes) | (live & swapped)

    state = release(state, recomputes)
    table, counters = state.sequences, state.counters
    source = table.fork_source
    alone = live & gather(keeps, source, False)
    source = jnp.where(alone, table.num_slots, source)
    source = state.beams.sharing_again(source, recomputes)
    old = table.roots
    table = replace(
        table,
        status=jnp.where(recomputes, WAITING, table.status),
        fork_source=source,
        roots=jnp.where(keeps, private_root(old), jnp.where(live, roots, old)),
    )
    counters = counters.plus(recomputed=lost)
    return replace(state, sequences=table, counters=counters)
