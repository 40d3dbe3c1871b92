"""Which values of a parametrized test run in CI; the others run in the nightly tier, `.ci/nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly_but(fast: Iterable[Any], values: Iterable[Any]) -> list:
    """The values of a `parametrize`, all but `fast` marked as slow.

    Args:
        values: numbers, names or tuples of several parameters.
    Raises: ValueError for one of `fast` that is none of `values`.
    """
    fast, values = list(fast), list(values)
    if unknown := [each for each in fast if each not in values]:
        raise ValueError(f"got {unknown} to run in CI, expected some of {values}")
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=() if each in fast else pytest.mark.slow)
        for each in values
    ]
