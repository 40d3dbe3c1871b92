"""Per-layer inputs: for each layer a few numbers of each token, which gate what the layer adds to its result."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import DEPTH, EMBED, LAYER_INPUT
from levanter_infer.kernels.backend import Backend
from levanter_infer.layers.activation import Activation
from levanter_infer.layers.linear import Linear, apply, fold_key, prepare_rows, random_weight, split_key
from levanter_infer.layers.norm import NormConfig, RMSNorm


@dataclass(frozen=True)
class LayerInputBlock:
    """A layer's use of its own input, without parameters."""

    width: int
    """Numbers of a token."""
    activation: Activation = Activation.GELU_TANH

    @property
    def stored(self) -> "LayerInputBlock":
        """The block with neutral options that no parameter depends on."""
        return LayerInputBlock(self.width)

    def num_parameters(self, hidden: int, norm: NormConfig) -> int:
        """From the sizes alone, in one layer. Args: hidden: width of the residual stream."""
        return 2 * hidden * self.width + norm.num_parameters(hidden)


class LayerInput(eqx.Module):
    """`x + norm(up(activation(gate(x)) · own))`, where `own` is the layer's input (Gemma 4)."""

    gate_proj: Linear
    """[layers, layer_input, embed]"""
    up_proj: Linear
    """[layers, embed, layer_input]"""
    norm: RMSNorm

    @staticmethod
    def init(
        batch: Sequence[Axis], embed: Axis, block: LayerInputBlock, norm: NormConfig, *, key: Array | None, dtype
    ) -> "LayerInput":
        """Random maps as in `Linear.init`; `batch`: axes of independent layers."""
        gate, up = split_key(fold_key(key, 3), 2)
        width = Axis(LAYER_INPUT, block.width)
        return LayerInput(
            gate_proj=Linear.init(batch, (width,), (embed,), key=gate, dtype=dtype),
            up_proj=Linear.init(batch, (embed,), (width,), key=up, dtype=dtype),
            norm=RMSNorm.init(batch, embed, config=norm, dtype=dtype),
        )

    def __call__(self, x: NamedArray, own: NamedArray, block: LayerInputBlock) -> NamedArray:
        """Args: x: [..., embed]; own: [..., layer_input]. Returns: [..., embed]."""
        (gate,) = apply(x, self.gate_proj)
        (result,) = apply(own, self.up_proj, gate=gate, activation=block.activation)
        return x + self.norm.by_rows(result, self.up_proj.by_rows)


class LayerInputs(eqx.Module):
    """The inputs of all layers: half from the token, from embeddings of its own, and half from its hidden state."""

    embeddings: Linear
    """[vocab, depth, layer_input]: its rows are those of a token."""
    proj: Linear
    """[depth, layer_input, embed]"""
    norm: RMSNorm
    """Norm of what `proj` gives for one layer."""

    @staticmethod
    def init(
        vocab: Axis, num_layers: int, width: int, embed: Axis, norm: NormConfig, *, key: Array | None, dtype
    ) -> "LayerInputs":
        """Random parameters: embeddings of standard deviation 0.02, the rest as in `Linear.init`."""
        rows, proj = split_key(fold_key(key, 4), 2)
        axes = (Axis(DEPTH, num_layers), Axis(LAYER_INPUT, width))
        return LayerInputs(
            embeddings=Linear(weight=random_weight(rows, (vocab, *axes), 0.02, dtype), bias=None, num_in=2),
            proj=Linear.init((), axes, (embed,), key=proj, dtype=dtype),
            norm=RMSNorm.init((), axes[1], config=norm, dtype=dtype),
        )

    def prepare(self, backend: Backend, *, donate: bool = False) -> "LayerInputs":
        """The same maps, stored as `backend` reads them. Args: as in `Linear.prepare`."""
        rows = prepare_rows(self.embeddings, backend, donate=donate)
        return dataclasses.replace(self, embeddings=rows, proj=self.proj.prepare(backend, donate=donate))

    def __call__(
        self, embedded: NamedArray, take_rows: Callable[[Linear], Array], num_rows: Array | None
    ) -> NamedArray:
        """The inputs.

        Args:
            embedded: [..., embed], the embeddings of the tokens with their factor.
            take_rows: the rows of a table for the same tokens, in the dtype of the parameters.
            num_rows: as for `Linear.at`.
        Returns: [depth, ..., layer_input]
        """
        depth, width = self.embeddings.ins
        factor = jnp.asarray(width.size**0.5, self.embeddings.dtype)
        axes = (*embedded.axes[:-1], depth, width)
        tokens = NamedArray(take_rows(self.embeddings).reshape([axis.size for axis in axes]), axes)
        proj = self.proj.at(None, num_rows)
        (states,) = apply(embedded, proj)

        def joined(states: NamedArray, tokens: NamedArray) -> NamedArray:
            states = self.norm(states * jnp.asarray(embedded.resolve_axis(EMBED).size ** -0.5, states.dtype))
            tokens = tokens * factor.astype(embedded.dtype)
            return (states + tokens) * jnp.asarray(2**-0.5, states.dtype)

        return proj.by_rows(joined, states, tokens).rearrange((DEPTH, ...))
