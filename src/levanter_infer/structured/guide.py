"""`Guide`: constraints that are no finite automaton, as llguidance's matchers on the host.

Source: https://github.com/guidance-ai/llguidance; a mask per token, from an Earley parser over a lexer of derivatives.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from levanter_infer.runtime.threads import DaemonThreads
from levanter_infer.structured.automaton import ConstraintError, TokenAutomaton
from levanter_infer.structured.json_schema import closed

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_COLONS = 8192
"""Colons of what llguidance compiles. Each rule of a grammar and each member of an object of a schema has one, so that
they bound the chains of rules and references that llguidance follows by recursion; the depth of parentheses, of JSON
and of regexes it bounds itself."""
_STACK_BYTES = 2**28
"""Stack of the thread that compiles. With llguidance 1.9.1 on x86-64 the shortest chains that overflow it have between
84,000 and 88,000 rules (one after the other, or alternatives; GBNF is translated to such), and between 110,000 and
118,000 terminals. Those of references, of arrays, and of `anyOf` never do: llguidance calls them too large from between
46,000 and 50,000, 10,000 and 16,384, and 5,000 and 10,000 definitions on. 8 MiB, a usual stack, hold fewer than 3,000
rules. Masks of chains of 16,384 rules are computed on a stack of 256 KiB."""
_MAX_GBNF_RULES = 1024
"""Rules of a grammar in GBNF, whose translation takes a second for a chain of so many, and four for twice as many."""
_starting = threading.Lock()
Result = TypeVar("Result")


class _Spelling:
    """The vocabulary in the form in which llguidance takes one. It spells what a grammar forces greedily, by the
    longest token that fits."""

    def __init__(self, tokens: Sequence[bytes], end_id: int):
        self.eos_token_id, self.bos_token_id = end_id, None
        self.tokens = [token or b"\xff<%d>" % i for i, token in enumerate(tokens)]
        self.special_token_ids = [i for i, token in enumerate(tokens) if not token]
        self._ids: dict[bytes, int] = {}
        for i, token in enumerate(tokens):
            if token:
                self._ids.setdefault(token, i)
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        data, ids = text.encode() if isinstance(text, str) else text, []
        while data:
            size = next((n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids), 1)
            ids += [self._ids[data[:size]]] if data[:size] in self._ids else []
            data = data[size:]
        return ids


class Guides:
    """Makes the guides of one vocabulary.

    Args:
        tokens: the bytes of each token; empty for those that stand for no text.
        end_ids: the end-of-sequence tokens, at least one.
    """

    def __init__(self, tokens: Sequence[bytes], end_ids: Sequence[int]):
        self._tokens, self._end_ids = tokens, tuple(end_ids)

    @functools.cached_property
    def _tokenizer(self):
        try:
            import llguidance
        except ImportError:
            raise ConstraintError(
                "llguidance, which guides by grammars and by schemas that are no finite automaton, is not installed; "
                "install levanter-infer with its extra [structured]"
            ) from None
        wrapper = llguidance.TokenizerWrapper(_Spelling(self._tokens, self._end_ids[0]))
        return llguidance.LLTokenizer(wrapper, n_vocab=len(self._tokens))

    def of_schema(self, schema: object) -> "Guide":
        """The guide of a JSON schema. Raises: ConstraintError for one that llguidance does not take."""
        document = {"allOf": [schema]} if isinstance(schema, bool) else closed(schema)  # llguidance wants an object
        text = _checked(json.dumps(document))
        return self._guide("json_schema", lambda matcher: matcher.grammar_from_json_schema(text, overrides=_OPTIONS))

    def of_grammar(self, grammar: str) -> "Guide":
        """The guide of a grammar: llguidance's Lark, or llama.cpp's GBNF. Raises: ConstraintError."""
        self._tokenizer  # noqa: B018  # raises if llguidance is missing
        if "::=" in grammar:
            if (rules := grammar.count("::=")) > _MAX_GBNF_RULES:
                raise ConstraintError(
                    f"it has {rules} rules in GBNF; at most {_MAX_GBNF_RULES} are taken; give fewer, or use Lark"
                )
            from llguidance.gbnf_to_lark import gbnf_to_lark

            try:
                grammar = gbnf_to_lark(grammar)
            except Exception as error:
                raise ConstraintError(f"it is no GBNF: {str(error)[:300]}") from None
        return self._guide("grammar", lambda matcher: matcher.grammar_from_lark(_checked(grammar)))

    def _guide(self, name: str, compiled) -> "Guide":
        tokenizer = self._tokenizer
        import llguidance

        def make():
            matcher = llguidance.LLMatcher(tokenizer, compiled(llguidance.LLMatcher))
            if not matcher.is_error():  # copies share the first mask, which takes seconds for thousands of alternatives
                matcher.compute_bitmask()
            return matcher

        try:
            matcher = _on_large_stack(make)
        except Exception as error:
            raise ConstraintError(str(error)[:500]) from None
        if matcher.is_error():
            raise ConstraintError(matcher.get_error()[:500])
        return Guide(matcher, len(self._tokens), self._end_ids)


def _checked(text: str) -> str:
    """A grammar or a schema for llguidance. Raises: ConstraintError for one whose recursion may overflow the stack."""
    colons = text.count(":")
    if colons > _MAX_COLONS:
        raise ConstraintError(
            f"it has {colons} colons, of rules or of the members of objects; at most {_MAX_COLONS} are taken; give "
            "fewer rules or a smaller schema"
        )
    return text


def _on_large_stack(make: Callable[[], Result]) -> Result:
    """`make()` on a thread with a stack of `_STACK_BYTES`, which does not keep the process from ending."""
    threads = DaemonThreads(1, "levanter-infer-grammar")
    with _starting:  # the size is that of all threads that start meanwhile
        before = threading.stack_size(_STACK_BYTES)
        try:
            made = threads.submit(make)
        finally:
            threading.stack_size(before)
    threads.close()
    return made.result()


class Guide:
    """The tokens that may follow in one sample, from all of its tokens so far."""

    def __init__(self, matcher, vocab_size: int, end_ids: tuple[int, ...], automaton: TokenAutomaton | None = None):
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._automaton, self._state = automaton, 0
        self.is_stale = True
        """Whether the device has an older mask than `allowed`; for the caller to set."""
        self.error: str | None = None
        """Why `allowed` has found no token; None: it has found some."""

    def copy(self, automaton: TokenAutomaton | None = None) -> "Guide":
        """The same for another sample, which has no token yet. Args: automaton: what it has to satisfy besides."""
        automaton = self._automaton if automaton is None else automaton
        return Guide(self._matcher.deep_copy(), self._vocab_size, self._end_ids, automaton)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sample has got these tokens. Requires: each was allowed."""
        for token in token_ids:
            if token not in self._end_ids:
                self._matcher.consume_token(token)
            if self._automaton is not None:
                self._state = self._automaton.step(self._state, token)
        self.is_stale = True

    @property
    def forced(self) -> bytes:
        """The text that follows in any case. llguidance allows its first token in the tokenizer's own spelling only."""
        return b"" if self._matcher.is_error() else self._matcher.compute_ff_bytes()

    def allowed(self) -> np.ndarray:
        """bool[vocab], the tokens that may follow; none after an error of the matcher."""
        allowed = np.zeros(self._vocab_size, bool)
        if self._matcher.is_error():
            self.error = f"the constraint allows no further token: {self._matcher.get_error()[:500]}"
            return allowed
        if self._matcher.is_stopped():  # nothing but the end is left
            allowed[list(self._end_ids)] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
            allowed[: len(found)] = found
            allowed[list(self._end_ids)] = self._matcher.is_accepting()
        if self._automaton is not None:
            allowed &= self._automaton.allowed(self._state) if self._state >= 0 else False
        if not allowed.any():
            self.error = (
                "the constraint allows no further token: what json_schema or grammar allows here, allowed_token_ids or "
                "bad_words forbid; give tokens that spell an answer"
            )
        return allowed
