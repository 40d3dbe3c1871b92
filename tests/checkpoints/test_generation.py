"""generation_config.json: what it suggests is said, applied when asked for, and named where it cannot be."""

import json
import logging

import pytest

from levanter_infer.checkpoints.generation import suggested_sampling
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.cli.session import suggestion_lines
from levanter_infer.config import load_config
from levanter_infer.engine.params import SamplingParams

QWEN3 = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "pad_token_id": 1,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "5.23.0",
}


def model(tmp_path, content=QWEN3):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "generation_config.json").write_text(text)
    return tmp_path


def suggested(tmp_path, content):
    return suggested_sampling(resolve_source(model(tmp_path, content)))


@pytest.mark.parametrize(
    "content, params, unsupported",
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}, {}),
        (
            {"do_sample": False, "repetition_penalty": 1.05},
            {"temperature": 0.0, "repetition_penalty": 1.05},
            {},
        ),
        ({"temperature": None, "min_p": 0.1}, {"min_p": 0.1}, {}),
        (
            {"max_new_tokens": 5, "min_new_tokens": 2, "stop_strings": ["x"]},
            {"max_tokens": 5, "min_tokens": 2, "stop": ["x"]},
            {},
        ),
        ({"typical_p": 0.9, "num_beams": 4, "top_k": 5}, {"top_k": 5}, {"typical_p": 0.9, "num_beams": 4}),
        ({"typical_p": 1.0, "num_beams": 1, "suppress_tokens": [], "use_cache": True, "max_length": 20}, {}, {}),
        ({"suppress_tokens": [3], "max_length": 4096}, {}, {"suppress_tokens": [3], "max_length": 4096}),
        ({}, {}, {}),
    ],
)
def test_parameters_are_those_of_the_file(tmp_path, content, params, unsupported):
    result = suggested(tmp_path, content)
    assert result is not None and (result.params, result.unsupported) == (params, unsupported)


def test_a_model_without_the_file_suggests_nothing(tmp_path):
    assert suggested_sampling(resolve_source(tmp_path)) is None
    assert suggestion_lines(None, SamplingParams()) == []


def config_of(tmp_path, sampling, *overrides, content=QWEN3):
    (tmp_path / "run.yaml").write_text(f"model: {model(tmp_path, content)}\nprompts: x\n{sampling}\n")
    return load_config(tmp_path / "run.yaml", overrides).sampling


@pytest.mark.parametrize(
    "sampling, overrides",
    [
        ("sampling: from_model", ()),
        ("sampling: {from_model: true}", ()),
        ("", (("sampling", "from_model"),)),
        ("", (("sampling.from_model", "true"),)),
    ],
)
def test_from_model_takes_what_the_file_suggests(tmp_path, sampling, overrides):
    assert config_of(tmp_path, sampling, *overrides) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize(
    "sampling, overrides",
    [
        ("sampling: {from_model: true, max_tokens: 9, temperature: 0.1}", ()),
        ("sampling: from_model", (("sampling.max_tokens", "9"), ("sampling.temperature", "0.1"))),
        ("sampling: {max_tokens: 9, temperature: 0.1}", (("sampling", "from_model"),)),
        ("sampling: {from_model: true, max_tokens: 9}", (("sampling.temperature", "0.1"),)),
    ],
)
def test_what_is_given_goes_before_what_is_suggested(tmp_path, sampling, overrides):
    expected = SamplingParams(temperature=0.1, top_k=20, top_p=0.95, max_tokens=9)
    assert config_of(tmp_path, sampling, *overrides) == expected


def test_without_from_model_nothing_is_taken(tmp_path):
    assert config_of(tmp_path, "") == SamplingParams()
    assert config_of(tmp_path, "sampling: {from_model: false, top_k: 2}") == SamplingParams(top_k=2)


@pytest.mark.parametrize(
    "sampling, content, match",
    [
        ("sampling: from_modle", QWEN3, "sampling='from_modle': expected from_model, or a mapping"),
        ("sampling: from_model", None, "has no generation_config.json to take sampling parameters from"),
        ("sampling: from_model", "{", "generation_config.json is not valid JSON"),
        ("sampling: from_model", {"temperature": "hot"}, "generation_config.json of .*: temperature='hot': expected"),
    ],
)
def test_what_cannot_be_taken_is_an_error(tmp_path, sampling, content, match):
    with pytest.raises(ValueError, match=match):
        config_of(tmp_path, sampling, content=content)


def test_library_users_take_it_by_name(tmp_path, caplog):
    path = model(tmp_path, {**QWEN3, "typical_p": 0.5})
    with caplog.at_level(logging.WARNING):
        params = SamplingParams.from_model(path, max_tokens=7, top_k=0)
    assert params == SamplingParams(temperature=0.6, top_p=0.95, top_k=0, max_tokens=7)
    assert [record.getMessage() for record in caplog.records] == [
        f"generation_config.json of {path}: typical_p=0.5 is not supported"
    ]


def test_commands_say_what_is_suggested_and_not_done(tmp_path):
    found = suggested(tmp_path, {**QWEN3, "stop_strings": "x", "typical_p": 0.5})
    assert suggestion_lines(found, SamplingParams()) == [
        "note      generation_config.json suggests temperature=0.6 top_k=20 top_p=0.95 stop='x'; not applied; "
        "`sampling: from_model` applies it",
        "note      generation_config.json has typical_p=0.5, which is not supported",
    ]
    assert found is not None
    assert len(suggestion_lines(found, SamplingParams(**found.params))) == 1
    assert "temperature='hot'" in suggestion_lines(suggested(tmp_path, {"temperature": "hot"}), SamplingParams())[0]
