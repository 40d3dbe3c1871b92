"""Particulars of the `xla` implementation: lanes, tiles, page groups, and a pool that is not copied."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.xla import attention as rpa_xla
from levanter_infer.kernels.xla import blocks
from tests.hlo import pool_copies
from tests.kernels.ragged import LAYERS, Sizes, attend, bits, make_ragged
from tests.tiers import nightly_but

SIZES = Sizes(6, 2, 32, 16, tokens=200, rows=8, max_pages=20, dtype="bfloat16", stored="uint16")
MIXED = [(1, 300), (70, 260), (1, 3), (2, 2), (33, 290), (1, 129)]


@jax.jit
def xla(arrays, sliding_window=None):
    return attend(**arrays, scale=0.2, kv_dtype=jnp.bfloat16, sliding_window=sliding_window, impl="xla")


@jax.jit
def xla_chunked(arrays, sliding_window=None):
    """In chunks of 150 positions."""
    return attend(
        **arrays, scale=0.2, kv_dtype=jnp.bfloat16, sliding_window=sliding_window, attention_chunk=150, impl="xla"
    )


LATENTS = replace(SIZES, q_heads=6, kv_heads=1, head_dim=34, value_dim=24)


@jax.jit
def xla_of_latents(arrays, sliding_window=None):
    return attend(**arrays, scale=0.2, kv_dtype=jnp.bfloat16, sliding_window=sliding_window, value_dim=24, impl="xla")


@jax.jit
def xla_of_deepseek(arrays, sliding_window=None):
    return attend(**arrays, scale=0.07, kv_dtype=jnp.bfloat16, sliding_window=sliding_window, value_dim=512, impl="xla")


KEYS_AND_VALUES = {
    "plain": (SIZES, xla),
    "sinks-chunk": (replace(SIZES, sinks=True), xla_chunked),
    "head-512": (replace(SIZES, head_dim=512), xla),
}
OF_LATENTS = {
    "latents": (LATENTS, xla_of_latents),
    "deepseek": (replace(LATENTS, q_heads=16, head_dim=576, value_dim=512), xla_of_deepseek),
}
RULES = pytest.mark.parametrize("sizes, xla", (KEYS_AND_VALUES | OF_LATENTS).values(), ids=KEYS_AND_VALUES | OF_LATENTS)


def retraced(batch):
    """`xla` in a new trace, which uses what a test has patched."""
    return jax.jit(lambda arrays: xla.__wrapped__(arrays))(batch.arrays)


@RULES
def test_bits_of_a_row_do_not_depend_on_the_others(sizes, xla):
    together = make_ragged(sizes, MIXED)
    window = jnp.int32(100)
    out = xla(together.arrays, window)
    token = 0
    for row, (q_len, _) in enumerate(MIXED):
        alone = dict(together.arrays)
        alone["page_indices"] = jnp.roll(together.arrays["page_indices"], -row, axis=0)
        alone["seq_lens"] = jnp.roll(together.arrays["seq_lens"], -row)
        alone["cu_q_lens"] = jnp.full(9, q_len, jnp.int32).at[0].set(0)
        alone["num_seqs"] = jnp.int32(1)
        alone["q"] = jnp.roll(together.arrays["q"], -token, axis=0)
        np.testing.assert_array_equal(bits(xla(alone, window)[:q_len]), bits(out[token : token + q_len]))
        token += q_len


# Not of latents: XLA adds up dot products of many query heads and one head of keys in an order of its own.
@pytest.mark.parametrize("sizes, xla", KEYS_AND_VALUES.values(), ids=KEYS_AND_VALUES)
def test_bits_of_a_token_are_the_same_decoded_or_in_a_prompt_chunk(sizes, xla):
    batch = make_ragged(sizes, [(150, 310)])
    whole = xla(batch.arrays)
    for split in ([1] * 5, [1, 2, 64, 1]):
        done = 0
        for q_len in split:
            part = dict(batch.arrays)
            part["q"] = jnp.roll(batch.arrays["q"], -done, axis=0)
            part["seq_lens"] = batch.arrays["seq_lens"].at[0].set(160 + done + q_len)
            part["cu_q_lens"] = jnp.full(9, q_len, jnp.int32).at[0].set(0)
            np.testing.assert_array_equal(bits(xla(part)[:q_len]), bits(whole[done : done + q_len]))
            done += q_len


def test_poison_in_another_row_changes_no_bits():
    batch = make_ragged(SIZES, [(1, 200), (60, 200), (1, 120)])
    clean = xla(batch.arrays)
    foreign = batch.arrays["page_indices"][1, :13]
    poisoned = dict(batch.arrays)
    poisoned["kv_pages"] = batch.arrays["kv_pages"].at[:, foreign].set(jnp.uint16(0x7FC0))
    poisoned["q"] = batch.arrays["q"].at[1:61].set(jnp.nan)
    out = xla(poisoned)
    for token in (0, 61):
        np.testing.assert_array_equal(bits(out[token]), bits(clean[token]))
    assert np.isnan(out[1:61]).all()


@pytest.mark.parametrize("tile", [3, 16])
def test_bits_do_not_depend_on_the_tile(tile, monkeypatch):
    batch = make_ragged(SIZES, MIXED)
    used = blocks.lanes(200, 8, 2, 3, 128)
    monkeypatch.setattr(blocks, "lanes", lambda *_: tuple(replace(lane, tile=tile) for lane in used))
    np.testing.assert_array_equal(bits(retraced(batch)), bits(xla(batch.arrays)))


@pytest.mark.parametrize("block_q, group", nightly_but([(6, 40)], [(1, 16), (6, 40), (64, 512)]))
def test_sizes_of_blocks_and_groups_change_only_rounding(block_q, group, monkeypatch):
    batch = make_ragged(SIZES, MIXED)
    monkeypatch.setattr(blocks, "lanes", lambda *_: (blocks.Lane(block_q, 1), blocks.Lane(block_q, 3)))
    monkeypatch.setattr(rpa_xla, "GROUP_TOKENS", group)
    np.testing.assert_allclose(retraced(batch), xla(batch.arrays), atol=1e-5)


def test_the_gather_of_other_platforms_reads_the_same(monkeypatch):
    batch = make_ragged(SIZES, MIXED)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    np.testing.assert_allclose(retraced(batch), xla(batch.arrays), atol=1e-6)


def test_every_token_finds_a_block():
    """The static number of query blocks suffices for the worst division of the tokens into rows."""
    for tokens, rows in ((4, 4), (130, 40)):
        sizes = Sizes(1, 1, 8, 4, tokens=tokens, rows=rows, max_pages=-(-tokens // 4))
        run = jax.jit(lambda arrays: attend(**arrays, scale=1.0, impl="xla"))
        for q_len in (1, 3, 17, tokens):
            q_lens = [q_len] * min(rows, tokens // q_len)
            if q_lens and q_len > 1:
                q_lens[-1] += tokens - sum(q_lens)
            batch = make_ragged(sizes, [(q, q) for q in q_lens])
            out = run({**batch.arrays, "q": jnp.ones_like(batch.arrays["q"])})
            assert (np.abs(np.asarray(out[: sum(q_lens)])).max(axis=(1, 2), initial=0) > 0).all()


def test_the_loop_of_a_step_copies_no_pool():
    """A loop that writes a token and attends, as the engine's does: every layer, both lanes."""
    batch = make_ragged(SIZES, [(1, 300), (20, 260)])

    def step(pool, arrays):
        def layer(index, carry):
            pool, q = carry
            page = arrays["page_indices"][:, 0]
            pool = pool.at[index, page, 0].set(jnp.ones((8, 4, 32), jnp.uint16), mode="drop")
            out = attend(
                **{**arrays, "q": q, "kv_pages": pool, "layer": index}, scale=0.2, kv_dtype=jnp.bfloat16, impl="xla"
            )
            return pool, out

        def body(carry):
            trips, pool, q = carry
            return trips + 1, *jax.lax.fori_loop(0, LAYERS, layer, (pool, q))

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (jnp.int32(0), pool, arrays["q"]))

    pool = batch.arrays.pop("kv_pages")
    text = jax.jit(step, donate_argnums=0).lower(pool, batch.arrays).compile().as_text()
    assert pool_copies(text, pool.shape, pool.dtype) == []
