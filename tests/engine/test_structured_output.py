"""Structured output in an engine: texts that match, tokens as a plain loop with the same masks takes them."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, load_model
from levanter_infer.engine.request import NO_TOKEN, NOT_FINITE
from levanter_infer.io.openai import failure
from levanter_infer.structured.compiler import ConstraintCompiler, Wanted
from tests.tiny_models import uncached_logprobs

CONFIG = EngineConfig(max_seqs=6, max_seq_len=192, page_size=8, max_constraints=4)
CODE = SamplingParams(regex="[a-z]{2}-[0-9]{3}", max_tokens=20)
PERSON = SamplingParams(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "string", "pattern": "^[1-9][0-9]?$"},
            "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
        },
        "required": ["name", "pets"],
    },
    max_tokens=120,
    temperature=0.8,
)
NEST = SamplingParams(grammar='start: "(" start ")" | "x"', max_tokens=40)
PROMPT = "the cat"
EOS = 0
"""The end-of-sequence token of models/tiny."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model():
    return load_model("models/tiny", dtype="float32")


@pytest.fixture(scope="module")
def engine(model):
    return InferenceEngine(*model, CONFIG, constraints=True)


def check(params: SamplingParams, completion) -> None:
    assert completion.finish_reason == "stop", (params, completion)
    if params.regex is not None:
        assert re.fullmatch(params.regex, completion.text), completion
    elif params.choice is not None:
        assert completion.text in params.choice
    elif params.grammar is not None:
        assert re.fullmatch(r"\(*x\)*", completion.text) and completion.text.count("(") == completion.text.count(")")
    else:
        value = json.loads(completion.text)
        assert set(value) - {"age"} == {"name", "pets"} and 1 <= len(value["name"]) <= 8
        assert (
            set(value["pets"]) <= {"cat", "dog"} and len(value["pets"]) <= 2 and 1 <= int(value.get("age", "1")) <= 99
        )


def test_any_mixture_in_a_batch_keeps_to_its_constraints_and_gives_what_each_gives_alone(engine):
    choice = SamplingParams(choice=["yes", "no", "maybe not"], max_tokens=20)
    free = SamplingParams(max_tokens=12, temperature=1.0)
    mixed = [
        CODE,
        PERSON,
        free,
        choice,
        NEST,
        dataclasses.replace(PERSON, n=3),
        dataclasses.replace(CODE, temperature=0),
    ]
    requests = [Request(PROMPT, sampling=params, id=f"mix-{i}") for i, params in enumerate(mixed)]
    outputs = engine.generate(requests)
    for params, output in zip(mixed, outputs, strict=True):
        assert output.error is None
        if params is not free:
            for completion in output.completions:
                check(params, completion)
    for request, output in zip(requests, outputs, strict=True):
        alone = engine.generate([request])[0]
        assert [c.token_ids for c in alone.completions] == [c.token_ids for c in output.completions]
    programs = dict(engine.stats()["programs"])
    engine.generate([PROMPT], SamplingParams(regex="(a|b)+c", max_tokens=9))
    assert engine.stats()["programs"] == programs and set(programs.values()) == {1}


@pytest.mark.parametrize("params", [CODE, PERSON, NEST])
def test_greedy_tokens_are_those_of_a_plain_loop_with_the_same_masks(engine, model, params):
    params = dataclasses.replace(params, temperature=0, max_tokens=24)
    found = engine.generate([PROMPT], params)[0].completions[0]
    weights, tokenizer = model
    compiler = ConstraintCompiler(tokenizer, weights.config.vocab_size, tokenizer.eos_token_ids)
    names = Wanted._fields
    constraint = compiler.compile(Wanted(**{name: getattr(params, name) for name in names}))
    prompt, tokens, state = tokenizer.encode(PROMPT), [], 0
    for token in found.token_ids:
        allowed = constraint.guide.allowed() if constraint.guide else constraint.automaton.allowed(state)
        logits = uncached_logprobs(weights, [*prompt, *tokens], 64)[-1]
        assert token == int(np.argmax(np.where(allowed, logits, -np.inf)))
        tokens.append(token)
        if constraint.guide:
            constraint.guide.extend([token])
        else:
            state = constraint.automaton.step(state, token)
    np.testing.assert_array_equal(found.processed_logprobs, 0)


def test_lists_of_tokens_and_words(engine, model):
    tokenizer = model[1]
    allowed = [70, 71, 300, tokenizer.eos_token_ids[0]]
    only = SamplingParams(allowed_token_ids=allowed, max_tokens=30, n=4)
    for completion in engine.generate([PROMPT], only)[0].completions:
        assert set(completion.token_ids) <= set(allowed)
    free = engine.generate([PROMPT], SamplingParams(max_tokens=30, temperature=0))[0].completions[0]
    words = sorted({word for word in re.findall("[A-Za-z]+", free.text)}, key=len)[-2:]
    without = SamplingParams(bad_words=words, max_tokens=30, temperature=0)
    text = engine.generate([PROMPT], without)[0].completions[0].text
    assert words and text != free.text
    second = free.token_ids[3]
    pair = SamplingParams(bad_words=[free.token_ids[2:4]], max_tokens=4, temperature=0)
    tokens = engine.generate([PROMPT], pair)[0].completions[0].token_ids
    assert tokens[:3] == free.token_ids[:3] and tokens[3] != second
    both = dataclasses.replace(CODE, bad_words=["1", [tokenizer.encode("7", add_special_tokens=False)[0]]], n=4)
    for completion in engine.generate([PROMPT], both)[0].completions:
        check(CODE, completion)
    guided = dataclasses.replace(NEST, bad_words=["("])
    assert engine.generate([PROMPT], guided)[0].completions[0].text == "x"


def test_a_constraint_that_leaves_no_token_fails_its_own_request_and_says_why(engine):
    stuck = dataclasses.replace(NEST, bad_words=["(", "x"])
    free = SamplingParams(max_tokens=4, temperature=0)
    failed, other = engine.generate([PROMPT, PROMPT], [stuck, free])
    assert failed.completions[0].finish_reason == "error"
    assert "allowed_token_ids or bad_words" in str(failed.completions[0].error)
    status, body = failure(failed) or (0, {})
    assert status == 400 and body["error"]["message"] == failed.completions[0].error
    assert other.completions[0].token_ids == engine.generate([PROMPT], free)[0].completions[0].token_ids


@pytest.mark.parametrize("options", [dict(), dict(temperature=0), dict(n=2, temperature=0.5)])
@pytest.mark.parametrize(
    "contradiction",
    [
        dict(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2),
        dict(allowed_token_ids=[EOS], min_tokens=1),
        dict(allowed_token_ids=[5, EOS], bad_words=[[5]], stop_token_ids=[5], min_tokens=1),
    ],
)
def test_parameters_that_contradict_each_other_are_no_fault_of_the_model(engine, contradiction, options):
    params, free = SamplingParams(max_tokens=6, **contradiction, **options), SamplingParams(max_tokens=4, temperature=0)
    failed, other = engine.generate([PROMPT, PROMPT], [params, free])
    assert {(c.finish_reason, c.error) for c in failed.completions} == {("error", NO_TOKEN)}
    status, body = failure(failed) or (0, {})
    assert status == 400 and body["error"]["message"] == NO_TOKEN
    assert other.completions[0].token_ids == engine.generate([PROMPT], free)[0].completions[0].token_ids
    assert engine.stats()["pages_free"] == engine.shapes.num_pages


def test_logits_that_are_not_finite_are_the_models_fault_whatever_a_request_asks(model):
    weights, tokenizer = model
    broken = eqx.tree_at(lambda m: m.embeddings.weight.array, weights, replace_fn=lambda a: a.at[5].set(np.nan))
    engine = InferenceEngine(broken, tokenizer, CONFIG, constraints=True)
    for params in (NEST, CODE, SamplingParams(allowed_token_ids=[7], max_tokens=3)):
        (output,) = engine.generate([Request(prompt_token_ids=[9, 5])], params)
        assert output.completions[0].error == NOT_FINITE
        assert (failure(output) or (0, {}))[0] == 500


@pytest.mark.slow
def test_a_broken_logits_mod_is_told_from_one_that_excludes_all_tokens(model):
    """Requests of one batch, which the mod tells by the length of their prompts."""

    def broken(logits, history, memory):
        token_7, length = jnp.arange(logits.shape[0]) == 7, history.prompt_len
        logits = jnp.where(token_7 & (length == 2), jnp.nan, logits)
        logits = jnp.where(token_7 & (length == 3), jnp.inf, logits)
        return jnp.where(length == 4, -jnp.inf, logits), memory

    engine = InferenceEngine(*model, CONFIG, logits_mod=broken)
    prompts = [Request(prompt_token_ids=[9, 5, 3, 2][:length]) for length in (2, 3, 4, 1)]
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, max_tokens=3)
        errors = [output.completions[0].error for output in engine.generate(prompts, params)]
        assert errors == [NOT_FINITE, NOT_FINITE, NO_TOKEN, None]
        for prompt, error in zip(prompts, errors, strict=True):
            assert engine.generate([prompt], params)[0].completions[0].error == error


def test_more_constraints_than_the_table_holds_wait_their_turn(engine):
    params = [SamplingParams(regex=f"{i}[a-z]{{3}}", max_tokens=9, n=2) for i in range(11)]
    outputs = engine.generate([PROMPT] * 11, params)
    for each, output in zip(params, outputs, strict=True):
        for completion in output.completions:
            check(each, completion)
    again = engine.generate([PROMPT] * 11, params)
    assert [o.completions[0].token_ids for o in again] == [o.completions[0].token_ids for o in outputs]


@pytest.mark.slow
def test_preempted_samples_keep_their_place_in_the_automaton(model):
    small = dataclasses.replace(CONFIG, max_pages=14)
    engine = InferenceEngine(*model, small, constraints=True)
    long = SamplingParams(regex="([a-z]{6} ){9}end", max_tokens=90)
    output = engine.generate([PROMPT] * 6, long)
    assert engine.stats()["preemptions"] > 0
    for each in output:
        assert each.error is None
        check(long, each.completions[0])


def test_what_cannot_be_applied_is_refused_and_the_others_are_served(engine):
    bad = [
        (SamplingParams(regex="("), "regex: it is no regular expression"),
        (SamplingParams(regex=r"\bx"), "regex: it has at, which no automaton"),
        (SamplingParams(grammar="start: missing"), "grammar: .*missing"),
        (SamplingParams(json_schema={"type": "string", "pattern": "("}), "json_schema: "),
        (SamplingParams(allowed_token_ids=[10_000]), "allowed_token_ids: token id 10000 is outside"),
        (SamplingParams(bad_words=[[10_000]]), "bad_words: token id 10000 is outside"),
        (SamplingParams(regex="[0-9]", allowed_token_ids=[70, 0]), "regex together with .*no text of this vocabulary"),
        (
            SamplingParams(regex="(a|b)*a(a|b){14}"),
            "regex: its automaton has more than 32767|regex: its automaton takes",
        ),
    ]
    outputs = engine.generate([PROMPT] * (len(bad) + 1), [*(params for params, _ in bad), CODE])
    for (_, message), output in zip(bad, outputs, strict=False):
        assert output.error is not None and re.match(message, output.error), output.error
    check(CODE, outputs[-1].completions[0])
    for arguments, message in [
        (dict(regex="a", choice=["b"]), "regex and choice: a request has one"),
        (dict(regex="a", ignore_eos=True), "ignore_eos with regex"),
        (dict(choice=["a"], min_tokens=2), "min_tokens=2 with choice"),
        (dict(regex="a", num_beams=2), "regex with num_beams=2"),
        (dict(choice=[]), "choice="),
        (dict(json_schema="{"), "json_schema="),
        (dict(json_schema='{"enum": [NaN]}'), "json_schema=.*not JSON compliant"),
        (dict(json_schema={"const": 1e999}), "json_schema=.*not JSON compliant"),
        (dict(allowed_token_ids=[]), "allowed_token_ids is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**arguments)
    without_tokenizer = ConstraintCompiler(None, 640, ())
    with pytest.raises(ValueError, match="regex: it needs a tokenizer"):
        without_tokenizer.compile(Wanted(regex="a"))
    assert without_tokenizer.compile(Wanted(allowed_token_ids=(3,))).automaton is not None


def test_an_automaton_that_the_table_cannot_hold_is_refused(model):
    tight = dataclasses.replace(CONFIG, constraint_bytes=4 * 640 * 2 + 60_000)
    engine = InferenceEngine(*model, tight)
    large = SamplingParams(regex="([a-z]{9} ){60}", max_tokens=9)
    with pytest.raises(ValueError, match="regex: its automaton has .* which engine.constraint_bytes does not hold"):
        engine.submit(PROMPT, large)
    with pytest.raises(ValueError, match="engine.constraint_bytes=100 does not hold engine.max_constraints=4"):
        InferenceEngine(*model, dataclasses.replace(CONFIG, constraint_bytes=100), constraints=True)


def test_a_logits_mod_sees_the_history_and_has_a_memory(model, engine):
    weights, tokenizer = model
    colon = tokenizer.encode(":", add_special_tokens=False)[0]
    long = len(tokenizer.encode(PROMPT)) + 1

    def every_third_token_is_a_colon(logits, history, memory):
        """After long prompts. A memory that is not that of this sample gives NaN, which fails it."""
        count = history.seq_len - history.prompt_len
        known = history.tokens[jnp.maximum(history.seq_len - 1, 0)] == memory["last"]
        right = (memory["count"] == count) & (known | (count == 0))
        only = jnp.where(jnp.arange(logits.shape[0]) == colon, 0.0, -jnp.inf)
        changed = jnp.where((count % 3 == 0) & (history.prompt_len >= long), only, logits)
        # The token that this step samples is known to the next one: greedy samples only
        last = jnp.argmax(changed).astype(jnp.int32)
        return jnp.where(right, changed, jnp.nan), {"count": memory["count"] + 1, "last": last}

    initial = {"count": np.int32(0), "last": np.int32(-1)}
    modified = InferenceEngine(
        weights, tokenizer, CONFIG, logits_mod=every_third_token_is_a_colon, logits_mod_init=initial
    )
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, n=2)
    prompts = [PROMPT, f"{PROMPT} and the other cat sat"] * 5
    free = engine.generate(PROMPT, params)[0].completions[0]
    for prompt, output in zip(prompts, modified.generate(prompts, params), strict=True):
        for completion in output.completions:
            assert completion.finish_reason == "length"
            if prompt == PROMPT:
                assert completion.token_ids == free.token_ids
            else:
                assert [token == colon for token in completion.token_ids][::3] == [True] * 7
    with pytest.raises(ValueError, match="does not apply the engine's logits_mod"):
        modified.submit(PROMPT, SamplingParams(num_beams=2))
    with pytest.raises(ValueError, match="num_continued_tokens=1: the engine's logits_mod tells"):
        modified.submit(Request(prompt_token_ids=[5, 6, 7], num_continued_tokens=1))


def test_a_fork_has_no_constraint_of_the_sample_that_had_its_slot_before(engine):
    """Constraints of automata and of the host, in all slots."""
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    expected = engine.generate([PROMPT], free)[0].completions[0].token_ids
    for constraint in (
        SamplingParams(allowed_token_ids=[70, 71], max_tokens=3),
        dataclasses.replace(NEST, max_tokens=3),
    ):
        engine.generate([PROMPT] * engine.shapes.num_slots, constraint)
        group = engine.submit(PROMPT, free)
        for _ in range(2):
            engine.step_round(max_steps=2)
        engine.fork(group, 0, engine.config.max_seqs - 1)
        engine.drain()
        assert [sample.token_ids for sample in group.sequences] == [expected] * engine.config.max_seqs


def test_samples_that_go_on_from_others_take_no_constraint(engine):
    request = engine.submit(PROMPT, dataclasses.replace(PERSON, n=2))
    while not request.sequences[0].token_ids:
        engine.step_round()
    with pytest.raises(ValueError, match="is constrained"):
        engine.resample(request, [0, 0])
    engine.cancel(request)
    engine.drain()


ON_MESHES = """
import dataclasses, json, sys
import jax.numpy as jnp, numpy as np
from levanter_infer import InferenceEngine, Request, load_model
from levanter_infer.engine.mesh import MeshConfig
from tests.engine.test_structured_output import CODE, CONFIG, NEST, PERSON, PROMPT, check

def first_is_70(logits, history, memory):
    only = jnp.where(jnp.arange(logits.shape[0]) == 70, 0.0, -jnp.inf)
    return jnp.where((memory == 0) & (history.seq_len == history.prompt_len), only, logits), memory + 1

model = load_model("models/tiny", dtype="float32")
params = [dataclasses.replace(each, n=2) for each in (CODE, PERSON, NEST)] * 3
requests = [Request(PROMPT, sampling=each, id=str(i)) for i, each in enumerate(params)]
found = []
for mesh in (None, MeshConfig(model=2), MeshConfig(data=2)):
    outputs = InferenceEngine(*model, CONFIG, mesh=mesh, constraints=True).generate(requests)
    for output, each in zip(outputs, params):
        for completion in output.completions:
            check(each, completion)
    found.append([[c.token_ids for c in output.completions] for output in outputs])
mod = dict(logits_mod=first_is_70, logits_mod_init=np.int32(0))
engine = InferenceEngine(*model, CONFIG, mesh=MeshConfig(model=2), **mod)
first = [c.token_ids[0] for o in engine.generate([PROMPT] * 5) for c in o.completions]
print(json.dumps({"equal": [each == found[0] for each in found], "first": first}))
"""


@pytest.mark.slow
def test_tokens_on_meshes_are_those_of_one_device():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", ON_MESHES]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"equal": [True] * 3, "first": [70] * 5}


@pytest.mark.slow
def test_ten_thousand_samples_over_twenty_schemas_parse(model):
    word, number = {"type": "string", "maxLength": 6}, {"type": "string", "pattern": "^[1-9][0-9]{0,3}$"}
    parts = [word, number, {"type": "boolean"}, {"enum": ["a", 1, None]}, {"type": "string", "format": "date"}]
    schemas: list[dict] = [PERSON.json_schema]  # type: ignore[list-item]
    for i in range(18):
        part = parts[i % 5]
        names = [f"k{j}" for j in range(i % 4 + 1)]
        objects = {"type": "object", "properties": dict.fromkeys(names, part), "required": names[: i % 3]}
        schemas.append([objects, {"type": "array", "items": objects, "maxItems": 2}, {"anyOf": [part, objects]}][i % 3])
    schemas.append({"$defs": {"x": word}, "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}})
    engine = InferenceEngine(*model, dataclasses.replace(CONFIG, max_seqs=64, max_constraints=8), constraints=True)
    outputs = engine.generate(
        [PROMPT] * len(schemas), [SamplingParams(json_schema=s, max_tokens=170, n=100, seed=1) for s in schemas]
    )
    texts = [(s, c) for s, o in zip(schemas, outputs, strict=True) for c in o.completions]
    for seed in range(2, 6):
        more = [SamplingParams(json_schema=s, max_tokens=170, n=100, seed=seed) for s in schemas]
        outputs = engine.generate([PROMPT] * len(schemas), more)
        texts += [(s, c) for s, o in zip(schemas, outputs, strict=True) for c in o.completions]
    assert len(texts) == 10_000
    for schema, completion in texts:
        assert completion.finish_reason == "stop", (schema, completion.text)
        json.loads(completion.text)
    assert engine.stats()["programs"]["round"] == 1
