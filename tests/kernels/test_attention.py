"""An attention call: choice of the implementation and messages for arguments that do not fit."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.ragged import attend

I32, F32, BF16 = jnp.int32, jnp.float32, jnp.bfloat16


def arguments(**changes):
    good = dict(
        q=jnp.zeros((4, 6, 8), F32),
        kv_pages=jnp.zeros((2, 5, 4, 4, 8), F32),
        layer=0,
        page_indices=jnp.zeros((3, 2), I32),
        seq_lens=jnp.zeros(3, I32),
        cu_q_lens=jnp.zeros(4, I32),
        num_seqs=jnp.int32(0),
        scale=1.0,
    )
    return {**good, **changes}


def test_backends_trace_programs_of_their_own():
    traced = arguments()
    del traced["scale"]
    programs = {
        impl: str(jax.make_jaxpr(functools.partial(attend, scale=1.0, impl=impl))(**traced))
        for impl in ("xla", "reference")
    }
    assert programs["xla"] != programs["reference"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(impl="flash"), 'impl="flash" is unknown; use one of: reference, xla, cpu, gpu'),
        (dict(kv_heads=3), "kv_heads: got 3, expected 2 as in kv_pages"),
        (dict(q=jnp.zeros((4, 8), F32)), r"q: got float32\[4, 8\]"),
        (dict(q=jnp.zeros((4, 5, 8), F32)), "4 interleaved heads for 5 query heads"),
        (dict(q=jnp.zeros((4, 6, 16), F32)), "got head_dim 8, expected 16"),
        (dict(kv_pages=jnp.zeros((5, 4, 4, 8), F32)), "give the whole pool"),
        (dict(kv_pages=jnp.zeros((2, 5, 4, 3, 8), F32)), "got 3 interleaved heads"),
        (dict(kv_dtype=BF16), "got dtype float32, expected bfloat16 or an unsigned integer of 2 bytes"),
        (dict(kv_pages=jnp.zeros((2, 5, 4, 4, 8), jnp.uint16)), "kv_dtype: got uint16, expected int8 or the floating"),
        (dict(page_indices=jnp.zeros(3, I32)), r"page_indices: got shape \(3,\)"),
        (dict(page_indices=jnp.zeros((3, 2), jnp.int16)), r"page_indices: got int16\[3, 2\], expected int32"),
        (dict(seq_lens=jnp.zeros(2, I32)), r"seq_lens: got int32\[2\], expected int32\[3\]"),
        (dict(cu_q_lens=jnp.zeros(3, I32)), r"cu_q_lens: got int32\[3\], expected int32\[4\]"),
        (dict(num_seqs=jnp.zeros(1, I32)), r"num_seqs: got int32\[1\], expected int32\[\]"),
        (dict(sliding_window=jnp.float32(3)), r"sliding_window: got float32\[\], expected an int32 scalar"),
        (dict(layer=jnp.zeros(1, I32)), r"layer: got int32\[1\]"),
        (dict(attention_chunk=0), "attention_chunk: got 0, expected a positive int, or None for one chunk"),
        (dict(attention_chunk=jnp.int32(8)), "attention_chunk: got 8, expected a positive int"),
        (dict(soft_cap=0.0), "soft_cap: got 0.0, expected a positive number"),
        (dict(sinks=jnp.zeros(2, F32)), r"sinks: got shape \(2,\), expected one entry per query head, \(6,\)"),
        (dict(alibi_slopes=jnp.zeros((6, 1), F32)), r"alibi_slopes: got shape \(6, 1\)"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(**{"impl": "xla", **arguments(**changes)})
