"""`Model`: what an engine needs of a model. `DecoderModel` has it; a model of another architecture needs these members
and no others."""

from typing import TYPE_CHECKING, Any, Protocol, Self

import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.cache import Cache
from levanter_infer.kernels.backend import Backend
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.layers.layout import Layout
from levanter_infer.layers.shard_axis import Vocabulary

if TYPE_CHECKING:
    from levanter_infer.models.config import DecoderConfig


class Model(Protocol):
    """A decoder over a paged cache. Its leaves are arrays, or `jax.ShapeDtypeStruct`s for its types."""

    @property
    def config(self) -> "DecoderConfig":
        """Sizes, and what else changes the mathematics; `swap_weights` compares it."""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the parameters, and by default of the pool."""
        ...

    @property
    def activation_dtype(self) -> jnp.dtype:
        """Dtype of the hidden states between layers."""
        ...

    @property
    def embed(self) -> Axis:
        """Axis of the hidden states."""
        ...

    @property
    def vocab(self) -> Vocabulary:
        """The part of the vocabulary whose logits this device computes."""
        ...

    def hidden(self, batch: PageBatchInfo, cache: Cache, attention: AttentionSpec) -> tuple[NamedArray, Cache]:
        """One step: the last hidden states, [token, embed], and the cache (pools as `config.pools`) with the tokens."""
        ...

    def routed(self, batch: PageBatchInfo, cache: Cache, attention: AttentionSpec) -> tuple[NamedArray, Cache, Any]:
        """As `hidden`, and the experts of each token, i32[expert layer, token, chosen]; for models with experts."""
        ...

    def logits(self, hidden: NamedArray, num_rows: Any = None) -> NamedArray:
        """f32[row, vocab] of hidden states [row, embed]; only the first `num_rows` rows are looked at."""
        ...

    # Storage: how a backend and a mesh have the parameters

    @property
    def backend(self) -> Backend:
        """The backend that the parameters are stored for, and that computes the matmuls."""
        ...

    @property
    def is_packed(self) -> bool:
        """Whether `prepare` has packed the parameters, in an order that only their backend knows."""
        ...

    def prepare(self, backend: Backend, *, donate: bool = False, quantizes: bool = False) -> Self:
        """The same model with its parameters stored as `backend` reads them. `donate`: its own arrays may be freed.
        `quantizes`: the weights of its layers and of its head are stored as int8; a model without it has no
        `engine.weight_dtype`."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether the arrays are those of a mesh that shards them already."""
        ...

    def shard_as(self, layout: Layout) -> Self:
        """The same model, knowing that its arrays are sharded by `layout`. Called for meshes that shard the model."""
        ...
