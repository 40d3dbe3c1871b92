"""What a change of weights means for sequences that are under way.

Pages are found by the tokens they hold under a root, and a root stands for the version of the weights too
(`engine/intake.py`). So what one version has computed is found under that version only. What two versions have
computed, or one after keys and values of another, is found by nobody: its sequence gets a root of its own.
"""

import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, replace
from levanter_infer.decode.codes import FINISHED, FREE, WAITING, private_root
from levanter_infer.decode.paging import release
from levanter_infer.decode.state import DecodeState


def on_weight_update(state: DecodeState, roots: Array, parked: Array, recompute: Array) -> DecodeState:
    """Go on with other weights.

    Sequences that hold nothing begin under the new version. Those that do keep it, and from now on share pages with
    nobody; or, with `recompute`, keep their tokens and compute them again. The beams of a search compute again in any
    case, because they go on from one another page by page. Samples that were about to share the prompt of one that
    has begun it compute it themselves.

    Args:
        roots: i32[seq], of each slot under the new version.
        parked: bool[seq], slots whose pages are in the host's memory and will come back.
        recompute: bool[].
    """
    table = state.sequences
    live = (table.status > FREE) & (table.status < FINISHED)
    holds = live & (table.num_computed > 0)
    gives_up = holds & recompute
    if state.beams is not None:
        gives_up |= holds & state.beams.searches
    lost = jnp.sum(jnp.where(gives_up, table.num_computed, 0), dtype=jnp.int32)
    keeps = (holds & ~gives_up) | (live & parked)

    state = release(state, gives_up)
    table, counters = state.sequences, state.counters
    source = table.fork_source
    alone = live & gather(keeps, source, False)
    source = jnp.where(alone, table.num_slots, source)
    if state.beams is not None:
        source = state.beams.sharing_again(source, gives_up)
    old = table.roots
    table = replace(
        table,
        status=jnp.where(gives_up, WAITING, table.status),
        fork_source=source,
        roots=jnp.where(keeps, private_root(old), jnp.where(live, roots, old)),
    )
    counters = replace(counters, recomputed=counters.recomputed + lost)
    return replace(state, sequences=table, counters=counters)
