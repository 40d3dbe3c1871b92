"""One round: a `lax.while_loop` over steps, without a transfer to the host in between."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache import by_pairs
from levanter_infer.cache.arrays import replace
from levanter_infer.decode.admission import Admission, admit
from levanter_infer.decode.codes import FINISHED, FREE, RUNNING, WAITING
from levanter_infer.decode.kv_offload import HostTerms, host_call, unless_called
from levanter_infer.decode.outputs import OutputRing, RoundOutputs, pack_outputs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState, GenState
from levanter_infer.decode.step import step
from levanter_infer.kernels import loops
from levanter_infer.layers.attention import AttentionSpec


def run_round(
    model, state: GenState, admission: Admission, shapes: Shapes, attention: AttentionSpec
) -> tuple[GenState, RoundOutputs]:
    """Admit, then step until the round ends. Pure; `programs.py` compiles it with the state donated."""
    with loops.branching(model.backend.platform.branches):
        state = replace(state, decode=admit(state.decode, admission))
    ring = OutputRing.init(shapes.ring_size, shapes.limits.max_logprobs)
    limits = RoundLimits(admission.max_steps, admission.min_free_slots, admission.host)
    state, ring = run_steps(model, state, ring, shapes, attention, limits)
    return state, pack_outputs(state.decode, ring, host_call(state.decode, shapes, admission.host))


class RoundLimits(NamedTuple):
    """Limits at which a round ends although work is left; fields as in `Admission`."""

    max_steps: Array
    min_free_slots: Array
    host: HostTerms | None = None


def run_steps(
    model, state: GenState, ring: OutputRing, shapes: Shapes, attention: AttentionSpec, limits: RoundLimits
) -> tuple[GenState, OutputRing]:
    """Step while there is work.

    The loop ends when nothing is pending, the ring could not hold another step, or a limit is reached: `max_steps`; the
    host could start further sequences (`min_free_slots`); it should move pages (`host`).
    """

    def goes_on(carry):
        steps, state, ring = carry
        more = (
            (steps < limits.max_steps)
            & (ring.count + shapes.max_rows <= ring.size)
            & has_work(state.decode, shapes, limits.min_free_slots)
        )
        return unless_called(more, state.decode, shapes, limits.host)

    def body(carry):
        steps, state, ring = carry
        state, ring = step(model, state, ring, shapes, attention)
        return steps + 1, state, ring

    with by_pairs.traced(model.backend.compares_tables), loops.branching(model.backend.platform.branches):
        _, state, ring = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state, ring))
    return state, ring


def has_work(state: DecodeState, shapes: Shapes, min_free_slots) -> Array:
    """Whether a step would compute anything, and the round is not starved of sequences that the host could admit.
    bool[]"""
    table = state.sequences
    running = jnp.sum(table.is_status(RUNNING), dtype=jnp.int32)
    waiting = jnp.any(table.is_status(WAITING))
    empty = jnp.sum(table.is_status(FREE) | table.is_status(FINISHED), dtype=jnp.int32)
    starved = ~waiting & (running < shapes.max_seqs) & (empty >= min_free_slots)
    return ((running > 0) | waiting) & ~starved
