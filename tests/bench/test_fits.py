"""Exponents of constructed growth."""

import numpy as np
import pytest

from levanter_infer.bench.report import exponent, growing_part

CONTEXTS = 2.0 ** np.arange(7, 14)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.05, 2.0])
def test_a_power_is_found(p):
    assert exponent(CONTEXTS, 3 * CONTEXTS**p) == pytest.approx(p, abs=1e-3)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("constant", [0.0, 0.2, 20.0])
def test_the_part_that_grows_is_told_from_the_constant_that_hides_it(p, constant):
    times = constant + 1e-3 * CONTEXTS**p
    found, at_zero = growing_part(CONTEXTS, times)
    assert found == pytest.approx(p, abs=0.01)
    assert at_zero == pytest.approx(constant, abs=0.02 * times[0])


def test_noise_of_one_percent_moves_the_exponent_little():
    noise = 1 + 0.01 * np.array([1, -1, 1, -1, 1, -1, 1])
    found, _ = growing_part(CONTEXTS, (1 + 1e-3 * CONTEXTS) * noise)
    assert found == pytest.approx(1, abs=0.1)


def test_three_points_are_too_few():
    with pytest.raises(ValueError, match="3 points"):
        growing_part([1, 2, 3], [1, 2, 3])
