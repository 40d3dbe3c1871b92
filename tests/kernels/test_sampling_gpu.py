"""Sampling's kernels for a GPU, interpreted or, where there is a GPU, on it, beside XLA's code and a sort."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.axes import MODEL
from levanter_infer.decode import sampling_draw
from levanter_infer.decode.sampling import History, LogitStats, choose
from levanter_infer.engine.params import SamplingParams
from levanter_infer.kernels.backend import DrawKey, DrawRules, LogitChanges, RowKernels
from levanter_infer.kernels.gpu import logit_changes
from levanter_infer.kernels.gpu import sampling as kernels
from levanter_infer.kernels.registry import make_backend
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis, Vocabulary
from levanter_infer.runtime import gpu_compiler
from tests.decode.sampling_oracle import table_of
from tests.jaxprs import equations
from tests.kernels.logit_changes import changed_by_numpy, changes_of
from tests.kernels.ragged import lowering_for_gpu
from tests.kernels.test_sampling_tpu import (
    CASES,
    ROWS,
    VOCAB,
    check_beside_xla,
    hard_logits,
    kept_by_sorting,
    terms_of,
    weights_of,
)
from tests.tiers import nightly_but

pytestmark = pytest.mark.usefixtures("optimized")  # bits of what users run

INTERPRET = jax.default_backend() != "gpu"
BACKEND = make_backend("gpu_interpret" if INTERPRET else "gpu")
ATOL = 2e-6 if INTERPRET else 2e-5
"""Tolerance of log probabilities: a GPU's exponentials and logarithms are Triton's in one and XLA's in the other."""
RNG = np.random.default_rng(11)
FEW = dict(_PARTS=2, _LANES=8, _DEPTH=2, _SEARCH_CHUNK=512)
"""Sizes of the kernels with 32 candidates for a row, in place of 4,096."""


def set_sizes(monkeypatch, sizes: dict[str, int], module=kernels) -> None:
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)


def rules_of(terms: np.ndarray, top_k=None, top_p=None, draws=None) -> DrawRules:
    """The rules for `terms` f32[row, 4] of `terms_of`."""
    rows = len(terms)
    columns = [jnp.asarray(terms[:, i]) for i in (0, 1, 3)]
    filters = [
        jnp.zeros(rows, jnp.int32) if top_k is None else jnp.asarray(top_k, jnp.int32),
        jnp.ones(rows, jnp.float32) if top_p is None else jnp.asarray(top_p, jnp.float32),
    ]
    drawn = np.ones(rows) if draws is None else draws
    return DrawRules(*columns, *filters, jnp.asarray(drawn, jnp.int32))


@pytest.mark.parametrize("few", nightly_but([False], [False, True]), ids=["candidates", "search"])
def test_thresholds_choose_what_sorting_chooses(few, monkeypatch):
    """With ties, -inf, equal logits and zeros of both signs; with so few candidates that most rows are searched too."""
    if few:
        set_sizes(monkeypatch, FEW)
    rows = [row for row in range(ROWS) if row not in (4, 5, 6)]
    logits = hard_logits()[rows]
    terms = terms_of(logits, 1.0)
    weights = np.asarray(weights_of(jnp.asarray(logits), jnp.asarray(terms)))

    @jax.jit
    def found(top_k, top_p):
        return kernels.thresholds(jnp.asarray(logits), rules_of(terms, top_k, top_p), interpret=INTERPRET)

    for case in range(len(CASES)):
        own = [CASES[(case + row) % len(CASES)] for row in range(len(rows))]
        top_k, top_p = (np.array(column) for column in zip(*own, strict=True))
        threshold = found(np.where(top_k >= VOCAB, 0, top_k).astype(np.int32), top_p.astype(np.float32))
        for row, (k, p) in enumerate(own):
            wanted = kept_by_sorting(logits[row], weights[row], k, np.float32(p))
            np.testing.assert_array_equal(np.flatnonzero(logits[row] >= threshold[row]), wanted, f"{rows[row]} {k} {p}")


@pytest.mark.parametrize("sizes, vocab", nightly_but([(FEW, 50)], [(FEW, 50), ({}, 5000)]), ids=["few", "as they are"])
def test_logits_that_tie_with_the_kth_count_for_top_p_where_they_are_no_candidates(sizes, vocab, monkeypatch):
    """One logit stands above all others, which are equal: top_k keeps them all, and top_p is a share of all of their
    weights. The candidates hold `seen` of them. In the third and fourth row the first logit is more than half of
    what the candidates weigh, and less than half of all."""
    set_sizes(monkeypatch, sizes)
    seen, share = kernels._PARTS * kernels._LANES * kernels._DEPTH - 1, 0.5
    assert seen < 0.9 * vocab
    ratios = np.repeat(
        [seen / 2, (seen + vocab) / 2, 1.2 * vocab], 2
    )  # the weight of the first beside one of the others
    logits = np.full((len(ratios), vocab), -0.5, np.float32)
    logits[:, 7] = -0.5 + np.log(ratios)
    terms = terms_of(logits, 1.0)
    weights = np.asarray(weights_of(jnp.asarray(logits), jnp.asarray(terms)))
    top_k = np.array([2, seen + 3] * 3)
    rules = rules_of(terms, top_k, np.full(len(ratios), share))
    threshold = jax.jit(functools.partial(kernels.thresholds, interpret=INTERPRET))(jnp.asarray(logits), rules)
    kept = [kept_by_sorting(*row, k, share) for row, k in zip(zip(logits, weights, strict=True), top_k, strict=True)]
    assert [len(ids) for ids in kept] == [vocab] * 4 + [1] * 2
    for row, ids in enumerate(kept):
        np.testing.assert_array_equal(np.flatnonzero(logits[row] >= threshold[row]), ids, str(row))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [257, VOCAB, 3001, 70001])
def test_draws_are_those_of_the_tree(vocab):
    """Trees of three, four and five levels, with all of their sums to the bit."""
    logits = (RNG.normal(size=(ROWS, vocab)) * 3).astype(np.float32)
    logits[2] = 1.5
    logits[3, 40:] = -np.inf
    terms = terms_of(logits, 0.7)
    terms[3, 2] = 0.25
    draws = np.ones(ROWS)
    draws[5] = 0
    seeds = jnp.asarray(RNG.integers(2**32, size=(ROWS, 2), dtype=np.uint32))
    key = DrawKey(seeds, jnp.arange(ROWS, dtype=jnp.int32), jnp.arange(ROWS, dtype=jnp.int32) * 1000)
    z, rules, threshold = jnp.asarray(logits), rules_of(terms, draws=draws), jnp.asarray(terms[:, 2])
    wanted, logprobs = drawn_by_xla(z, jnp.asarray(terms), key)
    own = kernels.GpuSampling(INTERPRET)
    token, logprob = (
        np.asarray(a) for a in jax.jit(functools.partial(sampling_draw.draw_rows, own))(z, rules, threshold, key)
    )
    drawn = draws > 0
    np.testing.assert_array_equal(token, np.where(drawn, wanted, 0))
    np.testing.assert_allclose(logprob, np.where(drawn, logprobs, 0), atol=ATOL)


def drawn_by_xla(z, terms, key: DrawKey) -> list[np.ndarray]:
    """The tokens of `sampling_draw.draw` and their log probabilities, for `terms` f32[row, 4] of `terms_of`."""
    words = sampling_draw.random_words(*key, sampling_draw.num_words(z.shape[1]))

    @jax.jit
    def drawn(z, terms):
        token, total = sampling_draw.draw(weights_of(z, terms), lambda ids: weights_of(_at(z, ids), terms), words)
        exponent = (_at(z, token[:, None])[:, 0] - terms[:, 0]) * terms[:, 1]
        return token, exponent - jnp.log(total)

    return [np.asarray(each) for each in drawn(z, terms)]


def _at(z, ids):
    return jnp.take_along_axis(z, ids, axis=1, mode="fill", fill_value=-jnp.inf)


@pytest.mark.skipif(not INTERPRET, reason="a GPU's exponential is not a CPU's")
def test_sums_have_the_bits_of_the_tree():
    logits = (RNG.normal(size=(4, VOCAB)) * 3).astype(np.float32)
    terms = terms_of(logits, 0.7)
    sizes = sampling_draw._level_sizes(VOCAB)
    levels = kernels.sums(jnp.asarray(logits), rules_of(terms), jnp.asarray(terms[:, 2]), sizes, interpret=INTERPRET)

    @jax.jit
    def by_xla(logits, terms):
        level = weights_of(logits, terms)
        first = sampling_draw._stretch_sums(level, sizes[1])
        return first, sampling_draw._stretch_sums(first, sizes[2])

    for own, wanted in zip(levels, by_xla(jnp.asarray(logits), jnp.asarray(terms)), strict=True):
        np.testing.assert_array_equal(own, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [False, True])
def test_kernels_sample_what_xla_samples(changed):
    assert isinstance(BACKEND.sampling_kernels(jnp.asarray(hard_logits())), RowKernels)
    slots = np.where(np.arange(ROWS) == ROWS - 1, ROWS, np.arange(ROWS))  # the last is padding
    check_beside_xla(BACKEND, changed, slots, ATOL)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_are_drawn_by_kernels_where_one_device_has_all_of_them(parts):
    """tests/engine/test_mesh.py compares the samples of two devices with those of one."""
    vocab = Vocabulary(VOCAB, ShardAxis(MODEL, parts) if parts > 1 else REPLICATED)
    table, lens = table_of([SamplingParams(top_k=3)] * 2, VOCAB), jnp.full(2, 2, jnp.int32)
    history = History(lens, jnp.zeros((2, 8), jnp.int32), jnp.arange(2, dtype=jnp.int32), lens, lens)

    def sampled(logits):
        stats = LogitStats.of_kernel(BACKEND, logits, jnp.int32(2), vocab)
        return choose(logits, table, history, max_top=0, stats=stats, vocab=vocab, backend=BACKEND).sampled().tokens

    traced = jax.make_jaxpr(jax.vmap(sampled, axis_name=MODEL))(jnp.zeros((parts, 2, vocab.part_size)))
    called = {each.params["name"] for each in equations(traced.jaxpr) if each.primitive.name == "pallas_call"}
    samplers = {"candidates", "thresholds", "weight_sums", "descend"}
    assert called & samplers == (samplers if parts == 1 else set())


@pytest.mark.slow
def test_rows_that_are_searched_and_rows_that_are_not_do_not_meet():
    """The sample of a row is the same to the bit alone and among others."""
    logits = jnp.asarray((RNG.normal(size=(3, VOCAB)) * np.array([[0.1], [3], [1]])).astype(np.float32))
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=3), SamplingParams(temperature=0)]

    @jax.jit
    def sample_all(own, table, history):
        stats = LogitStats.of_kernel(BACKEND, own, jnp.int32(len(own)))
        return choose(own, table, history, max_top=0, stats=stats, backend=BACKEND).sampled()

    def sampled(rows: list[int]):
        table = table_of([params[row] for row in rows], VOCAB, seeds=[7 + row for row in rows])
        lens = jnp.full(len(rows), 2, jnp.int32)
        slots = jnp.arange(len(rows), dtype=jnp.int32)
        history = History(lens, jnp.zeros((len(rows), 8), jnp.int32), slots, lens, lens)
        return sample_all(logits[jnp.asarray(rows)], table, history)

    together = sampled([0, 1, 2])
    for row in range(3):
        alone = sampled([row])
        for name in ("tokens", "logprobs", "processed_logprobs"):
            assert getattr(alone, name)[0] == getattr(together, name)[row], name


@pytest.mark.parametrize("vocab", [1, 7, 1000, 5003])
def test_logits_change_by_bias_penalties_bans_and_masks(vocab, monkeypatch):
    """With tokens in several chunks and tiles, and without masks, bias or impossible tokens."""
    set_sizes(monkeypatch, dict(_CHUNK=16, _TILE=512), logit_changes)
    logits, changes, allowed = changes_of(vocab)
    rows = len(logits)
    call = jax.jit(functools.partial(logit_changes.changed_logits, interpret=INTERPRET))
    found = np.asarray(call(jnp.asarray(logits), changes, jnp.int32(9)))
    np.testing.assert_allclose(found[:9], changed_by_numpy(logits, changes, allowed)[:9], rtol=1e-6, atol=1e-6)
    some = np.arange(rows) % 3 == 1
    few = np.asarray(call(jnp.asarray(logits), changes._replace(changed=some), jnp.int32(9)))
    assert few[[1, 4, 7]].tobytes() == found[[1, 4, 7]].tobytes()
    ids, values = np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32)
    fewer = changes._replace(bias_ids=ids, bias_values=values, banned_ids=ids, masked=np.zeros(rows, bool))
    found = call(jnp.asarray(logits), fewer._replace(masks=np.zeros((rows, 0), np.uint32)), jnp.int32(rows))
    np.testing.assert_allclose(found, changed_by_numpy(logits, fewer, allowed), rtol=1e-6, atol=1e-6)


def lowered(rows: int, vocab: int, device=None):
    """The kernels for so many rows, lowered for a GPU, or for a device that is described."""
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    own, f32, i32 = kernels.GpuSampling(), jnp.float32, jnp.int32

    def array(shape: tuple[int, ...], dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def sampled(z, changes, num_rows, rules, key):
        z = logit_changes.changed_logits(z, changes, num_rows)
        return sampling_draw.draw_rows(own, z, rules, own.thresholds(z, rules), key)

    _, changes, _ = changes_of(vocab)

    def of_rows(name: str, column):
        return array((64, 9000) if name == "tokens" else (rows, *column.shape[1:]), column.dtype)

    changes = LogitChanges(**{name: of_rows(name, column) for name, column in changes._asdict().items()})
    rules = DrawRules(*(array((rows,), dtype) for dtype in (f32, f32, f32, i32, f32, i32)))
    key = DrawKey(array((rows, 2), jnp.uint32), array((rows,), i32), array((rows,), i32))
    with lowering_for_gpu():
        given = array((rows, vocab), f32), changes, array((), i32), rules, key
        return jax.jit(sampled).trace(*given).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("vocab", [32_000, 262_144])
def test_kernels_lower_for_a_gpu(vocab):
    assert lowered(8, vocab).as_text().count("__gpu$xla.gpu.triton") == 7


COMPILE = """
import jax
from jax.experimental import topologies
from levanter_infer.plan.compiler import devices_of
from levanter_infer.plan.targets import parse_target
from tests.kernels.test_sampling_gpu import lowered
(device,) = devices_of(parse_target("h100"))
for rows in (1, 8, 64, 256):
    for vocab in (32_000, 128_256, 151_936, 262_144):
        print(lowered(rows, vocab, device).compile().memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(gpu_compiler.why_missing() is not None, reason=f"needs {gpu_compiler.NEEDS}")
def test_kernels_compile_for_an_h100():
    """With little beside the logits: changed ones, counts of tokens, two levels of sums, and the candidates."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=gpu_compiler.compiler_environment(), capture_output=True, text=True
    )
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == 16, done.stderr[-2000:]
    assert max(sizes) < 256 * (4 * (2 * 262_144 + 262_144 // 8) + 32 * 1024)
