"""`Stats`: what an engine has done, added up on the host once a round."""

import time

from levanter_infer.decode.outputs import HostOutputs

_TOTALS = {
    "steps": "steps",
    "preemptions": "preemptions",
    "recomputed": "recomputed_tokens",
    "generated": "generated_tokens",
    "prompt_tokens": "computed_prompt_tokens",
    "copied_pages": "copied_pages",
    "forks": "forks",
}
_WRAP = 2**32


class Stats:
    """Totals since the engine was made, and rates.

    A round in which prompt tokens were computed counts for the prefill rate and every other one for the decode rate,
    because nothing interrupts the device to time single steps. The first round of a program is left out of both: it
    may contain a compilation.
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
        self._tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}

    def on_submit(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens += num_prompt_tokens
        if self._submitted is None:
            self._submitted, self._first_token_s = time.perf_counter(), None

    def on_round(self, outputs: HostOutputs, seconds: float) -> None:
        """Count one round.

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
        if self._rounds > 1:
            phase = "prefill" if delta["prompt_tokens"] else "decode"
            self._tokens[phase] += delta["prompt_tokens"] if phase == "prefill" else delta["generated"]
            self._seconds[phase] += seconds

    def on_reset(self) -> None:
        """The device's counters start again at zero."""
        self._last = dict.fromkeys(_TOTALS, 0)

    def on_idle(self) -> None:
        """The next submission starts a new measurement of the time to the first token."""
        self._submitted = None

    def as_dict(self) -> dict[str, float | int | None]:
        def rate(phase: str) -> float | None:
            return self._tokens[phase] / self._seconds[phase] if self._seconds[phase] > 0 else None

        return {
            **self._totals,
            "prompt_tokens": self._prompt_tokens,
            "rounds": self._rounds,
            "prefill_tokens_per_s": rate("prefill"),
            "decode_tokens_per_s": rate("decode"),
            "time_to_first_token_s": self._first_token_s,
            "pages_total": self._pages_total,
            "pages_free": self._pages_free,
            "pages_peak": self._pages_peak,
        }
