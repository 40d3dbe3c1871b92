"""`RequestState` and its `SampleState`s: a request on the host, from submission to completion. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from levanter_infer.decode.codes import DEFAULT_ROOT
from levanter_infer.engine.params import SamplingParams, brief, stop_sequences
from levanter_infer.engine.request import NO_TOKEN, Completion, RequestOutput
from levanter_infer.engine.text import IncrementalDecoder, StopMatcher
from levanter_infer.policies import FinishReason
from levanter_infer.structured.automaton import TokenAutomaton
from levanter_infer.structured.guide import Guide


@dataclasses.dataclass(frozen=True, eq=False)
class PromptScores:
    """Log probabilities of the prompt tokens after the first."""

    logprobs: np.ndarray
    """f32[n]"""
    top_ids: np.ndarray
    """i32[n, top], the likeliest tokens at each position."""
    top_logprobs: np.ndarray
    """f32[n, top]"""


@dataclasses.dataclass(eq=False)
class SampleState:
    """One of the `n` continuations of a request: its slot, and what has been generated so far."""

    request: "RequestState"
    index: int
    slot: int | None = None
    first_round: int | None = None
    """The round that admitted it; what earlier rounds bring of its slot belongs to another sample. None: not admitted
    yet."""
    arrival: int = 0
    """Order of admission, smallest first; what the device orders samples of one priority by."""
    uploaded: int = 0
    """Prompt tokens that have been uploaded."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    processed_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    """Version of the weights for each token."""
    finish_reason: str | None = None
    """Set once the result is known; the slot may be free only later."""
    error: str | None = None
    """Why it ended in "error"; None for other reasons."""
    guide: Guide | None = None
    """Constraint that the host computes masks of."""
    stop_reason: str | int | tuple[int, ...] | None = None
    decoder: IncrementalDecoder | None = None
    matcher: StopMatcher | None = None
    score: float | None = None
    routes: np.ndarray | None = None
    """i16[position, layer, chosen], experts of the tokens that its slot has computed; None until they have been read.
    Of positions that it shares with the first sample, the first sample's count."""
    text: str = ""

    def extend(
        self, tokens: np.ndarray, logprobs: np.ndarray, processed: np.ndarray, top, versions: Sequence[int]
    ) -> None:
        """Append the tokens of one round, up to the token that completes a stop string: later ones are dropped."""
        if self.request.grown is not None:
            self.request.grown.add(self)
        count, wanted = self._extend_tokens(tokens.tolist()), self.request.params.logprobs
        if self.guide is not None:
            self.guide.extend(self.token_ids[-count:] if count else [])
        self.logprobs += logprobs[:count].tolist()
        self.processed_logprobs += processed[:count].tolist()
        self.versions += versions[:count]
        if wanted and top is not None:
            ids, values = (side[:count, :wanted].tolist() for side in top)
            self.top_logprobs += [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]

    def _extend_tokens(self, tokens: list[int]) -> int:
        """Append tokens and their text; returns how many, up to the one that completes a stop string."""
        if self.decoder is None:
            self.token_ids += tokens
            return len(tokens)
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if self._add_text(token):
                assert self.matcher is not None
                self.finish_reason, self.stop_reason = FinishReason.STOP, self.matcher.found
                return i + 1
        return len(tokens)

    def _add_text(self, token: int) -> bool:
        if self.decoder is None:
            return False
        piece = self.decoder.push(token)
        self.text += piece
        if self.matcher is None:
            return False
        cut = self.matcher.push(piece, len(self.token_ids))
        if cut is None:
            return False
        self.text = self.text[:cut]
        return True

    def finish(self, reason: str, error: str | None = None) -> None:
        """End with this reason, unless the sample has ended. Args: error: as in `Completion.error`."""
        if self.finish_reason is None:
            self.finish_reason = reason
            from_guide = self.guide.error if self.guide is not None and error == NO_TOKEN else None
            self.error = from_guide or error
            self.stop_reason = self._matched_tokens() if reason == FinishReason.STOP else None
            if self.decoder is not None:
                self.text += self.decoder.flush()

    def _matched_tokens(self) -> int | tuple[int, ...] | None:
        """The longest entry of `stop_token_ids` that the tokens end with, or None."""
        ends = (tuple(self.token_ids[-len(ids) :]) == ids for ids in stop_sequences(self.request.params))
        matched = [ids for ids, is_end in zip(stop_sequences(self.request.params), ends, strict=True) if is_end]
        longest = max(matched, key=len, default=None)
        return longest[0] if longest is not None and len(longest) == 1 else longest

    def snapshot(self) -> "SampleState":
        """A copy with lists of its own."""
        copied = {name: list(getattr(self, name)) for name in _RESULTS}
        decoder, matcher = (part and part.copy() for part in (self.decoder, self.matcher))
        return dataclasses.replace(self, **copied, decoder=decoder, matcher=matcher)

    def take_over(self, ancestor: "SampleState") -> None:
        """Continue from the state of `ancestor`, with the slot and the index that this sample has."""
        ancestor = ancestor.snapshot()
        for name in (*_RESULTS, "finish_reason", "error", "stop_reason", "decoder", "matcher", "text"):
            setattr(self, name, getattr(ancestor, name))

    @property
    def number(self) -> int:
        """The sample index in its random numbers."""
        return self.request.first_sample + self.index

    def completion(self) -> Completion:
        """The public result. Requires: the sample has finished."""
        assert self.finish_reason is not None
        return Completion(
            index=self.index,
            token_ids=self.token_ids,
            text=self.text if self.decoder is not None else None,
            finish_reason=self.finish_reason,
            logprobs=np.asarray(self.logprobs, np.float32),
            processed_logprobs=np.asarray(self.processed_logprobs, np.float32),
            top_logprobs=self.top_logprobs if self.request.params.logprobs else None,
            seed=self.request.seed,
            token_versions=np.asarray(self.versions, np.int32),
            score=self.score,
            error=self.error,
            routed_experts=self._routed_experts(),
            stop_reason=self.stop_reason,
        )

    @property
    def num_routed(self) -> int:
        """Tokens whose experts are known once it has ended."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1

    @property
    def awaits_routes(self) -> bool:
        """Whether the experts of its tokens have yet to be read."""
        wants = self.request.params.return_routed_experts
        return wants and self.routes is None and self.finish_reason != FinishReason.ABORT

    def _routed_experts(self) -> np.ndarray | None:
        """All samples but the first begin at the last token of the prompt."""
        if self.routes is None or self.index == 0:
            return self.routes
        first, shared = self.request.sequences[0].routes, len(self.request.prompt_token_ids) - 1
        return None if first is None else np.concatenate([first[:shared], self.routes[shared:]])


_RESULTS = ("token_ids", "logprobs", "processed_logprobs", "top_logprobs", "versions")


@dataclasses.dataclass(eq=False)
class RequestState:
    """A request that the engine serves, and its samples; what `InferenceEngine.submit` returns."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_len: int
    """Tokens, prompt included, at which a sample ends."""
    cache_salt: str | None = None
    first_sample: int = 0
    num_continued_tokens: int = 0
    root: int = DEFAULT_ROOT
    """Root in the prefix table, for salt and version of the weights from its submission on: requests of one root share
    pages."""
    priority: int = 0
    """Smallest first."""
    automaton: TokenAutomaton | None = None
    """Constraint that the device follows by itself."""
    timeout_s: float | None = None
    """Seconds from submission to its deadline."""
    sequences: list[SampleState] = dataclasses.field(default_factory=list)
    rank: int | None = None
    """Data-parallel rank that serves it; None before routing."""
    num_cached_tokens: int = 0
    """Prompt tokens found by prefix caching, as of the last round that computed the prompt."""
    prompt_scores: PromptScores | None = None
    """None until they have been read."""
    search_versions: list[int] = dataclasses.field(default_factory=list)
    """Version of the weights for each generated position of a beam search."""
    grown: "set[SampleState] | None" = dataclasses.field(default=None, repr=False)
    """Samples that got tokens add themselves here, so that a reader of many requests looks at no others."""
    scheduler: Any = dataclasses.field(default=None, repr=False)
    """The `Scheduler` that it was prepared for or submitted to: its slots are of that engine."""

    @property
    def is_loose(self) -> bool:
        """Whether its samples are independent of each other, which the beams of a search are not."""
        return self.params.num_beams == 1

    def completions(self) -> list[Completion]:
        """All samples, or the best of them with `best_of` and beam search. Requires: they have finished."""
        completions = [sequence.completion() for sequence in self.sequences]
        if self.params.best_of is None:
            return completions[: self.params.n] if self.params.num_beams > 1 else completions
        return sorted(completions, key=_mean_logprob, reverse=True)[: self.params.n]

    @property
    def is_guided(self) -> bool:
        """Whether the host says which tokens may follow, before every step."""
        return any(sample.guide is not None for sample in self.sequences)

    @property
    def is_done(self) -> bool:
        """Whether all samples have finished, and what they asked of the device's tables has been read."""
        ended = all(s.finish_reason is not None for s in self.sequences)
        return ended and not self.awaits_scores and not any(s.awaits_routes for s in self.sequences)

    def output(self) -> RequestOutput:
        """The public result. Raises: RuntimeError unless `is_done`."""
        if not self.is_done:
            raise RuntimeError(
                f"request {brief(self.id)} has not ended; call engine.step_round() until request.is_done, or "
                "engine.drain()"
            )
        scores, wanted = self.prompt_scores, self.params.prompt_logprobs
        top = None
        if scores is not None and wanted:
            positions = zip(scores.top_ids[:, :wanted].tolist(), scores.top_logprobs[:, :wanted].tolist(), strict=True)
            top = [dict(zip(ids, values, strict=True)) for ids, values in positions]
        return RequestOutput(
            id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            completions=self.completions(),
            prompt_logprobs=None if scores is None else scores.logprobs,
            prompt_top_logprobs=top,
            num_cached_tokens=self.num_cached_tokens,
            first_sample=self.first_sample,
            num_continued_tokens=self.num_continued_tokens,
        )

    @property
    def awaits_scores(self) -> bool:
        """Whether the scores of its prompt have yet to be read."""
        return (
            self.wants_scores and self.prompt_scores is None and self.sequences[0].finish_reason != FinishReason.ABORT
        )

    @property
    def wants_scores(self) -> bool:
        """Whether its prompt is scored."""
        return self.params.prompt_logprobs is not None


def _mean_logprob(completion: Completion) -> float:
    """Score that `best_of` compares; a sample that was aborted or failed comes last."""
    complete = completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and len(completion.logprobs) > 0
    return float(completion.logprobs.mean(dtype=np.float64)) if complete else -np.inf


def check_submitted(call: str, request, scheduler) -> None:
    """Raises: TypeError for what `submit` has not returned, ValueError for a request of another engine."""
    if not isinstance(request, RequestState):
        raise TypeError(
            f"{call} was given {brief(request)} ({type(request).__name__}); expected what submit() returned for "
            f"the request: request = engine.submit(...), and then engine.{call}(request)"
        )
    if request.scheduler is not scheduler:
        raise ValueError(
            f"{call} was given request {brief(request.id)} of another engine; call it on the engine that the "
            "request was submitted to"
        )


def check_sample(call: str, sequence, scheduler) -> None:
    """Raises: TypeError for what is no sample of a request, ValueError for one of another engine."""
    if not isinstance(sequence, SampleState):
        raise TypeError(
            f"{call} was given {brief(sequence)} ({type(sequence).__name__}); expected a sample of what submit() "
            f"returned: request = engine.submit(...), and then engine.{call}(request.sequences[0])"
        )
    check_submitted(call, sequence.request, scheduler)


def checked_prepared(request: RequestState, scheduler) -> RequestState:
    """A request of `prepare`. Raises: ValueError for one of another engine, or that was submitted or cancelled."""
    check_submitted("submit", request, scheduler)
    if request.rank is not None:
        raise ValueError(f"request {brief(request.id)} was submitted already; prepare it again")
    if request.is_done:
        raise ValueError(f"request {brief(request.id)} was cancelled; prepare it again")
    return request


def counts(requests: Sequence[RequestState], total: int) -> tuple[int, int, int]:
    """(sequences finished, `total`, tokens generated); looks at every sequence."""
    sequences = [sequence for request in requests for sequence in request.sequences]
    finished = sum(sequence.finish_reason is not None for sequence in sequences)
    return finished, total, sum(len(sequence.token_ids) for sequence in sequences)
