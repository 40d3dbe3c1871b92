"""`Tokenizer`: text to token ids and back, from the files of an HF model directory, on the `tokenizers` library alone.

Source: the files are read as transformers 5.23 reads them.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from levanter_infer.checkpoints.chat import TEMPLATE_ARGUMENTS, check_template_kwargs
from levanter_infer.checkpoints.chat_template import ChatTemplate
from levanter_infer.checkpoints.source import Source
from levanter_infer.checkpoints.tokenizer_limits import HARMLESS_GROWTH, TokenBound, check_growth, check_length, growth

logger = logging.getLogger(__name__)

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
)
_NAMED_TEMPLATES = "additional_chat_templates"
_MAX_TEMPLATES = 64
_MAX_FILE_BYTES = 2**28
_MAX_EOS = 64
"""Largest number of end-of-sequence ids: each takes an entry in the tables of every request."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LLAMA, _CODE_LLAMA = "LlamaTokenizer", "CodeLlamaTokenizer"
_DEFAULT_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_SPELLING_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders of tokens that spell their text, with "\u2581" for a space and <0x0A> for a byte."""
_CLASSES_IGNORED_FOR = ("mistral", "mixtral", "qwen2")
"""Model types for which transformers ignores a Llama class."""


class Tokenizer:
    """Encodes prompts, decodes tokens, renders chats. Create it with `from_directory`.

    Attributes:
        vocab_size: one more than the largest token id.
        eos_token_ids: ids that end a sequence.
        fingerprint: sha256 of the files it was read from.
        is_byte_level: whether decoding joins the bytes of the tokens and reads them as UTF-8.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    is_byte_level: bool

    def __init__(
        self, files: Mapping[str, bytes], *, model_config: Mapping[str, object] | None = None, where: str = ""
    ):
        """Use `from_directory`. `files` are contents by name; `where` is the directory in messages."""
        self._where = where
        model_config = model_config or {}
        self._config = _parse_json(files, "tokenizer_config.json", where)
        content = files["tokenizer.json"]
        kind = _class_of(content, self._config, model_config)
        tokens_map = {**_default_tokens(kind), **_parse_json(files, "special_tokens_map.json", where)}
        self._named_tokens = _named_tokens(self._config, tokens_map)
        self._tokenizer = _parse_tokenizer(content, where)  # refuses invalid content before anything else reads it
        if kind is not None:
            content = _rebuilt(content, kind, self._config, self._named_tokens.get("unk_token"))
            self._tokenizer = _parse_tokenizer(content, where)
        self._growth = growth(self._tokenizer.normalizer, self._tokenizer.pre_tokenizer)
        self._decoded_growth = growth(self._tokenizer.decoder)
        check_growth(self._growth, f"{where}/tokenizer.json: its normalizers and pre-tokenizers")
        check_growth(self._decoded_growth, f"{where}/tokenizer.json: its decoders")
        self._add_tokens()
        self._mark_special()
        self._tokenizer.encode_special_tokens = self._config.get("split_special_tokens") is True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._special_ids = frozenset(
            i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._set_post_processor(kind)
        generation = _parse_json(files, "generation_config.json", where)
        self.eos_token_ids = self._find_eos(generation, model_config)
        self._template_sources = _template_sources(files, self._config, where)
        self.fingerprint = _fingerprint(files)
        self._decoder_steps = _decoder_steps(files["tokenizer.json"])
        self.is_byte_level = self._decoder_steps == {"ByteLevel"}
        self._bytes_of_token: dict[int, bytes] = {}
        self._templates: dict[str, ChatTemplate] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Read a model directory. Raises: ValueError naming the file that is missing or broken."""
        directory = Path(path)
        if not directory.is_dir():
            raise ValueError(f"tokenizer: {directory} is not a directory")
        return cls.from_source(Source(directory, str(directory), None))

    @classmethod
    def from_source(cls, source: Source) -> "Tokenizer":
        """Read the files of a checkpoint. Raises: ValueError naming the file that is missing or broken."""
        with concurrent.futures.ThreadPoolExecutor(len(_FILES) + 1) as pool:  # remote files take a round trip each
            templates = [f"{_NAMED_TEMPLATES}/{n}" for n in source.names(_NAMED_TEMPLATES) if n.endswith(".jinja")]
            if len(templates) > _MAX_TEMPLATES:
                raise ValueError(
                    f"{source.where(_NAMED_TEMPLATES)}: {len(templates)} templates; expected at most {_MAX_TEMPLATES}"
                )
            names = list(dict.fromkeys((*_FILES, "config.json", *templates)))
            there = [name for name, has in zip(names, pool.map(source.has, names), strict=True) if has]
            contents = pool.map(lambda name: source.read_bytes(name, _MAX_FILE_BYTES), there)
            files = dict(zip(there, contents, strict=True))
        if "tokenizer.json" not in files:
            raise ValueError(
                f"{source.where()} has no tokenizer.json; save the tokenizer with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes one"
            )
        where = source.where()
        config = _parse_json(files, "config.json", where)
        files.pop("config.json", None)
        return cls(files, model_config=config, where=where)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; the text of a special token becomes that token.

        Args:
            add_special_tokens: add the special tokens that the model expects around a prompt, usually one at its start.
        Raises: ValueError if `text` is not a string of Unicode characters.
        """
        if not isinstance(text, str):
            raise ValueError(f"prompt is {type(text).__name__}; expected a string")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as e:
            raise ValueError("prompt holds half of a surrogate pair, which is not a Unicode character") from e
        check_length(num_bytes, self._growth, "the prompt")
        with _library_errors(f"{self._where}/tokenizer.json cannot encode the prompt"):
            # Gives the ids of `encode`, and lets other Python threads run meanwhile, which `encode` does not
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without encoding; 0 where none is known."""
        return self._bound(text)

    @functools.cached_property
    def _bound(self) -> TokenBound:
        return TokenBound(self._tokenizer.to_str())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens. An id without a token has no text. Raises: ValueError if an id is not below `vocab_size`."""
        ids = [int(i) for i in token_ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the tokenizer's vocabulary of {self.vocab_size}")
        if self._decoded_growth > HARMLESS_GROWTH:
            tokens = (self._tokenizer.id_to_token(i) or "" for i in ids)
            check_length(sum(len(t.encode()) + 1 for t in tokens), self._decoded_growth, "the text of the tokens")
        with _library_errors(f"{self._where}/tokenizer.json cannot decode tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` skips the token."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of the token, perhaps a part of a character; empty for an id without a token.

        Requires: `is_byte_level`.
        """
        known = self._bytes_of_token.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            known = self._bytes_of_token[token_id] = b"" if token is None else _bytes_of(token)
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds in the middle of a text, perhaps a part of a character; empty for special
        tokens and for an id without a token.

        Raises: ValueError if the decoder does not join the bytes of tokens (WordPiece, for instance).
        """
        if self.is_special(token_id):
            return b""
        if self.is_byte_level:
            return self.token_bytes(token_id)
        unknown = self._decoder_steps - _SPELLING_STEPS
        if unknown:
            raise ValueError(
                f"{self._where}/tokenizer.json: the decoder {', '.join(sorted(unknown))} does not join the bytes of "
                "tokens, so that a text cannot be constrained; constrain token ids"
            )
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template_sources)

    def _template(self, name: str) -> ChatTemplate:
        """The template with this name. Raises: ValueError if there is none."""
        where = self._where or "the model"
        if not self._template_sources:
            raise ValueError(f"{where} has no chat template, so it takes no messages; give a prompt instead")
        if name not in self._template_sources:
            names = ", ".join(sorted(self._template_sources))[:200]
            raise ValueError(
                f"{where} has no chat template {reprlib.repr(name)}; its templates are {names}: choose one by "
                "chat_template, a name"
            )
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._template_sources[name])
        return self._templates[name]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        chat_template: str | None = None,
        **chat_template_kwargs: object,
    ) -> str:
        """The prompt text of a conversation, as transformers 5 renders it.

        Encode it without special tokens: the template has written them.

        Args:
            messages: mappings with `role` and `content`, which is a string or a list of `{"type": "text", "text": ...}`
                parts. A template that loops over a message's parts gets them as they are; for others they are joined by
                line breaks.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with the start of the assistant's turn. Default: true unless
                `continue_final_message` is given; the two exclude each other.
            continue_final_message: end within the last message, so that the model continues it. A string is the key of
                the entry that is continued, such as "reasoning_content".
            chat_template: name of one of the model's templates, such as "rag". Default: "tool_use" for chats with tools
                if there is one, else "default".
            chat_template_kwargs: further variables of the template, such as `enable_thinking` or `documents`. A warning
                names one that the template does not read.
        Raises: ValueError if there is no template, it fails, or it refuses the messages.
        """
        check_template_kwargs({**chat_template_kwargs, "chat_template": chat_template})
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if chat_template is None:
            chat_template = "tool_use" if tools is not None and "tool_use" in self._template_sources else "default"
        template = self._template(chat_template)
        named = {name: token for name, token in self._named_tokens.items() if name not in TEMPLATE_ARGUMENTS}
        variables = {"documents": None, **named, **chat_template_kwargs}
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        template.warn_of_unread(chat_template_kwargs)
        return text

    def id_of(self, name: str) -> int | None:
        """Token id of a named special token, such as "bos_token"; None if the model names none."""
        token = self._named_tokens.get(name)
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None

    def _add_tokens(self) -> None:
        """Add the tokens of `added_tokens_decoder` that tokenizer.json has not, or with other properties."""
        given = self._config.get("added_tokens_decoder") or {}
        where = f"{self._where}/tokenizer_config.json: added_tokens_decoder"
        if not isinstance(given, Mapping):
            raise ValueError(f"{where} is {reprlib.repr(given)}; expected token ids and their tokens")
        tokens = {_token_id(key, where): _added_token(value, where) for key, value in given.items()}
        known = {repr(token) for token in self._tokenizer.get_added_tokens_decoder().values()}
        for number, token in sorted(tokens.items()):
            if repr(token) not in known:
                self._tokenizer.add_tokens([token])
                found = self._tokenizer.token_to_id(token.content)
                if found != number:
                    logger.warning(
                        "%s has %r as token %d, and with tokenizer.json it is %d; the latter is followed, as "
                        "transformers 5 does",
                        *(where, token.content, number, found),
                    )

    def _mark_special(self) -> None:
        """Mark the named and further special tokens of the configuration as special where the vocabulary has them as
        ordinary tokens."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        lists = (self._config.get(key) for key in ("additional_special_tokens", "extra_special_tokens"))
        further = [token for tokens in lists if isinstance(tokens, list) for token in tokens]
        further = [token.get("content") if isinstance(token, Mapping) else token for token in further]
        names = [t for t in (*self._named_tokens.values(), *further) if isinstance(t, str) and t not in added]
        self._tokenizer.add_special_tokens([t for t in names if self._tokenizer.token_to_id(t) is not None])

    def _set_post_processor(self, kind: str | None) -> None:
        """Keep tokenizer.json's post-processor, except for the class of Code Llama, which sets its own."""
        if kind == _CODE_LLAMA:
            self._begin_with_bos()
        added = self.encode("")
        for key, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
            wanted, token = self._config.get(key), self.id_of(name)
            if isinstance(wanted, bool) and token is not None and wanted != (token in added):
                logger.warning(
                    "%s/tokenizer_config.json says %s=%s, but tokenizer.json %s; the latter is followed, as "
                    "transformers 5 does",
                    *(self._where, key, str(wanted).lower(), "adds one" if token in added else "adds none"),
                )

    def _begin_with_bos(self) -> None:
        bos, token = self.id_of("bos_token"), self._named_tokens.get("bos_token")
        if token is None:
            return
        if bos is None:
            raise ValueError(
                f"{self._where}/tokenizer_config.json: prompts of this tokenizer_class begin with bos_token, which is "
                f"{token!r} and no token of tokenizer.json"
            )
        with _library_errors(f"{self._where}/tokenizer_config.json: bos_token cannot enclose a prompt"):
            self._tokenizer.post_processor = processors.TemplateProcessing(
                single=[str(token), "$A"], special_tokens=[(str(token), bos)]
            )

    def _find_eos(self, generation: Mapping, model_config: Mapping) -> tuple[int, ...]:
        text_config = model_config.get("text_config")
        sources = [("generation_config.json", generation), ("config.json", model_config)]
        sources += [("config.json: text_config", text_config)] if isinstance(text_config, Mapping) else []
        for source, config in sources:
            value = config.get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                got = repr(value)[:80]
                raise ValueError(f"{self._where}/{source}: eos_token_id is {got}; expected a token id or a list")
            if len(ids) > _MAX_EOS:
                raise ValueError(f"{self._where}/{source}: {len(ids)} eos_token_id; expected at most {_MAX_EOS}")
            return tuple(dict.fromkeys(ids))
        own = self.id_of("eos_token")
        return () if own is None else (own,)


@contextlib.contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Turn errors of the library into ValueError: it raises plain Exception, and a broken file can make it panic."""
    try:
        yield
    except BaseException as e:
        if isinstance(e, Exception) or type(e).__name__ == "PanicException":
            raise ValueError(f"{message}: {e}") from e
        raise


def _parse_tokenizer(content: bytes, where: str) -> tokenizers.Tokenizer:
    with _library_errors(f"{where}/tokenizer.json is not a tokenizer that this library reads"):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    # Prompts are never truncated or padded, whatever the file says.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _parse_json(files: Mapping[str, bytes], name: str, where: str) -> dict:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}/{name} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{where}/{name} holds a {type(value).__name__}; expected a JSON object")
    return value


def _token_id(key: object, where: str) -> int:
    if isinstance(key, str) and re.fullmatch(r"\d{1,9}", key):
        return int(key)
    raise ValueError(f"{where} has the key {reprlib.repr(key)}; expected a token id")


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _added_token(value: object, where: str) -> tokenizers.AddedToken:
    content = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(content, str) or not content:
        raise ValueError(f"{where} has {reprlib.repr(value)}; expected a mapping with the token's content")
    flags = {name: value[name] for name in _FLAGS if name in value}
    if not all(type(flag) is bool for flag in flags.values()):
        raise ValueError(f"{where} has {reprlib.repr(value)}; expected true or false for {', '.join(_FLAGS)}")
    return tokenizers.AddedToken(content, **flags)


def _named_tokens(config: Mapping, tokens_map: Mapping) -> dict[str, object]:
    """Texts of the named special tokens, as templates get them."""
    named: dict[str, object] = {}
    others = [name for name in config if name.endswith("_token") and name not in _NAMED_TOKENS]
    extra = config.get("extra_special_tokens")
    tokens = {name: config.get(name, tokens_map.get(name)) for name in _NAMED_TOKENS}
    tokens |= {name: config[name] for name in others} | (extra if isinstance(extra, dict) else {})
    for name, value in tokens.items():
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            named[name] = value
    return named


def _template_sources(files: Mapping[str, bytes], config: Mapping, where: str) -> dict[str, str]:
    """Templates by name: files of their own, else those of tokenizer_config.json, else that of a processor."""
    texts = {}
    for file, content in files.items():
        if file == "chat_template.jinja" or file.startswith(f"{_NAMED_TEMPLATES}/"):
            try:
                texts[_template_name(file)] = content.decode("utf-8")
            except UnicodeDecodeError as e:
                raise ValueError(f"{where}/{file} is not UTF-8: {e}") from e
    if "default" in texts:
        return texts
    template, file = config.get("chat_template"), "tokenizer_config.json"
    if template is None and not texts:
        file = "chat_template.json"
        template = _parse_json(files, file, where).get("chat_template")
    named = {"default": template} if template is not None else {}
    if isinstance(template, list):
        named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
    for source in named.values():
        if not isinstance(source, str):
            raise ValueError(f"{where}/{file}: chat_template is {type(source).__name__}, expected a string")
    return {name: source for name, source in {**named, **texts}.items() if source}


def _template_name(file: str) -> str:
    return "default" if file == "chat_template.jinja" else Path(file).name.removesuffix(".jinja")


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in (*_FILES, *sorted(set(files) - set(_FILES))):
        if name in files:
            digest.update(f"{name} {len(files[name])}\n".encode())
            digest.update(files[name])
    return digest.hexdigest()


def _decoder_steps(content: bytes) -> set[str]:
    """The types of the steps of the decoder; "none" without a decoder."""
    decoder = json.loads(content).get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return {step.get("type") or "none" for step in steps}


def _bytes_of(token: str) -> bytes:
    table = _byte_of_character()
    if all(c in table for c in token):
        return bytes(table[c] for c in token)
    return token.encode()  # an added token, whose text is plain


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level vocabularies. Source: GPT-2's `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


# Parts of tokenizer.json that a tokenizer class of transformers rebuilds
#
# Source: transformers 5.23 (`AutoTokenizer`, `TokenizersBackend`, `LlamaTokenizer`, `CodeLlamaTokenizer`). The special
# tokens around a prompt are those of tokenizer.json's post-processor, whatever the class and `add_bos_token` of
# tokenizer_config.json; versions before 5 read the latter, and kept the normalizer of Llama 2's files. Other classes
# are read as the file has them.


def _class_of(content: bytes, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> str | None:
    """The class that rebuilds parts of the tokenizer, if any.

    Args:
        content: content of tokenizer.json.
        config: content of tokenizer_config.json.
        model_config: content of config.json.
    """
    name = str(config.get("tokenizer_class") or model_config.get("tokenizer_class") or "").removesuffix("Fast")
    if name not in (_LLAMA, _CODE_LLAMA) or model_config.get("model_type") in _CLASSES_IGNORED_FOR:
        return None
    # Llama 3's files name the class of Llama 2, but are byte-level.
    return None if name == _LLAMA and b'"ByteLevel"' in content else name


def _default_tokens(kind: str | None) -> Mapping[str, str]:
    """Default named tokens of a class."""
    return _DEFAULT_TOKENS if kind is not None else {}


def _rebuilt(content: bytes, kind: str | None, config: Mapping[str, Any], unk_token: object) -> bytes:
    """tokenizer.json with the parts that the class rebuilds; unchanged without a class or without BPE.

    Text is split at special tokens, and each space becomes "▁". One more is put before the text: at its start only, or
    with `legacy` before each piece between special tokens.
    """
    if kind is None:
        return content
    file = json.loads(content)
    model = file.get("model") if isinstance(file, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return content
    prefix = config.get("add_prefix_space") is not False
    legacy = kind == _LLAMA and config.get("legacy") not in (None, False)
    scheme = "never" if not prefix else "always" if legacy else "first"
    file["normalizer"] = None
    file["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix or kind == _CODE_LLAMA:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    file["decoder"] = {"type": "Sequence", "decoders": steps}
    unknown = unk_token if kind == _CODE_LLAMA and unk_token in (model.get("vocab") or {}) else None
    plain = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    file["model"] = {**model, **plain, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return json.dumps(file, ensure_ascii=False).encode("utf-8", "surrogatepass")
