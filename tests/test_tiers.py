"""Every test is in a tier: CI, or a check of `.ci/nightly`."""

import fnmatch
import re
from pathlib import Path

import pytest

from tests.tiers import nightly_but

ROOT = Path(__file__).resolve().parents[1]
SLOW = re.compile(r"mark\.slow|nightly_but\(")


def nightly_checks() -> list[tuple[list[str], list[str]]]:
    """The paths that each check of slow tests runs, and those that it leaves out."""
    text = (ROOT / ".ci" / "nightly").read_text()
    words = [check.split() for check in re.findall(r'^  ".*\|\$slow (.*)"$', text, re.MULTILINE)]
    assert len(words) > 10
    left_out = "--ignore="
    return [
        ([word for word in check if not word.startswith("-")],
         [word.removeprefix(left_out) for word in check if word.startswith(left_out)])
        for check in words
    ]  # fmt: skip


def runs(path: str, file: str) -> bool:
    return file.startswith(path + "/") or fnmatch.fnmatch(file, path)


def test_every_file_with_slow_tests_is_in_one_check_of_the_nightly_tier():
    files = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__) and SLOW.search(path.read_text())
    ]
    assert len(files) > 60
    counts = {
        file: sum(
            any(runs(path, file) for path in paths) and not any(runs(path, file) for path in left_out)
            for paths, left_out in nightly_checks()
        )
        for file in files
    }
    assert {file: count for file, count in counts.items() if count != 1} == {}


def test_values_that_are_named_run_in_ci_and_others_do_not():
    found = nightly_but([2, (3, 4)], [1, 2, (3, 4), (4, 3)])
    assert [each.values for each in found] == [(1,), (2,), (3, 4), (4, 3)]
    assert [[mark.name for mark in each.marks] for each in found] == [["slow"], [], [], ["slow"]]
    with pytest.raises(ValueError, match=r"got \[5\] to run in CI, expected some of \[1, 2\]"):
        nightly_but([5], [1, 2])
