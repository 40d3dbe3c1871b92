"""The rotary embedding of a live model, read from the module that rotates its queries and keys.

A configuration's name does not say the formula: releases of Levanter differ in what `YarnRotaryEmbeddings` computes,
and differ from HF there. So the module itself is called, its frequencies are taken from what it returns, and what is
written down in HF's terms is compared with it again at positions and vectors that were not used for that.
"""

from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from levanter_infer.axes import HEAD_SIZE, POSITION
from levanter_infer.layers.rotary import RopeConfig, frequencies, rotary_tables, rotate
from levanter_infer.models.hf_config import HfConfig

_DOUBLINGS = 13
"""Positions 1, 2, 4, ... at which frequencies are read: exact matmuls in float32, and small enough arguments."""
_SAME = 2e-6
"""Relative difference of frequencies that are taken for equal: a few roundings of float32."""


def live_rope(module, config, head_dim: int, max_len: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of config.json, with which a checkpoint rotates as `module` does.

    HF's kind where it is the same, and otherwise `longrope` with one divisor per frequency, the form in which HF can
    write any frequencies.

    Args:
        module: called with (queries, position ids), as Levanter's `RotaryEmbeddings`.
        config: its configuration, for its theta and kind (`to_hf_config`).
        max_len: tokens of the longest sequence.
    Raises: ValueError if the module does something else than turning pairs by position · frequency.
    """
    inv_freq, scale = _read(module, head_dim)
    theta, scaling = config.to_hf_config() if hasattr(config, "to_hf_config") else (1e4, None)
    scaling = dict(scaling) if scaling else None
    if scaling and not {"type", "rope_type"} & set(scaling):
        scaling["rope_type"] = "linear"
    keys = {"rope_theta": float(theta), "rope_scaling": scaling}
    rope = _parsed(keys, head_dim, max_len)
    if rope is None or not _is_same(rope, inv_freq, scale, head_dim, max_len):
        base, _ = frequencies(RopeConfig(theta=float(theta)), head_dim, max_len)
        with np.errstate(divide="ignore"):  # what does not turn is refused below
            divisors = (base.astype(np.float64) / inv_freq).tolist()
        keys["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": scale,
        }
        rope = _parsed(keys, head_dim, max_len)
    if rope is None or not _rotates_alike(module, rope, head_dim, max_len):
        raise ValueError(
            f"the model's rotary embedding is {_name(module)}, which does not turn pairs (i, i + head_size / 2) by "
            "position · frequency; models with other position embeddings are not implemented"
        )
    return keys


def check_rope(module, rope: RopeConfig, head_dim: int, max_len: int) -> None:
    """Raises: ValueError if `rope`, which the caller gave, is not what the model's own module computes."""
    if not _rotates_alike(module, rope, head_dim, max_len):
        raise ValueError(
            f"config= says rope {rope.kind!r} with theta={rope.theta:g}, and the model's own {_name(module)} rotates "
            "otherwise; leave config= out to sample from the model as it is, or correct the model's config.rope"
        )


def _read(module, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position f64[head_dim / 2], and the factor on cos and sin."""
    positions = 2 ** np.arange(_DOUBLINGS)
    first = np.zeros((len(positions), head_dim), np.float32)
    first[:, : head_dim // 2] = 1
    cos, sin = np.split(_called(module, first, positions).astype(np.float64), 2, axis=-1)
    scale = float(np.float32(np.hypot(cos, sin).mean()))
    angles = np.arctan2(sin, cos)
    inv_freq = angles[0]
    for position, angle in zip(positions[1:], angles[1:], strict=True):
        rest = (angle - inv_freq * position + np.pi) % (2 * np.pi) - np.pi
        inv_freq = inv_freq + rest / position
    return inv_freq.astype(np.float32).astype(np.float64), scale


def _called(module, vectors: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Result of the module for f32[position, head_size]; computed at once, also while a caller is traced."""
    position, size = Axis(POSITION, len(positions)), Axis(HEAD_SIZE, vectors.shape[-1])
    with jax.ensure_compile_time_eval():
        queries = hax.named(jnp.asarray(vectors, jnp.float32), (position, size))
        try:
            turned = module(queries, hax.named(jnp.asarray(positions, jnp.int32), position))
            return np.asarray(turned.rearrange((position, size)).array, np.float32)
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"the model's rotary embedding is {_name(module)}, which cannot be called with queries and positions "
                f"({type(error).__name__}: {str(error)[:200]}); expected one of Levanter's RotaryEmbeddings"
            ) from error


def _parsed(keys: Mapping[str, Any], head_dim: int, max_len: int) -> RopeConfig | None:
    try:
        return HfConfig(keys).rope(head_dim, max_len)
    except ValueError:
        return None


def _is_same(rope: RopeConfig, inv_freq: np.ndarray, scale: float, head_dim: int, max_len: int) -> bool:
    expected, factor = frequencies(rope, head_dim, max_len)
    both = np.append(expected, factor), np.append(inv_freq, scale)
    return np.allclose(*both, rtol=_SAME, atol=0)


def _rotates_alike(module, rope: RopeConfig, head_dim: int, max_len: int) -> bool:
    """Whether random vectors are turned alike, at random positions up to `max_len`."""
    rng = np.random.default_rng(0)
    positions = np.sort(rng.integers(0, max(max_len, 2), 64))
    vectors = rng.standard_normal((64, head_dim)).astype(np.float32)
    theirs = _called(module, vectors, positions)
    with jax.ensure_compile_time_eval():
        position = Axis(POSITION, 64)
        tables = rotary_tables(rope, head_dim, hax.named(jnp.asarray(positions, jnp.int32), position), max_len)
        ours = rotate(hax.named(jnp.asarray(vectors), (position, Axis(HEAD_SIZE, head_dim))), *tables)
    # An angle is rounded when it is multiplied, so it is less exact the further the position.
    bound = (1e-5 + 4e-7 * positions[:, None]) * np.abs(vectors).max() * max(1.0, np.abs(theirs).max())
    return bool((np.abs(theirs - np.asarray(ours.array)) <= bound).all())


def _name(module) -> str:
    return type(module).__name__
