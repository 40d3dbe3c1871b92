"""`SamplingParams`: what is accepted, what is refused and in which words, and how it is encoded."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import levanter_infer.engine.params as params_module
from levanter_infer.decode.sampling_table import SamplingTable
from levanter_infer.decode.shapes import SamplingLimits
from levanter_infer.engine.admission import SamplingColumns
from levanter_infer.engine.params import SamplingParams, derive_seed
from tests.decode.sampling_oracle import sampling_table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: expected .* at least 1; generate .* or ask for prompt_logprobs"),
        ({"max_tokens": True}, "max_tokens=True: expected a whole number"),
        ({"max_tokens": 2.0}, "max_tokens=2.0: expected a whole number"),
        ({"max_tokens": None}, "max_tokens=None"),
        ({"temperature": -0.1}, "temperature=-0.1: expected a number from 0 to"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"temperature": "1e-5"}, "temperature='1e-5'.*in YAML with a decimal point"),
        ({"temperature": False}, "temperature=False"),
        ({"top_k": -2}, "top_k=-2: expected .* use 0 to switch it off"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0: expected a number above 0 and up to 1"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": -0.2}, "min_p=-0.2"),
        ({"min_p": 2}, "min_p=2"),
        ({"n": 0}, "n=0"),
        ({"num_beams": 0}, "num_beams=0: expected a whole number of at least 1"),
        ({"num_beams": 3, "n": 4}, "n=4 exceeds num_beams=3"),
        ({"num_beams": 3, "temperature": 0.7}, "temperature=0.7 with num_beams=3: a search does not sample"),
        ({"num_beams": 3, "top_k": 5}, "top_k=5 with num_beams=3"),
        ({"num_beams": 3, "top_p": 0.5}, "top_p=0.5 with num_beams=3"),
        ({"num_beams": 3, "min_p": 0.5}, "min_p=0.5 with num_beams=3"),
        ({"num_beams": 3, "best_of": 3}, "best_of=3 with num_beams=3"),
        ({"num_beams": 3, "stop": "x"}, "stop with num_beams=3.*use stop_token_ids"),
        ({"num_beams": 3, "stop_token_ids": [[1, 2]]}, "stop_token_ids with num_beams=3: only single tokens"),
        ({"num_beams": 3, "logprobs": 2}, "logprobs=2 with num_beams=3.*use 0"),
        ({"num_beams": 3, "prompt_logprobs": 0}, "prompt_logprobs with num_beams=3"),
        ({"num_beams": 3, "max_tokens": 0, "prompt_logprobs": 0}, "max_tokens=0 with num_beams=3"),
        ({"num_beams": 3, "early_stopping": "ever"}, "early_stopping='ever': expected true, false or"),
        ({"num_beams": 3, "length_penalty": float("nan")}, "length_penalty=nan"),
        ({"length_penalty": 0.5}, "length_penalty=0.5 is for beam search; set num_beams"),
        ({"early_stopping": True}, "early_stopping=True is for beam search; set num_beams"),
        ({"n": 3, "best_of": 2}, "best_of=2: expected a whole number of at least 3; sample at least n"),
        ({"seed": -1}, "seed=-1: expected a whole number from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"skip_special_tokens": None}, "skip_special_tokens=None: expected true or false"),
        ({"ignore_eos": 1}, "ignore_eos=1: expected true or false"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 exceeds max_tokens=8; raise max_tokens"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"logprobs": True}, "logprobs=True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: expected a whole number of at least 0; leave it out"),
        ({"prompt_logprobs": True}, "prompt_logprobs=True"),
        ({"prompt_logprobs": 0, "max_tokens": -1}, "max_tokens=-1: .* at least 0; use 0 to score the prompt"),
        ({"prompt_logprobs": 0, "max_tokens": 0, "n": 2}, "max_tokens=0 generates nothing to choose from"),
        ({"frequency_penalty": 2.1}, "frequency_penalty=2.1: expected a number from -2 to 2"),
        ({"presence_penalty": "x"}, "presence_penalty='x'"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: expected a number from 0.01 to 100"),
        ({"stop": 5}, "stop=5: expected a string or a list of strings"),
        ({"stop": ["a", ""]}, r"stop\[1\]='': expected a string of at least one character"),
        ({"stop": [None]}, r"stop\[0\]=None"),
        ({"stop_token_ids": 7}, "stop_token_ids=7: expected a list"),
        ({"stop_token_ids": "7"}, "stop_token_ids='7': expected a list"),
        ({"stop_token_ids": [[]]}, r"stop_token_ids\[0\]=\[\]"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids\[1\]=-1"),
        ({"stop_token_ids": [3, True]}, r"stop_token_ids\[1\]=True"),
        ({"stop_token_ids": [3, 2.0]}, r"stop_token_ids\[1\]=2.0"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\]: expected a mapping"),
        ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x': expected a token id"),
        ({"logit_bias": {-1: 1}}, "logit_bias has the key -1"),
        ({"logit_bias": {True: 1}}, "logit_bias has the key True"),
        ({"logit_bias": {1: "a"}}, r"logit_bias\[1\]='a': expected a number"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\]=nan"),
        ({"logit_bias": {1: float("-inf")}}, r"logit_bias\[1\]=-inf"),
        ({"logit_bias": {1: 2.0, "1": 3.0}}, "logit_bias names token id 1 twice"),
    ],
)
def test_bad_value_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**changes)
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams.from_dict(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": "x" * 10**6},
        {"temperature": [[[["x" * 100] * 100] * 100] * 100] * 100},
        {"top_k": 10**4000},
        {"top_k": 1 << 40_000},
        {"stop": ["x" * 10**6]},
        {"stop_token_ids": [["x"] * 10**6]},
        {"logit_bias": {"1" * 5000: 1.0}},
        {"logit_bias": {1: "x" * 10**6}},
        {"k" * 10**6: 1},
    ],
)
def test_message_is_short_however_large_the_value(changes):
    with pytest.raises(ValueError, match=next(iter(changes))[:20]) as error:
        SamplingParams.from_dict(changes)
    assert len(str(error.value)) < 600


def test_equivalent_spellings_are_kept_alike():
    params = SamplingParams(
        stop="\n", stop_token_ids=[5, [6, 7]], logit_bias={"12": 1, 3: -2.5}, top_k=None, temperature=np.float32(0.5)
    )
    assert params.stop == ("\n",)
    assert params.stop_token_ids == ((5,), (6, 7))
    assert params.logit_bias == {12: 1.0, 3: -2.5}
    assert dataclasses.replace(params, n=2) == dataclasses.replace(params, n=2)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    plain = SamplingParams.from_dict({"stop": None, "stop_token_ids": None, "logit_bias": None})
    assert plain == SamplingParams()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("top_P", "top_p"),
        ("repetition_penality", "repetition_penalty"),
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("stop_strings", "stop"),
        ("num_return_sequences", "n"),
        ("top_n", "logprobs"),
        ("eos_token_id", "stop_token_ids"),
        ("use_beam_search", "num_beams"),
        ("do_sample", "temperature"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest_known_one(name, nearest):
    message = f"no parameter '{name}'; the nearest known one is '{nearest}'"
    with pytest.raises(ValueError, match=f"^sampling has {message}"):
        SamplingParams.from_dict({"temperature": 1.0, name: 1})
    with pytest.raises(TypeError, match=f"^SamplingParams has {message}"):
        SamplingParams(temperature=1.0, **{name: 1})


def test_parameters_are_given_by_name():
    with pytest.raises(TypeError, match=r"by name and was given 0.7 without one; write Sampling"):
        SamplingParams(0.7)  # type: ignore[misc]


def test_other_engines_word_for_no_top_k_is_taken_as_such():
    params = SamplingParams(top_k=-1)
    assert params.top_k == 0 and params == SamplingParams()
    columns = SamplingColumns(1, limits())
    columns.set(0, params, seed=0, sample_index=0, eos_token_ids=())
    assert sampling_table(columns).top_k.tolist() == [0]
    assert SamplingParams(top_k=-1, num_beams=2).num_beams == 2


def test_parameters_can_be_replaced_and_copied():
    params = SamplingParams(top_k=3, stop=["a"], logit_bias={1: 2})
    assert dataclasses.replace(params, n=2) == SamplingParams(top_k=3, stop=["a"], logit_bias={1: 2}, n=2)
    assert copy.deepcopy(params) == params


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logit_bias": {3: 1.5, 4: 2}},
        {"json_schema": {"type": "object", "required": []}},
        {"stop_token_ids": [[1, 2]]},
    ],
)
def test_parameters_can_be_static_arguments_of_jit(changes):
    twice = [SamplingParams(**changes), SamplingParams(**copy.deepcopy(changes))]
    assert len(set(twice)) == 1 and len({*twice, SamplingParams(temperature=0.5)}) == 2
    traced = []
    program = jax.jit(lambda x, params: (traced.append(params), x)[1], static_argnums=1)
    assert [int(program(1, each)) for each in twice] == [1, 1] and len(traced) == 1


@pytest.mark.parametrize("schema", [{}, False, True])
def test_a_schema_that_is_false_in_python_is_a_constraint(schema):
    assert SamplingParams(json_schema=schema).is_constrained
    with pytest.raises(ValueError, match="json_schema with num_beams=2: a search applies no constraint"):
        SamplingParams(json_schema=schema, num_beams=2)


def test_arrays_of_token_ids_are_lists_of_them():
    params = SamplingParams(stop_token_ids=np.array([5, 6]), allowed_token_ids=np.array([7, 3]))
    assert params == SamplingParams(stop_token_ids=[5, 6], allowed_token_ids=[3, 7])
    assert all(type(token) is int for token in params.allowed_token_ids)
    with pytest.raises(ValueError, match="stop_token_ids.0.=1.5: expected a token id"):
        SamplingParams(stop_token_ids=np.array([1.5]))


@pytest.mark.parametrize("name", ["stream", "tools", "response_format", "structured_outputs", "logits_processors"])
def test_parameter_that_nothing_here_is_like_is_refused_without_naming_another(name):
    with pytest.raises(ValueError, match=f"no parameter '{name}'; none is near it \\(known: max_tokens, "):
        SamplingParams.from_dict({name: 1})


def test_sampling_that_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match="expected a mapping"):
        SamplingParams.from_dict([("n", 1)])  # type: ignore[arg-type]


def test_derived_seed_depends_on_config_seed_and_id_alone():
    assert derive_seed(0, "0") == 0xAC72368A586A18C1 >> 11  # sha256("0:0"), its first 53 bits
    seeds = {derive_seed(config_seed, request) for config_seed in range(3) for request in ("0", "1", "00", "é")}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_derived_seeds_survive_readers_that_keep_numbers_as_doubles():
    seeds = [derive_seed(7, str(i)) for i in range(1000)]
    assert [int(float(seed)) for seed in seeds] == seeds
    assert len(set(seeds)) == 1000 and max(seeds) > 2**52


def test_seed_is_derived_from_any_id():
    assert derive_seed(0, "\ud800") != derive_seed(0, "\ud801")


def test_params_module_does_not_import_jax():
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('params', {str(Path(params_module.__file__))!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['params'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert module.SamplingParams().n == 1\n"
        "assert not {'jax', 'haliax', 'equinox', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def limits(max_stop_sequences: int = 4) -> SamplingLimits:
    return SamplingLimits(
        vocab_size=100, max_logprobs=5, max_logit_bias=3, max_stop_sequences=max_stop_sequences, max_stop_tokens=16
    )


def test_columns_without_sequences_are_an_empty_table():
    columns, empty = sampling_table(SamplingColumns(3, limits())), SamplingTable.empty(3, limits())
    for name, column in columns.columns.items():
        other = empty.columns[name]
        assert (column.shape, column.dtype) == (other.shape, other.dtype), name
        assert np.array_equal(column, other), name


def test_columns_hold_what_was_asked():
    columns = SamplingColumns(2, limits())
    params = SamplingParams(
        temperature=0.5,
        top_k=1000,
        top_p=0.25,
        min_p=0.125,
        min_tokens=2,
        logprobs=4,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={7: 1.5, 99: -3.0},
        stop_token_ids=[[1, 2, 3], 9],
    )
    columns.set(1, params, seed=0x0123456789ABCDEF, sample_index=3, first_sample=2, eos_token_ids=(9, 11, 100))
    row = {name: column[1] for name, column in sampling_table(columns).columns.items()}
    assert {name: row[name].item() for name in row if row[name].ndim == 0} == {
        "temperature": 0.5,
        "top_k": 100,
        "top_p": 0.25,
        "log_min_p": np.float32(np.log(0.125)).item(),
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "sample_index": 3,
        "first_sample": 2,
        "min_tokens": 2,
        "num_logprobs": 4,
    }
    assert row["seed"].tolist() == [0x01234567, 0x89ABCDEF]
    assert row["bias_ids"].tolist() == [7, 99, 100] and row["bias_values"].tolist() == [1.5, -3.0, 0.0]
    assert row["stop_lens"].tolist() == [3, 1, 1, 0]
    assert row["stop_ids"][:16].tolist() == [100] * 13 + [1, 2, 3]
    assert row["stop_ids"][15::16].tolist() == [3, 9, 11, 100]
    assert (sampling_table(columns).temperature[0], sampling_table(columns).stop_lens[0].tolist()) == (
        0.0,
        [0, 0, 0, 0],
    )


def test_ignore_eos_leaves_only_the_stops_that_were_asked():
    columns = SamplingColumns(1, limits())
    columns.set(0, SamplingParams(ignore_eos=True, stop_token_ids=[4]), seed=0, sample_index=0, eos_token_ids=(9,))
    assert sampling_table(columns).stop_lens.tolist() == [[1, 0, 0, 0]]
    assert sampling_table(columns).stop_ids[0, 15] == 4


def test_top_p_too_small_for_float32_still_keeps_a_token():
    columns = SamplingColumns(1, limits())
    columns.set(0, SamplingParams(top_p=1e-60), seed=0, sample_index=0, eos_token_ids=())
    assert sampling_table(columns).top_p[0] > 0


def test_limits_of_zero_give_columns_of_no_width():
    none = SamplingLimits(vocab_size=10, max_logprobs=0, max_logit_bias=0, max_stop_sequences=0, max_stop_tokens=16)
    columns = SamplingColumns(1, none)
    columns.set(0, SamplingParams(), seed=0, sample_index=0, eos_token_ids=())
    table = sampling_table(columns)
    assert table.bias_ids.shape == (1, 0) and table.stop_ids.shape == (1, 0)
