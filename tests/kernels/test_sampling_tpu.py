"""Sampling's kernels for a TPU, interpreted, beside XLA's code and beside a sort."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.axes import MODEL
from levanter_infer.decode import sampling, sampling_draw
from levanter_infer.decode.constraints import RowMasks
from levanter_infer.decode.sampling import History, LogitStats, choose
from levanter_infer.decode.sampling_filters import filter_thresholds, thresholds_by_kernels
from levanter_infer.engine.params import SamplingParams
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.tpu import sampling as kernels
from levanter_infer.kernels.tpu.backend import TpuBackend
from levanter_infer.layers.shard_axis import ShardAxis, Vocabulary
from levanter_infer.structured.automaton import forced_tokens, packed
from tests.decode.sampling_oracle import table_of
from tests.tiers import nightly_but

pytestmark = pytest.mark.usefixtures("optimized")  # bits of what users run

VOCAB, ROWS = 2300, 11
RNG = np.random.default_rng(5)
BACKEND = make_backend("tpu_interpret")
FLOOR = -80.0


@dataclasses.dataclass(frozen=True)
class Quick(TpuBackend):
    """Interpreted without the detector of races."""

    def logit_stats(self, logits, num_rows):
        return kernels.logit_stats(logits, num_rows, interpret=True)

    def sampling_kernels(self, logits):
        return kernels.TpuSampling(True)


def hard_logits() -> np.ndarray:
    """Rows of normal logits, and rows with ties, -inf, NaN and +inf, equal logits, and zeros of both signs."""
    logits = (RNG.normal(size=(ROWS, VOCAB)) * 2).astype(np.float32)
    logits[1] = np.round(logits[1] * 2) / 2
    logits[2] = 1.5
    logits[3, 40:] = -np.inf
    logits[4] = -np.inf
    logits[5, 17], logits[6, 18] = np.nan, np.inf
    logits[7] = np.where(RNG.random(VOCAB) < 0.5, 0.0, -0.0)
    logits[8] = np.where(np.arange(VOCAB) % 128 == 3, 5.0 + np.arange(VOCAB) / VOCAB, logits[8])  # all in one lane
    return logits


def terms_of(logits: np.ndarray, inverse: float) -> np.ndarray:
    """f32[row, 4], as `weight_sums` takes them."""
    peak = np.nan_to_num(logits.max(axis=1), nan=0.0, posinf=0.0, neginf=0.0)
    columns = np.broadcast_arrays(peak, np.float32(inverse), np.float32(-np.inf), np.float32(FLOOR))
    return np.stack(columns, axis=1).astype(np.float32)


def weights_of(logits, terms):
    exponent = (logits - terms[:, :1]) * terms[:, 1:2]
    kept = (logits >= terms[:, 2:3]) & (exponent >= terms[:, 3:])
    return jnp.where(kept, jnp.exp(exponent), 0)


def test_statistics_equal_numpy():
    logits = hard_logits()
    peak, total, best = (np.asarray(a) for a in BACKEND.logit_stats(jnp.asarray(logits), jnp.int32(ROWS)))
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        exact = np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1)
    for row in range(ROWS):
        if row in (4, 5, 6):  # no token is possible, NaN, +inf
            assert not total[row] > 0
            continue
        assert peak[row] == logits[row].max() and best[row] == np.argmax(logits[row])
        assert total[row] == pytest.approx(exact[row], rel=2e-6)


@pytest.mark.parametrize(
    "vocab, part",
    nightly_but([(VOCAB, VOCAB)], [(VOCAB, VOCAB), (16 * 523, 4 * 523), (4 * 2048, 2048), (3001, 3001), (2049, 2049)]),
)
def test_sums_are_those_of_the_tree_to_the_bit(vocab, part):
    """For a whole vocabulary and for a device's part of one."""
    logits = (RNG.normal(size=(ROWS, part)) * 3).astype(np.float32)
    terms = terms_of(logits, 0.7)
    terms[3, 2] = 0.25
    widths = sampling_draw.level_widths(vocab)

    @jax.jit
    def by_xla(logits, terms):
        levels = [weights_of(logits, terms)]
        for width in widths:
            levels.append(sampling_draw._stretch_sums(levels[-1], width))
        return levels[1:]

    wanted = [np.asarray(level) for level in by_xla(jnp.asarray(logits), jnp.asarray(terms))]
    upper, lower = kernels.weight_sums(jnp.asarray(logits), jnp.asarray(terms), widths, jnp.int32(ROWS), interpret=True)
    place = 0
    for width, level in zip(widths[1:], wanted[1:], strict=True):
        filled = -(-width // 128) * 128
        np.testing.assert_array_equal(upper[:, place : place + width], level)
        assert not np.asarray(upper)[:, place + width : place + filled].any()
        place += filled
    filled = -(-widths[1] // 128) * 128
    stretches = np.asarray(lower).reshape(ROWS, 16, filled)[:, :, : widths[1]].reshape(ROWS, -1)
    np.testing.assert_array_equal(stretches[:, : widths[0]], wanted[0])


@pytest.mark.parametrize("size", [VOCAB, 700])
def test_the_weight_of_all_logits_equals_numpy(size):
    logits = hard_logits()[:, :size]
    rows = [row for row in range(ROWS) if row not in (5, 6)]
    terms = terms_of(logits, 0.7)
    terms[9, 3] = -1.0
    found = kernels.total_weights(jnp.asarray(logits), jnp.asarray(terms), jnp.int32(ROWS), interpret=True)
    wanted = np.asarray(weights_of(jnp.asarray(logits), jnp.asarray(terms)), np.float64).sum(axis=1)
    np.testing.assert_allclose(np.asarray(found)[rows], wanted[rows], rtol=1e-6)


def test_rows_that_are_not_in_use_are_not_read():
    logits = np.full((24, VOCAB), np.nan, np.float32)
    logits[:9] = RNG.normal(size=(9, VOCAB))
    peak, *_ = BACKEND.logit_stats(jnp.asarray(logits), jnp.int32(9))
    np.testing.assert_array_equal(peak[:9], logits[:9].max(axis=1))


@pytest.mark.parametrize("parts", nightly_but([3, 16], [1, 3, 4, 16]))
def test_candidates_hold_all_logits_above_their_bound(parts):
    logits = hard_logits()
    values, bound = (
        np.asarray(a) for a in kernels.candidates(jnp.asarray(logits), parts, jnp.int32(ROWS), interpret=True)
    )
    for row in set(range(ROWS)) - {5}:
        above = np.sort(logits[row][logits[row] > bound[row]])
        np.testing.assert_array_equal(np.sort(values[row][values[row] > bound[row]]), above)


def kept_by_sorting(logits: np.ndarray, weights: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Ids of the tokens that pass, from one sort of a row."""
    order = np.argsort(-logits, kind="stable")
    kth = logits[order[min(top_k, len(order)) - 1]] if top_k < len(order) else -np.inf
    kept = logits >= kth
    if top_p < 1:
        mass = np.where(kept, weights, 0).astype(np.float64)
        before = np.cumsum(mass[order]) - mass[order]
        lowest = logits[order][(before < top_p * mass.sum()) & kept[order]].min()
        kept &= logits >= lowest
    return np.flatnonzero(kept)


CASES = [(1, 1.0), (5, 1.0), (64, 1.0), (700, 1.0), (VOCAB - 1, 1.0), (VOCAB, 1.0), (10 * VOCAB, 0.5), (VOCAB, 1e-9)]
CASES += [(VOCAB, 0.3), (VOCAB, 0.9), (VOCAB, 0.999), (40, 0.9), (40, 1e-9), (900, 0.7), (3, 0.99999)]


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_thresholds_choose_what_sorting_chooses(first):
    """XLA's and the kernels' thresholds, with ties, -inf, equal logits and logits that gather in one lane."""
    rows = [row for row in range(ROWS) if row not in (4, 5, 6)]
    logits = hard_logits()[rows]
    num = len(rows)
    terms = terms_of(logits, 1.0)
    weights = np.asarray(weights_of(jnp.asarray(logits), jnp.asarray(terms)))
    vocab, count = Vocabulary(VOCAB), jnp.int32(num)

    @jax.jit
    def both(top_k, top_p):
        by_kernels = thresholds_by_kernels(
            kernels.TpuSampling(True), jnp.asarray(logits), jnp.asarray(terms), top_k, top_p, vocab, count
        )

        def weigh(z):
            exponent = z - terms[:, :1]
            return jnp.where(exponent >= FLOOR, jnp.exp(exponent), 0)

        return by_kernels, filter_thresholds(jnp.asarray(logits), weigh, top_k, top_p)

    for case in range(first, len(CASES), 2):
        own = [CASES[(case + row) % len(CASES)] for row in range(num)]
        top_k, top_p = (np.array(column) for column in zip(*own, strict=True))
        found = both(jnp.asarray(np.minimum(top_k, VOCAB), jnp.int32), jnp.asarray(top_p, jnp.float32))
        for row, (k, p) in enumerate(own):
            wanted = kept_by_sorting(logits[row], weights[row], k, np.float32(p))
            for threshold in found:
                np.testing.assert_array_equal(
                    np.flatnonzero(logits[row] >= threshold[row]), wanted, f"{rows[row]} {k} {p}"
                )


@pytest.mark.parametrize("num", nightly_but([7], [3, 7, 8]))
def test_devices_find_the_thresholds_of_all_rows_together(num):
    """Each searches a stretch of ten rows, of which some may be in no use."""
    parts, size = 4, 4 * 1024
    logits = (RNG.normal(size=(10, size)) * 3).astype(np.float32)
    own = [(40, 0.9), (size, 0.5), (700, 1.0), (5, 1.0), (size, 1.0), (300, 0.7), (size, 0.95), (1, 1.0)]
    top_k, top_p = (np.resize(column, 10) for column in zip(*own, strict=True))
    terms = terms_of(logits, 1.0)
    vocab = Vocabulary(size, ShardAxis(MODEL, parts))

    def of_part(part):
        return thresholds_by_kernels(
            kernels.TpuSampling(True),
            part,
            jnp.asarray(terms),
            jnp.asarray(top_k, jnp.int32),
            jnp.asarray(top_p, jnp.float32),
            vocab,
            jnp.int32(num),
        )

    of_parts = jnp.asarray(logits.reshape(10, parts, -1).swapaxes(0, 1))
    found = np.asarray(jax.jit(jax.vmap(of_part, axis_name=MODEL))(of_parts))
    weights = np.asarray(weights_of(jnp.asarray(logits), jnp.asarray(terms)))
    for device in found:
        np.testing.assert_array_equal(device, found[0])
    for row in range(num):
        wanted = kept_by_sorting(logits[row], weights[row], int(top_k[row]), np.float32(top_p[row]))
        np.testing.assert_array_equal(np.flatnonzero(logits[row] >= found[0, row]), wanted, str(row))


@pytest.mark.slow
def test_rows_beyond_those_that_count_decide_nothing():
    """In the interpreter that detects races, with NaN in memory that no kernel has written."""
    logits = hard_logits()[:4]
    logits = np.concatenate([logits, np.full((ROWS - 4, VOCAB), np.nan, np.float32)])
    terms, vocab, count = terms_of(logits, 1.0), Vocabulary(VOCAB), jnp.int32(4)
    top_k, top_p = jnp.full(ROWS, 40, jnp.int32), jnp.full(ROWS, 0.7, jnp.float32)

    def by(interpret):
        own = kernels.TpuSampling(interpret)
        return thresholds_by_kernels(own, jnp.asarray(logits), jnp.asarray(terms), top_k, top_p, vocab, count)

    nan = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    found = np.asarray(by(nan))
    np.testing.assert_array_equal(found[:4], np.asarray(by(True))[:4])
    assert np.all(found[4:] == -np.inf)
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=50, top_p=0.9),
    SamplingParams(top_p=0.3),
    SamplingParams(top_k=7, top_p=0.8),
    SamplingParams(temperature=0.3, top_p=0.99),
    SamplingParams(top_k=2000),
    SamplingParams(min_p=0.1, logprobs=2),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.5),
]


def check_beside_xla(backend, changed: bool, slots: np.ndarray, atol: float) -> None:
    """Samples of the backend's kernels equal those of XLA's code, for each of `PARAMS`.

    Args:
        changed: with parameters that change the logits before the draw.
        slots: i32[row]; rows with the slot `ROWS` are padding, and not compared.
        atol: of the log probabilities.
    """
    logits = jnp.asarray(hard_logits())
    changes = [{"logit_bias": {4: 3.0}}, {}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.3}, {}]
    params = [dataclasses.replace(p, **changes[i % 5]) if changed else p for i, p in enumerate(PARAMS)]
    lens = jnp.full(ROWS, 9, jnp.int32)
    tokens = jnp.argsort(-jnp.nan_to_num(logits), axis=1)[:, :20].astype(jnp.int32)  # likely ones, so that it matters
    history = History(lens, tokens, jnp.asarray(slots, jnp.int32), lens - 3, lens)
    used = slots < ROWS
    allowed = np.random.default_rng(0).random((ROWS, VOCAB)) < 0.4
    allowed[9] = np.arange(VOCAB) == 77  # forced
    words = packed(allowed)
    forced = jnp.asarray(forced_tokens(words, VOCAB))
    masks = RowMasks(jnp.asarray(words), jnp.arange(ROWS) % 3 == 0, forced) if changed else None

    @functools.partial(jax.jit, static_argnums=1)
    def sampled(table, by_kernels: bool):
        own = backend if by_kernels else None
        stats = None if own is None else LogitStats.of_kernel(own, logits, jnp.int32(ROWS))
        return choose(logits, table, history, max_top=3, stats=stats, backend=own, masks=masks).sampled()

    for seed in range(4):
        table = table_of(params, VOCAB, seeds=[100 * seed + row for row in range(ROWS)])
        ours, theirs = sampled(table, True), sampled(table, False)
        for name in ("tokens", "finite", "top_ids"):
            np.testing.assert_array_equal(getattr(ours, name)[used], getattr(theirs, name)[used], name)
        if masks is not None:
            drawn = np.asarray(masks.constrained & ours.possible) & used
            assert drawn.any() and allowed[drawn, np.asarray(ours.tokens)[drawn]].all()
        for name in ("logprobs", "processed_logprobs", "top_logprobs"):
            ours_of, theirs_of = getattr(ours, name)[used], getattr(theirs, name)[used]
            np.testing.assert_allclose(ours_of, theirs_of, atol=atol, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [False, True])
def test_kernels_sample_what_xla_samples(changed, monkeypatch):
    monkeypatch.setattr(sampling, "_CHANGED_ROWS", 4)
    check_beside_xla(Quick(), changed, np.arange(ROWS), atol=2e-6)
