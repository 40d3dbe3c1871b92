"""Beam searches on the device's tables, without a model: logits depend on the last token and its position alone.

A plain Python search over the same logits says what must be found. The host's part is the engine's own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.decode.admission import Admission, admit
from levanter_infer.decode.beam_table import BeamTable, hypotheses
from levanter_infer.decode.invariants import violations
from levanter_infer.decode.kv_offload import NO_CALL
from levanter_infer.decode.outputs import HostOutputs, OutputRing, pack_outputs
from levanter_infer.decode.sampling import History
from levanter_infer.decode.sampling_beams import candidates
from levanter_infer.decode.schedule import schedule
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.decode.step import append, empty_sample
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.runner import admission_fields, empty_admission
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.engine.validation import RequestLimits, validate

VOCAB = 9
SHAPES = Shapes(
    num_slots=10,
    max_seqs=5,
    max_seq_len=14,
    num_pages=17,
    page_size=2,
    max_step_tokens=6,
    max_round_steps=4,
    upload_tokens=32,
    prefix_cache=True,
    max_beams=4,
    limits=SamplingLimits(vocab_size=VOCAB, max_logprobs=0, max_logit_bias=1, max_stop_sequences=2, max_stop_tokens=1),
)


@functools.lru_cache
def programs():
    def step(state: DecodeState, admission: Admission, logits: jax.Array):
        state = admit(state, admission)
        state, plan, _, _ = schedule(state, SHAPES)
        table, slots = state.sequences, plan.slot_ids
        lens = table.seq_lens.at[slots].get(mode="fill", fill_value=1)
        rows = logits[lens, table.tokens.at[slots, lens - 1].get(mode="fill", fill_value=0)]
        prompt_lens = table.prompt_lens.at[slots].get(mode="fill", fill_value=0)
        history = History(lens, table.tokens, slots, prompt_lens, lens)
        offered = candidates(state.beams, rows, state.sampling.rows(slots), history, max_beams=SHAPES.max_beams)
        sampled = dataclasses.replace(
            empty_sample(SHAPES), tokens=jnp.argmax(rows, axis=1).astype(jnp.int32), candidates=offered
        )
        ring = OutputRing.init(SHAPES.ring_size, SHAPES.limits.max_logprobs)
        state, ring, _ = append(state, ring, plan, sampled, SHAPES)
        assert isinstance(state.beams, BeamTable)
        found = hypotheses(state.beams, jnp.arange(SHAPES.num_slots))
        return state, pack_outputs(state, ring, jnp.int32(NO_CALL)), violations(state), found

    return jax.jit(step), jax.jit(lambda: DecodeState.init(SHAPES))


@dataclasses.dataclass
class Search:
    prompt: list[int]
    params: SamplingParams
    width: int

    def group(self) -> RequestState:
        max_len = min(len(self.prompt) + self.params.max_tokens, SHAPES.max_seq_len)
        group = RequestState("", None, self.prompt, self.params, 0, max_len)
        group.sequences += [SampleState(group, i) for i in range(self.width)]
        return group


def random_search(rng: np.random.Generator) -> Search:
    width = int(rng.choice([1, 1, 1, 2, 2, 3, 4]))
    asked = {
        "num_beams": width,
        "n": width,
        "length_penalty": float(rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0])),
        "early_stopping": [False, True, "never"][rng.integers(3)],
    }
    stops = rng.choice(VOCAB, rng.integers(0, 3), replace=False).tolist()
    params = SamplingParams(
        max_tokens=int(rng.integers(1, 6) if width == 4 else rng.integers(3, 9)),
        stop_token_ids=stops,
        temperature=0.0,
        **(asked if width > 1 else {}),
    )
    prompt = [1, 2, 3, 4, 5] if rng.random() < 0.6 else rng.integers(0, VOCAB, 5).tolist()
    return Search(prompt[: rng.integers(1, 6)], params, width)


def random_logits(rng: np.random.Generator) -> np.ndarray:
    """f32[tokens known, last token, vocab]. Without the first, sequences that go the same ways in another order tie."""
    return (3 * rng.standard_normal((SHAPES.max_seq_len + 1, VOCAB, VOCAB))).astype(np.float32)


def expected(search: Search, logits: np.ndarray) -> list[tuple[float, list[int], str]]:
    """(score, tokens, reason), the best first."""
    wide = logits - logits.max(axis=2, keepdims=True)
    logprobs = (wide - np.log(np.exp(wide).sum(axis=2, keepdims=True))).astype(np.float32)
    params, width = search.params, search.width
    stops = {sequence[0] for sequence in params.stop_token_ids}
    limit = min(params.max_tokens, SHAPES.max_seq_len - len(search.prompt))
    running = [(np.float32(0 if beam == 0 else -1e9), list(search.prompt)) for beam in range(width)]
    found = [(np.float32(-1e9), [], "")] * width
    for generated in range(1, limit + 1):
        everything = [(score + logprobs[len(s), s[-1], t], [*s, t]) for score, s in running for t in range(VOCAB)]
        everything.sort(key=lambda entry: -entry[0])
        length = np.float32(generated) ** np.float32(params.length_penalty)
        for score, s in everything[:width]:
            if s[-1] in stops or generated == limit:
                found.append((score / length, s[len(search.prompt) :], "stop" if s[-1] in stops else "length"))
        found = sorted(found, key=lambda entry: -entry[0])[:width]
        running = [entry for entry in everything if entry[1][-1] not in stops][:width]
        longest = limit if params.early_stopping == "never" and params.length_penalty > 0 else generated
        possible = running[0][0] / np.float32(longest) ** np.float32(params.length_penalty)
        if not possible > found[-1][0] or (params.early_stopping is True and found[-1][2]):
            break
    return found


def run(searches: list[Search], logits: np.ndarray, *, cancel_rate: float = 0.0, seed: int = 0) -> dict[str, int]:
    """Serve the searches together and compare each; returns what has happened."""
    step, init = programs()
    rng, state, scheduler = np.random.default_rng(seed), init(), Scheduler(SHAPES)
    groups = [search.group() for search in searches]
    limits = RequestLimits.of(SHAPES, EngineConfig())
    for search, group in zip(searches, groups, strict=True):
        validate(Request(prompt_token_ids=search.prompt, sampling=search.params), limits)
        scheduler.submit([group], now=0.0)
    nothing, steps, counted = empty_admission(SHAPES), 0, {}
    while scheduler.has_work:
        fields = admission_fields(scheduler.next_admission(steps, 1).arrays(), SHAPES.limits, 1)
        state, packed, bad, found = step(state, dataclasses.replace(nothing, **fields), logits)
        assert not any(map(int, bad.values())), {name: int(count) for name, count in bad.items() if count}
        outputs = HostOutputs(packed, SHAPES)
        for group in scheduler.finished_searches([outputs], steps, 0):
            for sequence in group.sequences:
                generated = slice(len(group.prompt_token_ids), int(found.lens[sequence.slot]))
                tokens, logprobs = found.tokens[sequence.slot][generated], found.logprobs[sequence.slot][generated]
                sequence.extend(
                    np.asarray(tokens), np.asarray(logprobs), np.zeros(len(tokens)), None, [0] * len(tokens)
                )
                sequence.score = float(found.scores[sequence.slot])
        scheduler.collect([outputs], steps, 0)
        counted, steps = outputs.scalars, steps + 1
        if rng.random() < cancel_rate:
            scheduler.cancel(groups[rng.integers(len(groups))])
        assert steps < 2000, "searches never end"
    assert counted["free_pages"] == SHAPES.num_pages
    for search, group in zip(searches, groups, strict=True):
        if "abort" in [s.finish_reason for s in group.sequences]:
            continue
        wanted = expected(search, logits)
        got = [(s.score, s.token_ids, s.finish_reason) for s in group.sequences]
        assert [entry[1:] for entry in got] == [entry[1:] for entry in wanted], f"{search}: {got}, expected {wanted}"
        if search.width > 1:
            assert np.allclose([e[0] for e in got], [e[0] for e in wanted], rtol=1e-4, atol=1e-5), f"{got} {wanted}"
    return counted
