"""`Intake`: turns text and chats into token ids, and a `Request` into the `RequestState` that the engine serves."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from levanter_infer.checkpoints.chat import CHAT_KEYS, check_chat_settings, check_template_kwargs
from levanter_infer.decode.codes import DEFAULT_ROOT
from levanter_infer.decode.shapes import ConstraintShapes, Shapes
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.constraints import check_fits, constraint_shapes, wanted
from levanter_infer.engine.params import SamplingParams, brief, derive_seed, stop_sequences
from levanter_infer.engine.request import Request, RequestOutput, as_requests, as_sequences, refused
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.scoring import SCORE_ONLY
from levanter_infer.engine.text import IncrementalDecoder, StopMatcher
from levanter_infer.engine.validation import RequestLimits, sampling_of, validate, validate_id, validate_prompt_len
from levanter_infer.structured.compiler import Constraint, ConstraintCompiler

_CHAT_ONLY = {field.name: field.default for field in dataclasses.fields(Request) if field.name in CHAT_KEYS}
"""Fields of a request that only a chat may set, with their defaults."""
_FIRST_OWN_ROOT = 2**28
"""From here on numbers of roots belong to one request each."""
_KEPT_ROOTS = 4096
"""Roots of versions and salts that are remembered, at most; clients choose the salts."""
_FLAGS = ("add_generation_prompt", "continue_final_message")


class Intake:
    """Turns requests into request states that an engine of these sizes can serve, or refuses them.

    Args:
        tokenizer: None: prompts are token ids, and there is no text.
        seed: of the engine; a request without a seed derives its own from this and its id.
        has: further fields of `RequestLimits`, such as `has_experts`.
    """

    def __init__(self, shapes: Shapes, config: EngineConfig, tokenizer, seed: int, **has: bool):
        has_tokenizer = tokenizer is not None
        self.limits = RequestLimits.of(shapes, config, has_tokenizer=has_tokenizer, **has)
        self._tokenizer, self._seed = tokenizer, seed
        self._end_ids = end_ids = tuple(tokenizer.eos_token_ids) if has_tokenizer else ()
        self._compiler = ConstraintCompiler(tokenizer, shapes.limits.vocab_size, end_ids)
        self._constraint_shapes: Callable[[], ConstraintShapes] = functools.cache(
            lambda: constraint_shapes(config, shapes.limits.vocab_size)
        )
        self._roots: collections.OrderedDict[tuple[int, str | None], int] = collections.OrderedDict()
        """Numbers of versions and salts; the one that was asked for last is last."""
        self._num_roots = self._num_own_roots = 0
        self.version = 0
        """Version of the weights: requests share pages that this version has computed only."""

    def forget_roots(self) -> None:
        """Start the numbering of salts and versions again. Requires: no page is stored for any of them."""
        self._roots.clear()
        self._num_roots = 0

    def states(self, prompts, sampling) -> list[RequestState | RequestOutput]:
        """The state of the request of each prompt, or the output that refuses it. Args: as of `as_requests`."""
        made: list[RequestState | RequestOutput] = []
        for i, request in enumerate(as_requests(prompts, sampling)):
            if isinstance(request, ValueError):
                made.append(refused(None, str(i), str(request)))
                continue
            try:
                made.append(self.request_state(request, str(i)))
            except ValueError as error:
                made.append(refused(request, str(i), str(error)))
        return made

    def scored(self, sequences: Sequence[Sequence[int]]) -> list[RequestState]:
        """A request for the scores of each sequence. Raises: ValueError naming one that cannot be scored."""
        states = []
        for i, ids in enumerate(as_sequences(sequences)):
            try:
                states.append(self.request_state(Request(prompt_token_ids=ids, sampling=SCORE_ONLY), str(i)))
            except ValueError as error:
                raise ValueError(f"sequences[{i}]: {error}") from None
        return states

    def request_state(self, request: Request, default_id: str) -> RequestState:
        """The state of a request, with the samples that serve it; its `root` is that of when it is queued, and another
        call. Any thread may call this.

        Args:
            default_id: the id of a request that has none.
        Raises: ValueError saying what was got, what was expected, and what to do.
        """
        validate_id(request.id)
        ids = self._token_ids(request, sampling_of(request).max_tokens)
        request = validate(dataclasses.replace(request, prompt_token_ids=ids), self.limits)
        params, ids = sampling_of(request), list(request.prompt_token_ids or ())
        constraint = self.constraint(params)
        name = default_id if request.id is None else request.id
        state = RequestState(
            id=name,
            prompt=request.prompt,
            prompt_token_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else derive_seed(self._seed, name),
            max_len=self.limits.max_len(len(ids), params.max_tokens),
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_s=request.timeout_s,
            first_sample=request.first_sample,
            num_continued_tokens=request.num_continued_tokens,
            automaton=constraint.automaton,
        )
        hidden = None if params.skip_special_tokens else self._endings(params)
        decoder = None if self._tokenizer is None else IncrementalDecoder(self._tokenizer, hidden, ids)
        for index in range(params.num_sequences):
            guide = constraint.guide and constraint.guide.copy()
            sample = SampleState(request=state, index=index, guide=guide)
            if decoder is not None:
                sample.decoder = decoder.copy()
                if params.stop:
                    sample.matcher = StopMatcher(params.stop, min_tokens=params.min_tokens)
            state.sequences.append(sample)
        return state

    def constraint(self, params: SamplingParams) -> Constraint:
        """Constraint on tokens that may follow, ready for the device; compiled, where it is not known. Any thread may
        call this. Raises: ValueError for what cannot be applied."""
        if not params.is_constrained:
            return Constraint()
        asked = wanted(params)
        found = self._compiler.compile(asked)
        names = ", ".join(name for name, value in asked._asdict().items() if value not in (None, ()))
        check_fits(found, self._constraint_shapes(), names)
        if found.automaton is not None:
            found.automaton.masks  # noqa: B018  # computed here, beside the rounds, and not when it gets its place
        return found

    def _endings(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a sample by themselves."""
        return frozenset((*self._end_ids, *(ids[0] for ids in stop_sequences(params) if len(ids) == 1)))

    def root(self, request: RequestState) -> int:
        """The root in the prefix table of a request that is queued now: requests of one root share pages.

        Each version of the weights with each salt has two roots: an odd one, and an even one for scored prompts
        (`is_scored_root`). Those of a salt that was not asked for for long are forgotten: it gets new ones, and its
        pages are not found again. A request that wants its routed experts has a root of its own, because a page that
        another one has computed says nothing of them.
        """
        number = self._own_number() if request.params.return_routed_experts else self._number(request.cache_salt)
        return DEFAULT_ROOT - 2 * number - (request.params.prompt_logprobs is not None)

    def _own_number(self) -> int:
        number = _FIRST_OWN_ROOT + self._num_own_roots % _FIRST_OWN_ROOT
        self._num_own_roots += 1
        return number

    def _number(self, salt: str | None) -> int:
        """The number of this version and a salt. None is given twice, since pages may be stored for one that was
        forgotten; a request gets its own when all have been given."""
        key = (self.version, salt)
        if key in self._roots:
            self._roots.move_to_end(key)
            return self._roots[key]
        if self._num_roots == _FIRST_OWN_ROOT:
            return self._own_number()
        if len(self._roots) == _KEPT_ROOTS:  # requests without a salt keep theirs, however many salts come
            unsalted = (self.version, None)
            del self._roots[next(each for each in self._roots if each != unsalted)]
        self._roots[key] = self._num_roots
        self._num_roots += 1
        return self._roots[key]

    def _token_ids(self, request: Request, max_tokens: int):
        """The prompt as token ids; those that were given are not looked at. A text that is too long is not encoded."""
        given = [n for n in ("prompt", "prompt_token_ids", "messages") if getattr(request, n) is not None]
        if len(given) != 1:
            raise ValueError(f"a request needs one of prompt, prompt_token_ids, messages; got {given or 'none'}")
        self._check_chat_fields(request)
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if self._tokenizer is None:
            raise ValueError(f"{given[0]} needs a tokenizer and this engine has none; give prompt_token_ids")
        if request.messages is not None:
            ids = self._encoded(self._rendered(request), max_tokens, add_special_tokens=False)
        else:
            ids = self._encoded(request.prompt, max_tokens)
        vocab_size = self.limits.vocab_size
        if ids and max(ids) >= vocab_size:
            raise ValueError(
                f"the tokenizer gave token {max(ids)}, outside the model's vocabulary of {vocab_size} tokens: "
                "tokenizer and model do not belong together"
            )
        return ids

    def _encoded(self, text, max_tokens: int, **options: bool) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(
                f"prompt is {type(text).__name__}; expected a string (token ids are given as prompt_token_ids, a chat "
                "as messages)"
            )
        if len(text) > self.limits.max_seq_len:
            validate_prompt_len(self._tokenizer.least_tokens(text), max_tokens, self.limits, "at least ")
        return self._tokenizer.encode(text, **options)

    def _rendered(self, request: Request) -> str:
        assert request.messages is not None
        messages = _mappings("messages", request.messages, "a list of messages, each a mapping with role and content")
        tools = request.tools
        if tools is not None:
            tools = _mappings("tools", tools, "a list of tools, each a mapping (a JSON schema)")
        kwargs = {} if request.chat_template_kwargs is None else request.chat_template_kwargs
        kwargs = _plain("chat_template_kwargs", kwargs) if isinstance(kwargs, Mapping) else kwargs
        check_template_kwargs(kwargs)
        begins_turn = request.add_generation_prompt
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=not request.continue_final_message if begins_turn is None else begins_turn,
            continue_final_message=request.continue_final_message,
            **kwargs,
        )

    def _check_chat_fields(self, request: Request) -> None:
        if request.messages is not None:
            flags = {name: getattr(request, name) for name in _FLAGS}
            check_chat_settings({name: value for name, value in flags.items() if value is not _CHAT_ONLY[name]})
            return
        for name, default in _CHAT_ONLY.items():
            if getattr(request, name) is not default:
                raise ValueError(f"{name} is for chats, and this request has no messages; leave it out")


def _mappings(name: str, value, expected: str) -> list[dict]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {type(value).__name__}; expected {expected}")
    for i, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            raise ValueError(f"{name}[{i}] is {type(entry).__name__}; expected {expected}")
    return [_plain(f"{name}[{i}]", entry) for i, entry in enumerate(value)]


def _plain(name: str, value: Mapping) -> dict:
    try:
        return dict(value)
    except Exception as error:  # a mapping of the caller's own making
        raise ValueError(f"{name} cannot be read: {type(error).__name__}: {brief(str(error))}") from error
