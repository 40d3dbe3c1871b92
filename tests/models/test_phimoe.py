"""Phi-3.5-MoE: SparseMixer's routing, and the keys of its config.json."""

import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.layers.rotary import frequencies
from levanter_infer.layers.router import Router, Score
from levanter_infer.models.registry import family_for
from tests.golden_cases import load_case


def by_hand(logits: np.ndarray, sparsity: float) -> tuple[list[int], list[float]]:
    """Experts and weights of one row, as arXiv:2409.12136 evaluates them."""
    chosen: list[int] = []
    weights = []
    for _ in range(2):
        left = [i for i in range(len(logits)) if i not in chosen]
        best = max(left, key=lambda i: logits[i])
        limit = logits[best]
        near = [i for i in left if (limit - logits[i]) / max(abs(logits[i]), limit) <= sparsity]
        chosen.append(best)
        weights.append(1 / sum(np.exp(logits[i] - limit) for i in near))
    return chosen, weights


@pytest.mark.parametrize("sparsity", [0.02, 0.6, 1.5])
def test_each_expert_is_weighed_among_those_that_come_close(sparsity):
    logits = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    logits[:10] -= 4  # all below zero
    chosen, weights = Router(Score.SPARSEMIXER, sparsity=sparsity).choose(jnp.asarray(logits), 2, None)
    expected = [by_hand(row.astype(np.float64), sparsity) for row in logits]
    np.testing.assert_array_equal(chosen, [experts for experts, _ in expected])
    np.testing.assert_allclose(weights, [shares for _, shares in expected], rtol=1e-5)
    assert sparsity != 1.5 or (np.asarray(weights) < 0.99).any()


def test_either_length_has_its_attention_factor():
    config = family_for(raw := load_case("phimoe").config).config_from_hf(raw)
    (rope,) = config.ropes
    assert rope.depends_on_length and rope.original_len == 96
    short, long = (frequencies(rope, 16, length) for length in (96, 97))
    assert (short[1], long[1]) == (1.3, 1.6) and short[0][-1] > long[0][-1]


@pytest.mark.parametrize(
    "key, changes",
    [
        ("num_experts_per_tok", {"num_experts_per_tok": 3}),
        ("num_local_experts", {"num_local_experts": 1}),
        ("long_mscale", {"rope_scaling": {"short_mscale": 1.1}}),
        ("rope type 'linear'", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_its_key(key, changes):
    raw = load_case("phimoe").config
    if "rope_scaling" in changes and "rope_type" not in changes["rope_scaling"]:
        scaling = {name: value for name, value in raw["rope_scaling"].items() if name != "long_mscale"}
        changes = {"rope_scaling": scaling}
    elif "rope_scaling" in changes:
        raw = {name: value for name, value in raw.items() if name != "original_max_position_embeddings"}
    with pytest.raises(ValueError, match=key):
        family_for(raw).config_from_hf({**raw, **changes})
