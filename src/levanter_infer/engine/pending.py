"""`PendingQueue`: requests that have no slots yet."""

import collections
import heapq
from collections.abc import Iterator

from levanter_infer.engine.request_state import RequestState


class PendingQueue:
    """Groups by priority, smallest number first, and within one priority in the order in which they came."""

    def __init__(self):
        self._by_priority: dict[int, collections.deque[RequestState]] = {}
        self._priorities: list[int] = []  # a heap of the keys
        self.num_sequences = 0
        """Of all groups."""

    def push(self, group: RequestState) -> None:
        if group.priority not in self._by_priority:
            self._by_priority[group.priority] = collections.deque()
            heapq.heappush(self._priorities, group.priority)
        self._by_priority[group.priority].append(group)
        self.num_sequences += len(group.sequences)

    @property
    def first(self) -> RequestState:
        """Requires: there is one."""
        return self._by_priority[self._priorities[0]][0]

    def pop(self) -> RequestState:
        """Take out the first. Requires: there is one."""
        group = self._by_priority[self._priorities[0]].popleft()
        self.num_sequences -= len(group.sequences)
        self._drop_empty()
        return group

    def discard(self, group: RequestState) -> None:
        """Take out this one, if it is there."""
        groups = self._by_priority.get(group.priority)
        if groups is not None and group in groups:
            groups.remove(group)
            self.num_sequences -= len(group.sequences)
            self._drop_empty()

    def groups(self) -> Iterator[RequestState]:
        for priority in sorted(self._priorities):
            yield from self._by_priority[priority]

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def _drop_empty(self) -> None:
        """Forget priorities that nobody has, as far as they are the first."""
        while self._priorities and not self._by_priority[self._priorities[0]]:
            del self._by_priority[heapq.heappop(self._priorities)]
