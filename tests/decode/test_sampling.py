"""Sampling row by row: independence, greedy choice, logprobs, faulty rows, stop rules and what is not built."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.decode.constraints import RowMasks
from levanter_infer.decode.sampling import (
    ChosenTokens,
    History,
    LogitStats,
    SampleOutput,
    SamplingTable,
    choose,
    likeliest,
    logprobs_of,
    samples_whole_rows,
    stop_match,
)
from levanter_infer.decode.sampling_draw import draw, num_words, random_words, row_sums
from levanter_infer.decode.sampling_filters import filter_thresholds, float_keys, key_floats
from levanter_infer.engine.params import SamplingParams
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.layers.shard_axis import ShardAxis, Vocabulary
from levanter_infer.structured.automaton import forced_tokens, packed
from tests.decode.sampling_oracle import EOS, chi_square_p, distribution, limits_for, table_of
from tests.tiers import nightly_but

pytestmark = pytest.mark.usefixtures("optimized")  # bits and distributions of what users run

VOCAB, SLOTS, MAX_LEN, MAX_TOP = 401, 9, 1100, 6
RNG = np.random.default_rng(3)
LOGITS = (RNG.normal(size=(SLOTS, VOCAB)) * 2).astype(np.float32)
TOKENS = RNG.integers(0, VOCAB, (SLOTS, MAX_LEN)).astype(np.int32)
PROMPT_LENS = np.array([5, 30, 1, 1050, 8, 100, 2, 40, 3], np.int32)
SEQ_LENS = np.array([9, 31, 1, 1100, 20, 600, 2, 55, 700], np.int32)
MIXTURE = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, logprobs=3),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(top_p=0.995, logit_bias={4: 3.0, 400: 2.5}),
    SamplingParams(temperature=0, presence_penalty=1.0, logprobs=6),
    SamplingParams(min_tokens=5, top_k=300),
    SamplingParams(temperature=1.5, min_p=0.02, logprobs=0),
    SamplingParams(temperature=0, logit_bias={0: 1.0}, min_tokens=3),
]


@jax.jit
def sample_rows(logits, table: SamplingTable, slot_ids, tokens=TOKENS) -> SampleOutput:
    """`slot_ids` of the table; rows of `logits` belong to them."""
    seq_lens = jnp.asarray(SEQ_LENS).at[slot_ids].get(mode="fill", fill_value=0)
    return choose(
        logits,
        table.rows(slot_ids),
        History(
            positions=seq_lens,
            tokens=jnp.asarray(tokens),
            slot_ids=slot_ids,
            prompt_lens=jnp.asarray(PROMPT_LENS).at[slot_ids].get(mode="fill", fill_value=0),
            seq_lens=seq_lens,
        ),
        max_top=MAX_TOP,
    ).sampled()


def run(slots: list[int], logits=LOGITS, params=MIXTURE, rows: int = SLOTS) -> dict[str, np.ndarray]:
    """The output for `slots` as numpy arrays by name, from a batch padded to `rows`; SLOTS is an absent slot."""
    padded = slots + [SLOTS] * (rows - len(slots))
    of_rows = np.concatenate([logits, np.zeros((1, VOCAB), np.float32)])[padded]
    out = sample_rows(jnp.asarray(of_rows), table_of(params, VOCAB), jnp.asarray(padded, jnp.int32))
    values = {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
    return {name: np.asarray(value)[: len(slots)] for name, value in values.items() if value is not None}


def assert_same_bits(row: dict[str, np.ndarray], i: int, other: dict[str, np.ndarray], j: int) -> None:
    for name in row:
        assert row[name][i].tobytes() == other[name][j].tobytes(), (name, row[name][i], other[name][j])


def test_row_has_the_same_bits_alone_and_in_any_company():
    order = [6, 2, 8, 0, 4, 1, 3, 7, 5]
    together, reordered = run(list(range(SLOTS))), run(order)
    for slot in range(SLOTS):
        alone = run([slot], rows=1)
        assert_same_bits(alone, 0, together, slot)
        assert_same_bits(alone, 0, reordered, order.index(slot))
        assert_same_bits(alone, 0, run([slot]), 0)


def test_neighbours_of_faulty_rows_keep_their_bits():
    healthy = run(list(range(SLOTS)))
    faults = {0: np.nan, 3: np.inf, 5: -np.inf, 8: np.nan}
    logits = LOGITS.copy()
    logits[0, 17], logits[3, 400], logits[5], logits[8] = faults[0], faults[3], faults[5], faults[8]
    out = run(list(range(SLOTS)), logits)
    for slot in range(SLOTS):
        if slot not in faults:
            assert_same_bits(out, slot, healthy, slot)
            continue
        assert not out["finite"][slot] and not out["possible"][slot]
        assert out["tokens"][slot] == 0 and out["logprobs"][slot] == 0 and out["processed_logprobs"][slot] == 0
        assert (out["top_ids"][slot] == VOCAB).all() and (out["top_logprobs"][slot] == 0).all()
    assert healthy["finite"].all()


def test_a_row_without_any_possible_token_after_bans_has_none_though_it_is_finite():
    logits = np.full((SLOTS, VOCAB), -np.inf, np.float32)
    logits[:, EOS] = 1.0
    params = [SamplingParams(min_tokens=64), SamplingParams()] + [SamplingParams(temperature=0, min_tokens=64)] * 7
    out = run([0, 1, 2], logits, params)
    assert out["possible"].tolist() == [False, True, False] and out["finite"].all()
    assert out["tokens"].tolist() == [0, EOS, 0]


def test_greedy_takes_the_first_of_the_likeliest_and_is_certain():
    logits = LOGITS.copy()
    logits[0, [33, 200, 400]] = 50.0
    logits[1, [0, 400]] = 60.0
    logits[2] = -1.0
    out = run([0, 1, 2, 3], logits, [SamplingParams(temperature=0)] * SLOTS)
    assert out["tokens"].tolist() == [33, 0, 0, int(np.argmax(LOGITS[3]))]
    assert (out["processed_logprobs"] == 0).all()


def test_temperatures_near_zero_are_greedy_and_tiny_ones_finite():
    for temperature in (1e-40, 1e-6, 1.1e-5):
        out = run([0, 1], params=[SamplingParams(temperature=temperature)] * SLOTS)
        assert out["tokens"].tolist() == np.argmax(LOGITS[:2], axis=1).tolist()
        assert out["finite"].all() and (out["processed_logprobs"] == 0).all()


def test_logprobs_are_of_the_raw_model_distribution():
    exact = LOGITS.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    out = run(list(range(SLOTS)))
    for slot, params in enumerate(MIXTURE):
        assert out["logprobs"][slot] == pytest.approx(exact[slot, out["tokens"][slot]], abs=5e-6)
        wanted = params.logprobs or 0
        best = np.argsort(-exact[slot], kind="stable")[:wanted]
        assert out["top_ids"][slot].tolist() == best.tolist() + [VOCAB] * (MAX_TOP - wanted)
        np.testing.assert_allclose(out["top_logprobs"][slot, :wanted], exact[slot, best], atol=5e-6)
        assert (out["top_logprobs"][slot, wanted:] == 0).all()


def test_processed_logprobs_of_a_plain_request_are_the_raw_ones():
    out = run(list(range(SLOTS)), params=[SamplingParams()] * SLOTS)
    np.testing.assert_allclose(out["processed_logprobs"], out["logprobs"], atol=2e-6)


def test_large_logits_do_not_overflow():
    out = run(list(range(SLOTS)), LOGITS * np.float32(1e37), [SamplingParams(temperature=0.01, top_p=0.9)] * SLOTS)
    assert out["finite"].all()
    assert out["tokens"].tolist() == np.argmax(LOGITS, axis=1).tolist()


def test_penalties_see_a_history_of_several_chunks():
    flat = np.zeros((SLOTS, VOCAB), np.float32)
    tokens = TOKENS[3].tolist()
    unseen = sorted(set(range(VOCAB)) - set(tokens))
    params = [SamplingParams(temperature=0, repetition_penalty=100.0)] * SLOTS
    out = run([3], flat + 1, params)
    assert out["tokens"][0] == unseen[0]
    output = tokens[PROMPT_LENS[3] : SEQ_LENS[3]]
    absent = min(set(range(VOCAB)) - set(output))
    assert run([3], flat, [SamplingParams(temperature=0, presence_penalty=2.0)] * SLOTS)["tokens"][0] == absent


def test_draws_differ_by_seed_sample_and_position():
    words = np.asarray(
        random_words(
            jnp.asarray([[0, 1], [1, 0], [0, 1], [0, 1], [2**32 - 1, 7]], jnp.uint32),
            jnp.asarray([0, 0, 1, 0, 0], jnp.int32),
            jnp.asarray([5, 5, 5, 6, 5], jnp.int32),
            17,
        )
    )
    assert words.shape == (5, 17) and len(np.unique(words)) == words.size
    again = random_words(jnp.asarray([[0, 1]], jnp.uint32), jnp.asarray([1]), jnp.asarray([5]), 8)
    assert np.array_equal(np.asarray(again)[0], words[2, :8])


def test_random_words_are_threefry_blocks():
    def threefry(key, x):
        """Source: Random123, Salmon et al. 2011."""
        mask, rotations = 0xFFFFFFFF, ((13, 15, 26, 6), (17, 29, 16, 24))
        keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA]
        a, b = (x[0] + keys[0]) & mask, (x[1] + keys[1]) & mask
        for block in range(5):
            for r in rotations[block % 2]:
                a = (a + b) & mask
                b = (((b << r) | (b >> (32 - r))) & mask) ^ a
            a = (a + keys[(block + 1) % 3]) & mask
            b = (b + keys[(block + 2) % 3] + block + 1) & mask
        return a, b

    key = (0x12345678, 0x9ABCDEF0)
    for data in (3, 1000):
        key = threefry(key, (0, data))
    expected = [word for block in range(3) for word in threefry(key, (0, block))]
    words = random_words(jnp.asarray([[0x12345678, 0x9ABCDEF0]], jnp.uint32), jnp.asarray([3]), jnp.asarray([1000]), 6)
    assert np.asarray(words)[0].tolist() == expected


def test_draw_descends_a_deep_tree_in_proportion_to_the_weights():
    size, rows = 4500, 4000
    weights = (1 / (1 + np.random.default_rng(0).permutation(size)) ** 1.2).astype(np.float32)
    weights[::7] = 0

    @jax.jit
    def drawn(words):
        table = jnp.asarray(weights)
        everywhere = jnp.broadcast_to(table[None], (rows, size))
        return draw(everywhere, lambda ids: table.at[ids].get(mode="fill", fill_value=0.0), words)

    words = np.random.default_rng(1).integers(0, 2**32, (rows, num_words(size)), np.uint32)
    tokens, total = drawn(words)
    counts = np.bincount(np.asarray(tokens), minlength=size)
    assert counts[weights == 0].sum() == 0
    assert chi_square_p(counts, weights / weights.sum(dtype=np.float64)) > 1e-4
    np.testing.assert_allclose(total, weights.sum(dtype=np.float64), rtol=1e-6)


def test_draw_takes_the_only_token_with_weight_whatever_the_words():
    size = 300

    @jax.jit
    def drawn(weights, words):
        return draw(weights, lambda ids: jnp.take_along_axis(weights, ids, axis=1, mode="fill", fill_value=0.0), words)

    for only in (0, 15, 16, 299):
        weights = jnp.zeros((4, size)).at[:, only].set(1e-34)
        words = jnp.asarray([[0], [1], [2**31], [2**32 - 1]], jnp.uint32) * jnp.ones((1, num_words(size)), jnp.uint32)
        assert drawn(weights, words)[0].tolist() == [only] * 4


def test_row_sums_do_not_depend_on_the_number_of_rows():
    values = jnp.asarray(np.random.default_rng(2).normal(size=(33, 5001)).astype(np.float32))
    whole = np.asarray(jax.jit(row_sums)(values))
    for rows in (1, 2, 3, 7, 32):
        assert np.array_equal(np.asarray(jax.jit(row_sums)(values[-rows:])), whole[-rows:])


def test_float_keys_order_floats_and_come_back():
    values = np.array([-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-40, 2.0, 3e38, np.inf], np.float32)
    keys = np.asarray(float_keys(jnp.asarray(values)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert np.asarray(key_floats(jnp.asarray(keys))).tobytes() == values.tobytes()


@pytest.mark.parametrize("scale", [2.0, 0.25])
def test_thresholds_are_the_smallest_logit_that_passes(scale):
    """With a wide range of logits they are among the candidates, with a narrow one mostly beyond."""
    top_k = np.array([1, 64, 65, 400, VOCAB, VOCAB, VOCAB, 64, 300], np.int32)
    top_p = np.array([1.0, 1.0, 1.0, 1.0, 0.5, 0.99, 1e-9, 0.9, 0.9], np.float32)
    logits = LOGITS / 2 * np.float32(scale)

    @jax.jit
    def thresholds(logits, top_k, top_p):
        peak = jnp.max(logits, axis=1, keepdims=True)
        return filter_thresholds(logits, lambda z: jnp.exp(z - peak), top_k, top_p)

    found = thresholds(jnp.asarray(logits), jnp.asarray(top_k), jnp.asarray(top_p))
    for row in range(SLOTS):
        params = SamplingParams(top_k=int(top_k[row]), top_p=float(top_p[row]))
        assert found[row] == logits[row][distribution(logits[row], params, [], []) > 0].min(), row


def test_sampling_works_where_no_bias_stop_or_logprob_is_possible():
    limits = dataclasses.replace(limits_for(VOCAB), max_logit_bias=0, max_stop_sequences=0, max_logprobs=0)
    slot = jnp.zeros(1, jnp.int32)

    def function(logits):
        return choose(
            logits,
            SamplingTable.empty(1, limits).rows(slot),
            History(
                positions=slot,
                tokens=jnp.zeros((1, 8), jnp.int32),
                slot_ids=slot,
                prompt_lens=slot,
                seq_lens=slot,
            ),
            max_top=0,
        ).sampled()

    out = jax.eval_shape(function, jnp.asarray(LOGITS[:1]))
    assert out.tokens.shape == (1,) and out.top_ids.shape == (1, 0)


def test_padding_rows_cause_no_sampling():
    out = run([SLOTS, SLOTS, 1, SLOTS])
    assert out["tokens"][2] == np.argmax(LOGITS[1]) and out["finite"].all()


def test_no_array_of_slots_by_vocabulary_is_built():
    slots = 53
    table = table_of([SamplingParams()] * slots, VOCAB)
    rows = jnp.zeros(5, jnp.int32)

    def function(logits, table, tokens):
        return choose(
            logits,
            table.rows(rows),
            History(
                positions=rows,
                tokens=tokens,
                slot_ids=rows,
                prompt_lens=rows,
                seq_lens=rows,
            ),
            max_top=MAX_TOP,
        ).sampled()

    jaxpr = jax.make_jaxpr(function)(jnp.zeros((5, VOCAB)), table, jnp.zeros((slots, 64), jnp.int32))
    shapes = _shapes(jaxpr.jaxpr)
    assert any(VOCAB in shape for shape in shapes), "the walk sees nothing"
    assert not [shape for shape in shapes if slots in shape and VOCAB in shape]


def test_arrays_of_rows_by_vocabulary_are_built_in_branches_only():
    """Outside of branches there are the logits and their exponentials, but no counts, masks or ids per token."""
    table = table_of([SamplingParams()] * 5, VOCAB)
    rows = jnp.arange(5, dtype=jnp.int32)

    def function(logits, table, tokens):
        return choose(
            logits,
            table.rows(rows),
            History(
                positions=rows,
                tokens=tokens,
                slot_ids=rows,
                prompt_lens=rows,
                seq_lens=rows,
            ),
            max_top=MAX_TOP,
        ).sampled()

    jaxpr = jax.make_jaxpr(function)(jnp.zeros((5, VOCAB)), table, jnp.zeros((5, 64), jnp.int32))
    top_level = [
        (eqn.primitive.name, var.aval)
        for eqn in jaxpr.jaxpr.eqns
        for var in eqn.outvars
        if VOCAB in getattr(var.aval, "shape", ())
    ]
    assert {str(aval.dtype) for _, aval in top_level} == {"float32"}
    assert {name for name, _ in top_level} <= {"sub", "exp", "pad", "jit", "pjit", "broadcast_in_dim", "reshape"}


def _shapes(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of all values, inner functions included."""
    shapes = {tuple(getattr(var.aval, "shape", ())) for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            shapes |= _shapes(inner)
    return shapes


def test_table_rows_come_back_as_they_were_set():
    empty = SamplingTable.empty(SLOTS, limits_for(VOCAB))
    new = table_of(MIXTURE[:3], VOCAB)
    table = jax.jit(SamplingTable.set_rows)(empty, jnp.asarray([4, SLOTS, 0], jnp.int32), new)
    back = jax.jit(SamplingTable.rows)(table, jnp.asarray([0, SLOTS, 4, 7], jnp.int32))
    for name, column in back.columns.items():
        assert column.shape == (4, *empty.columns[name].shape[1:]) and column.dtype == empty.columns[name].dtype
        expected = [new.columns[name][2], empty.columns[name][0], new.columns[name][0]]
        assert np.array_equal(np.asarray(column[:3]), np.stack(expected)), name
        assert np.array_equal(np.asarray(column[3]), np.asarray(empty.columns[name][0])), name


def test_stop_match_compares_generated_tokens_only():
    none, width = VOCAB, 16
    window = np.full((6, width), none, np.int32)
    window[0, -3:] = [7, 8, 9]
    window[1, -2:] = [8, 9]
    window[2, -1:] = [9]
    window[3] = np.arange(16)
    window[4, -3:] = [7, 8, 9]
    window[5, -3:] = [7, 8, 9]
    params = [
        SamplingParams(stop_token_ids=[[1, 2], [7, 8, 9]], ignore_eos=True),
        SamplingParams(stop_token_ids=[[7, 8, 9]], ignore_eos=True),
        SamplingParams(stop_token_ids=[5, 9], ignore_eos=True),
        SamplingParams(stop_token_ids=[list(range(16))], ignore_eos=True),
        SamplingParams(stop_token_ids=[[8, 9]], ignore_eos=True),
        SamplingParams(),
    ]
    table = table_of(params, VOCAB)
    enough = jnp.asarray([True, True, True, True, False, True])
    stops = jax.jit(stop_match)(table.stop_ids, table.stop_lens, jnp.asarray(window), enough)
    assert np.asarray(stops).tolist() == [True, False, True, True, False, False]


def test_end_of_sequence_stops_unless_ignored():
    window = np.full((2, 16), VOCAB, np.int32)
    window[:, -1] = EOS
    table = table_of([SamplingParams(), SamplingParams(ignore_eos=True)], VOCAB)
    stops = stop_match(table.stop_ids, table.stop_lens, jnp.asarray(window), jnp.ones(2, jnp.bool_))
    assert np.asarray(stops).tolist() == [True, False]


@pytest.mark.parametrize("count", [1, 4])
def test_the_likeliest_tokens_have_the_bits_of_their_own_log_probability(count, getkey):
    logits = jax.random.normal(getkey(), (64, 50)) * 12
    stats = LogitStats.of(logits)
    ids, logprobs = likeliest(logits, stats, count)
    own = [logprobs_of(logits, ids[:, i], stats) for i in range(count)]
    np.testing.assert_array_equal(logprobs, np.stack(own, axis=1))


@pytest.mark.parametrize("backend", nightly_but(["cpu"], [None, "cpu"]))
def test_a_forced_row_gets_what_masking_and_drawing_would_give_it(backend):
    backend = None if backend is None else make_backend(backend)
    logits, slots = LOGITS.copy(), jnp.arange(SLOTS, dtype=jnp.int32)
    only = np.array([7, 8, 9, 10, 4, 11, EOS, 12, 13])  # row 6 may not end yet
    logits[3, 200], logits[5, 11] = np.nan, -np.inf
    lens, prompt_lens = jnp.asarray(SEQ_LENS), jnp.asarray(PROMPT_LENS)
    history = History(lens, jnp.asarray(TOKENS), slots, prompt_lens, lens)
    table = table_of(MIXTURE, VOCAB)

    @jax.jit
    def sampled(words, forced) -> SampleOutput:
        stats = None if backend is None else LogitStats.of_kernel(backend, jnp.asarray(logits), jnp.int32(SLOTS))
        masks = RowMasks(words, slots != 8, forced)
        own = dict(max_top=MAX_TOP, stats=stats, backend=backend, masks=masks)
        return choose(jnp.asarray(logits), table.rows(slots), history, **own).sampled()

    for several in ([], [0], [1, 2, 4], list(range(7))):  # rows with a choice
        allowed = np.arange(VOCAB) == only[:, None]
        allowed[several, 20:60] = True
        words = packed(allowed)
        forced = np.where(np.arange(SLOTS) == 8, VOCAB, forced_tokens(words, VOCAB))
        assert set(np.flatnonzero(forced == VOCAB)) == {*several, 8}
        ours, theirs = sampled(words, forced), sampled(words, np.full(SLOTS, VOCAB, np.int32))
        for name in ("tokens", "finite", "possible", "logprobs", "processed_logprobs", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        possible = np.asarray(ours.possible)
        assert not possible[3] and (possible[5], possible[6]) == (5 in several, 6 in several)
        assert np.asarray(ours.finite).tolist() == [slot != 3 for slot in range(SLOTS)]
        alone = np.flatnonzero(possible & (forced < VOCAB))
        np.testing.assert_array_equal(np.asarray(ours.tokens)[alone], only[alone])
        np.testing.assert_array_equal(np.asarray(ours.processed_logprobs)[alone], 0)


PLAIN = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3, top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=1.4, top_k=30, top_p=0.9, logprobs=0),
    SamplingParams(temperature=0, logprobs=MAX_TOP),
    SamplingParams(top_p=0.7, logprobs=2),
]
SPOILT = LOGITS.copy()
SPOILT[1, 7], SPOILT[2], SPOILT[3, 9] = np.nan, -np.inf, np.inf
SPOILT[4, [5, 50]] = SPOILT[4].max() + 1  # a tie


def history_of(slots) -> History:
    lens = jnp.asarray(SEQ_LENS)[slots]
    return History(lens, jnp.asarray(TOKENS), slots, jnp.asarray(PROMPT_LENS)[slots], lens)


MIXED = [*PLAIN, *MIXTURE, SamplingParams(min_p=0.3, logprobs=1), SamplingParams(presence_penalty=0.4, min_p=0.01)]


@pytest.mark.parametrize("asked", [PLAIN, MIXED, MIXED[::-1]], ids=["plain", "mixed", "reversed"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_sampled_together_have_the_bits_of_a_few(asked, masked):
    """All at once, with their log probabilities taken a few at a time, as `decode.step` samples them."""
    backend, slots = make_backend("cpu"), jnp.arange(SLOTS, dtype=jnp.int32)
    allowed = np.random.default_rng(2).random((SLOTS, VOCAB)) < 0.5
    allowed[6] = np.arange(VOCAB) == 40
    constrained = np.arange(SLOTS) % 3 == 0
    forced = jnp.asarray(np.where(constrained, forced_tokens(packed(allowed), VOCAB), VOCAB))

    @jax.jit
    def chosen(logits, rows, slots, words, forced) -> ChosenTokens:
        stats = LogitStats.of_kernel(backend, logits, jnp.int32(len(logits)))
        masks = RowMasks(words, jnp.asarray(constrained)[slots], forced) if masked else None
        return choose(logits, rows, history_of(slots), max_top=MAX_TOP, stats=stats, backend=backend, masks=masks)

    sampled, words = jax.jit(ChosenTokens.sampled), jnp.asarray(packed(allowed))
    for shift in range(len(asked)):
        table = table_of([asked[(slot + shift) % len(asked)] for slot in range(SLOTS)], VOCAB)
        together = chosen(jnp.asarray(SPOILT), table.rows(slots), slots, words, forced)
        assert not np.asarray(together.sampled().possible)[1:4].any()
        if asked is PLAIN and PLAIN[(4 + shift) % len(PLAIN)].temperature == 0:
            assert np.asarray(together.tokens)[4] == 5
        for first in (0, 5):
            own = slots[first : first + 4]
            few = chosen(jnp.asarray(SPOILT)[own], table.rows(own), own, words[own], forced[own])
            part = jax.tree.map(lambda array, own=own: array[own], together)
            for one, other in zip(jax.tree.leaves(sampled(part)), jax.tree.leaves(sampled(few)), strict=True):
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", ["cpu", "xla", "gpu_interpret", "tpu_interpret"])
def test_whole_rows_are_sampled_by_kernels_that_read_the_whole_vocabulary(name):
    logits, backend = jnp.zeros((4, 4096)), make_backend(name)
    assert samples_whole_rows(backend, logits, Vocabulary(4096)) == (name in ("cpu", "gpu_interpret"))
    assert not samples_whole_rows(backend, logits, Vocabulary(8192, ShardAxis("model", 2)))


@pytest.mark.parametrize("name", nightly_but(["cpu"], ["cpu", "tpu_interpret", "gpu_interpret"]))
def test_a_part_of_the_vocabulary_that_is_nan_makes_its_rows_not_finite(name):
    """While one in which no token is possible counts for nothing."""
    backend = make_backend(name)
    whole = np.random.default_rng(0).normal(size=(2, 4, 640)).astype(np.float32)
    whole[1, 0], whole[1, 1] = -np.inf, np.nan
    whole[1, 2], whole[0, 2, 7] = -np.inf, np.nan
    parts = [backend.logit_stats(jnp.asarray(part), jnp.int32(4)) for part in whole]

    class OfParts(XlaBackend):
        def logit_stats(self, logits, num_rows):
            own = jax.lax.axis_index("model")
            peak, total, best = (jnp.stack(each)[own] for each in zip(*parts, strict=True))
            return peak, total, best

    def merged(logits):
        stats = LogitStats.of_kernel(OfParts(), logits, jnp.int32(4), Vocabulary(1280, ShardAxis("model", 2)))
        assert stats is not None
        return stats.total

    totals = np.asarray(jax.vmap(merged, axis_name="model")(jnp.asarray(whole)))
    assert (totals > 0).tolist() == [[True, False, False, True]] * 2
    np.testing.assert_allclose(totals[:, 0], LogitStats.of(jnp.asarray(whole[0])).total[0], rtol=1e-6)
