"""A configuration is read as written, and every mistake in one is named, before JAX is imported."""

import dataclasses
import importlib
import json
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

from levanter_infer import keys
from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.config import _READABLE, OutputConfig, RunConfig, load_config
from levanter_infer.engine import config as engine_config
from levanter_infer.engine.config import EngineConfig
from levanter_infer.policies import AdmissionPolicy, PreemptionPolicy

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def config_from(tmp_path, text, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_two_lines_are_enough(tmp_path):
    config = config_from(tmp_path, "model: models/tiny\nprompts: ['17+25=']\n")
    assert config.model.path == "models/tiny" and config.prompts == ["17+25="]
    assert config.engine_config() == EngineConfig()


def test_every_section_is_read(tmp_path):
    config = config_from(
        tmp_path,
        """
        model: {path: org/name, dtype: bfloat16, revision: abc}
        tokenizer: other
        prompts_file: rows.jsonl
        chat: true
        sampling: {temperature: 1e-3, stop: ["\\n"], logit_bias: {3: -1}, top_k: 5}
        engine: {max_seqs: 4, max_round_seconds: 1}
        mesh: {data: 1, model: 1}
        output: {path: out.jsonl, overwrite: true, metrics: out.prom}
        """,
    )
    assert (config.model.dtype, config.model.revision, config.tokenizer) == ("bfloat16", "abc", "other")
    assert config.prompts_file == "rows.jsonl" and config.chat is True
    assert config.sampling.temperature == 1e-3 and config.sampling.stop == ("\n",)
    assert config.sampling.logit_bias == {3: -1.0} and config.sampling.top_k == 5
    assert config.engine_config() == EngineConfig(max_seqs=4, max_round_seconds=1.0)
    assert config.output == OutputConfig("out.jsonl", overwrite=True, metrics="out.prom")


def test_overrides_replace_single_keys(tmp_path):
    text = "model: {path: a, dtype: float32}\nprompts: x\nsampling: {temperature: 1.0, top_k: 3}\noutput: o\n"
    overrides = [("sampling.temperature", "0"), ("model", "b"), ("output.overwrite", "true"), ("engine.max_seqs", "2")]
    config = config_from(tmp_path, text, *overrides)
    assert (config.model.path, config.model.dtype) == ("b", "float32")
    assert (config.sampling.temperature, config.sampling.top_k) == (0, 3)
    assert config.output == OutputConfig("o", overwrite=True) and config.engine == {"max_seqs": 2}


@pytest.mark.parametrize(
    "override, expected",
    [
        (("prompts_file", "rows.jsonl"), (None, "rows.jsonl")),
        (("prompts", "[INST] 1: x"), (["[INST] 1: x"], None)),
    ],
)
def test_prompts_of_the_command_line_take_the_place_of_the_files(tmp_path, override, expected):
    for text in ("model: m\nprompts: [a, b]\n", "model: m\nprompts_file: p\n", "model: m\nchat: [{role: u}]\n"):
        config = config_from(tmp_path, text, override)
        assert (config.prompts, config.prompts_file) == expected and not config.chats


def test_repeated_prompts_add_up():
    config = load_config(None, [("model", "m"), ("prompts", "17"), ("prompts", "true")])
    assert config.prompts == ["17", "true"]


def test_empty_sections_are_as_if_left_out(tmp_path):
    config = config_from(tmp_path, "model: m\nprompts: x\nsampling:\nengine:\nmesh:\noutput:\nchat:\n")
    assert config == load_config(None, [("model", "m"), ("prompts", "x")])


def test_stop_strings_of_the_command_line_are_text_or_a_yaml_list():
    base = [("model", "m"), ("prompts", "x")]
    assert load_config(None, [*base, ("sampling.stop", "no: 5")]).sampling.stop == ("no: 5",)
    assert load_config(None, [*base, ("sampling.stop", '["\\n", "b"]')]).sampling.stop == ("\n", "b")


def test_chat_holds_one_conversation_or_several():
    turn = "{role: user, content: hi}"
    one = load_config(None, [("model", "m"), ("chat", f"[{turn}, {turn}]")]).chats
    several = load_config(None, [("model", "m"), ("chat", f"[[{turn}], [{turn}, {turn}]]")]).chats
    assert [len(c) for c in one] == [2] and [len(c) for c in several] == [1, 2]


START = "model: m\nprompts: x\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("prompts: x", "no model: give `model:"),
        ("model: m", "nothing to sample: give prompts, prompts_file, or chat"),
        ("model: m\nprompts: []", "prompts is an empty list"),
        ("model: ''\nprompts: x", "model is empty"),
        ("model:\nprompts: x", "no model: give `model:"),
        ("model: 5\nprompts: x", "model is 5; expected a mapping"),
        ("modle: m\nprompts: x", "unknown key modle; did you mean model?"),
        (START + "prompts_file: y", "prompts and prompts_file are both given"),
        (START + "output: {include: logprobs}", "output.include='logprobs': expected a list of texts, such as [one, "),
        (START + "sampling: {temprature: 1}", "'temprature'; the nearest known one is 'temperature'"),
        (START + "sampling: {temperature: hot}", "temperature='hot': expected a number"),
        (START + "sampling: 5", "sampling is 5; expected a mapping"),
        (START + "mesh: {model: 3}", "mesh.model=3: expected one of 1, 2, 4, 8 or 16"),
        (START + "mesh: {data: 0}", "mesh.data=0: expected a whole number of at least 1"),
        (START + "mesh: {expert: 0}", "mesh.expert=0: expected a whole number of at least 1"),
        (START + "mesh: {modell: 4}", "unknown key mesh.modell; did you mean model?"),
        (START + "temperature: 0", "unknown key temperature; did you mean sampling.temperature?"),
        (START + "path: x", "unknown key path; did you mean model.path or output.path?"),
        (START + "max_tokns: 5", "unknown key max_tokns; did you mean sampling.max_tokens?"),
        (START + "sampling: {max_seqs: 4}", "unknown key sampling.max_seqs; did you mean engine.max_seqs?"),
        (START + "sampling: {max_new_tokens: 4}", "unknown key sampling.max_new_tokens; did you mean max_tokens?"),
        (START + "mesh: {chat: true}", "unknown key mesh.chat; did you mean chat outside of mesh?"),
        (START + "output: {max-seqs: 4}", "unknown key output.max-seqs; did you mean engine.max_seqs?"),
        (START + "max_model_len: 9", "unknown key max_model_len; did you mean engine.max_seq_len?"),
        (START + "gpu_memory_utilization: 0.9", "unknown key gpu_memory_utilization; the KV cache takes the free"),
        (START + "xyzzy: 1", "unknown key xyzzy; known keys: model, tokenizer, prompts,"),
        (START + "engine: 5", "engine=5: expected a mapping"),
        (START + "output: {pth: o}", "unknown key output.pth; did you mean path?"),
        (START + "output: {overwrite: true}", "output lacks path and metrics"),
        (START + "output: {metrics: m.txt}", "output.metrics='m.txt'; expected a name that ends in .json or .prom"),
        (START + "chat: 5", "chat is neither true, false, a list"),
        ("model: m\nprompts: {a: b}", "prompts={'a': 'b'}: expected a text or a list of texts"),
        ("model: m\nmodel: n\nprompts: x", "a key is written twice"),
        ("model: [", "is not YAML"),
        ("- a", "holds a list; expected keys such as model and prompts"),
        ("", "is empty; expected keys such as model and prompts"),
        (START + "x: !!timestamp 2024-99-99", "is not YAML: month must be in 1..12"),
        ("model: m\nprompts: [1]", "prompts[0] is 1; expected text, put it in quotes"),
        ("model: m\nprompts: [a, null]", "prompts[1] is None; expected text"),
        (START + "tokenizer: true", "tokenizer=True: expected text"),
        (START + "output: {path: 5}", "output.path=5: expected text"),
        (START + "output: ''", "output=''; expected the name of a file or directory"),
        ('model: "a\\0b"\nprompts: x', "model='a\\x00b'; expected the name of a file"),
        (START + "mesh: {model: true}", "mesh.model=True: expected a whole number"),
        (START + f"sampling: {{seed: 0x{'f' * 9000}}}", "seed=a whole number of 36000 bits: expected"),
        (START + "engine: &a {x: *a}", "its aliases stand for more than"),
    ],
)
def test_mistake_is_named(tmp_path, text, message):
    with pytest.raises(ValueError) as error:
        config_from(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "engine, message",
    [
        ({"max_seq": 4}, "unknown key engine.max_seq; did you mean max_seqs?"),
        ({"max-seqs": 4}, "unknown key engine.max-seqs; did you mean max_seqs?"),
        ({"temperature": 0}, "unknown key engine.temperature; did you mean sampling.temperature?"),
        ({"max_num_seqs": 4}, "unknown key engine.max_num_seqs; did you mean max_seqs?"),
        ({"tensor_parallel_size": 4}, "unknown key engine.tensor_parallel_size; did you mean mesh.model?"),
        ({"max_seqs": "x"}, "engine.max_seqs='x': expected a whole number"),
        ({"max_seqs": 0}, "engine.max_seqs=0: expected a whole number of at least 1"),
        ({"max_seqs": 1.5}, "engine.max_seqs=1.5: expected a whole number"),
        ({"prefix_cache": 1}, "engine.prefix_cache=1: expected true or false"),
        ({"preempt": "swap"}, "engine.preempt='swap': expected recompute or offload"),
        ({"admission": "lazy"}, "engine.admission='lazy': expected optimistic, expected or worst_case"),
        (
            {"kv_dtype": "int4"},
            "engine.kv_dtype='int4': expected one of float32, bfloat16, float16, int8, float8_e4m3fn",
        ),
        ({"matmul": "fast"}, "engine.matmul='fast' is not available; use auto, xla, cpu, gpu or tpu"),
        ({"tiles": 5}, "engine.tiles is 5; expected a mapping of keys to values"),
    ],
)
def test_mistake_in_the_engine_section_is_named(tmp_path, engine, message):
    with pytest.raises(ValueError) as error:
        config_from(tmp_path, START + f"engine: {engine}").engine_config()
    assert message in str(error.value)


def test_message_is_short_however_large_what_it_names(tmp_path):
    """A few hundred bytes of aliases stand for 10^9 values."""
    keys = ("stop", "stop_token_ids", "n", "seed", "top_k", "top_p", "min_p", "logprobs", "max_tokens")
    bomb = "".join(f"  {key}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 10)}]\n" for i, key in enumerate(keys))
    for text in ("sampling:\n" + bomb, "? " + "k" * 100_000 + "\n: 1\n", "tokenizer: [" + "x" * 100_000 + "]"):
        with pytest.raises(ValueError) as error:
            config_from(tmp_path, START + text)
        assert len(str(error.value)) < 500


def test_aliases_are_read(tmp_path):
    config = config_from(tmp_path, "model: &name m\ntokenizer: *name\nprompts: x\n")
    assert config.tokenizer == "m"


@pytest.mark.parametrize("key, text", [("chat", "[" * 3000), ("sampling.temperature", "!!timestamp 2024-99-99")])
def test_override_that_is_no_yaml_is_named(key, text):
    with pytest.raises(ValueError, match=f"--{key} .* is not a YAML value") as error:
        load_config(None, [("model", "m"), ("prompts", "x"), (key, text)])
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("text", ["null", "", "~"])
@pytest.mark.parametrize("section", ["mesh", "engine", "sampling"])
def test_an_empty_section_has_its_defaults(section, text):
    base = [("model", "m"), ("prompts", "x")]
    assert load_config(None, [*base, (section, text)]) == load_config(None, base)


def test_unreadable_configuration_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read the configuration .*nope.yaml: No such file"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ValueError, match="cannot read the configuration"):
        load_config(tmp_path)


def test_override_inside_a_plain_value_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--prompts.x: prompts has no keys within it"):
        config_from(tmp_path, START, ("prompts.x", "1"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configuration_of_the_repository_loads(path):
    kind = BatchRunConfig if path.name.startswith("batch-") else RunConfig
    config = load_config(path, kind=kind)
    assert config.model.path and config.engine_config()


def test_configuration_is_checked_without_jax():
    code = (
        "import sys; from levanter_infer.config import load_config; import levanter_infer.sample\n"
        "config = load_config(None, [('model', 'm'), ('prompts', 'x'), ('engine.preempt', 'offload')])\n"
        "assert config.engine_config().preempt == 'offload' and 'jax' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"}, cwd=Path(__file__).parent.parent
    )


@pytest.mark.parametrize("place", [keys.RUN, *keys.SECTIONS.values()], ids=lambda place: place[1])
def test_every_key_has_an_annotation_that_can_be_decoded(place):
    if place[1] == "SamplingParams":
        return  # checks its values itself
    for field in dataclasses.fields(getattr(importlib.import_module(f"levanter_infer.{place[0]}"), place[1])):
        hint = field.type
        if isinstance(hint, str):
            assert field.name == "tiles"
            continue
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        is_section = any(map(dataclasses.is_dataclass, kinds))
        assert is_section or hint is typing.Any or hint in _READABLE or kinds[0] in _READABLE, field.name


def test_a_policy_is_an_enum_that_equals_its_plain_string():
    config = EngineConfig(preempt="offload")
    assert config.preempt is PreemptionPolicy.OFFLOAD and config.preempt == "offload"
    assert (
        "preempt='offload'" in repr(config)
        and json.loads(json.dumps(dataclasses.asdict(config)))["preempt"] == "offload"
    )
    assert EngineConfig(admission=AdmissionPolicy.OPTIMISTIC) == EngineConfig()
    assert hash(PreemptionPolicy.OFFLOAD) == hash("offload")


@pytest.mark.parametrize("name, kind", engine_config._POLICIES.items())
def test_every_value_of_a_policy_is_accepted_and_documented(name, kind):
    docs = {key.name: key.doc for key in keys.read_section(keys.SECTIONS["engine"]).keys}
    for value in map(str, kind):
        assert getattr(EngineConfig(**{name: value}), name) is kind(value) and value in docs[name]


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("output.overwrite", "'true'", True),
        ("mesh.data", "'2'", 2),
        ("multihost.stall_s", "3", 3.0),
        ("multihost.stall_s", "'1.5'", 1.5),
    ],
)
def test_text_that_spells_a_value_is_that_value(tmp_path, key, value, expected):
    section, name = key.split(".")
    more = "path: o, " if section == "output" else ""
    config = config_from(tmp_path, START + f"{section}: {{{more}{name}: {value}}}\n")
    assert getattr(getattr(config, section), name) == expected
    assert type(getattr(getattr(config, section), name)) is type(expected)


def test_a_date_is_the_text_that_it_is(tmp_path):
    config = config_from(tmp_path, "model: m\nprompts: [a]\nchat_template_kwargs: {date_string: 2024-07-26}\n")
    assert config.chat_template_kwargs == {"date_string": "2024-07-26"}
