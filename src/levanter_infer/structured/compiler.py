"""`ConstraintCompiler`: from the constraints of a request to the automaton, or the guide, that applies them."""

import collections
import json
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from levanter_infer.structured import automaton as automata
from levanter_infer.structured.automaton import ConstraintError, TokenAutomaton, TooManyStates
from levanter_infer.structured.guide import Guide, Guides
from levanter_infer.structured.json_schema import regex_of
from levanter_infer.structured.regex import transitions_of

_KEPT, _KEPT_BYTES = 256, 2**28
"""Compiled constraints that are kept, at most, and the bytes of their automata; the last one in any case."""
Result = TypeVar("Result")


class Constraint(NamedTuple):
    """The tokens that a request's samples may generate: at most one of both."""

    automaton: TokenAutomaton | None = None
    """The constraint that the device applies; None: no constraint, or `guide`."""
    guide: Guide | None = None
    """The constraint that the host applies, a copy for each sample; it obeys the constraints on token ids as well."""


class Wanted(NamedTuple):
    """The constraints of a request; `SamplingParams` has the same names."""

    regex: str | None = None
    json_schema: Any = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()

    @property
    def text_name(self) -> str | None:
        """Name of the parameter that constrains the text, if any."""
        names = ("regex", "json_schema", "choice", "grammar")
        return next((name for name in names if getattr(self, name) is not None), None)


class ConstraintCompiler:
    """Compiles constraints for one vocabulary, and keeps the last ones. Any thread may use it.

    Args:
        tokenizer: None: only constraints on token ids.
        vocab_size: of the model's logits.
        end_ids: end-of-sequence tokens.
    """

    def __init__(self, tokenizer, vocab_size: int, end_ids: tuple[int, ...]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_ids = tuple(token for token in end_ids if token < vocab_size)
        self._lock, self._spelled = threading.Lock(), None
        self._guides: Guides | None = None
        self._known: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        """Compiled constraints, or the `ConstraintError` of those that failed, by constraint; the last used last."""
        self._running: dict[Hashable, threading.Lock] = {}

    def compile(self, wanted: Wanted) -> Constraint:
        """The automaton or the guide that applies `wanted`.

        Raises: ValueError naming the parameter, what was got and what to do.
        """
        name = wanted.text_name
        try:
            return self._compiled(wanted, name)
        except RecursionError:
            raise ConstraintError(f"{name}: it nests too deeply") from None
        except UnicodeEncodeError:
            raise ConstraintError(f"{name}: it holds half of a surrogate pair, which is no character") from None

    def _compiled(self, wanted: Wanted, name: str | None) -> Constraint:
        of_tokens = self._of_tokens(wanted)
        if name is None:
            return Constraint(of_tokens)
        value = getattr(wanted, name)
        found = self._once((name, _key(value)), lambda: self._of_text(name, value))
        if isinstance(found, Guide):
            return Constraint(None, found.copy(of_tokens))
        if of_tokens is None:
            return Constraint(found)
        key = ("intersection", name, _key(value), wanted.allowed_token_ids, wanted.bad_words)
        what = f"{name} together with allowed_token_ids and bad_words"
        return Constraint(self._once(key, lambda: _named(what, lambda: automata.intersection(found, of_tokens))))

    def _of_tokens(self, wanted: Wanted) -> TokenAutomaton | None:
        found, size = None, self._vocab_size
        if wanted.allowed_token_ids is not None:
            allowed = wanted.allowed_token_ids
            _named("allowed_token_ids", lambda: self._check_ids(allowed))
            found = self._once(("allowed", allowed), lambda: automata.of_allowed(allowed, size))
        if wanted.bad_words:
            words = wanted.bad_words
            bad = self._once(("bad", words), lambda: _named("bad_words", lambda: self._without(words)))
            if found is None:
                return bad
            both, key = found, ("both", wanted.allowed_token_ids, words)
            what = "allowed_token_ids together with bad_words"
            found = self._once(key, lambda: _named(what, lambda: automata.intersection(both, bad)))
        return found

    def _without(self, words: tuple[str | tuple[int, ...], ...]) -> TokenAutomaton:
        sequences: set[tuple[int, ...]] = set()
        for word in words:
            if not isinstance(word, str):
                sequences.add(word)
                continue
            if self._tokenizer is None:
                raise ConstraintError("a word needs a tokenizer and this engine has none; give token ids")
            # at the begin of a text, and after another word
            for text in (word.lstrip(" "), " " + word.lstrip(" ")):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids:
                    sequences.add(tuple(ids))
        self._check_ids(token for ids in sequences for token in ids)
        return automata.without(sorted(sequences), self._vocab_size)

    def _check_ids(self, ids: Iterable[int]) -> None:
        outside = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            raise ConstraintError(f"token id {outside} is outside the vocabulary of {self._vocab_size} tokens")

    def _of_text(self, name: str, value: Any) -> TokenAutomaton | Guide:
        return _named(name, lambda: self._text_constraint(name, value))

    def _text_constraint(self, name: str, value: Any) -> TokenAutomaton | Guide:
        tokens = self._tokens()
        if name == "choice":
            return automata.from_bytes(*automata.of_choices([c.encode() for c in value]), tokens, self._end_ids)
        if name == "regex":
            return automata.from_bytes(*transitions_of(value), tokens, self._end_ids)
        regex = regex_of(value) if name == "json_schema" else None
        if regex is not None:
            try:
                return automata.from_bytes(*transitions_of(regex), tokens, self._end_ids)
            except TooManyStates:
                pass  # llguidance makes its automata as it goes
        with self._lock:  # one for all of them: it has a vocabulary of its own
            self._guides = guides = self._guides or Guides(tokens, self._end_ids)
        return guides.of_grammar(value) if name == "grammar" else guides.of_schema(value)

    def _tokens(self) -> list[bytes]:
        """The bytes of each token; empty for special ones and ids without a token."""
        if self._tokenizer is None:
            raise ConstraintError("it needs a tokenizer and this engine has none; give allowed_token_ids")
        if not self._end_ids:
            raise ConstraintError("it needs an end-of-sequence token, and the tokenizer has none")
        if self._spelled is None:
            text, ends = self._tokenizer.text_bytes, set(self._end_ids)
            self._spelled = [b"" if i in ends else text(i) for i in range(self._vocab_size)]
        return self._spelled

    def _once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """`make()`, once for each key among the last ones, also where it raises a ConstraintError."""
        with self._lock:
            turn = self._running.setdefault(key, threading.Lock())
        try:
            with turn:
                found: Any = self._recalled(key)
                if found is None:
                    try:
                        found = make()
                    except ConstraintError as error:
                        found = type(error)(*error.args)  # without its traceback, which holds the work that failed
                    self._keep(key, found)
        finally:
            with self._lock:
                self._running.pop(key, None)
        if isinstance(found, ConstraintError):
            raise type(found)(*found.args)
        return found

    def _recalled(self, key: Hashable) -> Any:
        with self._lock:
            if key not in self._known:
                return None
            self._known.move_to_end(key)
            return self._known[key]

    def _keep(self, key: Hashable, found: Any) -> None:
        with self._lock:
            known = self._known
            known[key] = found
            size = sum(each.nbytes for each in known.values() if isinstance(each, TokenAutomaton))
            while len(known) > 1 and (len(known) > _KEPT or size > _KEPT_BYTES):
                _, dropped = known.popitem(last=False)
                size -= dropped.nbytes if isinstance(dropped, TokenAutomaton) else 0


def _named(name: str, make: Callable[[], Result]) -> Result:
    try:
        return make()
    except ConstraintError as error:
        raise type(error)(f"{name}: {error}") from None


def _key(value: Any) -> Hashable:
    return json.dumps(value) if isinstance(value, Mapping | list | bool) else value
