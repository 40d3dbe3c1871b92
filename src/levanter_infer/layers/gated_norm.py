"""A norm whose result is gated by a small map of itself."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import NORM_GATE
from levanter_infer.layers.linear import Linear, apply, fold_key, split_key
from levanter_infer.layers.norm import ByRows, NormConfig, RMSNorm


class GatedNorm(RMSNorm):
    """`y · sigmoid(gate_up(silu(gate_down(y))))`, where y is the norm of x (GrugMoE)."""

    gate_down: Linear = eqx.field(kw_only=True)
    """[layers, norm_gate, embed]"""
    gate_up: Linear = eqx.field(kw_only=True)
    """[layers, embed, norm_gate]"""

    def at(self, layer: Array | None, num_rows: Array | None = None) -> "GatedNorm":
        """The norm of one layer of a stack, for inputs whose first `num_rows` rows count."""
        down, up = (part.at(layer, num_rows) for part in (self.gate_down, self.gate_up))
        return dataclasses.replace(self, layer=layer, gate_down=down, gate_up=up)

    @property
    def fusable(self) -> None:
        """None: no kernel computes the gate."""
        return None

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: [..., embed]"""

        def activated(down: NamedArray) -> NamedArray:
            return NamedArray(jax.nn.silu(down.array.astype(jnp.float32)).astype(x.dtype), down.axes)

        def gated(normed: NamedArray, gate: NamedArray) -> NamedArray:
            return (normed.astype(jnp.float32) * NamedArray(jax.nn.sigmoid(gate.array), gate.axes)).astype(x.dtype)

        rows = self.gate_down.by_rows
        normed = rows(super().__call__, x)
        (down,) = apply(normed, self.gate_down)
        (gate,) = apply(rows(activated, down), self.gate_up, dtype=jnp.float32)
        return rows(gated, normed, gate)

    def by_rows(self, x: NamedArray, rows: ByRows) -> NamedArray:
        """`RMSNorm.by_rows`; the matmuls compute all rows together."""
        return self(x)


def init_norm(
    batch: Sequence[Axis], embed: Axis, config: NormConfig, *, key: Array | None, dtype, number: int = 0
) -> RMSNorm:
    """A norm of hidden states that changes nothing but their scale, with random maps of its gate if it has one.

    Args:
        batch: axes of independent layers.
        number: which of the norms that have this key.
    """
    norm = RMSNorm.init(batch, embed, config=config, dtype=dtype)
    if config.gate_rank is None:
        return norm
    rank = Axis(NORM_GATE, config.gate_rank)
    down_key, up_key = split_key(fold_key(key, 100 + number), 2)
    return GatedNorm(
        **{field.name: getattr(norm, field.name) for field in dataclasses.fields(norm)},
        gate_down=Linear.init(batch, (rank,), (embed,), key=down_key, dtype=dtype),
        gate_up=Linear.init(batch, (embed,), (rank,), key=up_key, dtype=dtype),
    )
