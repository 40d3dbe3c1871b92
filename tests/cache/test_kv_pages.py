import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.axes import HEAD_SIZE, KV_HEADS, ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.kernels.call import PoolShape
from levanter_infer.kernels.cpu.backend import CPU
from levanter_infer.kernels.rules import decode_bits
from levanter_infer.kernels.tpu.backend import TpuBackend
from levanter_infer.kernels.tpu.pool import TpuPool
from levanter_infer.kernels.xla.backend import XLA, XlaBackend
from tests.hlo import pool_copies
from tests.tiers import nightly_but

SHAPE = dict(num_layers=2, num_pages=10, page_size=4, kv_heads=2, head_dim=8)
ON_CPU = XlaBackend(CPU)


def pool(dtype, backend=ON_CPU, **sizes) -> KvPages:
    return KvPages.init(PoolShape(**{**SHAPE, **sizes}, dtype=jnp.dtype(dtype)), backend)


def batch_info(dests, page_size=4):
    zeros = jnp.zeros(1, jnp.int32)
    return PageBatchInfo(
        tokens=hax.named(jnp.zeros(len(dests), jnp.int32), (TOKEN,)),
        positions=hax.named(jnp.zeros(len(dests), jnp.int32), (TOKEN,)),
        slot_ids=hax.named(zeros, (ROW,)),
        cu_q_lens=hax.named(jnp.asarray([0, len(dests)], jnp.int32), (ROW_BOUND,)),
        seq_lens=hax.named(zeros, (ROW,)),
        page_indices=hax.named(zeros[None], (ROW, SEQ_PAGE)),
        num_seqs=hax.named(jnp.int32(1), ()),
        new_token_dests=hax.named(jnp.asarray(dests, jnp.int32), (TOKEN,)),
        page_size=page_size,
    )


def keys_and_values(rng, count):
    shape = (count, SHAPE["kv_heads"], SHAPE["head_dim"])
    make = lambda: hax.named(jnp.asarray(rng.standard_normal(shape), jnp.float32), (TOKEN, KV_HEADS, HEAD_SIZE))  # noqa: E731
    return make(), make()


def values(kv: KvPages):
    raw = kv.pages.array
    return np.array(raw if raw.dtype == kv.dtype else jax.lax.bitcast_convert_type(raw, kv.dtype), np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_position_5_of_pages_2_7_is_written_to_page_7_offset_1(dtype):
    # The toy example of paged addressing: page size 4, page_indices [2, 7, none], position 5.
    page_indices, position = [2, 7, 10], 5
    dest = page_indices[position // 4] * 4 + position % 4
    kv = pool(dtype)
    k, v = keys_and_values(np.random.default_rng(0), 1)
    after = values(kv.write(jnp.int32(1), batch_info([dest]), k, v))
    stored = after[1, 7, 1]
    assert np.allclose(stored[0::2], np.asarray(k.array[0].astype(dtype), np.float32))
    assert np.allclose(stored[1::2], np.asarray(v.array[0].astype(dtype), np.float32))
    after[1, 7, 1] = 0
    assert not after.any()


@pytest.mark.parametrize("dtype, slabs", nightly_but([("bfloat16", 2)], [("bfloat16", 2), ("int8", 3)]))
def test_a_pool_for_tpus_holds_the_same_elsewhere(dtype, slabs):
    batch, (k, v) = batch_info([29, 40, 5, 6]), keys_and_values(np.random.default_rng(0), 4)
    plain = pool(dtype, XLA).write(jnp.int32(1), batch, k, v)
    kv = pool(dtype, TpuBackend())
    assert kv.pages.array.shape == (2, 10, slabs, 4, 128)
    after = TpuPool(SHAPE["kv_heads"], SHAPE["head_dim"], scaled=dtype == "int8").unpack(
        kv.write(jnp.int32(1), batch, k, v).pages.array.swapaxes(2, 3)
    )
    np.testing.assert_array_equal(after.astype(jnp.float32), decode_bits(plain.pages.array, plain.dtype))
    assert np.abs(after[1, 7, 1, 0::2].astype(jnp.float32) - k.array[0]).max() < 0.02
    places = jnp.asarray([7, 1]), jnp.asarray([1, 2])
    found = kv.write(jnp.int32(1), batch, k, v).values_at(*places)
    np.testing.assert_array_equal(found, plain.values_at(*places))
    np.testing.assert_array_equal(found, after[:, places[0], places[1]].astype(jnp.float32))


def test_a_number_beyond_those_of_8_bit_floats_becomes_the_largest_of_them():
    kv = pool("float8_e4m3fn")
    assert kv.pages.array.dtype == jnp.uint8
    k, v = keys_and_values(np.random.default_rng(0), 1)
    k = hax.named(k.array.at[0, 0, :3].set(jnp.asarray([1e4, -jnp.inf, jnp.nan])), k.axes)
    found = np.asarray(kv.write(jnp.int32(1), batch_info([5]), k, v).values_at(jnp.asarray([1]), jnp.asarray([1])))
    np.testing.assert_array_equal(found[1, 0, 0, :3], [448, -448, np.nan])
    np.testing.assert_allclose(found[1, 0, 1::2], v.array[0], rtol=2**-4, atol=2**-10)


def test_padding_tokens_are_written_nowhere():
    kv = pool("float32")
    k, v = keys_and_values(np.random.default_rng(0), 2)
    after = values(kv.write(jnp.int32(0), batch_info([40, 40]), k, v))
    assert not after.any()


def test_copy_copies_all_layers_and_ignores_none():
    kv = pool("float32")
    filled = hax.named(jnp.arange(kv.pages.array.size, dtype=jnp.float32).reshape(kv.pages.array.shape), kv.pages.axes)
    kv = dataclasses.replace(kv, pages=filled)
    after = values(kv.copy(jnp.asarray([3, 10], jnp.int32), jnp.asarray([8, 10], jnp.int32)))
    expected = values(kv).copy()
    expected[:, 8] = expected[:, 3]
    assert np.array_equal(after, expected)


def test_put_stores_in_all_layers_what_take_gave_and_ignores_none():
    empty = pool("float32")
    numbers = jnp.arange(empty.pages.array.size, dtype=jnp.float32).reshape(empty.pages.array.shape)
    contents = dataclasses.replace(empty, pages=hax.named(numbers, empty.pages.axes)).take(jnp.asarray([3, 7, 10]))
    after = np.asarray(empty.put(jnp.asarray([0, 5, 10]), contents).pages.array)
    expected = np.zeros_like(after)
    expected[:, [0, 5]] = np.asarray(numbers)[:, [3, 7]]
    assert np.array_equal(after, expected)


def test_zero_clears_every_byte():
    kv = pool("bfloat16")
    k, v = keys_and_values(np.random.default_rng(0), 1)
    assert not values(kv.write(jnp.int32(0), batch_info([5]), k, v).zero()).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_write_inside_a_loop_does_not_copy_the_pool(dtype, optimized):
    kv = pool(dtype, num_pages=4096)
    k, v = keys_and_values(np.random.default_rng(0), 1)

    def run(kv):
        return jax.lax.fori_loop(0, 3, lambda i, kv: kv.write(jnp.int32(1), batch_info([5]), k, v), kv)

    text = jax.jit(run, donate_argnums=0).lower(kv).compile().as_text()
    assert not pool_copies(text, kv.pages.array.shape, kv.pages.array.dtype)


def test_position_two_million_of_a_large_pool_is_an_ordinary_destination():
    # An earlier engine used 2 000 000 for "nowhere" and dropped what was written to page 15625, offset 0.
    kv = pool("bfloat16", num_layers=1, num_pages=15_626, page_size=128, kv_heads=1, head_dim=1)
    one = hax.named(jnp.ones((1, 1, 1), jnp.float32), (TOKEN, KV_HEADS, HEAD_SIZE))
    kv = kv.write(jnp.int32(0), batch_info([2_000_000], page_size=128), one, one)
    assert kv.pages.array[0, 15_625, 0].tolist() == [[0x3F80], [0x3F80]]
    assert int(jnp.count_nonzero(kv.pages.array)) == 2
