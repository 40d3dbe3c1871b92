"""The command `check`, also as `audit` and `doctor`: what it finds between an engine and the uncached forward."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer import audit, check, doctor
from levanter_infer.cache.arrays import replace
from levanter_infer.check import beside_uncached
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.diagnosis import diagnose
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.instructions import usable_isas
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.models import uncached
from tests.tiny_models import tiny_model, with_mixers
from tests.tokenizer_files import byte_level, write

PAGE = 8
TOLERANCE = check.MAX_DELTA["float32"]
SIZES = {"max_seqs": 4, "page_size": PAGE, "max_step_tokens": 32}
"""As in test_sample.py: compiled once for both."""
MAX_SEQ_LEN = 256


def sizes() -> dict[str, int]:
    return {"vocab_size": byte_level().get_vocab_size(), "max_position_embeddings": MAX_SEQ_LEN}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(tiny_model(**sizes()), directory)
    return write(directory, byte_level(), generation_config={"eos_token_id": 1})


@pytest.fixture(scope="module")
def engine(checkpoint) -> InferenceEngine:
    """One engine for everything here, the commands included: compiling is what takes time."""
    tokenizer = Tokenizer.from_directory(checkpoint)
    return InferenceEngine(tiny_model(**sizes()), tokenizer, EngineConfig(**SIZES))


@pytest.fixture
def shared(engine, monkeypatch):
    engine.reset()
    monkeypatch.setattr(check, "make_engine", lambda config, num_rows: config.engine_config() and engine)
    return engine


def requests(lengths=(5, 9, 14, 20), max_tokens: int = 24) -> list[Request]:
    rng = np.random.default_rng(3)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(
            prompt_token_ids=rng.integers(0, 250, n).tolist(),
            sampling=dataclasses.replace(sampling, seed=i),
            id=str(i),
        )
        for i, n in enumerate(lengths)
    ]


def judged(outputs: list[RequestOutput], model=None):
    model = tiny_model(**sizes()) if model is None else model
    return diagnose(beside_uncached(model, outputs, MAX_SEQ_LEN), TOLERANCE, PAGE)


@pytest.mark.slow
def test_the_engine_agrees_with_the_uncached_forward_and_noise_in_the_weights_is_drift(engine):
    outputs = engine.generate(requests())
    assert judged(outputs).verdict == "agree"
    coarse = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), tiny_model(**sizes()))
    found = judged(outputs, coarse)
    assert found.verdict == "drift", found.text


@pytest.mark.slow
def test_keys_that_are_turned_by_another_angle_are_the_prompt_path(engine):
    model = tiny_model(**sizes())
    config = with_mixers(model.config, rope=dataclasses.replace(model.config.ropes[0], theta=100.0))
    found = judged(engine.generate(requests()), dataclasses.replace(model, config=config))
    assert found.verdict == "prompt", found.text


def test_two_swapped_pages_are_a_scramble_that_begins_at_a_page(engine):
    """As soon as a sequence enters its third page, that one and its first change places in its table."""
    engine.reset()
    groups = [engine.submit(request) for request in requests((5, 7, 12))]
    swapped = set()
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=1)
        table = engine.state.decode.sequences
        computed, pages = np.asarray(table.num_computed), np.array(table.page_indices)
        for group in groups:
            slot = group.sequences[0].slot
            if slot is not None and slot not in swapped and computed[slot] == 2 * PAGE:
                swapped.add(slot)
        for slot in swapped:
            if computed[slot] > 2 * PAGE and slot >= 0:
                pages[slot, [0, 2]] = pages[slot, [2, 0]]
                swapped = swapped - {slot} | {-1 - slot}
        table = replace(table, page_indices=jnp.asarray(pages))
        engine.runner.state = eqx.tree_at(lambda s: s.decode.sequences, engine.state, table)
    engine.drain()
    outputs = [RequestOutput(g.id, None, g.prompt_token_ids, [s.completion() for s in g.sequences]) for g in groups]
    found = judged(outputs)
    assert found.verdict == "scramble", found.text
    engine.reset()


def test_a_look_inside_names_the_layer_that_stores_something_else(engine):
    """The engine's keys and values against those of its own model, and of one whose second layer gets other inputs."""
    engine.reset()
    (request,) = requests((12,))
    found = check.keys_and_values_of(engine, request, 0, stored=25)
    assert found is not None and found.tokens[:12].tolist() == request.prompt_token_ids
    model = tiny_model(**sizes())
    assert "all layers store the right keys" in check.compare_stored(model, found, PAGE, MAX_SEQ_LEN)
    other = eqx.tree_at(lambda m: m.layers.mlp.down_proj.weight, model, replace_fn=lambda w: w * jnp.float32(-1))
    text = check.compare_stored(other, found, PAGE, MAX_SEQ_LEN)
    assert "layer 1 is the first to store wrong ones" in text and "layer 0 stores the right ones" in text
    assert check.keys_and_values_of(engine, request, 0, stored=60) is None
    assert "depends on the batch composition" in check.compare_stored(model, None, PAGE, MAX_SEQ_LEN)


def test_scores_are_those_of_the_whole_forward_and_no_array_holds_all_logits():
    import haliax as hax

    model = tiny_model(vocab_size=101)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 101, 3 * uncached.BLOCK), jnp.int32)
    scores = jax.jit(uncached.token_scores)(model, tokens)
    expected = jax.nn.log_softmax(model(hax.named(tokens, ("position",))).array, axis=-1)
    chosen = jnp.take_along_axis(expected[:-1], tokens[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(scores.logprobs[:-1], chosen, atol=1e-4)
    np.testing.assert_allclose(scores.best_logprobs, expected.max(axis=1), atol=1e-4)
    assert (scores.best_ids == expected.argmax(axis=1)).mean() > 0.99
    text = str(jax.make_jaxpr(uncached.token_scores)(model, tokens))
    assert f"f32[{uncached.BLOCK},101]" in text and f"f32[{3 * uncached.BLOCK},101]" not in text


# The commands


@pytest.fixture
def command(capsys, checkpoint):
    def run(module, *arguments, engine_too: bool = True):
        options = ["--model", str(checkpoint), "--prompts", "hello", "--prompts", "the cat"] if engine_too else []
        status = module.main([*options, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


SAMPLING = ("--sampling.max_tokens", "12", "--sampling.n", "2", "--sampling.ignore_eos", "true")


def test_audit_prints_a_table_and_one_json_line_and_passes(command, shared):
    status, out, err = command(audit, *SAMPLING)
    line = json.loads(out)
    assert status == 0 and line["passed"] and line["verdict"] == "agree"
    assert (line["samples"], line["tokens"], line["weights"]) == (4, 48, "float32")
    assert [(b["from"], b["to"], b["tokens"]) for b in line["by_token"]] == [
        (0, 0, 4), (1, 1, 4), (2, 3, 8), (4, 7, 16), (8, 15, 16)
    ]  # fmt: skip
    assert 0 < line["mean_delta"] <= line["max_delta"] < TOLERANCE
    cached, uncached = line["perplexity"]
    assert cached == pytest.approx(uncached, abs=0.01) and cached > 1
    assert "8-15" in err and "passed    max |Δ logprob|" in err


def test_check_has_the_levels_of_audit_and_doctor(command, shared, capsys):
    for options, alias in ([[], audit], [["--level", "diagnosis"], doctor]):
        runs = [command(module, *SAMPLING, *more) for module, more in ((check, options), (alias, []))]
        (status, out, err), (alias_status, alias_out, alias_err) = runs
        assert status == alias_status == 0 and '"command": "check"' in out
        name = alias.__name__.rpartition(".")[2]
        assert alias_out == out.replace('"command": "check"', f'"command": "{name}"')
        assert err.splitlines()[-1] == alias_err.splitlines()[-1]
    assert check.main([]) == 0 and json.loads(capsys.readouterr().out)["command"] == "check"


def test_audit_fails_beyond_its_gate_and_says_where(command, shared):
    status, out, err = command(audit, *SAMPLING, "--max-delta", "1e-12")
    line = json.loads(out)
    assert status == 1 and not line["passed"] and line["gate"] == 1e-12
    assert f"request {line['worst']['id']}, sample {line['worst']['index']}, generated token" in err and "FAILED" in err


@pytest.mark.parametrize("module, options, message", [
    (audit, ["--max-delta", "-1"], "--max-delta -1: expected a number"),
    (audit, ["--max-delta"], "--max-delta needs a value"),
    (audit, ["--engine.max_sqs", "4"], "did you mean max_seqs?"),
    (doctor, ["--diff", "one.jsonl"], "--diff needs two files"),
    (doctor, ["--against.engine.attention", "fast"], "engine.attention='fast'"),
    (check, ["--level", "deep"], "--level 'deep': expected one of machine, numerics, diagnosis"),
    (check, ["--level", "machine"], "--level machine needs no configuration"),
    (check, ["--level", "numerics", "--against.model", "other"], "--level numerics compares no two"),
    (check, ["--diff", "one.jsonl", "other.jsonl"], "--diff compares two files and takes no configuration"),
])  # fmt: skip
def test_a_mistake_returns_two_and_says_what_is_wrong(command, shared, module, options, message):
    status, out, err = command(module, *options)
    assert (status, out) == (2, "") and message in err


def test_nothing_sampled_is_no_success(command, shared):
    status, out, err = command(audit, "--sampling.max_tokens", "999")
    assert (status, out) == (2, "") and "nothing was sampled" in err and "max_tokens=999" in err


def test_doctor_compares_two_engines(command, shared):
    status, out, err = command(doctor, *SAMPLING, "--against.sampling.temperature", "1.0")
    assert status == 0 and json.loads(out)["against"] == "engine" and "verdict   agree" in err
    isa = shared.describe()["cpu_isa"]
    assert f"cpu_isa={isa}: {shared.backend.isa_reason}" in err and json.loads(out)["cpu_isa"] == isa
    status, out, err = command(doctor, *SAMPLING, "--against.sampling.temperature", "0")
    assert status == 1 and json.loads(out)["verdict"] == "drift" and "seed or sampling are not the same" in err


def test_doctor_looks_inside_where_the_engine_and_the_plain_forward_disagree(command, shared, monkeypatch):
    model = tiny_model(**sizes())
    turned = with_mixers(model.config, rope=dataclasses.replace(model.config.ropes[0], theta=100.0))
    monkeypatch.setattr(check, "plain_model", lambda config: dataclasses.replace(model, config=turned))
    status, out, err = command(doctor, *SAMPLING)
    assert status == 1 and json.loads(out)["verdict"] in ("prompt", "scramble")
    assert (
        "layer 0 is the first to store wrong ones: keys of head 0, keys of head 1" in err and "look at positions" in err
    )


def test_doctor_alone_names_machine_versions_and_instruction_set(capsys):
    assert doctor.main([]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["device"]["platform"] == "cpu" and found["versions"]["jax"] == jax.__version__
    assert f"jax={jax.__version__}" in err and "machine   " in err
    if cpu.available():
        assert set(found["cpu_isa"]) == {"bfloat16", "float32"} and set(found["cpu_isa"].values()) <= set(usable_isas())
        assert f"bfloat16: cpu_isa={found['cpu_isa']['bfloat16']}: " in err
    else:
        assert "cannot be used" in err and found["cpu_isa"] == {}


def test_doctor_compares_two_files(command, tmp_path):
    rows = [
        {
            "id": str(i),
            "index": 0,
            "prompt_token_ids": [1, 2, i],
            "token_ids": [4, 5, 6],
            "logprobs": [-1.0, -2.0, None],
        }
        for i in range(3)
    ]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("\n".join(map(json.dumps, rows)))
    other.write_text("\n".join(map(json.dumps, rows[:2])))
    status, out, err = command(doctor, "--diff", str(one), str(other), engine_too=False)
    assert status == 0 and json.loads(out)["samples"] == 2 and "1 samples of the one" in err
    rows[1]["logprobs"] = [-1.0, -2.6, None]
    other.write_text("\n".join(map(json.dumps, rows)))
    status, out, err = command(doctor, "--diff", str(one), str(other), "--page-size", "1", engine_too=False)
    assert status == 1 and json.loads(out)["verdict"] == "scramble" and "logical page 3" in err
    one.write_text(json.dumps({**rows[0], "logprobs": None}))
    status, _, err = command(doctor, "--diff", str(one), str(other), engine_too=False)
    assert status == 2 and "one.jsonl:1 has no logprobs" in err
    for changes, message in (
        ({"token_ids": None}, "1 is no row"),
        ({"token_ids": [4]}, "3 logprobs of 1 tokens"),
        ({"top_logprobs": [1, 2, 3]}, "1 is no row"),
        ({"id": ["a list"]}, "1 is no row"),
    ):
        one.write_text(json.dumps({**rows[0], **changes}))
        status, _, err = command(doctor, "--diff", str(one), str(other), engine_too=False)
        assert status == 2 and message in err
    one.write_bytes(b'{"id": "\xff"}')
    status, _, err = command(doctor, "--diff", str(one), str(other), engine_too=False)
    assert status == 2 and "one.jsonl:1 is no row" in err
    one.write_text(json.dumps({name: value for name, value in rows[0].items() if name != "id"}))
    status, _, err = command(doctor, "--diff", str(one), str(other), engine_too=False)
    assert status == 2 and "one.jsonl:1 has no id" in err
    status, _, err = command(doctor, "--diff", str(other), str(other), "--page-size", "0", engine_too=False)
    assert status == 2 and "--page-size 0: expected a whole number of at least 1" in err
