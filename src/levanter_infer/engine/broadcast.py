"""Weights from another process: every process of `jax.distributed` calls, and one of them has the weights."""

import jax
import numpy as np
from haliax import NamedArray
from jax.experimental import multihost_utils

from levanter_infer.checkpoints.load import StoredModel
from levanter_infer.layers.layout import Layout
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.live import from_levanter
from levanter_infer.models.tensors import quantize_parameter, set_parameter
from levanter_infer.runtime.hosts import Hosts, agree


def send_weights(model, hosts: Hosts) -> None:
    """Broadcast a model to the processes that swap to `received_weights`, a parameter at a time.

    Every process of `jax.distributed` must take part at the same time, one with this call, and only one; it waits for
    the others.

    Args:
        model: as `InferenceEngine` takes it; its arrays belong to this process alone.
        hosts: all processes, of `runtime.multihost.joined`.
    Raises: ValueError in all processes if the models differ in size, dtype or form.
    """
    model = from_levanter(model)
    agree(hosts, "weights", _types(model))
    for leaf in jax.tree.leaves(model):
        multihost_utils.broadcast_one_to_all(np.asarray(leaf), is_source=True)


def received_weights(engine, hosts: Hosts) -> StoredModel:
    """Weights that another process broadcasts, for `engine.swap_weights`: received when the engine has given up its old
    weights, so that beside the new ones there is one parameter more. An engine with `weight_dtype` quantizes each when
    it has come.

    Requires: the sender's model has the sizes and dtypes of the engine's, and form (both from a checkpoint, or live).
    """
    types = engine.runner.types

    agree(hosts, "weights", _types(types))

    def received(leaf) -> jax.Array:
        return jax.numpy.asarray(multihost_utils.broadcast_one_to_all(np.zeros(leaf.shape, leaf.dtype)))

    def read(layout: Layout | None = None, quantizes: bool = False) -> DecoderModel:
        model = types
        for path, parameter in jax.tree_util.tree_leaves_with_path(
            types, is_leaf=lambda part: isinstance(part, NamedArray)
        ):
            name = ".".join(str(getattr(key, "name", getattr(key, "idx", None))) for key in path)
            model = set_parameter(model, name, jax.tree.map(received, parameter))
            model = quantize_parameter(model, name) if quantizes else model
        return model

    return StoredModel(types, read)


def _types(model) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{[*leaf.shape]}" for path, leaf in leaves}
