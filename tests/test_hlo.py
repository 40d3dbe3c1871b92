"""The reader of compiled programs finds the copies that are known to happen on a CPU."""

import jax
import jax.numpy as jnp

from tests.hlo import hlo_dtype, pool_copies

SHAPE = (2, 101, 4, 6, 8)


def copies(fn, dtype):
    text = jax.jit(fn, donate_argnums=0).lower(jax.ShapeDtypeStruct(SHAPE, dtype)).compile().as_text()
    return pool_copies(text, SHAPE, dtype)


def write(pool, page):
    return pool.at[1, page].set(jnp.ones((), pool.dtype))


def loop(write_page):
    return lambda pool: jax.lax.fori_loop(0, 9, lambda page, pool: write_page(pool, page), pool)


def test_writes_in_place_are_no_copies():
    assert copies(loop(write), jnp.uint16) == []


def test_a_branch_that_carries_a_pool_which_stays_is_found():
    """Both results are needed, so no version of XLA can do without a copy."""

    def branch(pool, page):
        return jax.lax.cond(page % 3 == 0, lambda p: write(p, page), lambda p: p.at[0, page + 1].set(2), pool)

    def last_two(pool):
        return jax.lax.fori_loop(0, 9, lambda page, pools: (branch(pools[0], page), pools[0]), (pool, pool))

    assert any(" copy(" in line for line in copies(last_two, jnp.uint16))


def test_a_conversion_of_the_pool_is_found():
    def scale(pool, page):
        return (pool.astype(jnp.float32) * page).astype(pool.dtype)

    assert any(" convert(" in line for line in copies(loop(scale), jnp.bfloat16))


def test_a_layer_cut_out_of_the_pool_is_found():
    def mirrored(pool):
        return jnp.flip(jax.lax.dynamic_index_in_dim(pool, 1, keepdims=False).reshape(-1)), pool

    assert copies(mirrored, jnp.uint16)


def test_dtypes_have_the_compilers_names():
    names = [hlo_dtype(d) for d in (jnp.bfloat16, jnp.uint16, jnp.float8_e4m3fn, jnp.int32, jnp.bool_)]
    assert names == ["bf16", "u16", "f8e4m3fn", "s32", "pred"]
