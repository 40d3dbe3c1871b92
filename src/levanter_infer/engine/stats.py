"""`Stats`: what an engine has done, added up on the host once a round."""

import dataclasses
import time

from levanter_infer.decode.outputs import HostOutputs

_TOTALS = {
    "steps": "steps",
    "preemptions": "preemptions",
    "recomputed": "recomputed_tokens",
    "prompt_steps": "prompt_steps",
    "generated": "generated_tokens",
    "prompt_tokens": "computed_prompt_tokens",
    "copied_pages": "copied_pages",
    "forks": "forks",
}
_WRAP = 2**32


@dataclasses.dataclass
class _Phase:
    """Sums over the rounds of one kind."""

    seconds: float = 0.0
    steps: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0
    generated: int = 0


class Stats:
    """Totals since the engine was made, and rates.

    Nothing interrupts the device to time single steps. The time of a decode step comes from rounds in which no
    prompt was computed; what the other rounds took beyond their decode steps counts as prefill.
    """

    def __init__(self, pages_total: int):
        self._last: dict[str, int] = dict.fromkeys(_TOTALS, 0)
        self._totals = dict.fromkeys(_TOTALS.values(), 0)
        self._pages_total = pages_total
        self._pages_free = pages_total
        self._pages_peak = 0
        self._rounds = 0
        self._prompt_tokens = 0
        self._first_token_s: float | None = None
        self._submitted: float | None = None
        self._decode = _Phase()
        self._mixed = _Phase()
        self.compile_s = 0.0

    def on_submit(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens += num_prompt_tokens
        if self._submitted is None:
            self._submitted, self._first_token_s = time.perf_counter(), None

    def on_round(self, outputs: HostOutputs, seconds: float) -> tuple[int, int]:
        """Count one round; returns its steps, and those of them that computed prompt tokens.

        Args:
            seconds: from its launch, or from the end of the round before if that was later, to its end.
        """
        delta = {}
        for counter, name in _TOTALS.items():
            value = outputs.scalars[counter]
            delta[counter] = (value - self._last[counter]) % _WRAP
            self._last[counter] = value
            self._totals[name] += delta[counter]
        self._pages_free = outputs.scalars["free_pages"]
        self._pages_peak = max(self._pages_peak, outputs.scalars["pages_peak"])
        self._rounds += 1
        if delta["generated"] and self._first_token_s is None and self._submitted is not None:
            self._first_token_s = time.perf_counter() - self._submitted
        phase = self._mixed if delta["prompt_steps"] else self._decode
        phase.seconds += seconds
        phase.steps += delta["steps"]
        phase.prompt_steps += delta["prompt_steps"]
        phase.prompt_tokens += delta["prompt_tokens"]
        phase.generated += delta["generated"]
        return delta["steps"], delta["prompt_steps"]

    def on_reset(self) -> None:
        """The device's counters start again at zero."""
        self._last = dict.fromkeys(_TOTALS, 0)

    def on_idle(self) -> None:
        """The next submission starts a new measurement of the time to the first token."""
        self._submitted = None

    def _prefill_s(self) -> float:
        mixed = self._mixed
        step_s = self._decode.seconds / self._decode.steps if self._decode.steps else 0.0
        # A step with a prompt chunk is no cheaper than one without.
        return max(mixed.seconds - (mixed.steps - mixed.prompt_steps) * step_s, mixed.prompt_steps * step_s)

    def as_dict(self) -> dict[str, float | int | None]:
        def rate(tokens: int, seconds: float) -> float | None:
            return tokens / seconds if tokens and seconds > 0 else None

        return {
            **self._totals,
            "prompt_tokens": self._prompt_tokens,
            "rounds": self._rounds,
            "prefill_tokens_per_s": rate(self._mixed.prompt_tokens, self._prefill_s()),
            "decode_tokens_per_s": rate(self._decode.generated, self._decode.seconds),
            "time_to_first_token_s": self._first_token_s,
            "compile_s": self.compile_s,
            "pages_total": self._pages_total,
            "pages_free": self._pages_free,
            "pages_peak": self._pages_peak,
        }
