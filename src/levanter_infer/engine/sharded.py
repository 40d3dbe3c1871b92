"""Several data shards behind the interface of one: each has slots, tables and a loop of its own."""

from collections.abc import Sequence as Many
from typing import Any

import jax
import numpy as np

from levanter_infer.decode.admission import Admission
from levanter_infer.decode.outputs import HostOutputs, RoundOutputs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.routing import expected_tokens, route
from levanter_infer.engine.sequence import Group, Sequence
from levanter_infer.engine.slots import SlotManager, empty_admission

_OF_ALL = ("refs_max",)
"""Scalars of a round of which the largest counts; of the others the sum."""


class ShardedOutputs:
    """What a round of several shards has brought."""

    def __init__(self, outputs: RoundOutputs, shapes: Shapes, num_shards: int):
        self.shards = [HostOutputs(outputs, shapes, shard) for shard in range(num_shards)]
        scalars = [shard.scalars for shard in self.shards]
        self.scalars = {name: (max if name in _OF_ALL else sum)(s[name] for s in scalars) for name in scalars[0]}
        """Of all shards together."""

    @property
    def steps(self) -> list[int]:
        """Steps of each shard since the last reset."""
        return [shard.scalars["steps"] for shard in self.shards]


class ShardedSlots:
    """`SlotManager` for several shards: decides which one serves a request, and then asks that one's.

    Where a request waits at first depends on the requests alone (`routing.route`). Before a round, shards with slots
    for which nobody waits are given who waits first at shards that have none. That is decided from what the rounds have
    brought, and so alike on every host.
    """

    def __init__(self, shapes: Shapes, eos_token_ids: tuple[int, ...], num_shards: int):
        self._managers = [SlotManager(shapes, eos_token_ids) for _ in range(num_shards)]
        self._groups: list[Group] = []
        self._empty = jax.tree.map(np.asarray, empty_admission(shapes))

    @property
    def shapes(self) -> Shapes:
        return self._managers[0].shapes

    @shapes.setter
    def shapes(self, value: Shapes) -> None:
        self._empty = jax.tree.map(np.asarray, empty_admission(value))
        for manager in self._managers:
            manager.shapes = value

    def route(self, groups: Many[Group]) -> None:
        """Decide at once where these go, before they are added."""
        self._groups = [group for group in self._groups if not group.is_done]
        loads = [0] * len(self._managers)
        for group in self._groups:
            assert group.shard is not None
            loads[group.shard] += expected_tokens(group)
        for group, shard in zip(groups, route(groups, loads, self.shapes.page_size), strict=True):
            group.shard = shard
        self._groups += groups

    def add(self, group: Group, now: float) -> None:
        if group.shard is None:
            self.route([group])
        self.of(group).add(group, now)

    def discard(self, group: Group) -> None:
        self.of(group).discard(group)

    def of(self, group: Group) -> SlotManager:
        """The slots of the shard that serves this group."""
        assert group.shard is not None, "it was never added"
        return self._managers[group.shard]

    def expire(self, now: float) -> list[Sequence]:
        due = [group for manager in self._managers for group in manager.take_due(now)]
        return [sequence for group in due for sequence in self.of(group).end(group)]

    def abandon(self) -> None:
        for manager in self._managers:
            manager.abandon()

    def next_admission(self, round_id: int, max_steps: int) -> dict[str, Any]:
        """As of one shard, with a leading axis of shards."""
        self._level()
        of_shards = [manager.next_admission(round_id, max_steps) for manager in self._managers]
        names = {name for fields in of_shards for name in fields}
        return {
            name: _stacked([fields.get(name, getattr(self._empty, name)) for fields in of_shards])
            for name in sorted(names)
        }

    def _level(self) -> None:
        """Let who waits where there is no room wait where there is most, one after the other."""
        while True:
            taker = max(self._managers, key=lambda manager: manager.room)
            waiting = [(manager, manager.first_waiting) for manager in self._managers if manager.room < 0]
            fitting = [(m, group) for m, group in waiting if group is not None and len(group.sequences) <= taker.room]
            if not fitting:
                return
            donor, _ = min(fitting, key=lambda pair: (pair[1].priority, pair[0].room))
            donor.hand_over(taker).shard = self._managers.index(taker)

    def collect(self, outputs: ShardedOutputs, round_id: int, version: int) -> list[Sequence]:
        pairs = zip(self._managers, outputs.shards, strict=True)
        return [sequence for manager, shard in pairs for sequence in manager.collect(shard, round_id, version)]

    def searches(self, outputs: ShardedOutputs, round_id: int, version: int) -> list[Group]:
        pairs = zip(self._managers, outputs.shards, strict=True)
        return [group for manager, shard in pairs for group in manager.searches(shard, round_id, version)]

    def take_leaving(self) -> list[tuple[Group, int]]:
        return [pair for manager in self._managers for pair in manager.take_leaving()]

    def groups(self) -> list[Group]:
        return [group for manager in self._managers for group in manager.groups()]

    def roots(self) -> np.ndarray:
        """As of one shard, with a leading axis of shards."""
        return np.stack([manager.roots() for manager in self._managers])

    @property
    def admits(self) -> bool:
        return all(manager.admits for manager in self._managers)

    @admits.setter
    def admits(self, value: bool) -> None:
        for manager in self._managers:
            manager.admits = value

    @property
    def occupants(self) -> list[Sequence]:
        return [sequence for manager in self._managers for sequence in manager.occupants]

    @property
    def has_prompts(self) -> bool:
        return any(manager.has_prompts for manager in self._managers)

    @property
    def is_short(self) -> bool:
        return any(manager.is_short for manager in self._managers)

    @property
    def is_idle(self) -> bool:
        return all(manager.is_idle for manager in self._managers)


def _stacked(parts: list):
    """Trees of arrays, one behind the other along a new first axis of shards."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *parts)


def stacked_admission(shapes: Shapes, num_shards: int) -> Admission:
    """`empty_admission` of several shards."""
    return _stacked([empty_admission(shapes)] * num_shards)


def make_slots(shapes: Shapes, eos_token_ids: tuple[int, ...], num_shards: int) -> SlotManager:
    """Who has which slot, on one shard or on several."""
    if num_shards == 1:
        return SlotManager(shapes, eos_token_ids)
    return ShardedSlots(shapes, eos_token_ids, num_shards)  # type: ignore[return-value]


def make_nothing(shapes: Shapes, num_shards: int) -> Admission:
    """The admission that admits nothing."""
    return empty_admission(shapes) if num_shards == 1 else stacked_admission(shapes, num_shards)


def read_outputs(outputs: RoundOutputs, shapes: Shapes, num_shards: int) -> HostOutputs:
    """What a round has brought."""
    if num_shards == 1:
        return HostOutputs(outputs, shapes)
    return ShardedOutputs(outputs, shapes, num_shards)  # type: ignore[return-value]


def told_one_shard(fields: tuple[np.ndarray, ...], shard: int | None, num_shards: int) -> tuple[np.ndarray, ...]:
    """Arguments of a program for one shard, beside zeros for the others. Args: shard: None where there is only one."""
    if num_shards == 1:
        return fields
    return tuple(np.stack([field * (i == shard) for i in range(num_shards)]) for field in fields)


class ShardSteps:
    """How evenly the shards have worked: a shard that has nothing left waits for the end of the round."""

    def __init__(self, num_shards: int):
        self._last = np.zeros(num_shards, np.int64)
        self.idle = np.zeros(num_shards, np.int64)
        """Steps that each shard has stood still while another one went on."""
        self.total = 0
        """Steps of the longest in each round, added up."""
        self.last = [0] * num_shards
        """Of each shard in the last round."""

    def on_round(self, steps: list[int]) -> int:
        """Args: steps: of each shard since the last reset. Returns: steps of the shard that had most in this round."""
        now = np.asarray(steps, np.int64)
        done = (now - self._last) % 2**32
        self._last = now
        longest, self.last = int(done.max()), done.tolist()
        self.total += longest
        self.idle += longest - done
        return longest

    def on_reset(self) -> None:
        """The device's counters start again at zero."""
        self._last[:] = 0

    @property
    def idle_shares(self) -> dict[str, float]:
        """Of each shard."""
        return {str(shard): int(idle) / max(1, self.total) for shard, idle in enumerate(self.idle)}
