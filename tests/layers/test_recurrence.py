"""Recurrences and short convolutions: packed rows in chunks give what whole sequences give, a token at a time."""

import functools
import os
import subprocess
import sys

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter_infer.axes import EMBED, POSITION, ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.slot_state import SlotState
from levanter_infer.layers import recurrence
from levanter_infer.layers.causal_conv import CausalConv
from levanter_infer.layers.delta_net import DeltaNet, DeltaNetBlock
from levanter_infer.layers.kimi_delta import KimiDelta, KimiDeltaBlock
from levanter_infer.layers.linear import Fusion, Linear
from levanter_infer.layers.recurrence import TokenInputs
from levanter_infer.layers.rows import RaggedRows
from levanter_infer.layers.short_conv import ShortConv, ShortConvBlock
from tests.tiers import nightly_but

HEADS, KEY, VALUE = 3, 5, 4
EMBED_AXIS = Axis(EMBED, 12)
BLOCKS = {
    "short_conv": ShortConvBlock(channels=7, taps=4, bias=True),
    "delta_net": DeltaNetBlock(2, 4, key_size=6, value_size=5, taps=3, norm_eps=1e-5),
    "kimi_delta": KimiDeltaBlock(3, head_dim=6, taps=3, norm_eps=1e-5),
}
MIXERS = {"short_conv": ShortConv, "delta_net": DeltaNet, "kimi_delta": KimiDelta}


def token_inputs(num: int, *, delta: bool, seed: int = 0, decay: float = 0.3, by_channel: bool = False) -> TokenInputs:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal((num, HEADS, *shape)).astype(np.float32)

    k = normal(KEY)
    return TokenInputs(
        q=normal(KEY),
        k=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v=normal(VALUE),
        log_decay=np.float32(-decay) * np.abs(normal(*[KEY] * by_channel)),
        beta=1 / (1 + np.exp(-normal())) if delta else None,
    )


def by_hand(state: np.ndarray, x: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in float64."""
    state, out = state.astype(np.float64), []
    q, k, v, g = (np.asarray(each, np.float64) for each in (x.q, x.k, x.v, x.log_decay))
    for t in range(q.shape[0]):
        rows = []
        for h in range(HEADS):
            decayed = np.exp(g[t, h])[..., None] * state[h]
            delta = v[t, h] if x.beta is None else float(x.beta[t, h]) * (v[t, h] - decayed.T @ k[t, h])
            state[h] = decayed + np.outer(k[t, h], delta)
            rows.append(state[h].T @ q[t, h])
        out.append(rows)
    return state, np.asarray(out)


def batch_of(rows: list[tuple[int, int, int]], num_tokens: int, num_rows: int, num_slots: int) -> PageBatchInfo:
    """Rows (slot, first position, tokens), packed and padded."""
    lens = [count for _, _, count in rows] + [0] * (num_rows - len(rows))
    bounds = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    positions = np.zeros(num_tokens, np.int32)
    for (_, first, count), start in zip(rows, bounds, strict=False):
        positions[start : start + count] = first + np.arange(count)
    slots = [slot for slot, _, _ in rows] + [num_slots] * (num_rows - len(rows))
    none = hax.named(jnp.zeros(num_tokens, jnp.int32), (TOKEN,))
    return PageBatchInfo(
        tokens=none,
        positions=hax.named(jnp.asarray(positions), (TOKEN,)),
        slot_ids=hax.named(jnp.asarray(slots, jnp.int32), (ROW,)),
        cu_q_lens=hax.named(jnp.asarray(bounds), (ROW_BOUND,)),
        seq_lens=hax.named(jnp.zeros(num_rows, jnp.int32), (ROW,)),
        page_indices=hax.named(jnp.zeros((num_rows, 1), jnp.int32), (ROW, SEQ_PAGE)),
        num_seqs=hax.named(jnp.int32(len(rows)), ()),
        new_token_dests=none,
        page_size=1,
    )


_rows_of_batch = jax.jit(RaggedRows.of)


def rows_of(rows: list[tuple[int, int, int]], num_tokens: int, num_rows: int = 4, num_slots: int = 6) -> RaggedRows:
    return _rows_of_batch(batch_of(rows, num_tokens, num_rows, num_slots))


@pytest.mark.parametrize(("delta", "by_channel"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("decay", [0.3, 40.0])  # e^-40 a token: differences of the sums would overflow
def test_every_form_of_the_recurrence_gives_its_definition(delta, by_channel, decay):
    x = token_inputs(37, delta=delta, decay=decay, by_channel=by_channel)
    start = np.random.default_rng(1).standard_normal((HEADS, KEY, VALUE)).astype(np.float32)
    want_state, want = by_hand(start, x)
    state, results = jax.jit(functools.partial(jax.lax.scan, recurrence.one_token))(jnp.asarray(start), x)
    np.testing.assert_allclose(results, want, atol=2e-6)
    np.testing.assert_allclose(state, want_state, atol=2e-6)
    state, results = jax.jit(recurrence.block)(jnp.asarray(start), x)
    np.testing.assert_allclose(results, want, atol=5e-6)
    np.testing.assert_allclose(state, want_state, atol=5e-6)
    np.testing.assert_allclose(jax.jit(recurrence.scan)(x), by_hand(np.zeros_like(start), x)[1], atol=2e-6)


def test_a_block_of_equal_keys_stays_exact():
    """Powers of the triangular system would grow beyond float32's digits; substitution does not."""
    x = token_inputs(recurrence.BLOCK, delta=True, decay=0.0)
    x = TokenInputs(x.q, jnp.broadcast_to(x.k[:1], x.k.shape), x.v, x.log_decay, jnp.ones_like(x.beta) * 0.99)
    zeros = np.zeros((HEADS, KEY, VALUE), np.float32)
    np.testing.assert_allclose(jax.jit(recurrence.block)(jnp.asarray(zeros), x)[1], by_hand(zeros, x)[1], atol=2e-5)


@pytest.mark.parametrize(
    ("delta", "by_channel"), nightly_but([(True, True)], [(True, False), (False, False), (True, True)])
)
def test_a_scan_of_packed_rows_has_the_same_bits_wherever_steps_end(delta, by_channel):
    """A sequence of 23 tokens alone, and in steps with others; in the plain form up to rounding."""
    x, other = (token_inputs(23, delta=delta, seed=seed, by_channel=by_channel) for seed in (0, 5))
    scan = jax.jit(recurrence.ragged_scan)
    zeros = np.zeros((4, HEADS, KEY, VALUE), np.float32)
    state, whole = scan(zeros, x, rows_of([(0, 0, 23)], 23))
    np.testing.assert_allclose(whole, jax.jit(recurrence.scan)(x), atol=2e-6)
    for cuts, before in (((0, 23), 3), ((0, 1, 2, 13, 23), 1), ((0, 9, 10, 22, 23), 5)):
        kept, parts = zeros, []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            count, size = end - begin, before + end - begin + 2
            step = jax.tree.map(lambda o, a: np.concatenate([o[:before], a[begin:end], o[:2]]), other, x)  # noqa: B023
            kept, result = scan(kept, step, rows_of([(3, 0, before), (0, begin, count)], size))
            parts.append(np.asarray(result)[before : before + count])
            kept = np.stack([zeros[0], kept[1], *zeros[2:]])
        assert np.concatenate(parts).tobytes() == np.asarray(whole).tobytes()
        assert np.asarray(kept[1]).tobytes() == np.asarray(state[0]).tobytes()


@pytest.mark.parametrize("by_channel", [False, True])
def test_rows_of_a_packed_batch_do_not_see_each_other(by_channel):
    """One row of many tokens (over two blocks), one of a single token, one of two, and padding."""
    counts = [recurrence.BLOCK + 6, 1, 2]
    num_tokens = sum(counts) + 3
    x = token_inputs(num_tokens, delta=True, by_channel=by_channel)
    start = np.random.default_rng(1).standard_normal((4, HEADS, KEY, VALUE)).astype(np.float32)
    rows = rows_of([(3, 5, counts[0]), (0, 9, counts[1]), (2, 0, counts[2])], num_tokens)
    state, results = jax.jit(recurrence.ragged)(jnp.asarray(start), x, rows)
    first = 0
    for row, count in enumerate(counts):
        part = x.map(lambda array, first=first, count=count: array[first : first + count])
        want_state, want = by_hand(start[row], part)
        np.testing.assert_allclose(results[first : first + count], want, atol=1e-5)
        np.testing.assert_allclose(state[row], want_state, atol=1e-5)
        first += count
    assert not np.asarray(results[first:]).any() and (np.asarray(state[3]) == start[3]).all()


@pytest.mark.parametrize("taps", nightly_but([4], [2, 4]))
def test_a_convolution_in_chunks_gives_the_whole_to_the_bit(taps):
    rng = np.random.default_rng(0)
    conv = CausalConv.init((), 5, taps, key=jax.random.key(0), dtype=jnp.float32, bias=True)
    x = jnp.asarray(rng.standard_normal((11, 5)), jnp.float32)
    whole = conv.dense(x)
    padded = np.concatenate([np.zeros((taps - 1, 5)), x])
    want = sum(padded[j : j + 11] * np.asarray(conv.weight.array)[:, j] for j in range(taps))
    np.testing.assert_allclose(whole, want, atol=1e-6)
    part = Linear.init((), (EMBED_AXIS,), (Axis("mlp", 4),), key=None, dtype=jnp.float32)
    tail, done = jnp.zeros((1, taps - 1, 5)), 0
    for count in (1, 2, 5, 1, 2):  # shorter and longer than the tail
        rows = rows_of([(0, done, count)], 8, num_rows=1)
        chunk = np.zeros((8, 5), np.float32)
        chunk[:count] = x[done : done + count]
        result, tail = conv.ragged(jnp.asarray(chunk), tail, rows, part)
        assert (np.asarray(result)[:count] == np.asarray(whole)[done : done + count]).all()
        done += count


@functools.cache
def mixer(name: str):
    module = MIXERS[name].init((), EMBED_AXIS, BLOCKS[name], key=jax.random.key(3), dtype=jnp.float32)
    rng = np.random.default_rng(5)  # a decay, and other gains than one
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype), module)


@pytest.mark.parametrize("name", nightly_but(["delta_net"], BLOCKS))
def test_a_mixer_in_chunks_gives_the_whole_sequence_and_writes_its_slots_only(name):
    """Two sequences side by side, cut differently, in slots that hold another sequence's state."""
    block, module = BLOCKS[name], mixer(name)
    rng, num_slots, layer = np.random.default_rng(2), 6, jnp.int32(1)
    lens, slots = (90, 13), (4, 0)
    texts = [rng.standard_normal((count, 12)).astype(np.float32) for count in lens]
    dense = jax.jit(lambda x: module.dense(x, Fusion(), block)[0].rearrange((POSITION, EMBED)).array)
    whole = [np.asarray(dense(hax.named(jnp.asarray(text), (POSITION, EMBED_AXIS)))) for text in texts]
    state = SlotState.init(2, num_slots, dict(block.memory.sizes))
    state = jax.tree.map(lambda leaf: leaf + 7, state)  # stale numbers
    paged = jax.jit(lambda x, state, rows: module.paged(x, Fusion(), block, state, layer, rows))
    done = [0, 0]
    for counts in ((70, 1), (1, 2), (5, 1), (1, 8), (13, 1)):
        rows = [(slots[i], done[i], counts[i]) for i in range(2)]
        packed = np.concatenate([texts[i][done[i] : done[i] + counts[i]] for i in range(2)])
        packed = np.pad(packed, ((0, 80 - len(packed)), (0, 0)))
        x, state = paged(hax.named(jnp.asarray(packed), (TOKEN, EMBED_AXIS)), state, rows_of(rows, 80))
        first = 0
        for i in range(2):
            got = np.asarray(x.array)[first : first + counts[i]]
            np.testing.assert_allclose(got, whole[i][done[i] : done[i] + counts[i]], atol=2e-5)
            done[i], first = done[i] + counts[i], first + counts[i]
    assert tuple(done) == lens
    for named in state.arrays.values():
        assert (np.asarray(named.array[0]) == 7).all() and (np.asarray(named.array[1, [1, 2, 3, 5]]) == 7).all()


def test_slots_take_over_the_state_of_others():
    state = SlotState.init(2, 3, {"memory": (2,)})
    state = SlotState({"memory": hax.named(jnp.arange(12.0).reshape(2, 3, 2), state.arrays["memory"].axes)})
    copied = state.copy(jnp.asarray([2, 0, 3]), jnp.asarray([0, 3, 3]))  # 3: none
    assert copied.arrays["memory"].array.tolist() == [[[4, 5], [2, 3], [4, 5]], [[10, 11], [8, 9], [10, 11]]]
    taken = state.take(jnp.asarray([1, 3]))
    moved = copied.put(jnp.asarray([2, 3]), taken).arrays["memory"].array
    assert (
        moved[:, 2].tolist() == [[2, 3], [8, 9]]
        and moved[:, :2].tolist() == copied.arrays["memory"].array[:, :2].tolist()
    )
    assert (state.num_layers, state.num_entries, state.nbytes) == (2, 3, 48)


def test_uneven_heads_are_refused():
    with pytest.raises(ValueError, match="linear_num_value_heads=3 is no multiple"):
        DeltaNetBlock(2, 3, 4, 4, 4, 1e-6)


@pytest.mark.parametrize("num, equal_keys", [(1, False), (16, False), (40, False), (64, False), (64, True)])
def test_triangular_systems_are_solved(num, equal_keys):
    rng = np.random.default_rng(num)
    keys = rng.standard_normal((HEADS, num, 8))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    keys = keys[:, :1].repeat(num, axis=1) if equal_keys else keys
    system = np.tril(1.9 * keys @ keys.swapaxes(1, 2), -1)
    right = rng.standard_normal((HEADS, num, VALUE))
    found = recurrence.solved(jnp.asarray(system, jnp.float32), jnp.asarray(right, jnp.float32))
    expected = np.linalg.solve(np.eye(num) + system, right)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


MANY_SYSTEMS = """
import faulthandler, sys
faulthandler.dump_traceback_later(60, exit=True)
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from levanter_infer.layers.recurrence import solved

mesh = jax.make_mesh((4,), ("x",))
solve = lambda system, right: jax.lax.psum(solved(system, right), "x") * 1e-3
program = jax.jit(jax.shard_map(solve, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"), check_vma=False))
sharding = jax.NamedSharding(mesh, P("x"))
system = jax.device_put(jnp.tril(jnp.full((256, 64, 64), 0.1), -1), sharding)
right = jax.device_put(jnp.ones((256, 64, 64)), sharding)
for _ in range(50):
    right = program(system, right).block_until_ready()
print("ok", right.shape)
"""


@pytest.mark.slow
def test_several_cpu_devices_solve_at_once():
    """LAPACK's solver waits for the threads that run the devices (jaxlib 0.10.2)."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MANY_SYSTEMS], env={**os.environ, **flags}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "ok (256, 64, 64)" in done.stdout, done.stderr[-3000:]
