"""`Progress`: tokens over time of one call of `generate`, as the host sees them at the end of each round."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request, RequestOutput


@dataclasses.dataclass(frozen=True)
class Progress:
    """Totals over all sequences at the ends of rounds; seconds since the call."""

    outputs: list[RequestOutput]
    seconds: list[float]
    generated: list[int]
    prompt_tokens: list[int]
    first_token_s: float
    """Seconds from the call to the first sampled token of any request."""

    @property
    def total_s(self) -> float:
        return self.seconds[-1]

    @property
    def token_ids(self) -> list[list[int]]:
        return [completion.token_ids for output in self.outputs for completion in output.completions]

    def seconds_of(self, begin: int, end: int) -> float:
        """Seconds from the `begin`-th generated token to the `end`-th, interpolated within rounds. Time after the
        `begin`-th token without any new token, such as for prompts, does not count."""
        return _time_of(end, self.generated, self.seconds) - _time_of(begin, self.generated, self.seconds, latest=True)

    def prefill_seconds_of(self, begin: int, end: int) -> float:
        """Seconds from the `begin`-th computed prompt token to the `end`-th."""
        return _time_of(end, self.prompt_tokens, self.seconds) - _time_of(begin, self.prompt_tokens, self.seconds)


def _time_of(count: int, totals: Sequence[int], seconds: Sequence[float], *, latest: bool = False) -> float:
    """Time when a total reached `count`; with `latest` the last time at which it was no larger."""
    reached, first = np.unique(totals, return_index=True)
    indices = np.searchsorted(totals, reached, side="right") - 1 if latest else first
    return float(np.interp(count, reached, np.asarray(seconds)[indices]))


def record(engine: InferenceEngine, prompts: Sequence[list[int]], max_tokens: int) -> Progress:
    """Generate `max_tokens` greedy tokens from each prompt. Raises: RuntimeError if a request fails."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_token_ids=list(ids), sampling=sampling) for ids in prompts]
    engine.warmup()
    before = engine.stats()["computed_prompt_tokens"]
    start = time.perf_counter()
    seconds, generated, computed = [0.0], [0], [0]

    def on_update(_finished: int, _total: int, tokens: int) -> None:
        seconds.append(time.perf_counter() - start)
        generated.append(tokens)
        computed.append(engine.stats()["computed_prompt_tokens"] - before)

    outputs = engine.generate(requests, on_update=on_update)
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outputs)} requests failed: {failed[0]}")
    first = engine.stats()["time_to_first_token_s"]
    assert isinstance(first, float)
    return Progress(outputs, seconds, generated, computed, first)
