"""`Timeline`: arrivals, tokens and rounds of one run, with its phases, spikes and latencies."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

PHASES = ("ramp", "steady", "tail")


@dataclasses.dataclass(frozen=True)
class Round:
    """One round, at the time when its outputs were read. Times in seconds, `end` since the start of the run."""

    end: float
    seconds: float
    """Seconds since the round before was read, or since the engine was busy again."""
    steps: int
    prompt_steps: int
    """Steps that computed prompt tokens."""
    tokens: int
    decoding: int
    """Sequences between their first and their last token."""
    others_s: float | None = None
    """Processor time of other processes meanwhile, if known."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


@dataclasses.dataclass
class Timeline:
    """One run: arrival times of requests, times at which tokens were seen, and rounds. Seconds since the start."""

    arrivals: list[float]
    token_times: list[list[float]]
    token_ids: list[list[int]]
    rounds: list[Round]

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.token_times)

    @property
    def tokens(self) -> int:
        return sum(len(times) for times in self.token_times)

    @property
    def tokens_per_s(self) -> float:
        """Over the whole run, from the start to the last token."""
        return self.tokens / self.seconds

    def first_token_s(self) -> list[float]:
        """Per request, from its arrival to its first token."""
        return [times[0] - arrival for times, arrival in zip(self.token_times, self.arrivals, strict=True)]

    def inter_token_s(self) -> list[float]:
        """Gaps between consecutive tokens of a request, as seen: 0 for tokens of one round."""
        return [gap for times in self.token_times for gap in np.diff(times).tolist()]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a run."""

    rounds: int
    seconds: float
    tokens: int

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


def bounds(timeline: Timeline) -> tuple[float, float]:
    """Start and end of the steady phase; equal if there is none.

    Before it, sequences only begin: it starts when as many decode as in the median moment of the run. After it, they
    only end: it ends with the last first token of a request.
    """
    last_begins = max(times[0] for times in timeline.token_times)
    usual = _median_over_time(timeline.rounds)
    full = next((r.end for r in timeline.rounds if r.decoding >= usual), last_begins)
    return min(full, last_begins), last_begins


def _median_over_time(rounds: Sequence[Round]) -> int:
    """Number of decoding sequences in the median moment."""
    ordered = sorted(rounds, key=lambda r: r.decoding)
    half = sum(r.seconds for r in rounds) / 2
    passed = 0.0
    for r in ordered:
        passed += r.seconds
        if passed >= half:
            return r.decoding
    return 0


def phases(timeline: Timeline) -> dict[str, Phase]:
    """`ramp`, `steady` and `tail`; together they are the run."""
    begin, end = bounds(timeline)
    edges = [0.0, begin, end, timeline.seconds]
    rounds = np.array([r.end for r in timeline.rounds])
    tokens = np.array([time for times in timeline.token_times for time in times])

    def count(times: np.ndarray, low: float, high: float) -> int:
        return int(np.sum((times > low) & (times <= high)))

    return {
        name: Phase(count(rounds, low, high), high - low, count(tokens, low, high))
        for name, low, high in zip(PHASES, edges[:-1], edges[1:], strict=True)
    }


def in_steady(timeline: Timeline) -> list[Round]:
    begin, end = bounds(timeline)
    return [r for r in timeline.rounds if begin < r.end <= end]


def spikes(rounds: Sequence[Round], threshold_s: float | None = None) -> tuple[list[Round], float]:
    """Rounds whose steps took longer than a threshold, and the threshold: twice the median step if not given."""
    if threshold_s is None:
        threshold_s = 2 * statistics.median(r.step_s for r in rounds) if rounds else 0.0
    return [r for r in rounds if r.step_s > threshold_s], threshold_s
