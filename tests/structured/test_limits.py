"""What a constraint may cost: each of these ended the process or took minutes without a bound."""

import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from levanter_infer.structured import guide as guides
from levanter_infer.structured.automaton import ConstraintError, TooManyStates, from_bytes, intersection, without
from levanter_infer.structured.guide import Guides
from levanter_infer.structured.json_schema import regex_of
from levanter_infer.structured.regex import transitions_of

VOCAB = [*(bytes([i]) for i in range(256)), b"yes", b""]
END = 257


def chained(rules: int, form: str, last: str) -> str:
    """A grammar whose first rule leads to the last one by all others."""
    return "".join(form.format(i, i + 1) for i in range(rules - 1)) + last.format(rules - 1)


def lark(rules: int) -> str:
    return chained(rules, 'r{}: "a" r{}\n', 'r{}: "b"\n').replace("r0", "start", 1)


def terminals(rules: int) -> str:
    return "start: R0\n" + chained(rules - 1, 'R{}: "a" R{}\n', 'R{}: "b"\n')


def optional(rules: int) -> str:
    return chained(rules, 'r{0}: r{1} | "a"\n', 'r{}: "b"\n').replace("r0", "start", 1)


def references(count: int, wrapped) -> dict:
    """A schema whose definitions refer one to the next."""
    chain = {f"a{i}": wrapped({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "null"}}}


SCHEMAS = {
    "references": lambda part: part,
    "arrays": lambda part: {"type": "array", "items": part},
    "alternatives": lambda part: {"anyOf": [{"type": "null"}, part]},
}


def test_a_compilation_without_end_does_not_keep_the_process_from_ending():
    code = (
        "import threading, time; from levanter_infer.structured.guide import _on_large_stack; "
        "threading.Thread(target=_on_large_stack, args=(lambda: time.sleep(60),), daemon=True).start(); time.sleep(0.2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_first_mask_of_a_large_grammar_is_computed_where_it_is_compiled():
    begin = time.perf_counter()
    guide = Guides(VOCAB, [END]).of_grammar(optional(2000))
    compiled = time.perf_counter()
    guide.copy().allowed()
    assert time.perf_counter() - compiled < (compiled - begin) / 4


@pytest.mark.parametrize("grammar", [lark, terminals, optional])
def test_a_chain_of_rules_does_not_overflow_the_stack(grammar):
    made = Guides(VOCAB, [END])
    guide, allowed = made.of_grammar(grammar(guides._MAX_COLONS)), []
    before = threading.stack_size(2**18)
    try:
        walker = threading.Thread(target=lambda: allowed.append(guide.copy().allowed()))
        walker.start()
    finally:
        threading.stack_size(before)
    walker.join()
    assert np.flatnonzero(allowed[0]).tolist() in ([ord("a")], [ord("a"), ord("b")])
    with pytest.raises(ConstraintError, match="it has 50000 colons, of rules .* at most 8192 are taken; give fewer"):
        made.of_grammar(grammar(50_000))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_chain_of_references_does_not_overflow_the_stack(name):
    made = Guides(VOCAB, [END])
    of_link = str(references(1, SCHEMAS[name])).count(":") - str(references(0, SCHEMAS[name])).count(":")
    assert made.of_schema(references((guides._MAX_COLONS - 4) // of_link, SCHEMAS[name])).allowed().any()
    for refused in (references(50_000, SCHEMAS[name]), {"const": ":" * 50_000}):
        with pytest.raises(ConstraintError, match=r"it has \d+ colons, of rules or of the members of objects"):
            made.of_schema(refused)


def slowness() -> float:
    """How much slower this processor is just now than that of the bounds."""
    begin, numbers = time.process_time(), {}
    for i in range(1_000_000):
        numbers[i & 1023] = i
    return max(1.0, (time.process_time() - begin) / 0.075)


@contextlib.contextmanager
def within(seconds: float):
    """What runs inside takes no longer than this on the processor of the bounds. Bounds are of work, and seconds are
    what is measured: a processor that shares its core with another process takes nearly twice as long, and may be fast
    again right after, so that its speed is measured before and after."""
    before = max(slowness(), slowness())
    begin = time.process_time()
    yield
    took = time.process_time() - begin
    assert took < seconds * max(before, slowness(), slowness())


def test_a_grammar_in_gbnf_has_so_many_rules():
    text = chained(guides._MAX_GBNF_RULES, 'r{} ::= "a" r{}\n', 'r{} ::= "b"\n').replace("r0", "root", 1)
    made = Guides(VOCAB, [END])
    assert np.flatnonzero(made.of_grammar(text).allowed()).tolist() == [ord("a")]
    with (
        within(1),
        pytest.raises(ConstraintError, match="it has 1025 rules in GBNF; at most 1024 are taken; give fewer"),
    ):
        made.of_grammar(text + 'more ::= "c"\n')


def test_threads_that_start_after_a_compilation_have_stacks_as_before():
    before = threading.stack_size()
    Guides(VOCAB, [END]).of_grammar('start: "a"')
    assert threading.stack_size() == before


@pytest.mark.parametrize("regex", ["a(?:){100000000}", "((?:){4294967294}){4294967294}a", "a(?:b{0}){100000000}"])
def test_what_is_empty_is_repeated_once(regex):
    with within(1):
        found, plain = transitions_of(regex), transitions_of("a")
    for left, right in zip(found, plain, strict=True):
        np.testing.assert_array_equal(left, right)


def test_items_that_are_empty_are_work_too():
    with within(3), pytest.raises(TooManyStates, match="its automaton takes too long to make; simplify it"):
        transitions_of("(?:" + "()" * 30_000 + "b){10000}")


def multiplied(levels: int, width: int, **bounds) -> dict:
    """A schema in which each definition refers `width` times to the next: `width ** levels` parts."""
    definitions: dict = {f"a{levels}": {"type": "null"}}
    for i in range(levels):
        further = {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * width}
        definitions[f"a{i}"] = {"type": "array", "items": further, **bounds}
    return {"$ref": "#/$defs/a0", "$defs": definitions}


NESTED = "^" + "(" * 100_000 + "a" + ")" * 100_000 + "$"
LARGE = {
    "$defs": {"large": {"const": "a" * 200_000}},
    "type": "object",
    "properties": {f"p{i}": {"$ref": "#/$defs/large"} for i in range(5000)},
}


@pytest.mark.parametrize(
    "schema, expected",
    [
        (multiplied(8, 20, maxItems=0), r"\[\]"),
        (multiplied(8, 20), None),
        (LARGE, None),
        ({"type": "string", "pattern": NESTED}, f'"(?a:{NESTED[1:-1]})"'),
    ],
    ids=["no-items", "multiplied", "large", "nested"],
)
def test_a_schema_is_read_in_a_second_or_left_to_llguidance(schema, expected):
    with within(2):
        assert regex_of(schema) == expected


SETS = ["".join(chr(0x100 + k + 2 * i) for i in range(300)) for k in range(300)]


@pytest.mark.parametrize(
    "regex",
    ["(?:a?){8000}", "(?:a*){8000}", "(?i)" + "".join(f"[\x01-{chr(0x100 + i)}]" for i in range(8000))],
    ids=["optional", "any-number", "case"],
)
def test_the_work_of_a_regex_is_bounded(regex):
    with within(3), pytest.raises(TooManyStates, match="its automaton takes too long to make; simplify it"):
        transitions_of(regex)


@pytest.mark.slow
def test_sets_without_case_take_no_longer_than_others():
    with within(3):
        found = transitions_of("(?i)" + "".join(f"[{letters}]" for letters in SETS))
    assert len(found[0]) > len(SETS)


@pytest.mark.slow
def test_the_work_of_an_intersection_is_bounded():
    vocab = [*VOCAB[:256], *(b"%c%c" % (a, b) for a in range(97, 117) for b in range(97, 117)), b""]
    automaton = from_bytes(*transitions_of("[a-z ]{9000}"), vocab, [len(vocab) - 1])
    pairs = without([(i, i + 1) for i in range(97, len(vocab) - 2)], len(vocab))
    refusal = r"together they have more than \d+ states, with \d+ classes of tokens"
    with within(8), pytest.raises(TooManyStates, match=refusal):
        intersection(automaton, pairs)
