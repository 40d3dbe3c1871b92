"""Sparse attention: the choice of keys by an indexer, and attention to them, against numpy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from levanter_infer.kernels.call import NO_KEY, IndexQueries, Share
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.tpu.choice import is_largest
from levanter_infer.kernels.tpu.sizes import Tile, align_queries
from levanter_infer.kernels.tpu.tiling import Tiles
from levanter_infer.kernels.xla import blocks
from tests.kernels.ragged import (
    RUNS_HERE,
    Ragged,
    Sizes,
    attend,
    attention_call,
    bits,
    dense_attention,
    for_tpu,
    make_ragged,
    random_rows,
)
from tests.tiers import nightly_but

KINDS = ("decode", "prompts", "chunks", "mixed")
INDEX_HEADS, INDEX_DIM, CHOSEN = 5, 22, 12
SIZES = {
    "small": Sizes(6, 1, 34 + INDEX_DIM, 4, max_pages=40, value_dim=24),
    "bits": Sizes(16, 1, 96 + INDEX_DIM, 16, tokens=80, max_pages=10, dtype="bfloat16", stored="uint16", value_dim=64),
    "few-heads": Sizes(2, 1, 48 + INDEX_DIM, 16, max_pages=10, value_dim=32, sinks=True),
    "int8": Sizes(3, 1, 34 + INDEX_DIM, 16, max_pages=10, dtype="int8", value_dim=24),
}
"""Tokens of all sizes store an index key of `INDEX_DIM` numbers behind their latent."""


@dataclasses.dataclass(frozen=True)
class Sparse(Ragged):
    """A batch whose queries and keys are those of attention, and whose pool has index keys too."""

    index_keys: list[np.ndarray]
    """[seq_len, index_dim] per row."""


def make_sparse(sizes: Sizes, rows: list[tuple[int, int]], seed: int = 0) -> Sparse:
    batch = make_ragged(sizes, rows, seed)
    queries, keys = ([side[..., :-INDEX_DIM] for side in sides] for sides in (batch.queries, batch.keys))
    index_keys = [side[:, 0, -INDEX_DIM:] for side in batch.keys]
    arrays = {**batch.arrays, "q": batch.arrays["q"][..., :-INDEX_DIM]}
    return Sparse(sizes, arrays, batch.q_lens, batch.seq_lens, queries, keys, batch.values, index_keys)


def index_queries(batch: Sparse, seed: int = 0, num_chosen: int = CHOSEN) -> IndexQueries:
    """Random queries, and weights of both signs; NaN for padding tokens."""
    rng, used = np.random.default_rng(seed), sum(batch.q_lens)
    q = np.full((batch.sizes.tokens, INDEX_HEADS, INDEX_DIM), np.nan, np.float32)
    q[:used] = rng.standard_normal(q[:used].shape)
    weights = np.full(q.shape[:2], np.nan, np.float32)
    weights[:used] = rng.standard_normal(weights[:used].shape)
    return IndexQueries(jnp.asarray(q), jnp.asarray(weights), num_chosen)


@functools.cache
def chooser(impl: str, dtype: str, num_chosen: int, value_dim: int):
    """The jitted choice; everything that may be traced is."""
    backend = make_backend(impl)

    def choose(arrays: dict, q, weights):
        static = dict(scale=1.0, kv_dtype=dtype, value_dim=value_dim, index_dim=INDEX_DIM, backend=backend)
        return backend.choose_keys(attention_call(**arrays, **static), IndexQueries(q, weights, num_chosen))

    return jax.jit(choose)


def choose(impl: str, batch: Sparse, queries: IndexQueries) -> np.ndarray:
    run = chooser(impl, batch.sizes.dtype, queries.num_chosen, batch.sizes.value_dim)
    chosen = np.array(run(batch.arrays, queries.q, queries.weights))
    chosen[sum(batch.q_lens) :] = NO_KEY  # what padding tokens choose means nothing
    return chosen


def expected_choice(batch: Sparse, queries: IndexQueries) -> np.ndarray:
    """The oracle, in f64, one token at a time."""
    found = np.full((batch.sizes.tokens, queries.num_chosen), NO_KEY)
    token = 0
    for keys, q_len, seq_len in zip(batch.index_keys, batch.q_lens, batch.seq_lens, strict=True):
        for position in range(seq_len - q_len, seq_len):
            matmul = np.asarray(queries.q[token], np.float64) @ keys[: position + 1].T.astype(np.float64)
            scores = np.asarray(queries.weights[token], np.float64) @ np.maximum(matmul, 0)
            best = np.sort(np.argsort(-scores, kind="stable")[: queries.num_chosen])
            found[token, : len(best)] = best
            token += 1
    return found


@pytest.mark.parametrize(
    "name, impl",
    nightly_but(
        [("small", "xla"), ("bits", "gpu_interpret"), ("few-heads", "xla"), ("int8", "reference")],
        itertools.product(SIZES, RUNS_HERE),
    ),
)
def test_choice_and_attention_of_random_batches_equal_dense(name, impl):
    sizes = SIZES[name]
    if sizes.dtype == "int8" and impl not in ("reference", "xla"):
        pytest.skip("these kernels read no pages of int8")
    for seed, kind in enumerate(KINDS):
        batch = make_sparse(sizes, random_rows(sizes, kind, seed), seed)
        queries = index_queries(batch, seed)
        chosen = choose(impl, batch, queries)
        np.testing.assert_array_equal(chosen, expected_choice(batch, queries))
        options = dict(scale=0.3, kv_dtype=sizes.dtype, value_dim=sizes.value_dim, index_dim=INDEX_DIM, impl=impl)
        sparse = attend(**batch.arrays, **options, chosen=jnp.asarray(chosen))
        np.testing.assert_allclose(sparse, dense_attention(batch, scale=0.3, chosen=chosen), atol=1e-5, rtol=1e-5)
        whole = attend(**batch.arrays, **options)
        np.testing.assert_allclose(whole, dense_attention(batch, scale=0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_of_equal_scores_the_earlier_keys_are_chosen(impl):
    """All heads have the weight zero, or none points towards a key: sums of zeros of both signs."""
    batch = make_sparse(SIZES["small"], [(9, 100), (1, 40)])
    queries = index_queries(batch)
    weights, q = queries.weights.at[:5].set(0).at[2:5].set(-1), queries.q.at[2:5].set(0)
    chosen = choose(impl, batch, dataclasses.replace(queries, weights=weights, q=q))
    np.testing.assert_array_equal(chosen[:5], np.broadcast_to(np.arange(CHOSEN), (5, CHOSEN)))
    np.testing.assert_array_equal(chosen[5:10], expected_choice(batch, queries)[5:10])


@pytest.mark.parametrize("impl", RUNS_HERE)
def test_as_many_keys_as_may_be_chosen_are_all_seen(impl):
    """More keys may be chosen than a sequence can have: attention is dense, whatever the scores."""
    batch = make_sparse(SIZES["small"], [(1, 160), (20, 90), (3, 3)])
    chosen = choose(impl, batch, index_queries(batch, num_chosen=500))
    assert chosen.shape == (48, 160)
    out = attend(**batch.arrays, scale=0.3, value_dim=24, index_dim=INDEX_DIM, impl=impl, chosen=jnp.asarray(chosen))
    np.testing.assert_allclose(out, dense_attention(batch, scale=0.3), atol=1e-5, rtol=1e-5)


def test_bits_of_a_row_do_not_depend_on_the_others():
    sizes = dataclasses.replace(SIZES["bits"], tokens=120, rows=6)
    together = make_sparse(sizes, [(1, 150), (70, 160), (2, 2), (33, 120)])
    queries = index_queries(together)
    chosen = choose("xla", together, queries)

    def run(arrays: dict, chosen):
        return attend(
            **arrays,
            scale=0.3,
            kv_dtype="bfloat16",
            value_dim=64,
            index_dim=INDEX_DIM,
            impl="xla",
            chosen=jnp.asarray(chosen),
        )

    out, token = run(together.arrays, chosen), 0
    for row, q_len in enumerate(together.q_lens):
        arrays = dict(together.arrays)
        for name in ("page_indices", "seq_lens"):
            arrays[name] = jnp.roll(arrays[name], -row, axis=0)
        arrays["cu_q_lens"] = jnp.full(7, q_len, jnp.int32).at[0].set(0)
        arrays["num_seqs"], arrays["q"] = jnp.int32(1), jnp.roll(arrays["q"], -token, axis=0)
        alone = dataclasses.replace(together, arrays=arrays)
        q, weights = (jnp.roll(side, -token, axis=0) for side in (queries.q, queries.weights))
        own = choose("xla", alone, dataclasses.replace(queries, q=q, weights=weights))
        np.testing.assert_array_equal(own[:q_len], chosen[token : token + q_len])
        np.testing.assert_array_equal(bits(run(arrays, own)[:q_len]), bits(out[token : token + q_len]))
        token += q_len


@pytest.mark.parametrize("tile", [1, 3, 16])
def test_the_choice_does_not_depend_on_the_tile(tile, monkeypatch):
    batch = make_sparse(SIZES["bits"], [(40, 150), (1, 160), (1, 30), (2, 99)])
    queries, used = index_queries(batch), blocks.lanes(80, 5, 1, INDEX_HEADS, 128)
    usual = choose("xla", batch, queries)
    monkeypatch.setattr(blocks, "lanes", lambda *_: tuple(dataclasses.replace(lane, tile=tile) for lane in used))
    chooser.cache_clear()
    np.testing.assert_array_equal(choose("xla", batch, queries), usual)
    chooser.cache_clear()


def test_poison_in_another_row_changes_no_choice():
    batch = make_sparse(SIZES["small"], [(1, 100), (30, 120), (1, 60)])
    queries = index_queries(batch)
    clean = choose("xla", batch, queries)
    foreign = batch.arrays["page_indices"][1, :30]
    arrays = {**batch.arrays, "kv_pages": batch.arrays["kv_pages"].at[:, foreign].set(jnp.nan)}
    q = queries.q.at[1:31].set(jnp.nan)
    found = choose("xla", dataclasses.replace(batch, arrays=arrays), dataclasses.replace(queries, q=q))
    np.testing.assert_array_equal(found[[0, 31]], clean[[0, 31]])


def test_calls_that_do_not_fit_are_refused():
    batch = make_sparse(SIZES["small"], [(1, 30), (5, 9)])
    queries = index_queries(batch)
    for changes, message in (
        (dict(q=queries.q[:, :, :-1]), r"index queries: got shape \(48, 5, 21\), expected \(48, heads, 22\)"),
        (dict(q=queries.q[:9]), r"index queries: got shape \(9, 5, 22\), expected \(48, heads, 22\)"),
        (dict(weights=queries.weights[:, :2]), r"weights of index queries: got shape \(48, 2\), expected \(48, 5\)"),
        (dict(q=queries.q.astype(jnp.int32)), "index queries: got int32, expected a floating dtype"),
        (dict(num_chosen=0), "num_chosen: got 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            choose("xla", batch, dataclasses.replace(queries, **changes))
    arrays = batch.arrays
    with pytest.raises(ValueError, match="got head_dim 56, expected 57 as in q and index_dim=23"):
        attend(**arrays, index_dim=23, scale=1.0, value_dim=24, impl="xla")
    with pytest.raises(ValueError, match=r"chosen: got int32\[48\], expected int32\[48, keys\]"):
        attend(**arrays, index_dim=22, scale=1.0, value_dim=24, impl="xla", chosen=jnp.zeros(48, jnp.int32))
    with pytest.raises(ValueError, match=r"chosen: got int32\[9, 3\], expected int32\[48, keys\]"):
        attend(
            **arrays, index_dim=22, scale=1.0, value_dim=24, impl="gpu_interpret", chosen=jnp.zeros((9, 3), jnp.int32)
        )
    with pytest.raises(ValueError, match="index_dim and chosen are for a pool of latents; give value_dim too"):
        attend(**arrays, index_dim=22, scale=1.0, kv_heads=1, impl="xla")


TPU_SIZES = {
    "small": Sizes(6, 1, 176 + INDEX_DIM, 32, tokens=80, rows=5, max_pages=10, value_dim=144),
    "bits": Sizes(16, 1, 96 + INDEX_DIM, 32, tokens=150, max_pages=10, dtype="bfloat16", value_dim=64),
    "int8": Sizes(4, 1, 40 + INDEX_DIM, 32, tokens=80, rows=5, max_pages=10, dtype="int8", value_dim=24),
    "float8": Sizes(4, 1, 40 + INDEX_DIM, 32, tokens=80, rows=5, max_pages=10, dtype="float8_e4m3fn", value_dim=24),
}
TPU_ROWS = [(1, 300), (7, 140), (1, 3), (66, 290), (1, 64)]
"""Decode tokens, and chunks whose query blocks begin in any lane; some see fewer keys than may be chosen."""


def chosen_on_tpu(choice: np.ndarray, q_pos: np.ndarray) -> list[np.ndarray]:
    """Positions of the keys that each token has chosen, of those up to its own."""
    by_lane = np.asarray(choice, np.float32).reshape(choice.shape[0], -1, 128)
    found = []
    for token in range(len(q_pos)):
        group, lane = divmod(token, 64)
        own = by_lane[group, :, lane]
        if group > 0:  # the group before has the same token in its upper half
            np.testing.assert_array_equal(by_lane[group - 1, :, lane + 64], own)
        found.append(np.flatnonzero(own[: q_pos[token] + 1] == 0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TPU_SIZES)
def test_the_kernels_of_a_tpu_leave_out_keys_that_are_not_chosen(name):
    sizes = TPU_SIZES[name]
    batch = make_sparse(sizes, TPU_ROWS)
    queries = index_queries(batch, num_chosen=40)
    arrays = for_tpu(batch, INDEX_DIM)
    del arrays["kv_heads"]
    static = dict(kv_heads=1, scale=0.3, kv_dtype=sizes.dtype, value_dim=sizes.value_dim, index_dim=INDEX_DIM)
    backend = make_backend("tpu_interpret")

    @jax.jit
    def choose_on_tpu(arrays: dict, q, weights):
        call = attention_call(**arrays, **static, backend=backend)
        return backend.choose_keys(call, IndexQueries(q, weights, queries.num_chosen))

    choice = choose_on_tpu(arrays, queries.q, queries.weights)
    expected = expected_choice(batch, queries)
    q_pos = np.concatenate([np.arange(n - q, n) for q, n in TPU_ROWS])
    found = chosen_on_tpu(choice, q_pos)
    for own, wanted in zip(found, expected, strict=False):
        np.testing.assert_array_equal(own, wanted[wanted != NO_KEY])
    tiles = Tiles(Tile(4, 3, 1), Tile(4, 3, 1, max(8, align_queries(sizes.q_heads))))
    run = jax.jit(lambda arrays, chosen: attend(**arrays, **static, tiles=tiles, impl="tpu_interpret", chosen=chosen))
    out = run(arrays, choice)
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found
    np.testing.assert_allclose(out, dense_attention(batch, scale=0.3, chosen=expected), atol=1e-5, rtol=1e-5)
    # A layer that shares the choice has a pool without index keys
    shared = make_ragged(dataclasses.replace(sizes, head_dim=sizes.head_dim - INDEX_DIM), TPU_ROWS)
    static["index_dim"] = 0
    own = {name: array for name, array in for_tpu(shared).items() if name != "kv_heads"}
    out = jax.jit(lambda own, chosen: attend(**own, **static, tiles=tiles, impl="tpu_interpret", chosen=chosen))(
        own, choice
    )
    np.testing.assert_allclose(out, dense_attention(shared, scale=0.3, chosen=expected), atol=1e-5, rtol=1e-5)
    static["index_dim"] = INDEX_DIM
    whole = jax.jit(lambda arrays: attend(**arrays, **static, tiles=tiles, impl="tpu_interpret"))(arrays)
    np.testing.assert_allclose(whole, dense_attention(batch, scale=0.3), atol=1e-5, rtol=1e-5)


def test_the_largest_scores_are_found_without_a_sort():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((40, 300)).astype(np.float32)
    scores[:, ::7] = -np.inf
    scores[5:20] = np.round(scores[5:20])  # many equal ones, and both zeros
    scores[3] = -np.inf
    scores[4, 10:] = -np.inf
    for count in (1, 13, 150, 300):
        found = np.asarray(jax.jit(is_largest, static_argnums=1)(jnp.asarray(scores), count))
        for row, own in zip(found, scores, strict=True):
            best = np.argsort(-own, kind="stable")[:count]
            np.testing.assert_array_equal(np.flatnonzero(row), np.sort(best[own[best] > -np.inf]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "int8"])
def test_rules_show_no_key_that_is_not_chosen_on_a_tpu(name):
    sizes = TPU_SIZES[name]
    batch = make_sparse(sizes, TPU_ROWS)
    arrays = for_tpu(batch, INDEX_DIM)
    expected = expected_choice(batch, queries := index_queries(batch, num_chosen=40))
    backend, arrays = make_backend("tpu_interpret"), {n: array for n, array in arrays.items() if n != "kv_heads"}
    static = dict(kv_heads=1, kv_dtype=sizes.dtype, value_dim=sizes.value_dim, index_dim=INDEX_DIM)
    call = attention_call(**arrays, **static, scale=0.3, backend=backend)
    choice = jax.jit(lambda q, weights: backend.choose_keys(call, IndexQueries(q, weights, 40)))(
        queries.q, queries.weights
    )
    tiles = Tiles(Tile(4, 3, 1), Tile(4, 3, 1, max(8, align_queries(sizes.q_heads))))
    for rules in (
        dict(soft_cap=2.0),
        dict(score_mod=lambda score, q_pos, kv_pos, head: 2 * jnp.tanh(score / 2)),
        dict(mask_mod=lambda q_pos, kv_pos, head: q_pos - kv_pos < 3),  # hides all keys that some tokens have chosen
    ):
        options = dict(**static, **rules, scale=0.3, tiles=tiles, impl="tpu_interpret")
        out = jax.jit(lambda arrays, chosen, options=options: attend(**arrays, **options, chosen=chosen))(
            arrays, choice
        )
        np.testing.assert_allclose(
            out, dense_attention(batch, scale=0.3, chosen=expected, **rules), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("impl", ["xla", "gpu_interpret", "tpu_interpret"])
def test_devices_that_share_the_tokens_add_up_to_all_of_them(impl):
    sizes = TPU_SIZES["small"] if impl == "tpu_interpret" else SIZES["small"]
    batch = make_sparse(sizes, TPU_ROWS if impl == "tpu_interpret" else [(1, 100), (20, 150), (1, 9), (9, 60), (1, 30)])
    queries, backend = index_queries(batch), make_backend(impl)
    arrays = for_tpu(batch, INDEX_DIM) if impl == "tpu_interpret" else {**batch.arrays, "kv_heads": 1}
    call = attention_call(**arrays, scale=1.0, value_dim=sizes.value_dim, index_dim=INDEX_DIM, backend=backend)

    @jax.jit
    def choose(index: jax.Array):
        share = Share(index, 3, lambda choice: choice)
        return backend.choose_keys(call, dataclasses.replace(queries, share=share))

    shares = [np.asarray(choose(jnp.int32(index))).astype(np.float64) for index in range(3)]
    assert sum(np.any(share) for share in shares) > 1
    np.testing.assert_array_equal(sum(shares), np.asarray(jax.jit(lambda: backend.choose_keys(call, queries))()))
