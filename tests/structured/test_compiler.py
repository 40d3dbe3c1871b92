"""`ConstraintCompiler`: what it keeps, and what it refuses."""

import threading

import pytest

from levanter_infer.structured import compiler as compilers
from levanter_infer.structured.automaton import ConstraintError, TooManyStates
from levanter_infer.structured.compiler import ConstraintCompiler, Wanted

VOCAB = [*(bytes([i]) for i in range(256)), b"yes", b""]


class Spelled:
    """A tokenizer of these tokens."""

    def text_bytes(self, token_id: int) -> bytes:
        return VOCAB[token_id]


@pytest.fixture
def compiler():
    return ConstraintCompiler(Spelled(), len(VOCAB), (256 + 1,))


def counted(monkeypatch, name: str) -> list:
    calls, original = [], getattr(compilers, name)
    monkeypatch.setattr(compilers, name, lambda *args: calls.append(args) or original(*args))
    return calls


def test_a_constraint_is_compiled_once_and_so_is_one_that_is_refused(compiler, monkeypatch):
    calls = counted(monkeypatch, "transitions_of")
    first = compiler.compile(Wanted(regex="yes|no")).automaton
    assert compiler.compile(Wanted(regex="yes|no")).automaton is first
    for _ in range(3):
        with pytest.raises(TooManyStates, match="regex: it spells out"):
            compiler.compile(Wanted(regex="(a{1000}){1000}"))
    assert len(calls) == 2


def test_what_is_kept_of_constraints_is_small(compiler):
    """llguidance has a vocabulary of its own, of megabytes, and a refusal has none of the work that failed."""
    guides = [compiler.compile(Wanted(grammar=f'start: "{word}"')).guide for word in ("yes", "no")]
    assert all(guide is not None for guide in guides)
    maker = compiler._guides
    compiler.compile(Wanted(json_schema={"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}}))
    assert maker is not None and compiler._guides is maker
    with pytest.raises(TooManyStates):
        compiler.compile(Wanted(regex="(a{1000}){1000}"))
    (kept,) = [found for found in compiler._known.values() if isinstance(found, ConstraintError)]
    assert kept.__traceback__ is kept.__context__ is kept.__cause__ is None


def test_a_schema_may_be_true_or_false(compiler):
    """True allows every JSON value, as {} does; False allows none, which is an error."""
    guides = [compiler.compile(Wanted(json_schema=schema)).guide for schema in (True, {})]
    first, second = (guide.allowed() for guide in guides if guide is not None)
    assert (first == second).all() and all(first[ord(character)] for character in '{["1tn')
    with pytest.raises(ConstraintError, match="json_schema: .*schema is false"):
        compiler.compile(Wanted(json_schema=False))


def test_threads_that_want_the_same_wait_for_one(compiler, monkeypatch):
    calls, found = counted(monkeypatch, "transitions_of"), []
    compile_it = lambda: found.append(compiler.compile(Wanted(regex="[a-z]{40}")).automaton)  # noqa: E731
    threads = [threading.Thread(target=compile_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len({id(each) for each in found}) == 1 and len(found) == 6


def test_what_is_kept_has_a_size(compiler, monkeypatch):
    first = compiler.compile(Wanted(regex="a")).automaton
    monkeypatch.setattr(compilers, "_KEPT_BYTES", 3 * first.nbytes)
    for letter in "bcd":
        compiler.compile(Wanted(regex=letter))
    assert compiler.compile(Wanted(regex="d")).automaton is compiler.compile(Wanted(regex="d")).automaton
    assert compiler.compile(Wanted(regex="a")).automaton is not first


def test_what_is_no_text_or_nests_too_deeply_is_refused_by_name(compiler):
    with pytest.raises(ConstraintError, match="choice: it holds half of a surrogate pair"):
        compiler.compile(Wanted(choice=("a\ud800",)))
    with pytest.raises(ConstraintError, match="grammar: .*surrogates not allowed"):
        compiler.compile(Wanted(grammar='start: "\ud800"'))
    with pytest.raises(ConstraintError, match="json_schema: no text of this vocabulary"):
        compiler.compile(Wanted(json_schema={"const": "\ud800"}))
    deep: dict = {"type": "null"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ConstraintError, match="json_schema: it nests too deeply"):
        compiler.compile(Wanted(json_schema=deep))


@pytest.mark.parametrize("wanted", [{"allowed_token_ids": (1, 258)}, {"bad_words": ((3, 258),)}])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(compiler, wanted):
    (name,) = wanted
    with pytest.raises(ConstraintError, match=f"{name}: token id 258 is outside the vocabulary of 258 tokens"):
        compiler.compile(Wanted(**wanted))
