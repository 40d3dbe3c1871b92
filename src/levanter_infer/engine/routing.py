"""Which requests go to which data shard: a function of the requests alone, the same on every host."""

import collections
import heapq
from collections.abc import Sequence

from levanter_infer.engine.request_state import RequestState

_PARTS_PER_SHARD = 4
"""Requests that begin alike stay together, but for sets heavier than this part of a shard's share, which are cut: one
more computation of a common beginning costs less than a shard that waits for the others."""


def expected_tokens(group: RequestState) -> int:
    """Tokens that a request may compute: its prompt once, and what each of its sequences may generate."""
    generated = group.max_len - len(group.prompt_token_ids)
    return len(group.prompt_token_ids) + generated * max(1, len(group.sequences))


def route(groups: Sequence[RequestState], loads: Sequence[int], page_size: int) -> list[int]:
    """The shard of each request.

    Requests whose prompts have the first page in common go to one shard, and the heaviest such set goes first to the
    shard with the least to do (arXiv:1005.5123 calls it LPT: at most 4/3 of the best there is).

    Args:
        loads: expected tokens that each shard has to compute already.
        page_size: tokens that two prompts must begin with to share anything.
    """
    weights = [expected_tokens(group) for group in groups]
    limit = max(1, (sum(loads) + sum(weights)) // (len(loads) * _PARTS_PER_SHARD))
    sets: dict[tuple, list[int]] = collections.defaultdict(list)
    for i, group in enumerate(groups):
        beginning = tuple(group.prompt_token_ids[:page_size])
        alike = len(beginning) == page_size
        sets[(group.root, beginning) if alike else (i,)].append(i)
    chunks = [chunk for members in sets.values() for chunk in _cut(members, weights, limit)]
    chunks.sort(key=lambda chunk: (-sum(weights[i] for i in chunk), chunk[0]))
    heap = [(load, shard) for shard, load in enumerate(loads)]
    heapq.heapify(heap)
    shards = [0] * len(groups)
    for chunk in chunks:
        load, shard = heapq.heappop(heap)
        for i in chunk:
            shards[i] = shard
        heapq.heappush(heap, (load + sum(weights[i] for i in chunk), shard))
    return shards


def _cut(members: list[int], weights: list[int], limit: int) -> list[list[int]]:
    """The members in order, in pieces of at most `limit` or of one member."""
    pieces: list[list[int]] = [[]]
    weight = 0
    for i in members:
        if pieces[-1] and weight + weights[i] > limit:
            pieces.append([])
            weight = 0
        pieces[-1].append(i)
        weight += weights[i]
    return pieces
