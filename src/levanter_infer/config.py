"""`RunConfig`: the configuration of a command, from a YAML file and `--dotted.key value` overrides.

Nothing here imports JAX, so that a mistake in a configuration is answered at once.
"""

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from levanter_infer.checkpoints.chat import CHAT_KEYS, check_chat_settings
from levanter_infer.checkpoints.source import Source, resolve_source
from levanter_infer.columns import check_include
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.mesh import MeshConfig
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.keys import certain_hint, hint_for
from levanter_infer.runtime.multihost import MultihostConfig

_MAX_CONFIG_BYTES = 2**22
_MAX_ALIASED_NODES = 100_000
"""Values of a configuration with aliases, at most; a value counts as often as it is named."""
_SOURCES = ("prompts", "prompts_file", "chat")
_PLAIN_TEXT = (
    *("model.path", "model.dtype", "model.revision", "model.adapter", "tokenizer", "prompts", "prompts_file"),
    *("output.path", "output.metrics", "sampling.stop", "multihost.coordinator", "multihost.bind"),
    *("plan.target", "plan.shape", "plan.json"),
)
"""Keys whose value on the command line is plain text; all others are YAML."""
_FILES = ("model.path", "model.adapter", "tokenizer", "prompts_file", "output.path", "output.metrics")
_SHORT = {"model": "path", "output": "path", "multihost": "coordinator", "sampling": "from_model"}
"""Sections that may be a plain string, and the key that the string sets."""


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Source of the model."""

    path: str
    """A directory in HF's layout, a URL of one that fsspec reads (gs://, s3://), or a hub id."""
    dtype: str | None = None
    """bfloat16 or float32; default: as stored."""
    revision: str | None = None
    """Branch, tag or commit of a hub repository."""
    adapter: str | None = None
    """A LoRA adapter as PEFT saves it, which is merged into the weights: a directory, a URL or a hub id."""

    def resolve(self) -> Source:
        """Find it, as `resolve_source`."""
        return resolve_source(self.path, self.revision, adapter=self.adapter)


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """Output files."""

    path: str | None = None
    """A JSONL file for the rows."""
    overwrite: bool = False
    """Replace files that exist."""
    metrics: str | None = None
    """A file for the engine's metrics: FILE.json, or FILE.prom in Prometheus' text format."""
    include: list[str] = dataclasses.field(default_factory=list)
    """Further columns of all rows: logprobs, top_logprobs, processed_logprobs, cumulative_logprob, token_versions,
    score, routed_experts, prompt_logprobs, prompt_top_logprobs, num_cached_tokens. Columns that `sampling` asks for
    need no entry."""
    carry: list[str] = dataclasses.field(default_factory=list)
    """Further columns of the rows of prompts_file, such as [source, label], that are copied to the rows of the
    output."""

    def __post_init__(self):
        check_include(self.include)
        if self.path is None and self.metrics is None:
            raise ValueError("output lacks path and metrics; expected a file for rows, one for metrics, or both")
        if self.carry and self.path is None:
            raise ValueError("output.carry without output.path; say where the rows go")
        if self.metrics is not None and not self.metrics.endswith((".json", ".prom")):
            raise ValueError(f"output.metrics={brief(self.metrics)}; expected a name that ends in .json or .prom")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run of `levanter_infer.sample`."""

    model: ModelSource
    """A path or hub id, or a mapping with `path`, `dtype`, `revision`."""
    tokenizer: str | None = None
    """A directory, URL or hub id to take the tokenizer from; default: the model's."""
    prompts: list[str] | None = None
    """Prompts, or a single one."""
    prompts_file: str | None = None
    """A text file with one prompt a line, or JSONL rows."""
    chat: Any = False
    """true: each text prompt is a user message. A list of messages is a chat to continue; a list of such lists is
    several."""
    tools: list[dict[str, Any]] | None = None
    """Descriptions of functions for the chat template; rows may have their own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as `{enable_thinking: false}`; rows may override them."""
    add_generation_prompt: bool | None = None
    """End chats with the generation prompt. Default: unless they continue their last message."""
    continue_final_message: bool | None = None
    """Continue the last message of chats instead of starting another."""
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    """Sampling parameters of every request; rows of a prompts file may override them. Requests derive
    their seeds from its `seed`. `from_model` alone, or `from_model: true` beside other parameters: the suggestions of
    the model's generation_config.json, which parameters given here override."""
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of `EngineConfig`; see `engine_config`."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    multihost: MultihostConfig = dataclasses.field(default_factory=MultihostConfig)
    """Processes of a job over several hosts; `auto` alone: read from the environment."""
    output: OutputConfig | None = None
    """A JSONL file for the results, or a mapping with `path`, `overwrite`, `metrics`."""

    def __post_init__(self):
        given = [name for name in _SOURCES if getattr(self, name) not in (None, False, True)]
        if not given:
            raise ValueError("nothing to sample: give prompts, prompts_file, or chat with a list of messages")
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; expected one of them")
        if self.prompts is not None and not self.prompts:
            raise ValueError("prompts is an empty list; expected at least one prompt")
        check_chat_settings({key: getattr(self, key) for key in CHAT_KEYS if getattr(self, key) is not None})
        self.check_files()

    def check_files(self) -> None:
        """Raises: ValueError for a name of a file or directory that cannot be one."""
        if not self.model.path:
            raise ValueError("model is empty; expected a directory or a hub id")
        for name in _FILES:
            section, _, key = name.rpartition(".")
            value = getattr(getattr(self, section) if section else self, key, None)
            if value is not None and (not value or "\0" in value):
                raise ValueError(f"{section or key}={brief(value)}; expected the name of a file or directory")

    def engine_config(self) -> EngineConfig:
        """The engine's section. Raises: ValueError for an unknown key or a wrong value."""
        return decode_engine(self.engine)

    @property
    def chats(self) -> list[list[Mapping[str, Any]]]:
        """The conversations written in the configuration itself."""
        if not isinstance(self.chat, list):
            return []
        return self.chat if all(isinstance(c, list) for c in self.chat) else [self.chat]


AnyRunConfig = typing.TypeVar("AnyRunConfig", bound=RunConfig)


def load_config(
    path: str | Path | None, overrides: Sequence[tuple[str, str]] = (), kind: type[AnyRunConfig] = RunConfig
) -> AnyRunConfig:
    """Read a configuration.

    Args:
        path: a YAML file; None if the overrides say everything.
        overrides: (dotted key, text) in order. A later one replaces an earlier, but for `prompts`, which add up.
            Prompts given here replace those in the file, in whichever form.
        kind: type of the configuration.
    Raises: ValueError naming the file or key that is wrong.
    """
    content = {} if path is None else _read_yaml(Path(path))
    for name, key in _SHORT.items():
        if isinstance(content.get(name), str):
            content[name] = {key: content[name]}
    _apply_overrides(content, overrides)
    content = {key: value for key, value in content.items() if value is not None}  # a key with nothing behind it
    check_keys(content, [f.name for f in dataclasses.fields(kind)], "")
    if "model" not in content:
        raise ValueError("no model: give `model: <directory or hub id>` in the configuration, or --model")
    if isinstance(content.get("prompts"), str):
        content["prompts"] = [content["prompts"]]
    _check_chat(content.get("chat", False))
    if isinstance(content.get("sampling"), dict) and "from_model" in content["sampling"]:
        content["sampling"] = _with_suggested(content["sampling"], content["model"])
    return decode_section(kind, content, "")


def _with_suggested(sampling: dict[str, Any], model: Any) -> dict[str, Any]:
    """Sampling parameters, with the model's suggestions for those that are not given."""
    given = {key: value for key, value in sampling.items() if key != "from_model"}
    wanted = sampling["from_model"]
    if wanted is False or wanted is None:
        return given
    if wanted not in (True, "from_model"):
        raise ValueError(f"sampling={brief(wanted)}: expected from_model, or a mapping of parameters to values")
    from levanter_infer.checkpoints.generation import required_sampling

    source = decode_section(ModelSource, model, "model")
    suggested = required_sampling(source.path, source.revision).params
    try:
        SamplingParams.from_dict(suggested)
    except ValueError as e:
        raise ValueError(f"generation_config.json of {source.path}: {e}") from e
    return {**suggested, **given}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"{path} has more than {_MAX_CONFIG_BYTES} bytes; put prompts into a prompts_file")
        content = _parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"cannot read the configuration {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8: {e}; save it as UTF-8") from e
    except _BadYaml as e:
        raise ValueError(f"{path} is not YAML: {e}") from e
    if content is None:
        raise ValueError(f"{path} is empty; expected keys such as model and prompts")
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected keys such as model and prompts")
    return content


class _BadYaml(Exception):
    """A text that is no YAML, or no YAML for a configuration."""


def _parse_yaml(text: str) -> Any:
    try:
        loader = _Loader(text)
        content = loader.get_single_data()
        if loader.has_aliases:
            _check_aliases(content)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as e:
        raise _BadYaml(" ".join(str(e).split())[:300]) from e
    return content


def _check_aliases(content: Any) -> None:
    """Raises: ValueError for content whose aliases expand to too many values."""
    count, rest = 0, [content]
    while rest:
        value = rest.pop()
        count += 1
        if count > _MAX_ALIASED_NODES:
            raise ValueError(f"its aliases stand for more than {_MAX_ALIASED_NODES} values; write them out")
        if isinstance(value, dict):
            rest.extend((*value.keys(), *value.values()))
        elif isinstance(value, (list, tuple, set)):
            rest.extend(value)


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load`, but a key written twice is an error, 1e-5 is a number, and a date is the text that it is."""

    has_aliases = False

    def compose_node(self, parent, index):
        self.has_aliases = self.has_aliases or self.check_event(yaml.AliasEvent)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value) and not any(key.tag.endswith(":merge") for key, _ in node.value):
            raise yaml.constructor.ConstructorError("a key is written twice in a mapping", node.start_mark)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def _apply_overrides(content: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> None:
    values: dict[str, Any] = {}
    for key, text in overrides:
        key = f"{key}.{_SHORT[key]}" if key in _SHORT else key
        value = _parse_value(key, text)
        values[key] = [*values.get(key, []), value] if key == "prompts" else value
    if any(key in _SOURCES and not isinstance(value, bool) for key, value in values.items()):
        for name in _SOURCES:
            if not isinstance(content.get(name), bool):
                content.pop(name, None)
    for key, value in values.items():
        section = content
        *outer, last = key.split(".")
        for name in outer:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):
                raise ValueError(f"--{key}: {name} has no keys within it")
        section[last] = value


def _parse_value(key: str, text: str) -> Any:
    if key in _PLAIN_TEXT and not (key == "sampling.stop" and text[:1] in ("[", '"')):
        return text
    try:
        return _parse_yaml(text)
    except _BadYaml as e:
        raise ValueError(f"--{key} {brief(text)} is not a YAML value: {e}") from e


def _check_chat(chat: Any) -> None:
    if not isinstance(chat, bool) and not (isinstance(chat, list) and chat and all(_is_chat_item(c) for c in chat)):
        raise ValueError("chat is neither true, false, a list of {role, content} messages, nor a list of such lists")


def _is_chat_item(item: Any) -> bool:
    return isinstance(item, dict) or (isinstance(item, list) and all(isinstance(m, dict) for m in item))


def decode_section(cls: type, content: Any, path: str) -> Any:
    """A dataclass from plain values.

    Args:
        path: dotted key of the section, for messages; empty for the whole configuration.
    Raises: ValueError naming an unknown key with the nearest known one, or a value of the wrong type.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{path or 'the configuration'} is {brief(content)}; expected a mapping of keys to values")
    if cls is SamplingParams:
        _check_places(content, [f.name for f in dataclasses.fields(cls)], path)
        return SamplingParams.from_dict(content)
    check_keys(content, [f.name for f in dataclasses.fields(cls)], path)
    values = dict(content)
    for field in dataclasses.fields(cls):
        if field.name in values:
            values[field.name] = _decode_value(field.type, values[field.name], f"{path}.{field.name}".lstrip("."))
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path or 'the configuration'} lacks {', '.join(missing)}")
    return cls(**values)


def decode_engine(content: Any) -> EngineConfig:
    """The engine's section from plain values. Imports JAX if it has `tiles`. Raises: ValueError as `decode_section`."""
    if isinstance(content, dict) and content.get("tiles") is not None:
        from levanter_infer.kernels.tpu.tiling import Tiles

        content = content | {"tiles": decode_section(Tiles, content["tiles"], "engine.tiles")}
    return decode_section(EngineConfig, content, "engine")


def _decode_value(hint: Any, value: Any, key: str) -> Any:
    """A plain value as the annotation of its key wants it: text that spells a number counts as one, and nothing else is
    converted. Raises: ValueError naming the key, what it holds and what it should hold."""
    if isinstance(hint, str):
        return value  # `EngineConfig.tiles`, which `decode_engine` has decoded
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    section = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
    if section is not None and value is not None:
        return decode_section(typing.cast(type, section), value, key)
    if isinstance(value, list) and list[str] in kinds:
        for i, item in enumerate(value):
            if not isinstance(item, str):
                raise ValueError(f"{key}[{i}] is {brief(item)}; expected text, put it in quotes")
    for kind in kinds:
        with contextlib.suppress(ValueError, OverflowError):
            return _decode_plain(kind, value)
    remedy = ", put it in quotes" if str in kinds else ""
    raise ValueError(f"{key}={brief(value)}: expected {_READABLE.get(hint) or _READABLE[kinds[0]]}{remedy}")


def _decode_plain(kind: Any, value: Any) -> Any:
    """Raises: ValueError or OverflowError for a value of another kind."""
    is_text = isinstance(value, str)
    if kind is bool and is_text and value in ("true", "false"):
        return value == "true"
    if kind is int and (is_text or type(value) is int):
        return int(value)
    if kind is float and (is_text or type(value) in (int, float)):
        return float(value)
    plain = type(None) if kind is None else typing.get_origin(kind) or kind
    if kind in (int, float) or not (kind is Any or isinstance(value, plain)):
        raise ValueError
    if plain is list:
        return [_decode_plain(typing.get_args(kind)[0], item) for item in value]
    return value


_READABLE = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict[str, Any]: "a mapping of keys to values",
    list[str]: "a list of texts, such as [one, other]",
    list[str] | None: "a text or a list of texts",
    list[dict[str, Any]]: "a list of mappings",
}
"""Expected values in words, by annotation."""


def _check_places(given: Iterable[Any], known: Sequence[str], path: str) -> None:
    """Raises: ValueError naming the first key that belongs to another section or is another engine's name of one."""
    for key in given:
        hint = None if key in known else certain_hint(str(key), known, path)
        if hint is not None:
            raise ValueError(f"unknown key {path}.{_short(key)}; {hint}")


def check_keys(given: Iterable[Any], known: Sequence[str], path: str, remedy: str = "") -> None:
    """Raises: ValueError naming the first unknown key and the nearest known one.

    Args:
        remedy: further advice, in which NAME stands for the key.
    """
    for key in given:
        if key not in known:
            name = _short(key)
            hint = hint_for(name, known, path) + remedy.replace("NAME", name)
            raise ValueError(f"unknown key {f'{path}.{name}' if path else name}; {hint}")


def _short(key: Any) -> str:
    return str(key) if len(str(key)) <= 80 else f"{str(key)[:80]}..."
