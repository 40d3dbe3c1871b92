"""`SamplingParams`: how to sample one request. Imports no JAX, so that a command refuses bad input at once."""

import dataclasses
import difflib
import functools
import hashlib
import json
import logging
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

MAX_STOP_TOKENS = 16
"""Tokens of one stop token sequence, at most."""
MAX_STOP_CHARS = 4096
"""Characters of one stop string, at most."""
_MAX_BIAS = 1e30
_MAX_INT = 2**31 - 1
_MAX_ENTRIES = 1_000_000
"""Entries of a list, at most; the engine's own limits are lower."""
_MAX_DIGITS = 20
"""Digits of a token id written as a string, at most."""
_CLOSE = 0.75
"""Similarity (difflib's ratio) of a suggestion, at least."""
MAX_PATTERN_CHARS = 2**20
"""Characters of a regex, schema, grammar or all choices, at most."""

NAMES_ELSEWHERE = {
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "max_length", "num_predict", "n_predict"), "max_tokens"
    ),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "until"), "stop"),
    **dict.fromkeys(("eos_token_id", "stop_ids", "stop_tokens"), "stop_token_ids"),
    **dict.fromkeys(("num_return_sequences", "num_samples", "num_generations"), "n"),
    **dict.fromkeys(("top_logprobs", "top_n", "top_n_tokens", "output_logprobs"), "logprobs"),
    **dict.fromkeys(("beam_width", "use_beam_search", "beam_size"), "num_beams"),
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "bad_words_ids": "bad_words",
    "ebnf": "grammar",
    "schema": "json_schema",
    "do_sample": "temperature",
    "enable_return_routed_experts": "return_routed_experts",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "sequence_bias": "logit_bias",
}
"""Names of other engines for these parameters, or for the parameter with the same effect."""


class UnknownName(TypeError, ValueError):
    """An argument that does not exist: a TypeError as Python has it, and a ValueError as all refused input."""


def check_names(
    owner: str, given: Iterable[object], known: Sequence[str], elsewhere: Mapping[str, str], what: str = "parameter"
) -> None:
    """Raises: UnknownName for the first name that is not known, with the nearest one that is, if any is near."""
    for name in given:
        if name not in known:
            written = name[:80] if isinstance(name, str) else brief(name)
            close = difflib.get_close_matches(written, known, n=1, cutoff=_CLOSE)
            nearest = elsewhere.get(written) or (close[0] if close else None)
            hint = "none is near it" if nearest is None else f"the nearest known one is {nearest!r}"
            raise UnknownName(f"{owner} has no {what} {brief(name)}; {hint} (known: {', '.join(known)})")


@functools.cache
def field_names(cls: type) -> tuple[str, ...]:
    """The names of a dataclass' fields."""
    return tuple(field.name for field in dataclasses.fields(cls))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, given by name.

    Order of processing: logit_bias; repetition, frequency and presence penalty; min_tokens; regex, json_schema, choice,
    grammar, allowed_token_ids, bad_words; temperature; top_k, top_p of what top_k leaves, min_p.

    Raises: ValueError for a value of the wrong type or out of range; TypeError for an unknown name, with the nearest
        known one.
    """

    max_tokens: int = 64
    """Tokens to generate, at most; at least 1, or 0 with prompt_logprobs. The engine's max_seq_len may end a sequence
    earlier."""
    temperature: float = 1.0
    """Divides the logits, 0 to 1e6. 0 (and below 1e-5): greedy, the argmax with the lowest id on ties."""
    top_k: int | None = 0
    """Sample from the k likeliest tokens only, ties included. 0, -1 or None: from all. -1 is kept as 0."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together hold this share of the probability, above 0 to 1; ties included.
    1: from all."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this share of the largest, 0 to 1. 0: from all."""
    n: int = 1
    """Independent samples of the request; at least 1."""
    num_beams: int = 1
    """Beam search with this many beams instead of sampling: returns the best n of as many hypotheses, best first. 1: no
    search. Temperature, top_k, top_p and min_p do not apply and stay at their defaults."""
    length_penalty: float = 1.0
    """Score of a hypothesis of m tokens: the sum of its log probabilities divided by m to this power; -10 to 10."""
    early_stopping: bool | str = False
    """When a beam search ends. True: with as many hypotheses as beams. False: once no beam can beat the worst of them
    by its score at its present length. "never": once none can at any length."""
    best_of: int | None = None
    """Number of samples, at least n, of which the n with the highest mean log probability under the model are returned,
    best first. None: n."""
    seed: int | None = None
    """0 to 2^64 - 1; samples of one request differ whatever the seed. None: derived from the request's id and the seed
    of the engine (`InferenceEngine(seed=…)`, in commands `sampling.seed` of the configuration), below 2^53."""
    stop: str | Sequence[str] = ()
    """A string or strings, of up to 4096 characters, that end a sample as soon as they appear in its text; the text is
    cut before them. Kept as a tuple."""
    stop_token_ids: Sequence[int | Sequence[int]] = ()
    """Token ids, or sequences of up to 16 token ids, that end a sample once generated. Kept as a tuple of tuples."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text. Those that can end the sample are always left out."""
    min_tokens: int = 0
    """Fewest tokens to generate: until then end-of-sequence and one-token stops are impossible, and no other stop ends
    the sample. 0 to max_tokens."""
    logprobs: int | None = None
    """0: log probabilities of the generated tokens; k: also of the k likeliest tokens at each position. None: files and
    a server's answers have none (`Completion.logprobs` always has those of the generated tokens)."""
    prompt_logprobs: int | None = None
    """None: no log probabilities of the prompt; 0: of each of its tokens after the first; k: also of the k likeliest
    tokens at each of these positions."""
    return_routed_experts: bool = False
    """Whether each completion has `routed_experts`, the experts that its tokens went through, for a training step that
    replays the routing. The request shares no pages with others (prefix caching)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it has been generated; -2 to 2."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that has been generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that occur in prompt or output; 0.01 to 100. 1: off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids. Ids may be decimal strings, as in JSON. Kept as a dict of int to
    float."""
    regex: str | None = None
    """A regular expression that the whole text matches, in the syntax of Python's `re`. At most one of regex,
    json_schema, choice and grammar. The sample ends where the text is complete, or at max_tokens before."""
    json_schema: Mapping | str | bool | None = None
    """A JSON schema, or its text, to which the text conforms. Properties come in the order of the schema; there are no
    others unless `additionalProperties` says so. Kept as a dict."""
    choice: Sequence[str] | None = None
    """The text is one of these. Kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar of the text: llguidance's Lark, or llama.cpp's GBNF. The host computes the mask of allowed
    tokens before every token."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens are sampled, end-of-sequence tokens included. Kept as a sorted tuple."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Words that are not sampled, as text (with and without a space before it) or as token ids. Kept as a tuple of
    strings and tuples."""

    def __new__(cls, *args, **kwargs):
        if args:
            raise TypeError(
                f"SamplingParams takes its parameters by name and was given {brief(args[0])} without one; write "
                "SamplingParams(temperature=0.7, max_tokens=64)"
            )
        check_names("SamplingParams", kwargs, field_names(cls), NAMES_ELSEWHERE)
        return super().__new__(cls)

    def __post_init__(self):
        if _is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, _MAX_INT, "leave it out if none are wanted")
            _check_int("max_tokens", self.max_tokens, 0, _MAX_INT, "use 0 to score the prompt and generate nothing")
        else:
            remedy = "generate at least one token, or ask for prompt_logprobs (of a server: echo with logprobs)"
            _check_int("max_tokens", self.max_tokens, 1, _MAX_INT, remedy)
        _check_number("temperature", self.temperature, 0, 1e6, "use 0 for greedy sampling")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 0, _MAX_INT, "use 0 to switch it off")
        _check_number("top_p", self.top_p, 0, 1, "use 1 to switch it off", above=True)
        _check_number("min_p", self.min_p, 0, 1, "use 0 to switch it off")
        _check_int("n", self.n, 1, _MAX_INT, "ask for at least one sample")
        _check_int("num_beams", self.num_beams, 1, _MAX_INT, "use 1 to switch it off")
        _check_number("length_penalty", self.length_penalty, -10, 10, "use 0 to switch it off")
        if not (
            type(self.early_stopping) is bool
            or (isinstance(self.early_stopping, str) and self.early_stopping == "never")
        ):
            raise ValueError(f'early_stopping={brief(self.early_stopping)}: expected true, false or "never"')
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, _MAX_INT, "sample at least n, or leave it out")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1, "use a seed of at most 64 bits, or leave it out")
        for name in ("ignore_eos", "return_routed_experts", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={brief(getattr(self, name))}: expected true or false")
        _check_int("min_tokens", self.min_tokens, 0, _MAX_INT, "use 0 to switch it off")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; raise max_tokens or lower "
                "min_tokens"
            )
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, _MAX_INT, "leave it out if none are wanted")
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2, "use 0 to switch it off")
        _check_number("presence_penalty", self.presence_penalty, -2, 2, "use 0 to switch it off")
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100, "use 1 to switch it off")
        # Several spellings are accepted, numpy's integers too; readers see one
        whole = (
            "max_tokens",
            "top_k",
            "n",
            "best_of",
            "num_beams",
            "seed",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
        )
        for name in whole:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_sequences(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        for name in ("regex", "grammar"):
            _check_pattern(name, getattr(self, name))
        object.__setattr__(self, "json_schema", _schema(self.json_schema))
        object.__setattr__(self, "choice", _choice(self.choice))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        _check_constraints(self)
        _check_beams(self)
        if self.max_tokens == 0 and self.num_sequences > 1:
            raise ValueError("max_tokens=0 generates nothing to choose from; leave out n and best_of")

    def __hash__(self) -> int:
        """So that they can be a static argument of `jit`. Of mappings the keys count, which equal ones share."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(tuple(frozenset(value) if isinstance(value, Mapping) else value for value in values))

    @property
    def is_constrained(self) -> bool:
        """Whether the tokens that may follow depend on what has been sampled, or are listed."""
        return bool(self.bad_words) or any(getattr(self, name) is not None for name in (*_OF_TEXT, "allowed_token_ids"))

    @property
    def num_sequences(self) -> int:
        """Sequences that the request occupies while it runs."""
        return self.num_beams if self.num_beams > 1 else self.best_of or self.n

    @classmethod
    def from_model(cls, path_or_id, revision: str | None = None, **overrides: object) -> "SamplingParams":
        """Parameters that a model's generation_config.json suggests, with `overrides` by name. Others have the defaults
        of this class; a setting that cannot be applied is named in a warning.

        Args:
            path_or_id, revision: as in `load_model`.
        Raises: ValueError if the model has no such file, or a value is bad.
        """
        from levanter_infer.checkpoints.generation import required_sampling

        suggested = required_sampling(path_or_id, revision)
        for name, value in suggested.unsupported.items():
            logger.warning("generation_config.json of %s: %s=%s is not supported", path_or_id, name, brief(value))
        return cls.from_dict({**suggested.params, **overrides})

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "SamplingParams":
        """Parameters by name, as read from a config or a row of input.

        Raises: ValueError for a name that is not a parameter (with the nearest one that is), or a bad value.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"sampling={brief(values)}: expected a mapping of parameter names to values")
        check_names("sampling", values, field_names(cls), NAMES_ELSEWHERE)
        return cls(**values)  # type: ignore[arg-type]


_OF_TEXT = ("regex", "json_schema", "choice", "grammar")


def _check_constraints(params: SamplingParams) -> None:
    """Raises: ValueError for parameters that contradict a constraint on the text."""
    given = [name for name in _OF_TEXT if getattr(params, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]}: a request has one constraint on its text; leave one out")
    for name in given:
        if params.ignore_eos:
            raise ValueError(f"ignore_eos with {name}: the sample ends where its text is complete; leave it out")
        if params.min_tokens:
            raise ValueError(
                f"min_tokens={params.min_tokens} with {name}: the sample ends where its text is complete; say its "
                f"length in {name}"
            )


def _check_pattern(name: str, given: object) -> None:
    if given is not None and not (isinstance(given, str) and 0 < len(given) <= MAX_PATTERN_CHARS):
        raise ValueError(f"{name}={brief(given)}: expected a string of 1 to {MAX_PATTERN_CHARS} characters")


def _schema(given: object) -> dict | bool | None:
    if given is None:
        return None
    what = "a JSON schema, as a mapping or its text"
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        schema = json.loads(text) if len(text) <= MAX_PATTERN_CHARS else None
        json.dumps(schema, allow_nan=False)  # Python reads NaN, and 1e999 as infinity
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema={brief(given)}: expected {what}; {brief(str(error))}") from None
    if not isinstance(schema, dict | bool) or isinstance(given, bytes):
        raise ValueError(f"json_schema={brief(given)}: expected {what}, of up to {MAX_PATTERN_CHARS} characters")
    return schema


def _choice(given: object) -> tuple[str, ...] | None:
    if given is None:
        return None
    entries = _entries("choice", given, "a list of strings")
    for i, entry in enumerate(entries):
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"choice[{i}]={brief(entry)}: expected a string of at least one character")
    if not entries or sum(map(len, entries)) > MAX_PATTERN_CHARS:
        raise ValueError(f"choice={brief(given)}: expected 1 string or more, of up to {MAX_PATTERN_CHARS} characters")
    return tuple(dict.fromkeys(entries))


def _allowed(given: object) -> tuple[int, ...] | None:
    if given is None:
        return None
    entries = _entries("allowed_token_ids", given, "a list of token ids")
    for i, entry in enumerate(entries):
        if not (_is_int(entry) and 0 <= entry <= _MAX_INT):
            raise ValueError(f"allowed_token_ids[{i}]={brief(entry)}: expected a token id")
    if not entries:
        raise ValueError("allowed_token_ids is empty, so that nothing could be sampled; name a token, or leave it out")
    return tuple(sorted({int(entry) for entry in entries}))


def _bad_words(given: object) -> tuple[str | tuple[int, ...], ...]:
    result: list[str | tuple[int, ...]] = []
    for i, entry in enumerate(_entries("bad_words", given, "a list of strings or lists of token ids")):
        if isinstance(entry, str) and entry.strip(" "):
            result.append(entry)
            continue
        ids = () if isinstance(entry, str) else _entries(f"bad_words[{i}]", entry, "a string or a list of token ids")
        if not ids or not all(_is_int(token) and 0 <= token <= _MAX_INT for token in ids):
            raise ValueError(f"bad_words[{i}]={brief(entry)}: expected a word, or a list of at least one token id")
        result.append(tuple(int(token) for token in ids))
    return tuple(dict.fromkeys(result))


def _check_beams(params: SamplingParams) -> None:
    """Raises: ValueError for parameters that contradict a beam search, or need one."""
    defaults = {field.name: field.default for field in dataclasses.fields(params)}
    if params.num_beams == 1:
        for name in ("length_penalty", "early_stopping"):
            if getattr(params, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(params, name)} is for beam search; set num_beams, or leave it out")
        return
    search = f"num_beams={params.num_beams}"
    if params.max_tokens == 0:
        raise ValueError(f"max_tokens=0 with {search}: there is nothing to search; raise max_tokens")
    for name in ("top_k", "top_p", "min_p"):
        if (getattr(params, name) or 0) != defaults[name]:
            raise ValueError(f"{name}={getattr(params, name)} with {search}: a search does not sample; leave it out")
    if params.temperature not in (0, 1):
        raise ValueError(f"temperature={params.temperature} with {search}: a search does not sample; leave it out")
    if params.n > params.num_beams:
        raise ValueError(f"n={params.n} exceeds {search}, the hypotheses of a search; raise num_beams or lower n")
    if params.best_of is not None:
        raise ValueError(f"best_of={params.best_of} with {search}: a search returns its best n anyway; leave it out")
    if params.stop:
        raise ValueError(f"stop with {search}: a search ends at tokens, not at text; use stop_token_ids")
    if any(len(sequence) > 1 for sequence in stop_sequences(params)):
        raise ValueError(f"stop_token_ids with {search}: only single tokens end a hypothesis; give token ids")
    if params.prompt_logprobs is not None:
        raise ValueError(f"prompt_logprobs with {search}: ask for them in a request without a search")
    if params.is_constrained:
        names = (*_OF_TEXT, "allowed_token_ids", "bad_words")
        name = next(name for name in names if getattr(params, name) not in (None, ()))
        raise ValueError(f"{name} with {search}: a search applies no constraint; sample, or leave it out")
    if params.return_routed_experts:
        raise ValueError(f"return_routed_experts with {search}: ask for them in a request without a search")
    if params.logprobs:
        raise ValueError(f"logprobs={params.logprobs} with {search}: only those of its tokens are known; use 0")


class _Brief(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x, level):
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"a whole number of {x.bit_length()} bits"


def brief(value: object) -> str:
    """`repr` for messages: short, however large or deeply nested the value is."""
    try:
        text = _Brief().repr(value)
    except Exception:  # whatever the repr of a caller's object does
        return f"<{type(value).__name__}>"
    return text if len(text) <= 160 else text[:120] + "..." + text[-37:]


def stop_sequences(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """`stop_token_ids` in the form in which it is kept."""
    return params.stop_token_ids  # type: ignore[return-value]


def derive_seed(config_seed: int, request_id: str) -> int:
    """The seed of a request that has none: a function of the config's seed and the request's id, from 0 to 2^53 - 1.

    Readers of JSON that keep numbers as doubles keep all of its digits.
    """
    digest = hashlib.sha256(f"{config_seed}:{request_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def _is_int(value: object) -> bool:
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _check_int(name: str, value: object, low: int, high: int, remedy: str) -> None:
    if not (_is_int(value) and low <= value <= high):  # type: ignore[operator]
        bounds = f"of at least {low}" if high == _MAX_INT else f"from {low} to {high}"
        raise ValueError(f"{name}={brief(value)}: expected a whole number {bounds}; {remedy}")


def _check_number(name: str, value: object, low: float, high: float, remedy: str, above: bool = False) -> None:
    if not (_is_number(value) and low <= value <= high and not (above and value == low)):  # type: ignore[operator]
        if isinstance(value, str):
            remedy = "write it without quotes, and in YAML with a decimal point (1.0e-5, not 1e-5)"
        bounds = f"above {low} and up to {high}" if above else f"from {low} to {high}"
        raise ValueError(f"{name}={brief(value)}: expected a number {bounds}; {remedy}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else _entries("stop", stop, "a string or a list of strings")
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop[{i}]={brief(string)}: expected a string of at least one character")
        if len(string) > MAX_STOP_CHARS:
            raise ValueError(f"stop[{i}] has {len(string)} characters; a stop string has at most {MAX_STOP_CHARS}")
    return tuple(strings)


def _stop_sequences(sequences: object) -> tuple[tuple[int, ...], ...]:
    expected = "a list whose entries are token ids or lists of token ids"
    result = []
    for i, entry in enumerate(_entries("stop_token_ids", sequences, expected)):
        ids = (entry,) if _is_int(entry) else _entries(f"stop_token_ids[{i}]", entry, "a token id or token ids")
        if len(ids) == 0 or not all(_is_int(token) and 0 <= token <= _MAX_INT for token in ids):
            raise ValueError(
                f"stop_token_ids[{i}]={brief(entry)}: expected a token id or a list of at least one token id"
            )
        result.append(tuple(int(token) for token in ids))
    return tuple(result)


def _entries(name: str, value: object, expected: str) -> Sequence:
    if value is None:
        return ()
    if getattr(value, "ndim", None) == 1:  # an array of numbers
        value = value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        try:
            if len(value) <= _MAX_ENTRIES:
                return list(value)
        except Exception as error:  # a sequence of the caller's own making
            raise ValueError(f"{name} cannot be read: {type(error).__name__}: {brief(str(error))}") from error
        raise ValueError(f"{name} has {len(value)} entries; expected at most {_MAX_ENTRIES}")
    raise ValueError(f"{name}={brief(value)}: expected {expected}")


def _bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={brief(bias)}: expected a mapping of token ids to numbers")
    try:
        entries = list(bias.items())
    except Exception as error:  # a mapping of the caller's own making
        raise ValueError(f"logit_bias cannot be read: {type(error).__name__}: {brief(str(error))}") from error
    result: dict[int, float] = {}
    for key, value in entries:
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS
        token = int(key) if digits else key
        if not (_is_int(token) and 0 <= token <= _MAX_INT):  # type: ignore[operator]
            raise ValueError(f"logit_bias has the key {brief(key)}: expected a token id")
        if token in result:
            raise ValueError(f"logit_bias names token id {token} twice; name it once")
        if not (_is_number(value) and abs(value) <= _MAX_BIAS):  # written so that NaN fails too
            raise ValueError(
                f"logit_bias[{key}]={brief(value)}: expected a number from -1e30 to 1e30; -100 makes a token all but "
                "impossible"
            )
        result[int(token)] = float(value)
    return result
