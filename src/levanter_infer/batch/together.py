"""A job on one mesh over several processes: process 0 reads and writes the job's directory, and all compute.

All processes read the same rows in the same order. Which shards are worked on, and which of their rows are finished,
only process 0 knows: it tells the others shard by shard, as it claims them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from levanter_infer.batch.plan import InputShard, Plan
from levanter_infer.batch.shard import OpenShard
from levanter_infer.runtime.hosts import Hosts


class FollowedShard:
    """A shard that another process writes.

    Args:
        finished: rows that were finished when it was claimed.
    """

    def __init__(self, source: InputShard, finished: Iterable[int]):
        self.source, self._finished = source, set(finished)
        self.found = len(self._finished)

    def __contains__(self, row: int) -> bool:
        return row in self._finished

    @property
    def is_complete(self) -> bool:
        return len(self._finished) == self.source.rows

    def finish(self, row: int, outputs: Sequence[Mapping[str, Any]]) -> None:
        self._finished.add(row)

    def commit(self) -> None:
        pass

    def leave(self) -> None:
        pass


def told(hosts: Hosts, shards: Iterator[OpenShard]) -> Iterator[OpenShard]:
    """The shards, each told to the others as it is claimed."""
    place = f"claims/{hosts.fresh('claims')}"
    number = 0
    for shard in shards:
        finished = [row for row in range(shard.source.rows) if row in shard]
        hosts.announce(f"{place}/{number}", [shard.source.index, finished])
        number += 1
        yield shard
    hosts.announce(f"{place}/{number}", None)


def followed(hosts: Hosts, plan: Plan) -> Iterator[FollowedShard]:
    """The shards that process 0 has claimed. Raises: HostLost."""
    place = f"claims/{hosts.fresh('claims')}"
    number = 0
    while (claim := hosts.hear(f"{place}/{number}", math.inf)) is not None:
        index, finished = claim
        number += 1
        yield FollowedShard(plan.shards[index], finished)
