"""The control path alone: a step without a model, in a pool that is nearly full.

Every step packs, allocates, copies on write, appends, applies stop rules, frees the pages of finished sequences and
starts new ones in their slots; pages are reused least recently released first. Only keys and values are left out.
"""

import argparse
import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.bench.report import digest, emit, provenance, summarize
from levanter_infer.bench.workload import count, numbers
from levanter_infer.cache.arrays import replace
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.decode.codes import FINISHED, RUNNING, WAITING
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.paging import release
from levanter_infer.decode.prefix import insert_prefix, match_prefix
from levanter_infer.decode.programs import compile_program
from levanter_infer.decode.sampling import SampleOutput
from levanter_infer.decode.schedule import schedule
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.decode.step import append, batch_info, empty_sample
from levanter_infer.engine.params import MAX_STOP_TOKENS

PAGE_SIZE = 16
SLOTS = (64, 256, 1024)
PAGES = (4096, 16384, 65536, 262144)
_FILL = 0.97
_VOCAB = 32000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=numbers, default=SLOTS, help="comma-separated; default 64,256,1024")
    parser.add_argument("--pages", type=numbers, default=PAGES, help="comma-separated; default 4096 … 262144")
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--prefix-cache", action="store_true", help="steps with the prefix cache; default without")
    parser.add_argument("--prompt", type=count, default=10000, help="tokens of the prompt in the prefix lookup")


def run(args: argparse.Namespace) -> None:
    """Print one line per (slots, pages): `step_ms` is the median over `repeats` launches of `steps` steps."""
    about = provenance()
    for num_slots, num_pages in itertools.product(args.slots, args.pages):
        if num_pages >= 2 * num_slots:
            case = measure(num_slots, num_pages, args)
            emit({"bench": "control", **case, **about})
    for num_pages in (pages for pages in args.pages if pages * PAGE_SIZE > args.prompt):
        emit({"bench": "control", **measure_prefix(num_pages, args.prompt, repeats=args.repeats), **about})


def measure(num_slots: int, num_pages: int, args: argparse.Namespace) -> dict[str, object]:
    steps, repeats = args.steps, args.repeats
    shapes = dataclasses.replace(control_shapes(num_slots, num_pages), prefix_cache=args.prefix_cache)
    state = nearly_full(shapes)
    program = compile_program(lambda state: control_loop(state, shapes, steps), donate=(0,))
    state = jax.block_until_ready(program(state))  # compiles, and leaves the regular start
    before = _totals(state)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(program(state))
        times.append((time.perf_counter() - start) / steps * 1e3)
    check_invariants(state)
    after = _totals(state)
    moved = {name: round((after[name] - before[name]) / (steps * repeats), 3) for name in before}
    return {
        "slots": num_slots,
        "pages": num_pages,
        "step_ms": summarize(times)["median"],
        "step_ms_spread": summarize(times),
        "page_size": PAGE_SIZE,
        "steps": steps,
        "free_pages": int(state.page_table.num_free),
        "per_step": moved,
        "config": {name: value for name, value in dataclasses.asdict(shapes).items() if name != "limits"},
        "workload_hash": digest([num_slots, num_pages, steps, repeats]),
        "output_hash": digest(np.asarray(state.sequences.page_indices).tolist()),
    }


def _totals(state: DecodeState) -> dict[str, int]:
    names = ("generated", "prompt_tokens", "preemptions")
    return {name: int(getattr(state.counters, name)) for name in names}


def control_shapes(num_slots: int, num_pages: int) -> Shapes:
    mean_pages = num_pages // num_slots
    return Shapes(
        num_slots=num_slots,
        max_seqs=num_slots,
        max_seq_len=2 * mean_pages * PAGE_SIZE,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_step_tokens=4 * num_slots,
        max_round_steps=2,
        upload_tokens=1,
        limits=SamplingLimits(
            vocab_size=_VOCAB, max_logprobs=1, max_logit_bias=1, max_stop_sequences=8, max_stop_tokens=MAX_STOP_TOKENS
        ),
    )


def nearly_full(shapes: Shapes, seed: int = 0) -> DecodeState:
    """All slots decode, at random positions of sequences of random lengths, and hold most of the pool."""
    rng = np.random.default_rng(seed)
    state = DecodeState.init(shapes)
    slots, size = shapes.num_slots, shapes.page_size
    mean = shapes.num_pages * size * _FILL / slots
    stored = rng.uniform(0.3, 1.7, slots)
    stored = np.maximum((stored / stored.sum() * mean * slots - size).astype(np.int32), 2)
    stored = np.minimum(stored, shapes.max_seq_len - 2)
    held = -(-stored // size)
    order = rng.permutation(shapes.num_pages).astype(np.int32)
    indices = np.full(state.sequences.page_indices.shape, shapes.num_pages, np.int32)
    for slot, end in enumerate(np.cumsum(held)):
        indices[slot, : held[slot]] = order[end - held[slot] : end]
    used = int(held.sum())
    counts = np.zeros(shapes.num_pages, np.int32)
    counts[order[:used]] = 1
    prompt = np.maximum(stored // 2, 1).astype(np.int32)
    i32 = lambda values: jnp.asarray(values, jnp.int32)  # noqa: E731
    sequences = replace(
        state.sequences,
        tokens=i32(rng.integers(0, _VOCAB, state.sequences.tokens.shape)),
        seq_lens=i32(stored + 1),
        num_computed=i32(stored),
        page_indices=i32(indices),
        status=i32(np.full(slots, RUNNING)),
        arrival=i32(rng.permutation(slots)),
        prompt_lens=i32(prompt),
        max_lens=i32(np.minimum(stored + 1 + rng.integers(1, np.maximum(stored, 2)), shapes.max_seq_len)),
    )
    page_table = replace(
        state.page_table,
        ref_counts=i32(counts),
        free_ring=i32(np.concatenate([order[used:], order[:used]])),
        num_free=i32(shapes.num_pages - used),
    )
    return dataclasses.replace(state, sequences=sequences, page_table=page_table)


def control_loop(state: DecodeState, shapes: Shapes, steps: int) -> DecodeState:
    """`steps` steps without a model; finished sequences start again from their prompt as new arrivals."""
    sampled = empty_sample(shapes)

    def body(carry):
        step, state, ring = carry
        state, plan, _, _ = schedule(state, shapes)
        ring = replace(ring, count=jnp.zeros((), jnp.int32))
        batch = batch_info(state, plan, shapes)
        state, ring, _ = append(state, ring, plan, _instead_of_a_model(batch, sampled), shapes)
        return step + 1, _recycle(state), ring

    ring = OutputRing.init(shapes.ring_size, shapes.limits.max_logprobs)
    return jax.lax.while_loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), state, ring))[1]


def _instead_of_a_model(batch: PageBatchInfo, sampled: SampleOutput) -> SampleOutput:
    """ "Sample" tokens that depend on all inputs of a model, so that none is optimised away."""
    rows = sampled.tokens.shape[0]
    pages = jnp.sum(batch.page_indices.array, axis=1, dtype=jnp.int32)
    token = batch.tokens.array[:rows] + batch.positions.array[:rows] + batch.new_token_dests.array[:rows]
    mixed = jnp.abs(token + pages + batch.seq_lens.array) % _VOCAB
    return dataclasses.replace(sampled, tokens=mixed)


def _recycle(state: DecodeState) -> DecodeState:
    table = state.sequences
    again = table.is_status(FINISHED)
    youngest = jnp.max(table.arrival) + jnp.cumsum(again, dtype=jnp.int32)
    table = replace(
        table,
        status=jnp.where(again, WAITING, table.status),
        seq_lens=jnp.where(again, table.prompt_lens, table.seq_lens),
        arrival=jnp.where(again, youngest, table.arrival),
    )
    return dataclasses.replace(state, sequences=table)


def measure_prefix(num_pages: int, prompt_len: int, *, repeats: int) -> dict[str, object]:
    """Insertion and lookup of prefixes: a prompt finds its pages, and 64 sequences fill a page each.

    The state is not donated: both times include a copy of the tables.
    """
    slots, pages = 64, (prompt_len - 1) // PAGE_SIZE
    sizes = control_shapes(slots, num_pages)
    shapes = dataclasses.replace(
        sizes, max_seq_len=prompt_len + PAGE_SIZE, max_step_tokens=prompt_len, prefix_cache=True
    )
    none, order = jnp.zeros(slots, jnp.bool_), jnp.arange(slots, dtype=jnp.int32)
    fill = compile_program(lambda state, filled: insert_prefix(state, shapes, filled, none))
    find = compile_program(lambda state: match_prefix(state, shapes, order)[0])
    give_back = compile_program(lambda state: release(state, order == 0))
    state = give_back(fill(_one_prompt(shapes, pages, prompt_len), jnp.where(order == 0, pages, 0)))
    found = find(state)
    assert int(found.sequences.num_computed[1]) == pages * PAGE_SIZE, "the prompt was not found"

    def timed(function, *arguments) -> dict[str, float | int]:
        jax.block_until_ready(function(*arguments))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times.append((time.perf_counter() - start) * 1e3)
        return summarize(times)

    decoding = DecodeState.init(shapes)
    first_pages = jnp.full(decoding.sequences.page_indices.shape, num_pages, jnp.int32).at[:, 0].set(order)
    table = replace(
        decoding.sequences,
        tokens=state.sequences.tokens,
        page_indices=first_pages,
        num_computed=jnp.full(slots, PAGE_SIZE, jnp.int32),
    )
    decoding = dataclasses.replace(decoding, sequences=table)
    return {
        "case": "prefix",
        "pages": num_pages,
        "prompt": prompt_len,
        "found_pages": pages,
        "lookup_ms": timed(find, state),
        "register_64_pages_ms": timed(fill, decoding, jnp.ones(slots, jnp.int32)),
        "workload_hash": digest([num_pages, prompt_len]),
        "output_hash": digest(np.asarray(found.sequences.page_indices[1]).tolist()),
    }


def _one_prompt(shapes: Shapes, pages: int, prompt_len: int) -> DecodeState:
    """Slot 0 has computed `pages` pages of a prompt, and slot 1 has the same prompt and nothing computed."""
    state, rng = DecodeState.init(shapes), np.random.default_rng(0)
    tokens = rng.integers(0, _VOCAB, (shapes.num_slots, shapes.max_seq_len)).astype(np.int32)
    tokens[1] = tokens[0]
    indices = np.full(state.sequences.page_indices.shape, shapes.num_pages, np.int32)
    order = rng.permutation(shapes.num_pages).astype(np.int32)
    indices[0, :pages] = order[:pages]
    slot = np.arange(shapes.num_slots)
    table = replace(
        state.sequences,
        tokens=jnp.asarray(tokens),
        page_indices=jnp.asarray(indices),
        num_computed=jnp.asarray(np.where(slot == 0, pages * PAGE_SIZE, 0).astype(np.int32)),
        seq_lens=jnp.full(shapes.num_slots, prompt_len, jnp.int32),
        status=jnp.asarray(np.where(slot == 1, RUNNING, FINISHED).astype(np.int32)),
    )
    page_table = replace(
        state.page_table,
        ref_counts=jnp.zeros(shapes.num_pages, jnp.int32).at[order[:pages]].set(1),
        free_ring=jnp.asarray(np.concatenate([order[pages:], order[:pages]])),
        num_free=jnp.int32(shapes.num_pages - pages),
    )
    return dataclasses.replace(state, sequences=table, page_table=page_table)
