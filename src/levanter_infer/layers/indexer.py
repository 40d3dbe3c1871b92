"""The indexer of sparse attention: queries and keys of its own, by which each token chooses the keys it attends to.

Source: DeepSeek sparse attention, report of DeepSeek-V3.2-Exp, section 2.1 (the lightning indexer). Its scores are
`Σ_h w[t, h] · max(q[t, h] · k[s], 0)`; factors that all scores of a token share choose nothing, and are left out. The
published code rotates queries and keys by a Hadamard matrix, which leaves dot products as they are, and rounds both
to 8-bit floats; here they have the dtypes of activations and of the pool.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import HEAD_SIZE, INDEX_HEADS, INDEX_WEIGHT
from levanter_infer.kernels.call import IndexQueries
from levanter_infer.layers.linear import Linear, split_key
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.rotary import Rope


@dataclass(frozen=True)
class IndexerBlock:
    """An indexer, without its parameters."""

    num_heads: int
    """Heads of queries (`index_n_heads`); all of them read the same keys."""
    head_dim: int
    """Numbers of a query, and of an index key (`index_head_dim`); the first of them are rotated."""
    num_chosen: int
    """Keys that a token attends to, at most (`index_topk`)."""
    norm: NormConfig
    """Norm of index keys."""
    interleaved: bool
    """Whether the rotated pairs of its queries and keys are neighbours."""

    def num_parameters(self, hidden: int, q_latent: int) -> int:
        """From the sizes alone. Args: hidden, q_latent: widths of its inputs."""
        of_input = (self.head_dim + self.num_heads) * hidden
        return self.num_heads * self.head_dim * q_latent + of_input + self.norm.num_parameters(self.head_dim)


class Indexer(eqx.Module):
    """The maps and the norm of an indexer. Devices that shard heads have all of its own."""

    q_proj: Linear
    """[layers, index_head, index_size, q_latent]"""
    k_proj: Linear
    """[layers, index_size, embed]"""
    k_norm: RMSNorm
    """[layers, head_size]"""
    weight_proj: Linear
    """[layers, index_weight, embed]"""

    @staticmethod
    def init(
        batch: Sequence[Axis], embed: Axis, q_latent: Axis, block: IndexerBlock, *, key: Array | None, dtype
    ) -> "Indexer":
        """Random projections as in `Linear.init`; `batch`: axes of independent layers."""
        keys = split_key(key, 3)
        size = Axis(HEAD_SIZE, block.head_dim)

        def linear(number: int, outs: Sequence[Axis], source: Axis) -> Linear:
            return Linear.init(batch, outs, (source,), key=keys[number], dtype=dtype)

        return Indexer(
            q_proj=linear(0, (Axis(INDEX_HEADS, block.num_heads), size), q_latent),
            k_proj=linear(1, (size,), embed),
            k_norm=RMSNorm.init(batch, size, config=block.norm, dtype=dtype),
            weight_proj=linear(2, (Axis(INDEX_WEIGHT, block.num_heads),), embed),
        )

    def part(
        self, q: NamedArray, k: NamedArray, weights: NamedArray, block: IndexerBlock, rope: Rope | None
    ) -> "IndexPart":
        """The indexer's part of a layer, from the results of its maps: queries and keys are normed and rotated."""
        k_norm = self.k_norm.picked()

        def rotated(q: NamedArray, k: NamedArray, *angles: NamedArray) -> tuple[NamedArray, NamedArray]:
            k = k_norm(k)
            if rope is None:
                return q, k
            own = Rope(dataclasses.replace(rope.config, interleaved=block.interleaved), *angles)
            return own.rotate(q), own.rotate(k)

        q, k = self.q_proj.by_rows(rotated, q, k, *(() if rope is None else rope.angles))
        return IndexPart(IndexQueries(q.array, weights.array, block.num_chosen), k.array)


@dataclass(frozen=True)
class IndexPart:
    """The index queries and keys of the tokens of a layer."""

    queries: IndexQueries
    """With the token axes [...] in place of [T]."""
    keys: Array
    """[..., head_size], the index keys."""


@dataclass
class Choice:
    """The keys that the tokens of a step attend to. A layer with an indexer chooses them, for itself and for the later
    layers that share its choice (GLM-5); the loops over layers carry them from one to the next."""

    keys: Array | None = None
    """As `AttentionCall.chosen`; in the plain forward bool[..., query, key], the keys that each query sees. None: all,
    because no layer chooses, or sequences have no more tokens than are chosen."""

    def of_layer(self, choose: Callable[[], Array] | None) -> Array | None:
        """The keys of a layer with sparse attention. Args: choose: gives its own choice, if it has an indexer."""
        if self.keys is not None and choose is not None:
            self.keys = choose()
        return self.keys


def chosen_of_all(part: IndexPart) -> Array:
    """The choice over plain sequences, the whole matrix of scores at once: bool[..., query, key].

    Args: part: of tokens [..., position], position 0 first.
    """
    queries, f32 = part.queries, jnp.float32
    matmul = jnp.einsum("...qhd,...kd->...hqk", queries.q, part.keys, preferred_element_type=f32)
    weights = jnp.moveaxis(queries.weights.astype(f32), -1, -2)[..., None]
    scores = jnp.sum(jax.nn.relu(matmul) * weights, axis=-3)
    size = scores.shape[-1]
    is_past = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), scores.shape)
    _, chosen = jax.lax.top_k(jnp.where(is_past, scores, -jnp.inf), min(queries.num_chosen, size))
    return jnp.put_along_axis(jnp.zeros(scores.shape, bool), chosen, True, axis=-1, inplace=False) & is_past
