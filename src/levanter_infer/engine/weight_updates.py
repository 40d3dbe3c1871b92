"""Weight updates, on the host: what is checked, and what requests need to know of other weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from haliax import NamedArray

from levanter_infer.checkpoints.load import StoredModel, open_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.engine.intake import Intake
from levanter_infer.engine.kv_offload import KvOffload
from levanter_infer.engine.params import brief
from levanter_infer.engine.request_state import SampleState
from levanter_infer.engine.runner import Runner
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.models.blocks import differences
from levanter_infer.models.live import from_levanter
from levanter_infer.models.protocol import Model
from levanter_infer.policies import WeightSwapPolicy


def checked_policy(policy) -> WeightSwapPolicy:
    """Raises: ValueError for no policy."""
    if not isinstance(policy, str) or policy not in list(WeightSwapPolicy):
        raise ValueError(f"policy={brief(policy)}: expected one of {', '.join(WeightSwapPolicy)}")
    return WeightSwapPolicy(policy)


def checked_version(version, current: int, runner: Runner) -> int:
    """The number of new weights; None is the next one. Raises: ValueError for no number, or for that of the weights in
    use. Weights that were given up may come back under their number."""
    if version is None:
        version = current + 1
    if isinstance(version, bool) or not isinstance(version, (int, np.integer)) or not 0 <= version < 2**31:
        raise ValueError(f"version={brief(version)}: expected a whole number from 0 to 2^31 - 1")
    if version == current and runner.model is not None:
        raise ValueError(f"version={version} names the weights in use; give other weights another number")
    return int(version)


def check_weights_are_there(runner: Runner, running: list[SampleState]) -> None:
    """Raises: ValueError if sequences have to end with weights that have been deleted."""
    if running and not runner.has_weights:
        raise ValueError(
            'policy="drain" needs the weights in use, and they have been deleted: their arrays, which the engine '
            "shares, were donated elsewhere, or the last swap_weights failed; drain before that, or use keep_kv or "
            "recompute"
        )


def update_roots(runner: Runner, scheduler: Scheduler, offload: KvOffload, intake: Intake, *, recompute: bool) -> None:
    """Give requests the prefix-cache roots of the new weights, on the host and on the device.

    Requires: no round is in flight, and `intake` has the new version.
    """
    for request in scheduler.requests():
        request.root = intake.root(request)
        if recompute or not request.is_loose:
            offload.begin_anew(request)
    roots = scheduler.roots()
    swapped = np.zeros(roots.shape, bool)
    swapped[..., offload.swapped_slots()] = True  # with several ranks there are none
    runner.on_weight_update(roots, swapped, recompute=recompute)


def new_weights(types, model, adapter: str | Path | None = None) -> "Model | StoredModel":
    """Weights given to `swap_weights`, as the runner takes them; checkpoints are opened, and of their
    weights only a head that has to equal the embeddings is read.

    Raises: ValueError unless it has the configuration, shapes and dtypes of `types`; as `load_model`, `from_levanter`.
    """
    if isinstance(model, str | Path):
        model = open_model(resolve_source(model, adapter=adapter), dtype=np.dtype(types.dtype))
    elif adapter is not None:
        raise ValueError("swap_weights was given an adapter for weights in memory; give the checkpoint of its base")
    if isinstance(model, StoredModel):
        check_same_types(types, model.types)
        return model
    model = from_levanter(model)
    check_same_types(types, model)
    for name, array in _named(model).items():
        if not isinstance(array, np.ndarray | jax.Array) or (isinstance(array, jax.Array) and array.is_deleted()):
            got = "deleted, or donated to another program" if isinstance(array, jax.Array) else type(array).__name__
            raise ValueError(f"swap_weights was given a model whose {name} is {got}; expected arrays in memory")
    return model


def check_same_types(types, model) -> None:
    """Raises: ValueError unless `model` has the configuration, shapes and dtypes of `types`."""
    differing = differences(types.config, model.config)
    if not differing:
        differing = [] if model.is_packed else _differing(types, model)
        if not differing and jax.tree.structure(types) != jax.tree.structure(model):
            differing = ["it is not in the form in which it was loaded or trained"]
    if differing:
        raise ValueError(
            f"swap_weights was given another model: {'; '.join(differing[:4])}; the programs are compiled for one "
            "architecture, make another engine for this one"
        )


def _differing(old, new) -> list[str]:
    def types(tree) -> dict[str, str]:
        return {name: f"{array.dtype}{[*array.shape]}" for name, array in _named(tree).items()}

    before, now = types(old), types(new)
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _named(tree) -> dict[str, Any]:
    """The arrays of a tree, or what stands in their place, by dotted name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): getattr(leaf, "array", leaf) for path, leaf in leaves
    }
