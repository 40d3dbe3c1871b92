"""Every option of a router against a choice in plain NumPy and float64, one row at a time."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.layers.router import Groups, GroupScore, Router, Score, SelectionBias

ROWS, EXPERTS, CHOSEN = 40, 12, 3
LOGITS = np.random.default_rng(0).normal(size=(ROWS, EXPERTS)) * 1.5
BIAS = np.random.default_rng(1).normal(size=EXPERTS)


def choice(
    router: Router, logits: np.ndarray, num_chosen: int, bias: np.ndarray | None
) -> tuple[list[int], np.ndarray]:
    """The oracle: the experts of one token, the best first, and their weights."""
    everybody = range(len(logits))
    sigmoids, exps = 1 / (1 + np.exp(-logits)), np.exp(logits)
    scores = {Score.SOFTMAX: exps / exps.sum(), Score.SOFTMAX_OF_CHOSEN: logits, Score.SIGMOID: sigmoids}[router.score]
    compared = (logits if router.selection_bias is SelectionBias.ON_LOGITS else scores) + (0 if bias is None else bias)
    if router.groups is not None:
        size = len(logits) // router.groups.number
        groups = [sorted(compared[first : first + size]) for first in range(0, len(logits), size)]
        values = [each[-1] if router.groups.score is GroupScore.MAX else each[-1] + each[-2] for each in groups]
        best = sorted(range(len(groups)), key=lambda group: -values[group])[: router.groups.chosen]
        compared = [compared[expert] if expert // size in best else router.groups.left_out for expert in everybody]
    chosen = sorted(everybody, key=lambda expert: -compared[expert])[:num_chosen]
    weights = exps[chosen] / exps[chosen].sum() if router.score is Score.SOFTMAX_OF_CHOSEN else scores[chosen]
    if router.normalize:
        weights = weights / max(weights.sum() + router.sum_eps, router.sum_min)
    return chosen, weights * router.scale


ON_SCORES = Router(Score.SIGMOID, selection_bias=SelectionBias.ON_SCORES)
OPTIONS = {
    "softmax": (Router(), Router(normalize=True)),
    "normalized": (Router(normalize=True), Router()),
    "softmax_of_chosen": (Router(Score.SOFTMAX_OF_CHOSEN), Router()),
    "sigmoid": (Router(Score.SIGMOID), Router()),
    "total": (Router(normalize=True, scale=2.5), Router(normalize=True)),
    "scale": (Router(Score.SIGMOID, scale=2.5), Router(Score.SIGMOID)),
    "eps": (Router(normalize=True, sum_eps=0.3), Router(normalize=True)),
    "least_sum": (Router(normalize=True, sum_min=0.9), Router(normalize=True)),
    "bias_on_scores": (ON_SCORES, Router(Score.SIGMOID)),
    "bias_on_logits": (dataclasses.replace(ON_SCORES, selection_bias=SelectionBias.ON_LOGITS), ON_SCORES),
    "groups_by_two": (dataclasses.replace(ON_SCORES, groups=Groups(4, 2)), ON_SCORES),
    "groups_by_largest": (
        dataclasses.replace(ON_SCORES, groups=Groups(4, 2, GroupScore.MAX)),
        dataclasses.replace(ON_SCORES, groups=Groups(4, 2)),
    ),
    "left_out_in_part": (
        dataclasses.replace(ON_SCORES, groups=Groups(6, 2, left_out=1.2)),
        dataclasses.replace(ON_SCORES, groups=Groups(6, 2)),
    ),
    "every_group": (dataclasses.replace(ON_SCORES, groups=Groups(4, 4)), Router(Score.SIGMOID)),
}
"""Each option, and the router without it."""


def found(router: Router) -> tuple[np.ndarray, np.ndarray]:
    bias = None if router.selection_bias is SelectionBias.NONE else jnp.asarray(BIAS, jnp.float32)
    chosen, weights = router.choose(jnp.asarray(LOGITS, jnp.float32), CHOSEN, bias)
    return np.asarray(chosen), np.asarray(weights)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_router_chooses_and_weighs_as_it_says(name):
    router, without = OPTIONS[name]
    chosen, weights = found(router)
    bias = None if router.selection_bias is SelectionBias.NONE else BIAS
    for row, logits in enumerate(LOGITS):
        experts, expected = choice(router, logits, CHOSEN, bias)
        assert chosen[row].tolist() == experts
        np.testing.assert_allclose(weights[row], expected, rtol=2e-6)
    plain, plain_weights = found(without)
    assert (plain != chosen).any() or np.abs(plain_weights - weights).max() > 1e-2


def test_the_options_that_a_router_is_stored_for_are_those_with_parameters():
    assert all(router.stored in (Router(), ON_SCORES.stored) for router, _ in OPTIONS.values())
    assert len({Router(bias=True).stored, Router(float32=True).stored, ON_SCORES.stored, Router().stored}) == 4
