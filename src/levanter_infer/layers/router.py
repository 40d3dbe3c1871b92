"""How a mixture of experts chooses the experts of a token, and their weights: the options of a router."""

import enum
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.layers.norm import NormConfig


class Score(enum.Enum):
    """Function of the logits that gives experts their weights."""

    SOFTMAX = "softmax over all experts"
    """Qwen3-MoE."""
    SOFTMAX_OF_CHOSEN = "softmax over the chosen experts"
    """gpt-oss. The choice is by logits."""
    SIGMOID = "sigmoid of each logit"
    """DeepSeek-V3."""
    SPARSEMIXER = "for each of two experts in turn, softmax over those of the others that come close"
    """Phi-3.5-MoE. The choice is by logits. Source: arXiv:2409.12136, as it is evaluated."""


class SelectionBias(enum.Enum):
    """Place of a learnt bias of each expert that moves the choice and not the weights."""

    NONE = "none"
    ON_SCORES = "added to the scores"
    """DeepSeek-V3."""
    ON_LOGITS = "added to the logits, by which experts are then chosen"
    """GrugMoE."""


class GroupScore(enum.Enum):
    """Score by which groups of experts are compared."""

    TOP_TWO = "sum of the two largest scores"
    """DeepSeek-V3."""
    MAX = "the largest score"
    """DeepSeek-V2."""


@dataclass(frozen=True)
class Groups:
    """Groups of consecutive experts; all experts of a token come from the best few groups."""

    number: int
    chosen: int
    """Groups of each token."""
    score: GroupScore = GroupScore.TOP_TWO
    left_out: float = -math.inf
    """Score of experts in other groups, when experts are chosen."""


@dataclass(frozen=True)
class Router:
    """The options of a router, without its parameters."""

    score: Score = Score.SOFTMAX
    normalize: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    sum_eps: float = 0.0
    """Added to that sum."""
    sum_min: float = 0.0
    """The least number by which weights are divided."""
    scale: float = 1.0
    """Factor of the weights: where they are normalized, the total of a token's weights."""
    sparsity: float | None = None
    """SparseMixer: an expert comes close whose logit is less than the best by at most this, as a share of the larger of
    its magnitude and the best."""
    selection_bias: SelectionBias = SelectionBias.NONE
    groups: Groups | None = None
    bias: bool = False
    """Whether logits have a bias."""
    exact_logits: bool = False
    """Whether logits stay in float32, and are not rounded to the dtype of the hidden states."""
    float32: bool = False
    """Whether the router's weights are float32 in a model of any dtype."""
    norm: NormConfig | None = None
    """A norm of the router's own, of the residual stream, instead of that of the experts; None: it has none."""
    logits_scale: float = 1.0
    """Factor of the logits."""
    expert_scale: bool = False
    """Whether the weight of each chosen expert is multiplied by a learnt number of the expert."""
    weigh_inputs: bool = False
    """Whether weights multiply the inputs of the experts (Llama 4), and not their results."""

    @property
    def stored(self) -> "Router":
        """The router with neutral options that no parameter depends on."""
        has_bias = self.selection_bias is not SelectionBias.NONE
        selection_bias = SelectionBias.ON_SCORES if has_bias else SelectionBias.NONE
        return Router(
            selection_bias=selection_bias,
            bias=self.bias,
            float32=self.float32,
            norm=self.norm,
            expert_scale=self.expert_scale,
        )

    def choose(
        self, logits: Array, num_chosen: int, selection_bias: Array | None, expert_scale: Array | None = None
    ) -> tuple[Array, Array]:
        """The experts of each row, and their weights.

        Args:
            logits: f32[row, expert]
            selection_bias, expert_scale: f32[expert]; None: there is none.
        Returns: i32[row, chosen] and f32[row, chosen].
        """
        if self.score is Score.SPARSEMIXER:
            assert num_chosen == 2 and self.sparsity is not None and selection_bias is expert_scale is None
            return _sparsemixer(logits, self.sparsity)
        scores = self._scores(logits if self.logits_scale == 1 else logits * jnp.float32(self.logits_scale))
        choice = logits if self.selection_bias is SelectionBias.ON_LOGITS else scores
        if selection_bias is not None:
            choice = choice + selection_bias[None]
        if self.groups is not None:
            choice = _of_best_groups(choice, self.groups)
        weights, chosen = jax.lax.top_k(choice, num_chosen)
        if choice is not scores:
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.score is Score.SOFTMAX_OF_CHOSEN:
            weights = jax.nn.softmax(weights, axis=-1)
        weights = self._normalized(weights)
        if expert_scale is not None:
            weights = weights * expert_scale[chosen]
        return chosen.astype(jnp.int32), weights

    def _scores(self, logits: Array) -> Array:
        match self.score:
            case Score.SOFTMAX:
                return jax.nn.softmax(logits, axis=-1)
            case Score.SOFTMAX_OF_CHOSEN | Score.SPARSEMIXER:
                return logits
            case Score.SIGMOID:
                return jax.nn.sigmoid(logits)

    def _normalized(self, weights: Array) -> Array:
        if self.normalize:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            total = total + jnp.float32(self.sum_eps) if self.sum_eps else total
            weights = weights / (jnp.maximum(total, jnp.float32(self.sum_min)) if self.sum_min else total)
        return weights if self.scale == 1 else weights * jnp.float32(self.scale)


def _sparsemixer(logits: Array, sparsity: float) -> tuple[Array, Array]:
    """As `Router.choose`: the two best experts, each weighed among those that come close to it; the second without the
    first."""
    chosen, weights = [], []
    left = logits
    for _ in range(2):
        best, expert = jnp.max(left, axis=-1, keepdims=True), jnp.argmax(left, axis=-1)[:, None]
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > jnp.float32(sparsity)
        shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        chosen, weights = [*chosen, expert], [*weights, jnp.take_along_axis(shares, expert, axis=-1)]
        left = jnp.where(jnp.arange(left.shape[-1])[None] == expert, -jnp.inf, left)
    return jnp.concatenate(chosen, axis=-1).astype(jnp.int32), jnp.concatenate(weights, axis=-1)


def _of_best_groups(choice: Array, groups: Groups) -> Array:
    """[row, expert], with `left_out` for the experts of other groups."""
    rows, experts = choice.shape
    grouped = choice.reshape(rows, groups.number, experts // groups.number)
    if groups.score is GroupScore.MAX:
        values = jnp.max(grouped, axis=-1)
    else:
        values = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(values, groups.chosen)
    is_best = jnp.any(best[:, :, None] == jnp.arange(groups.number)[None, None], axis=1)
    return jnp.where(is_best[:, :, None], grouped, jnp.float32(groups.left_out)).reshape(rows, experts)
