"""RMSNorm."""

import haliax as hax
import jax.numpy as jnp
import numpy as np

from levanter_infer.layers.norm import NormConfig, RMSNorm


def test_norm_equals_the_formula_over_its_own_axis():
    rng = np.random.default_rng(0)
    x = hax.named(jnp.asarray(rng.normal(size=(3, 6, 2)), jnp.float32), ("token", "head_size", "kv_head"))
    weight = hax.named(jnp.asarray(rng.normal(size=6), jnp.float32), "head_size")
    wide = np.asarray(x.array, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 0.1) * np.asarray(weight.array)[:, None]
    got = RMSNorm(weight=weight, config=NormConfig(eps=0.1))(x)
    assert got.axes == x.axes
    np.testing.assert_allclose(np.asarray(got.array), expected, rtol=1e-5)


def test_norm_of_bf16_is_computed_in_float32():
    # 1 + 2^-9 and the like vanish if squares and mean are rounded to bfloat16 on the way.
    values = jnp.asarray(np.linspace(1.0, 1.5, 64), jnp.bfloat16)
    x = hax.named(values, "embed")
    got = RMSNorm(weight=hax.ones(x.axes, dtype=jnp.bfloat16), config=NormConfig(eps=1e-6))(x)
    wide = np.asarray(values, np.float64)
    expected = jnp.asarray(wide / np.sqrt((wide**2).mean() + 1e-6), jnp.bfloat16)
    assert got.dtype == jnp.bfloat16 and (got.array == expected).all()
