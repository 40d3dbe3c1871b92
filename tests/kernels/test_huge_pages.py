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


def resident_and_huge(address: int) -> tuple[int, int]:
    """Bytes of the mapping that has an address: those in memory, and of these those in huge pages."""
    sizes = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if sizes is not None:
                break
            sizes = {} if int(bounds[1], 16) <= address < int(bounds[2], 16) else None
        elif sizes is not None and line.endswith(" kB"):
            name, size = line.removesuffix(" kB").split(":")
            sizes[name] = int(size) * 1024
    assert sizes, "no mapping has this address"
    return sizes["Rss"], sizes["AnonHugePages"]


@needs_huge_pages
def test_an_empty_array_is_in_huge_pages_once_it_is_written():
    array = empty((_SIZE,), np.uint8)
    array[:] = 1
    assert resident_and_huge(array.ctypes.data)[1] >= _SIZE


@needs_huge_pages
def test_zeros_of_jax_take_no_memory_until_they_are_written_and_then_huge_pages():
    zeros = jnp.zeros(_SIZE // 4, jnp.int32)
    address = zeros.unsafe_buffer_pointer()
    remap_zeros({"zeros": zeros, "a few": jnp.zeros(3)})
    assert resident_and_huge(address + HUGE_PAGE) == (0, 0)
    written = jax.jit(lambda x: x.at[_SIZE // 8].set(7), donate_argnums=0)(zeros)
    assert written.unsafe_buffer_pointer() == address
    assert resident_and_huge(address + HUGE_PAGE) == (HUGE_PAGE, HUGE_PAGE)
    expected = np.zeros(_SIZE // 4, np.int32)
    expected[_SIZE // 8] = 7
    np.testing.assert_array_equal(written, expected)


@needs_huge_pages
def test_the_pages_that_an_engine_has_written_are_in_huge_ones():
    config = EngineConfig(max_seqs=2, page_size=16, max_pages=4096, max_seq_len=64)
    engine = InferenceEngine(tiny_model(), config=config)

    def pool() -> jax.Array:
        return max(jax.tree.leaves(engine.state.cache), key=lambda leaf: leaf.nbytes)

    address = pool().unsafe_buffer_pointer()
    assert pool().nbytes > 2 * HUGE_PAGE
    for _ in range(2):
        engine.generate([Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4))])
        assert pool().unsafe_buffer_pointer() == address
        resident, huge = resident_and_huge(address + HUGE_PAGE)
        assert 0 < resident == huge


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
