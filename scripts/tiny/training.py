"""The tiny model's shape, its loss and its optimizer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray

from levanter_infer.axes import POSITION
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for

from .tokenizer import MAX_LENGTH, VOCAB_SIZE

HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

Arrays = tuple[jax.Array, jax.Array]


def model_config() -> DecoderConfig:
    return family_for(HF_CONFIG).config_from_hf(HF_CONFIG)


def mean_loss(model: DecoderModel, step_batches: Sequence[Arrays]) -> jax.Array:
    """Cross entropy per learned token, averaged within each kind of example and then over kinds.

    Kinds weigh the same whatever their number of tokens, so that stories do not drown the sums.
    """
    losses = []
    for tokens, weights in step_batches:
        axes = (Axis("row", tokens.shape[0]), Axis(POSITION, tokens.shape[1] - 1))
        logits = model(NamedArray(tokens[:, :-1], axes)).array
        losses_per_token = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        losses.append(jnp.sum(losses_per_token * weights[:, 1:]) / jnp.sum(weights[:, 1:]))
    return jnp.mean(jnp.stack(losses))


def make_optimizer(num_steps: int, peak: float) -> optax.GradientTransformation:
    """AdamW with a short warm-up and a cosine to nearly nothing; norms do not decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, num_steps // 20), num_steps, peak * 0.01)

    def decays(model):
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), model)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=decays)
    )


def make_step(optimizer: optax.GradientTransformation):
    """`step(model, state, batches) -> (model, state, loss)`."""

    def step(model: DecoderModel, state, step_batches: Sequence[Arrays]):
        loss, gradients = jax.value_and_grad(mean_loss)(model, step_batches)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    return jax.jit(step)
