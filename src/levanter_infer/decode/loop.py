"""One round: a `lax.while_loop` over steps, on the device from beginning to end."""

import jax
import jax.numpy as jnp

from levanter_infer.cache.arrays import replace
from levanter_infer.decode.admission import Admission, admit
from levanter_infer.decode.codes import FINISHED, FREE, RUNNING, WAITING
from levanter_infer.decode.kv_offload import ends_for_host, host_call
from levanter_infer.decode.outputs import OutputRing, RoundOutputs, pack_outputs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState, GenState
from levanter_infer.decode.step import step
from levanter_infer.layers.attention import AttentionSpec


def run_round(
    model, state: GenState, admission: Admission, shapes: Shapes, attention: AttentionSpec
) -> tuple[GenState, RoundOutputs]:
    """Admit, then step until the round ends. Pure; `programs.py` compiles it with the state donated."""
    state = replace(state, decode=admit(state.decode, admission))
    ring = OutputRing.init(shapes.ring_size, shapes.limits.max_logprobs)
    state, ring = run_steps(
        model,
        state,
        ring,
        shapes,
        attention,
        max_steps=admission.max_steps,
        min_free_slots=admission.min_free_slots,
        host=admission.host,
    )
    call = None if admission.host is None else host_call(state.decode, shapes, admission.host)
    return state, pack_outputs(state.decode, ring, call)


def run_steps(
    model,
    state: GenState,
    ring: OutputRing,
    shapes: Shapes,
    attention: AttentionSpec,
    *,
    max_steps,
    min_free_slots,
    host=None,
) -> tuple[GenState, OutputRing]:
    """Step while there is work.

    The loop ends when nothing is pending, the ring could not hold another step, `max_steps` is reached, or places
    are empty that the host could fill (`min_free_slots`, see `Admission`), or pages should be moved (`host`).
    """

    def goes_on(carry):
        steps, state, ring = carry
        more = (
            (steps < max_steps)
            & (ring.count + shapes.max_seqs <= ring.size)
            & has_work(state.decode, shapes, min_free_slots)
        )
        return more if host is None else more & ~ends_for_host(state.decode, shapes, host)

    def body(carry):
        steps, state, ring = carry
        state, ring = step(model, state, ring, shapes, attention)
        return steps + 1, state, ring

    _, state, ring = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state, ring))
    return state, ring


def has_work(state: DecodeState, shapes: Shapes, min_free_slots) -> jax.Array:
    """Whether a step would compute anything, and nobody better could use its place. bool[]"""
    table = state.sequences
    running = jnp.sum(table.is_status(RUNNING), dtype=jnp.int32)
    waiting = jnp.any(table.is_status(WAITING))
    empty = jnp.sum(table.is_status(FREE) | table.is_status(FINISHED), dtype=jnp.int32)
    starved = ~waiting & (running < shapes.max_seqs) & (empty >= min_free_slots)
    return ((running > 0) | waiting) & ~starved
