"""Automata over tokens: beside llguidance's masks of the same grammar, and beside what they are made of."""

import itertools
import json
import random
import re

import numpy as np
import pytest

from levanter_infer.structured.automaton import (
    ConstraintError,
    TooManyStates,
    forced_tokens,
    from_bytes,
    intersection,
    mask_words,
    of_allowed,
    of_choices,
    packed,
    without,
)
from levanter_infer.structured.compiler import ConstraintCompiler, Wanted
from levanter_infer.structured.guide import Guides
from levanter_infer.structured.json_schema import closed, regex_of
from levanter_infer.structured.regex import transitions_of

PIECES = [
    "yes",
    "no",
    "may",
    "be",
    "12",
    "1",
    "23",
    "-",
    " 4",
    "é",
    "ab",
    "abc",
    '{"',
    '":',
    '", "',
    "name",
    "true",
    "}",
]
VOCAB = [*(bytes([i]) for i in range(256)), *(piece.encode() for piece in PIECES), "é".encode()[:1], b""]
END = len(VOCAB) - 1
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "on": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["name", "on"],
}
REGEXES = [
    "(yes|no|maybe)",
    "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?",
    "(ab|abc){1,4}é?",
    r"[^\n]{1,8}!",
    r"[a-zéß-π]{1,3}@[a-z]{1,2}\.(com|org)",
    "(?i)straße|[^a-z]{2}",
]


class Spelled:
    """A tokenizer of these tokens."""

    def text_bytes(self, token_id: int) -> bytes:
        return VOCAB[token_id]


def automaton_of(source):
    regex = source if isinstance(source, str) else regex_of(source)
    return from_bytes(*transitions_of(regex), VOCAB, [END])


def walks(automaton, count: int, steps: int, seed: int = 0):
    """Random walks along allowed tokens: the tokens so far, and the state."""
    rng = random.Random(seed)
    for _ in range(count):
        state, tokens = 0, []
        for _ in range(steps):
            yield tokens, state
            possible = np.flatnonzero(automaton.allowed(state)).tolist()
            token = rng.choice([t for t in possible if t != END] or [END])
            if token == END:
                break
            state, tokens = automaton.step(state, token), [*tokens, token]


@pytest.mark.parametrize("regex", REGEXES)
def test_masks_are_those_of_llguidance_for_the_same_regex(regex):
    automaton, guides = automaton_of(regex), Guides(VOCAB, [END])
    escaped = regex.replace("/", "\\/")
    first = guides.of_grammar(f"start: /{escaped}/")
    compared = 0
    for tokens, state in walks(automaton, 12, 20):
        guide = first.copy()
        guide.extend(tokens)
        ours, theirs = automaton.allowed(state), guide.allowed()
        if guide.forced:  # there llguidance takes the tokenizer's own spelling alone
            assert theirs.any() and ours[theirs].all(), f"after {tokens}"
            continue
        np.testing.assert_array_equal(ours, theirs, err_msg=f"after {tokens}")
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("source", [*REGEXES, OBJECT])
def test_a_token_leads_where_its_bytes_lead(source):
    transitions, accepting = transitions_of(source if isinstance(source, str) else regex_of(source))
    automaton = from_bytes(transitions, accepting, VOCAB, [END])
    for tokens, state in walks(automaton, 8, 20):
        byte_state = 0
        for byte in b"".join(VOCAB[token] for token in tokens):
            byte_state = transitions[byte_state, byte]
        expected = [bool(token) for token in VOCAB]
        for i, token in enumerate(VOCAB):
            reached = byte_state
            for byte in token:
                reached = transitions[reached, byte] if reached >= 0 else -1
            expected[i] &= bool(reached >= 0)
        expected[END] = bool(accepting[byte_state])
        np.testing.assert_array_equal(automaton.allowed(state), expected, err_msg=f"after {tokens}")


@pytest.mark.parametrize("regex", REGEXES)
def test_a_walk_that_may_end_matches_and_one_that_may_not_is_a_beginning(regex):
    automaton = automaton_of(regex)
    ended = 0
    for tokens, state in walks(automaton, 12, 30):
        data = b"".join(VOCAB[token] for token in tokens)
        may_end = bool(automaton.allowed(state)[END])
        matches = re.fullmatch(regex, text_of(data))
        assert may_end == (matches is not None), data
        ended += may_end
    assert ended > 0


def text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\udcff" * 50  # half a character: no text that matches


def test_a_schema_gives_texts_that_parse_and_conform():
    automaton = automaton_of(OBJECT)
    texts = set()
    for tokens, state in walks(automaton, 200, 80):
        if automaton.allowed(state)[END]:
            value = json.loads(b"".join(VOCAB[token] for token in tokens))
            assert set(value) - {"n"} == {"name", "on"} and type(value["on"]) is bool and len(value["name"]) <= 6
            texts.add(value["name"])
    assert len(texts) > 20


def test_choices_are_taken_whole_and_in_any_split_into_tokens():
    automaton = from_bytes(*of_choices([b"yes", b"yesno", "né".encode()]), VOCAB, [END])
    spelled = {VOCAB[token] for token in np.flatnonzero(automaton.allowed(0))}
    assert spelled == {b"y", b"yes", b"n"}
    after = automaton.step(0, VOCAB.index(b"yes"))
    assert set(np.flatnonzero(automaton.allowed(after)).tolist()) == {END, VOCAB.index(b"n"), VOCAB.index(b"no")}
    half = automaton.step(automaton.step(0, VOCAB.index(b"n")), VOCAB.index(b"\xc3"))
    assert {VOCAB[token] for token in np.flatnonzero(automaton.allowed(half))} == {b"\xa9"}


def test_states_from_which_the_vocabulary_reaches_no_end_are_never_entered():
    tokens = [b"a", b"ab", b"c", b""]
    automaton = from_bytes(*transitions_of("(ab|ad)c"), tokens, [3])
    assert np.flatnonzero(automaton.allowed(0)).tolist() == [1]  # "a" would need a token of "b" or "d"
    with pytest.raises(ConstraintError, match="no text of this vocabulary satisfies it"):
        from_bytes(*transitions_of("ad"), tokens, [3])


@pytest.mark.parametrize("seed", range(4))
def test_words_are_left_out_wherever_they_would_end(seed):
    rng = random.Random(seed)
    words = [tuple(rng.randrange(4) for _ in range(rng.randint(1, 3))) for _ in range(4)]
    if {(token,) for token in range(5)} <= set(words):
        return
    automaton = without(words, 6)
    for text in itertools.product(range(6), repeat=5):
        state = 0
        for place, token in enumerate(text):
            ends = any(text[: place + 1][-len(word) :] == word for word in words)
            assert automaton.allowed(state)[token] == (not ends), (words, text, place)
            if ends:
                break
            state = automaton.step(state, token)


def test_many_words_are_left_out_in_time():
    words = [(i, i + 1, i + 2) for i in range(2000)] + [tuple(range(3000, 3500))]
    automaton = without(words, 4000)
    assert automaton.num_states == 1 + 2 * 2000 + 499
    state = automaton.step(automaton.step(0, 7), 8)
    assert np.flatnonzero(~automaton.allowed(state)).tolist() == [9]
    with pytest.raises(TooManyStates, match="10001 prefixes and 10000 distinct tokens"):
        without([tuple(range(10_000))], 20_000)


def test_a_product_allows_what_both_do():
    number, no_word = automaton_of(r"[a-z0-9]{1,6}"), without([(ord("1"),), (ord("a"), ord("b"))], len(VOCAB))
    both = intersection(number, no_word)
    rng = random.Random(0)
    for _ in range(50):
        states = [0, 0, 0]
        while True:
            allowed = both.allowed(states[0])
            np.testing.assert_array_equal(allowed, number.allowed(states[1]) & no_word.allowed(states[2]))
            token = rng.choice(np.flatnonzero(allowed).tolist())
            if token == END:
                break
            states = [part.step(state, token) for part, state in zip((both, number, no_word), states, strict=True)]
    with pytest.raises(ConstraintError, match="no text of this vocabulary satisfies it"):
        intersection(automaton_of("[0-9]"), of_allowed([ord("a"), END], len(VOCAB)))
    with pytest.raises(ConstraintError, match="no text of this vocabulary satisfies it"):
        intersection(of_allowed([1], 9), without([[1]], 9))


def test_masks_have_a_bit_for_each_token():
    rng = np.random.default_rng(0)
    for size in (5, 300, 128 * 32, 128 * 32 + 1):
        allowed = rng.random((3, size)) < 0.5
        words, count = packed(allowed), mask_words(size)
        assert words.shape == (3, count) and count % 128 == 0
        token = np.arange(size)
        np.testing.assert_array_equal(words[:, token % count] >> (token // count) & 1, allowed)


def test_a_mask_of_one_token_forces_it():
    rng = np.random.default_rng(0)
    for size in (5, 300, 128 * 32, 128 * 32 + 1):
        allowed = np.zeros((7, size), bool)
        token = rng.integers(0, size, 7)
        token[:2] = 0, size - 1
        allowed[np.arange(7), token] = True
        allowed[3] = False
        allowed[4, (token[4] + 1) % size] = allowed[5, (token[5] + size // 2) % size] = True
        expected = np.where(np.isin(np.arange(7), [3, 4, 5]), size, token)
        np.testing.assert_array_equal(forced_tokens(packed(allowed), size), expected)


def test_masks_of_states_are_what_their_transitions_allow():
    automaton = automaton_of(OBJECT)
    assert automaton.num_masks < automaton.num_states
    for state in range(automaton.num_states):
        expected = packed(automaton.allowed(state)[None])[0]
        np.testing.assert_array_equal(automaton.masks[automaton.mask_of[state]], expected)


def test_what_is_no_regex_or_too_large_is_refused():
    with pytest.raises(ConstraintError, match="it is no regular expression: missing \\)"):
        transitions_of("(")
    for bad, name in (("a(?=b)", "assert"), (r"(a+)\1", "groupref"), (r"\bfoo", "at"), ("(?>a*)b", "atomic_group")):
        with pytest.raises(ConstraintError, match=f"it has {name}, which no automaton"):
            transitions_of(bad)
    for large in ("(a|b)*a(a|b){15}", "(x{500}){500}", "((((.{99}){99}){99}){99}){99}", r"(.*\w.*){40}"):
        with pytest.raises(TooManyStates, match="its automaton|spells out"):
            transitions_of(large)
    with pytest.raises(TooManyStates, match="it has 1000000 characters; at most"):
        transitions_of("a" * 1_000_000)
    for empty in ("[\ud800-\udfff]", "a\ud800", r"[^\s\S]"):
        with pytest.raises(ConstraintError, match="no text of this vocabulary satisfies it"):
            from_bytes(*transitions_of(empty), VOCAB, [END])
    with pytest.raises(TooManyStates, match="they have more than 32767 prefixes"):
        of_choices(b"option %d" % i for i in range(10**9))
    with pytest.raises(ConstraintError, match="recursion|deeply"):
        transitions_of("(" * 20_000 + "a" + ")" * 20_000)


def test_anchors_of_the_whole_text_change_nothing():
    for regex in ("^ab$", "^ab", "ab$"):
        found, plain = transitions_of(regex), transitions_of("ab")
        np.testing.assert_array_equal(found[0], plain[0])
    assert transitions_of(r"a\$")[1].sum() == 1 and not np.array_equal(
        transitions_of(r"a\$")[0], transitions_of("a")[0]
    )


BOUNDED = [
    OBJECT,
    {"enum": ["a", 1, None, True]},
    {"const": "x"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[0-9]{5}$"},
    {"type": "string", "pattern": r"^((a|b)|[|(])\|$"},
    {"type": "string", "pattern": r"^[-A-Z0-9]{2}A-z[\w-][a\-z][#-A]\[$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}], "title": "x"},
    {"$defs": {"a": {"type": "boolean"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}},
]
UNBOUNDED = [
    {},
    True,
    {"type": "object"},
    {"type": "integer", "minimum": 3},
    {"type": "number", "multipleOf": 2},
    {"type": "array"},
    {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
    {"type": "string", "pattern": "[0-9]"},
    {"type": "string", "pattern": "^.*$"},
    {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": r"^(\)a)|b$"},
    {"type": "string", "pattern": '^[^a]"$'},
    {"type": "string", "pattern": "^[ -@]{5}$"},
    {"type": "string", "pattern": "^[!-a]$"},
    {"type": "string", "pattern": "^a[A-z]+$"},
    {"type": "string", "pattern": "^[[-a]$"},
    {"type": "string", "pattern": "^[]+-a]$"},
    {"type": "string", "pattern": r"^[\+-\]]$"},
    {"type": "string", "pattern": r"^[ -\-]$"},
    {"type": "string", "pattern": "^a$", "maxLength": 3},
    {"type": "string", "format": "email"},
    {"type": ["string", "null"]},
    {"enum": [[1]]},
    {"allOf": [{"type": "null"}]},
    {"oneOf": [{"type": "null"}]},
    {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["y"]},
    {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    {"type": "array", "items": {"$ref": "#"}},
    {"$ref": "https://example.org/schema"},
]


@pytest.mark.parametrize("schema", BOUNDED)
def test_schemas_that_are_automata(schema):
    assert automaton_of(schema).num_states > 1


@pytest.mark.parametrize("schema", UNBOUNDED)
def test_schemas_that_are_not_regular_or_not_known_are_left_to_llguidance(schema):
    assert regex_of(schema) is None


@pytest.mark.parametrize("pattern", ["^[ -@]{5}$", "^[A-z]{3}$", r"^[-A-Z]{2}[a\-z][#-A]$"])
def test_what_a_pattern_allows_is_json(pattern):
    compiler = ConstraintCompiler(Spelled(), len(VOCAB), (END,))
    constraint, rng = compiler.compile(Wanted(json_schema={"type": "string", "pattern": pattern})), random.Random(0)
    for _ in range(60):
        guide, state, tokens = constraint.guide and constraint.guide.copy(), 0, []
        while not tokens or tokens[-1] != END:
            allowed = guide.allowed() if guide else constraint.automaton.allowed(state)
            tokens.append(rng.choice(np.flatnonzero(allowed).tolist()))
            if guide:
                guide.extend(tokens[-1:])
            else:
                state = constraint.automaton.step(state, tokens[-1])
        assert isinstance(json.loads(b"".join(VOCAB[token] for token in tokens)), str)


def test_objects_have_the_properties_that_are_named():
    nested = {"type": "object", "properties": {"a": {"properties": {"b": {}}}}, "enum": [{"properties": {}}]}
    found = closed(nested)
    assert isinstance(found, dict)
    assert found["additionalProperties"] is False and found["properties"]["a"]["additionalProperties"] is False
    assert found["enum"] == nested["enum"] and closed({"type": "object"}) == {"type": "object"}
    for name in ("default", "enum", "properties", "a"):  # names of properties are no keywords
        inner = closed({"properties": {name: nested}, "$defs": {name: nested}})
        assert inner["properties"][name] == inner["$defs"][name] == found  # type: ignore[index]


def test_a_guide_follows_a_grammar_that_nests():
    guide = Guides(VOCAB, [END]).of_grammar('start: "a" start "b" | "ab"')
    text = b"aaabbb"
    for i, byte in enumerate(text):
        allowed = guide.allowed()
        assert allowed[byte] and not allowed[END], text[:i]
        guide.extend([byte])
    assert np.flatnonzero(guide.allowed()).tolist() == [END]
    gbnf = Guides(VOCAB, [END]).of_grammar('root ::= "x" root "y" | "z"')
    assert {VOCAB[token] for token in np.flatnonzero(gbnf.allowed())} == {b"x", b"z"}
    with pytest.raises(ConstraintError):
        Guides(VOCAB, [END]).of_grammar("start: missing")
