"""The host's side of `swap_weights`: other weights for an engine that goes on."""

import abc
import dataclasses
from typing import Any

import jax
import numpy as np
from haliax import NamedArray

from levanter_infer.decode.programs import Programs
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.coordination import RoundCoordinator
from levanter_infer.engine.intake import Intake
from levanter_infer.engine.kv_offload import KvOffload
from levanter_infer.engine.params import brief
from levanter_infer.engine.request_state import SampleState
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.engine.stats import Stats
from levanter_infer.engine.turns import Turns, exclusive
from levanter_infer.engine.uploads import without_ranks
from levanter_infer.models.live import from_levanter

POLICIES = ("drain", "keep_kv", "recompute")


class Versions(abc.ABC):
    """What `InferenceEngine` can do with the weights of a model that is being trained."""

    model: Any
    state: Any
    programs: Programs
    backend: Backend
    version: int = 0
    """Of the weights that the next round uses."""
    _types: Any
    _scheduler: Scheduler
    _offload: KvOffload
    _coordinator: RoundCoordinator
    _intake: Intake
    _stats: Stats
    _known: list[SampleState]
    _turns: Turns

    @abc.abstractmethod
    def _is_in_progress(self) -> bool: ...

    @abc.abstractmethod
    def _flush(self) -> list[SampleState]:
        """Read the round in flight, if there is one."""

    @abc.abstractmethod
    def step_round(self, *, max_steps: int | None = None) -> list[SampleState]: ...

    @exclusive
    def swap_weights(self, model, *, version: int | None = None, policy: str = "drain", donate: bool = False) -> None:
        """Sample with other weights from the next round on. The pool stays, and nothing is compiled again.

        The round in flight is read first. The engine gives up its old weights before it lays out the new ones, so
        there is never a third copy; where it shares the arrays of the model (`from_levanter`), nothing is moved at all,
        and they must live until the next swap.

        Args:
            model: as for `InferenceEngine`, with the same sizes and dtype. Arrays that lie on other devices, or
                otherwise spread over them, are moved to where the old ones lie.
            version: names these weights, from 0 to 2^31 - 1; the next number by default. Pages are found only by
                requests of the version that computed them: who comes back to an earlier number brings the same weights
                again, and finds what is left of its pages.
            policy: what becomes of the sequences that are on the device. `drain`: they end first, with the old weights;
                requests that wait begin with the new ones. `keep_kv`: they go on at once from the keys and values that
                the old weights have computed, and share no pages with others from then on. `recompute`: they keep
                their tokens and compute keys and values anew.
            donate: the engine may delete the model's arrays as it lays out its own.
        Raises: ValueError if the model is another one, or an argument is none; nothing has changed then.
        """
        version = self._checked_version(version)
        if policy not in POLICIES:
            raise ValueError(f"policy={brief(policy)}: expected one of {', '.join(POLICIES)}")
        model = from_levanter(model)
        check_same_types(self._types, model)
        self._coordinator.on_input({"weights": np.asarray([version, POLICIES.index(policy)])})
        if policy == "drain":
            self._check_weights_are_there()
            self._drain_running()
        self._known += self._flush()
        self._intake.version = version
        self._enter_version(recompute=policy == "recompute")
        places = jax.tree.map(lambda leaf: leaf.sharding, self.model)
        self.model = None  # its memory may be needed for the new one
        prepared = self.backend.prepare(model, donate=donate)
        self.model = jax.tree.map(_placed, prepared, places)
        self.version = version
        self._stats.registry.add("weight_swaps", 1)
        self._stats.registry.set("weights_version", version)

    def _checked_version(self, version) -> int:
        if version is None:
            version = self.version + 1
        if isinstance(version, bool) or not isinstance(version, (int, np.integer)) or not 0 <= version < 2**31:
            raise ValueError(f"version={brief(version)}: expected a whole number from 0 to 2^31 - 1")
        if version == self.version:
            raise ValueError(f"version={version} names the weights in use; give other weights another number")
        return int(version)

    def _check_weights_are_there(self) -> None:
        if self._scheduler.active and any(leaf.is_deleted() for leaf in jax.tree.leaves(self.model)):
            raise ValueError(
                'policy="drain" needs the weights in use, and they have been deleted: their arrays, which the engine '
                "shares, were donated to somebody else; drain before that, or use keep_kv or recompute"
            )

    def _drain_running(self) -> None:
        """Let everybody end who has a slot, and nobody begin."""
        known = self._flush()
        self.state = self._offload.recall(self.programs.tier, self.state)
        self._scheduler.admits = False
        try:
            while self._scheduler.active:
                known += self.step_round()
        finally:
            self._scheduler.admits = True
            self._known = known + self._known

    def _enter_version(self, *, recompute: bool) -> None:
        for group in self._scheduler.requests():
            group.root = self._intake.root(group)
            if recompute or not group.is_loose:
                self.state = self._offload.begin_anew(self.programs.tier, self.state, group)
        roots = self._scheduler.roots()
        swapped = np.zeros(roots.shape, bool)
        swapped[..., self._offload.swapped_slots()] = True  # pages are offloaded with one rank only
        of_ranks = (roots, swapped, np.full(roots.shape[:-1], recompute))
        arguments = self.backend.put(without_ranks(of_ranks, self.backend.num_shards))
        decode = self.programs.on_weight_update(self.state.decode, *arguments)
        self.state = dataclasses.replace(self.state, decode=decode)


def check_same_types(types, model) -> None:
    """Raises: ValueError unless `model` has the configuration, shapes and dtypes of `types`."""
    own, other = dataclasses.asdict(types.config), dataclasses.asdict(model.config)
    differing = [f"{name} was {own[name]!r} and is {other[name]!r}" for name in own if own[name] != other[name]]
    if not differing:
        differing = _differing(types, model)
        if not differing and jax.tree.structure(types) != jax.tree.structure(model):
            differing = ["it is not in the form in which it was loaded or trained"]
    if differing:
        raise ValueError(
            f"swap_weights was given another model: {'; '.join(differing[:4])}; the programs are compiled for one "
            "architecture, make another engine for this one"
        )


def _differing(old, new) -> list[str]:
    def named(tree) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
        return {
            jax.tree_util.keystr(
                path, simple=True, separator="."
            ): f"{leaf.dtype}{[*getattr(leaf, 'array', leaf).shape]}"
            for path, leaf in leaves
        }

    before, now = named(old), named(new)
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _placed(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
