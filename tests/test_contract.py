"""docs/contract.md: every id once, each with one of the three ends, every path there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contract.md"
IDS = [
    f"{group}{i}"
    for group, count in (("M", 96), ("L", 67), ("I", 48), ("H", 24), ("T", 28))
    for i in range(1, count + 1)
]


def rows() -> list[list[str]]:
    """id, what, end of every row of the tables."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [MLIHT]\d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_id_stands_there_once_and_in_order():
    assert len(IDS) == 263
    assert [row[0] for row in rows()] == IDS


def test_every_row_says_what_and_has_one_of_three_ends():
    for row in rows():
        assert len(row) == 3, row
        assert len(row[1].split()) >= 2, f"{row[0]} does not say what it is"
        assert re.match(r"\*(met by|position|waits for)\* \S", row[2]), f"{row[0]} ends as {row[2]!r}"


def test_what_meets_an_item_is_a_test_or_a_bench_that_exists():
    for id_, _, end in rows():
        if not end.startswith("*met by*"):
            continue
        paths = re.findall(r"`([^`]+)`", end)
        assert paths and end == "*met by* " + ", ".join(f"`{path}`" for path in paths), f"{id_}: {end}"
        for path in paths:
            assert (ROOT / path).is_file(), f"{id_} names {path}, which does not exist"
            assert re.match(r"tests/(\w+/)*test_\w+\.py$|src/levanter_infer/bench/\w+\.py$", path), f"{id_}: {path}"


def test_positions_link_to_pages_that_exist():
    for id_, _, end in rows():
        if end.startswith("*position*"):
            targets = re.findall(r"\]\(([^)]+)\)", end)
            assert targets, id_
            for target in targets:
                assert (PAGE.parent / target).is_file(), f"{id_} links to {target}, which does not exist"


def test_what_is_waited_for_is_a_capability():
    for id_, _, end in rows():
        if end.startswith("*waits for*"):
            assert not re.search(r"#\d|issue|`|\]\(", end), f"{id_} waits for {end!r}; name the capability"


PITFALLS = [
    *("M47", "M94", "M96", "L8", "L39", "L57", "L58", "L60", "I43", "I47", "I48"),
    *("H17", "H18", "H19", "H20", "H21", "H22", "H23", "T1", "T2", "T17", "T18", "T19", "T20", "T21"),
]
"""Faults that the designs warn of."""


def test_every_pitfall_and_risk_ends_in_a_test():
    ends = {row[0]: row[2] for row in rows()}
    for id_ in PITFALLS:
        assert re.search(r"^\*met by\* .*`tests/(\w+/)*test_\w+\.py`", ends[id_]), f"{id_} ends as {ends[id_]}"
