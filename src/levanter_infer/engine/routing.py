"""Routing of requests to data-parallel ranks: a function of the requests alone, the same on every host."""

import collections
import heapq
from collections.abc import Sequence

from levanter_infer.engine.request_state import RequestState

_PARTS_PER_RANK = 4
"""Requests with a common prefix stay on one rank, except sets heavier than this fraction of a rank's share, which are
cut: computing a common prefix once more costs less than a rank that waits for the others."""


def expected_tokens(request: RequestState) -> int:
    """Tokens that a request may compute: its prompt once, and what each of its samples may generate."""
    generated = request.max_len - len(request.prompt_token_ids)
    return len(request.prompt_token_ids) + generated * max(1, len(request.sequences))


def route(requests: Sequence[RequestState], loads: Sequence[int], page_size: int) -> list[int]:
    """The rank of each request.

    Requests whose prompts share the first page go to one rank. The heaviest such set goes first, to the rank with the
    least load (arXiv:1005.5123 calls it LPT: at most 4/3 of the optimum).

    Args:
        loads: expected tokens that each rank has still to compute.
        page_size: length of the shortest prefix that two prompts can share.
    """
    weights = [expected_tokens(request) for request in requests]
    limit = max(1, (sum(loads) + sum(weights)) // (len(loads) * _PARTS_PER_RANK))
    sets: dict[tuple, list[int]] = collections.defaultdict(list)
    for i, request in enumerate(requests):
        prefix = tuple(request.prompt_token_ids[:page_size])
        sets[(request.root, prefix) if len(prefix) == page_size else (i,)].append(i)
    parts = [part for members in sets.values() for part in _cut(members, weights, limit)]
    parts.sort(key=lambda part: (-sum(weights[i] for i in part), part[0]))
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    ranks = [0] * len(requests)
    for part in parts:
        load, rank = heapq.heappop(heap)
        for i in part:
            ranks[i] = rank
        heapq.heappush(heap, (load + sum(weights[i] for i in part), rank))
    return ranks


def _cut(members: list[int], weights: list[int], limit: int) -> list[list[int]]:
    """The members in order, in parts of a weight of at most `limit`, or of one member."""
    parts: list[list[int]] = [[]]
    weight = 0
    for i in members:
        if parts[-1] and weight + weights[i] > limit:
            parts.append([])
            weight = 0
        parts[-1].append(i)
        weight += weights[i]
    return parts
