"""`Stats`: totals and rates of an engine, updated on the host once per round."""

import dataclasses
import time

import numpy as np

from levanter_infer.decode.outputs import RoundResult
from levanter_infer.engine.metrics import METRICS, Registry

_TOTALS = {metric.counter: metric.name for metric in METRICS.values() if metric.counter is not None}
_AS_THEY_ARE = ("running", "waiting", "stored_tokens", "refs_max", "refs_sum", "cached_pages")
"""Scalars of a round that are metrics under the same name."""
_WRAP = 2**32


@dataclasses.dataclass
class _Phase:
    """Sums over the rounds with, or without, prompt chunks."""

    seconds: float = 0.0
    steps: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0
    generated: int = 0


class Stats:
    """Totals since the engine was made, and rates, written into `registry`.

    Nothing interrupts the device to time single steps. The time of a decode step comes from rounds in which no
    prompt was computed; what the other rounds took beyond their decode steps counts as prefill.
    """

    def __init__(self, *, pages_total: int, page_bytes: int, pool_bytes: int, weights_bytes: int, num_ranks: int = 1):
        self.registry = Registry()
        self._ranks = RankSteps(num_ranks) if num_ranks > 1 else None
        self._last: dict[str, int] = dict.fromkeys(_TOTALS, 0)
        self._pages_total, self._page_bytes = pages_total, page_bytes
        self._pages_peak = 0
        self._submitted: float | None = None
        self._decode = _Phase()
        self._mixed = _Phase()
        sizes = {"pages_total": pages_total, "pool_bytes": pool_bytes, "weights_bytes": weights_bytes}
        for name, value in {
            **sizes,
            "page_bytes": self._page_bytes,
            "pages_peak": 0,
            "compile_s": 0.0,
            "weights_version": 0,
        }.items():
            self.registry.set(name, value)
        self._set_empty()

    def _set_empty(self) -> None:
        for name in ("pages_in_use", *_AS_THEY_ARE):
            self.registry.set(name, 0)
        self.registry.set("pages_free", self._pages_total)

    @property
    def rank_steps(self) -> list[int]:
        """Steps of each data-parallel rank in the last round; empty for one rank."""
        return [] if self._ranks is None else self._ranks.last

    def on_submit(self, num_prompt_tokens: int) -> None:
        self.registry.add("prompt_tokens", num_prompt_tokens)
        if self._submitted is None:
            self._submitted = time.perf_counter()
            self.registry.set("time_to_first_token_s", None)

    def on_round(self, outputs: RoundResult, seconds: float) -> tuple[int, int]:
        """Count one round.

        Args:
            seconds: from its launch, or from the end of the previous round if that was later, to its end.
        Returns: its steps, and how many of them computed prompt tokens; with several data-parallel ranks, those of the
            rank with most steps.
        """
        registry, scalars = self.registry, outputs.scalars
        delta = {}
        for counter, name in _TOTALS.items():
            delta[counter] = (scalars[counter] - self._last[counter]) % _WRAP
            self._last[counter] = scalars[counter]
            registry.add(name, delta[counter])
        registry.add("rounds", 1)
        registry.observe("round_s", seconds)
        registry.add("paged_kv_bytes_read", delta["pages_touched"] * self._page_bytes)
        for name in _AS_THEY_ARE:
            registry.set(name, scalars[name])
        registry.set("pages_free", scalars["free_pages"])
        registry.set("pages_in_use", self._pages_total - scalars["free_pages"])
        self._pages_peak = max(self._pages_peak, scalars["pages_peak"])
        registry.set("pages_peak", self._pages_peak)
        if delta["generated"] and registry["time_to_first_token_s"] is None and self._submitted is not None:
            registry.set("time_to_first_token_s", time.perf_counter() - self._submitted)
        if self._ranks is not None:
            delta["steps"] = self._ranks.on_round(outputs.steps)
            delta["prompt_steps"] = min(delta["prompt_steps"], delta["steps"])
            registry.set("idle_share", self._ranks.idle_shares)
        phase = self._mixed if delta["prompt_steps"] else self._decode
        phase.seconds += seconds
        phase.steps += delta["steps"]
        phase.prompt_steps += delta["prompt_steps"]
        phase.prompt_tokens += delta["prompt_tokens"]
        phase.generated += delta["generated"]
        self._set_rates()
        return delta["steps"], delta["prompt_steps"]

    def on_time(self, **seconds: float) -> None:
        """Add the host's times of a round, named by the first word of the metric: launch, wait, download, collect."""
        for name, spent in seconds.items():
            self.registry.add(f"{name}_s", spent)

    def on_reset(self) -> None:
        """The device's counters start again at zero."""
        self._last = dict.fromkeys(_TOTALS, 0)
        if self._ranks is not None:
            self._ranks.on_reset()
        self._set_empty()

    def on_idle(self) -> None:
        """Start a new measurement of the time to the first token at the next submission."""
        self._submitted = None

    def _set_rates(self) -> None:
        def ratio(amount: float, per: float) -> float | None:
            return amount / per if amount and per > 0 else None

        decode, mixed = self._decode, self._mixed
        step_s = ratio(decode.seconds, decode.steps) or 0.0
        # A step with a prompt chunk is no cheaper than one without.
        prefill_s = max(mixed.seconds - (mixed.steps - mixed.prompt_steps) * step_s, mixed.prompt_steps * step_s)
        self.registry.set("prefill_tokens_per_s", ratio(mixed.prompt_tokens, prefill_s))
        self.registry.set("decode_tokens_per_s", ratio(decode.generated, decode.seconds))
        generated = decode.generated + mixed.generated
        names = ("copied_pages", "prefix_hits", "prefix_misses", "recomputed_tokens")
        copied, hits, misses, recomputed = (self.registry[name] for name in names)
        assert isinstance(copied, int) and isinstance(hits, int)
        assert isinstance(misses, int) and isinstance(recomputed, int)
        self.registry.set("prefix_hit_rate", ratio(hits, hits + misses))
        self.registry.set("copies_per_token", copied / generated if generated else None)
        self.registry.set("recomputed_per_token", recomputed / generated if generated else None)


class RankSteps:
    """Balance of the work of data-parallel ranks: a rank that has nothing left waits for the end of the round."""

    def __init__(self, num_ranks: int):
        self._last = np.zeros(num_ranks, np.int64)
        self.idle = np.zeros(num_ranks, np.int64)
        """Steps for which each rank was idle while another one went on."""
        self.total = 0
        """Steps of the longest rank of each round, added up."""
        self.last = [0] * num_ranks
        """Steps of each rank in the last round."""

    def on_round(self, steps: list[int]) -> int:
        """Args: steps: of each rank since the last reset. Returns: steps of the rank that had most in this round."""
        now = np.asarray(steps, np.int64)
        done = (now - self._last) % _WRAP
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
        """Fraction of the steps for which each rank was idle."""
        return {str(rank): int(idle) / max(1, self.total) for rank, idle in enumerate(self.idle)}
