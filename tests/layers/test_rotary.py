"""Every rope kind against formulas written down again, in float64."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.axes import HEAD_SIZE, POSITION
from levanter_infer.layers.rotary import RopeConfig, frequencies, rotary_tables, rotate

DIM = 16
PLAIN = 10000.0 ** -(np.arange(0, DIM, 2) / DIM)
SHORT = tuple(1.0 + 0.1 * i for i in range(DIM // 2))
LONG = tuple(2.0 + 0.5 * i for i in range(DIM // 2))


def _llama3(factor, low, high, original):
    expected = []
    for freq in PLAIN:
        wavelength = 2 * np.pi / freq
        if wavelength < original / high:
            expected.append(freq)
        elif wavelength > original / low:
            expected.append(freq / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * freq / factor + smooth * freq)
    return np.array(expected)


def _yarn(factor, original, fast=32.0, slow=1.0, truncate=True):
    def dimension(rotations):
        return DIM * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(10000.0))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    ramp = np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    return PLAIN / factor * ramp + PLAIN * (1 - ramp)


CASES = {
    "default": (RopeConfig(), PLAIN, 1.0),
    "linear": (RopeConfig(kind="linear", factor=4.0), PLAIN / 4, 1.0),
    "yarn": (
        RopeConfig(kind="yarn", factor=4.0, original_len=256),
        _yarn(4.0, 256),
        0.1 * np.log(4.0) + 1,
    ),
    "yarn_untruncated": (
        RopeConfig(
            kind="yarn",
            factor=4.0,
            original_len=256,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
            mscale=1.3,
            mscale_all_dim=0.6,
        ),
        _yarn(4.0, 256, 16.0, 2.0, False),
        (0.13 * np.log(4.0) + 1) / (0.06 * np.log(4.0) + 1),
    ),
    "yarn_attention_factor": (
        RopeConfig(kind="yarn", factor=4.0, original_len=256, attention_factor=1.4),
        _yarn(4.0, 256),
        1.4,
    ),
    "llama3": (
        RopeConfig(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_len=128),
        _llama3(8.0, 1.0, 4.0, 128),
        1.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_the_formula(name):
    config, expected, scaling = CASES[name]
    got, got_scaling = frequencies(config, DIM, rope_len=64)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got_scaling == pytest.approx(scaling, rel=1e-12)
    if name not in ("default",):
        assert np.abs(got / PLAIN - 1).max() > 0.1


def test_llama3_covers_kept_stretched_and_interpolated_frequencies():
    ratio = CASES["llama3"][1] / PLAIN
    assert (ratio == 1).any() and np.isclose(ratio, 1 / 8).any() and ((ratio > 0.13) & (ratio < 0.99)).any()


@pytest.mark.parametrize("length, stretch", [(10, 1.0), (64, 1.0), (65, 2 * 65 / 64 - 1), (128, 3.0)])
def test_dynamic_frequencies_grow_with_the_length_beyond_the_original(length, stretch):
    config = RopeConfig(kind="dynamic", factor=2.0, original_len=64)
    theta = 10000.0 * stretch ** (DIM / (DIM - 2))
    got, scaling = frequencies(config, DIM, rope_len=length)
    np.testing.assert_allclose(got, theta ** -(np.arange(0, DIM, 2) / DIM), rtol=1e-6)
    assert scaling == 1.0


@pytest.mark.parametrize("length, divisors", [(48, SHORT), (49, LONG)])
def test_longrope_takes_the_long_divisors_beyond_the_original(length, divisors):
    config = RopeConfig(kind="longrope", factor=4.0, original_len=48, short_factor=SHORT, long_factor=LONG)
    got, scaling = frequencies(config, DIM, rope_len=length)
    np.testing.assert_allclose(got, PLAIN / np.array(divisors), rtol=1e-6)
    assert scaling == pytest.approx(np.sqrt(1 + np.log(4.0) / np.log(48)), rel=1e-12)


def test_only_dynamic_and_longrope_depend_on_length():
    for config, expected, _ in CASES.values():
        assert not config.depends_on_length
        np.testing.assert_allclose(frequencies(config, DIM, rope_len=100_000)[0], expected, rtol=1e-6)
    assert RopeConfig(kind="dynamic").depends_on_length
    assert RopeConfig(kind="longrope", short_factor=(1.0,), long_factor=(2.0,)).depends_on_length
    assert not RopeConfig(kind="longrope", short_factor=(2.0,), long_factor=(2.0,)).depends_on_length


def test_rotation_turns_pairs_by_their_angle_and_scales():
    config = RopeConfig(kind="yarn", factor=4.0, original_len=256, attention_factor=1.5)
    positions = np.array([0, 1, 7, 300], np.int32)
    x = np.random.default_rng(0).normal(size=(4, 3, DIM)).astype(np.float32)
    cos, sin = rotary_tables(config, DIM, hax.named(jnp.asarray(positions), POSITION), 512)
    got = rotate(hax.named(jnp.asarray(x), (POSITION, "kv_head", HEAD_SIZE)), cos, sin)
    turned = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(
        1j * positions[:, None] * frequencies(config, DIM, 512)[0].astype(np.float64)
    )[:, None, :]
    expected = 1.5 * np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(np.asarray(got.array), expected, atol=2e-5)


def test_unknown_kind_and_missing_parameter_are_refused():
    with pytest.raises(ValueError, match="'mrope'.*expected one of default"):
        frequencies(RopeConfig(kind="mrope"), DIM, 1)
    with pytest.raises(ValueError, match="'linear' needs factor"):
        frequencies(RopeConfig(kind="linear"), DIM, 1)


def test_parameters_at_which_a_formula_divides_by_zero_are_refused():
    with pytest.raises(ValueError, match="rope_theta=1 gives all dimensions one frequency"):
        frequencies(RopeConfig(kind="yarn", theta=1.0, factor=2.0, original_len=64), DIM, 1)
    with pytest.raises(ValueError, match="heads of 2 have one frequency"):
        frequencies(RopeConfig(kind="dynamic", factor=2.0, original_len=64), 2, 1)
    long = dict(short_factor=(1.0,) * (DIM // 2), long_factor=(1.0,) * (DIM // 2), factor=2.0)
    with pytest.raises(ValueError, match="original_max_position_embeddings=1, expected more"):
        frequencies(RopeConfig(kind="longrope", original_len=1, **long), DIM, 1)
