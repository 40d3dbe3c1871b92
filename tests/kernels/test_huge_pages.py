"""Arrays in huge pages are where the system says, with their contents."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
from levanter_infer.cache.memory import FixedState, FullKv, Latents, PoolSizes, WindowKv
from levanter_infer.kernels.cpu.huge_pages import HUGE_PAGE, empty, remap_zeros
from tests.tiny_models import tiny_model

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZE = 8 * HUGE_PAGE
needs_huge_pages = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="needs a system that provides huge pages"
)


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that has an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping has this address")


@needs_huge_pages
def test_an_empty_array_is_in_huge_pages_once_it_is_written():
    array = empty((_SIZE,), np.uint8)
    array[:] = 1
    assert huge_bytes(array.ctypes.data) >= _SIZE


@needs_huge_pages
def test_zeros_of_jax_move_to_huge_pages_where_they_are():
    zeros = jnp.zeros(_SIZE // 4, jnp.int32)
    address = zeros.unsafe_buffer_pointer()
    remap_zeros({"zeros": zeros, "a few": jnp.zeros(3)})
    written = jax.jit(lambda x: x.at[_SIZE // 8].set(7), donate_argnums=0)(zeros)
    assert written.unsafe_buffer_pointer() == address
    assert huge_bytes(address + HUGE_PAGE) >= _SIZE - 2 * HUGE_PAGE
    expected = np.zeros(_SIZE // 4, np.int32)
    expected[_SIZE // 8] = 7
    np.testing.assert_array_equal(written, expected)


@needs_huge_pages
def test_the_pool_of_an_engine_is_in_huge_pages():
    config = EngineConfig(max_seqs=2, page_size=16, max_pages=4096, max_seq_len=64)
    engine = InferenceEngine(tiny_model(), config=config)

    def pool() -> jax.Array:
        return max(jax.tree.leaves(engine.state.cache), key=lambda leaf: leaf.nbytes)

    address = pool().unsafe_buffer_pointer()
    assert pool().nbytes > 2 * HUGE_PAGE
    assert huge_bytes(address + HUGE_PAGE) >= pool().nbytes - 2 * HUGE_PAGE
    for _ in range(2):
        engine.generate([Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4))])
        assert pool().unsafe_buffer_pointer() == address


@pytest.mark.parametrize(
    "memory",
    [FullKv(2, 8), Latents(24, index_dim=8), WindowKv(2, 8, window=16), FixedState((("state", (2, 3)),))],
    ids=lambda memory: type(memory).__name__,
)
def test_a_fresh_pool_holds_zeros(memory):
    """`remap_zeros` would change any other."""
    sizes = PoolSizes(num_pages=8, page_size=4, num_slots=2, dtype=jnp.dtype("bfloat16"))
    for leaf in jax.tree.leaves(memory.init(2, sizes)):
        assert not leaf.any()
