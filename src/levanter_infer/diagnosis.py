"""Classification of the differences between two paths that should give the same log probabilities.

A path that is wrong before it has generated anything shows it at the first token: template, tokenizer, positions.
Rounding is everywhere and grows smoothly; it changes a token only where two are nearly as likely. A wrong page, a wrong
mask or a stale key breaks off from one position on, by far more than rounding, and the position says which.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_JUMP = 8.0
"""A difference so many times larger than all before it is no rounding."""
_OUTLIER = 64.0
"""A single difference so many times larger than usual is no rounding, whatever follows."""
_LARGEST = 1e3
"""Cap of a difference in a mean; differences may be infinite."""
_USUAL = 0.01
"""Floor of the usual difference, as a share of the largest that passes."""
_AFTER = 8
"""Tokens after a jump that decide whether it was an outlier."""
_WRONG = 0.25
"""Nats by which tokens may differ and still be called rounding, where nearly all samples differ alike."""
_STORED = 0.25
"""Share of their usual size by which keys and values may differ before they are wrong."""
_MOST = 0.75
"""Share of the samples that a rule must fit to be reported as one."""


@dataclasses.dataclass(frozen=True)
class Path:
    """One sample as one path sees it."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log probability of each of `token_ids` under the model."""
    top_logprobs: Sequence[Mapping[int, float]] | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """One sample on both paths."""

    id: str
    index: int
    one: Path
    other: Path

    @property
    def first_difference(self) -> int | None:
        """Index of the first generated token that differs, or that one path lacks."""
        tokens = list(zip(self.one.token_ids, self.other.token_ids, strict=False))
        lengths = len(self.one.token_ids), len(self.other.token_ids)
        return next((i for i, (a, b) in enumerate(tokens) if a != b), None if lengths[0] == lengths[1] else len(tokens))

    def deltas(self) -> np.ndarray:
        """|Δ logprob| of each generated token while both contexts are the same, f64.

        The last entry belongs to the first different token, if there is one: the largest difference among the tokens
        whose log probability both paths report, or else that of the two tokens that they chose.
        """
        end = self.first_difference
        one, other = (np.asarray(path.logprobs[:end], np.float64) for path in (self.one, self.other))
        equal = (one == other) | (np.isnan(one) & np.isnan(other))
        deltas = np.abs(np.where(equal, 0.0, np.subtract(one, other, where=~equal, out=np.zeros_like(one))))
        deltas = np.where(np.isnan(deltas), np.inf, deltas)
        return deltas if end is None else np.append(deltas, self._delta_at_split(end))

    def _delta_at_split(self, end: int) -> float:
        if end >= min(len(self.one.token_ids), len(self.other.token_ids)):
            return math.inf  # one of them ended
        tops = [path.top_logprobs[end] for path in (self.one, self.other) if path.top_logprobs is not None]
        if len(tops) == 2:
            known = tops[0].keys() & tops[1].keys()
            return max((abs(tops[0][token] - tops[1][token]) for token in known), default=math.inf)
        return abs(self.one.logprobs[end] - self.other.logprobs[end])


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    verdict: str
    """agree, prompt, drift or scramble."""
    findings: list[str]
    """Observations, one sentence each."""
    suspect: Pair | None = None
    """A sample that shows the fault."""
    stored: int = 0
    """Stored tokens of `suspect` from which on it shows."""

    @property
    def text(self) -> str:
        return f"{self.verdict}: " + "; ".join(self.findings)


def diagnose(pairs: Sequence[Pair], tolerance: float, page_size: int | None = None) -> Diagnosis:
    """Say how two paths disagree.

    Args:
        tolerance: the largest |Δ logprob| that rounding may make.
        page_size: tokens per page of the first path, if it has pages.
    """
    different = [pair for pair in pairs if list(pair.one.prompt_token_ids) != list(pair.other.prompt_token_ids)]
    if different:
        return Diagnosis("prompt", [_prompts_differ(different[0]), f"so in {len(different)} of {len(pairs)} samples"])
    deltas = [pair.deltas() for pair in pairs]
    worst = max((float(np.max(d)) for d in deltas if d.size), default=0.0)
    parted = [pair for pair in pairs if pair.first_difference is not None]
    onsets = _onsets(deltas, tolerance)
    if worst <= tolerance and not parted and onsets.count(None) == len(onsets):
        return Diagnosis("agree", [f"no |Δ logprob| above {tolerance:g}; the largest is {worst:.3g}"])
    broken = [_Broken(p, d, onset) for p, d, onset in zip(pairs, deltas, onsets, strict=True) if onset is not None]
    if not broken:
        return Diagnosis("drift", _drift(deltas, tolerance, len(parted)))
    at_once = [sample.pair for sample in broken if sample.onset == 0]
    if len(at_once) >= _MOST * len(broken):
        findings = _prompt_path(pairs, at_once, page_size)
        return Diagnosis("prompt", findings, at_once[0], len(at_once[0].one.prompt_token_ids))
    worst_one = max(broken, key=lambda sample: float(np.max(sample.deltas)))
    findings = _scramble(worst_one, broken, len(pairs), tolerance, page_size)
    return Diagnosis("scramble", findings, worst_one.pair, worst_one.query + 1)


class _Broken(NamedTuple):
    """A sample that is wrong from generated token `onset` on."""

    pair: Pair
    deltas: np.ndarray
    onset: int

    @property
    def query(self) -> int:
        """The position whose query gives the first wrong log probability."""
        return len(self.pair.one.prompt_token_ids) + self.onset - 1


def _onsets(deltas: Sequence[np.ndarray], tolerance: float) -> list[int | None]:
    """First token from which each sample is wrong by far more than before; None if it never is."""
    typical = [_typical(d) for d in deltas if d.size]
    usual = float(np.quantile(typical, 0.25)) if typical else 0.0  # rounding, unless nearly all samples are wrong
    level = max(tolerance * _USUAL, min(2 * usual, _WRONG / _JUMP))
    return [_onset(d, level) for d in deltas]


def _typical(deltas: np.ndarray) -> float:
    """Mean of all but the largest quarter."""
    return float(np.mean(np.sort(np.minimum(deltas, _LARGEST))[: -(-3 * len(deltas) // 4)]))


def _onset(deltas: np.ndarray, level: float) -> int | None:
    """The first jump that is no outlier of rounding: what follows is as bad, or it is larger than any outlier."""
    before = np.maximum.accumulate(np.append(level, deltas))[:-1]
    for i in np.flatnonzero(deltas > _JUMP * before):
        if deltas[i] > _OUTLIER * level or np.median(deltas[i : i + _AFTER]) > _JUMP * level:
            return int(i)
    return None


def _prompts_differ(pair: Pair) -> str:
    one, other = list(pair.one.prompt_token_ids), list(pair.other.prompt_token_ids)
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return (
        f"the prompts themselves differ (request {pair.id}: from token {shared} on, {one[shared : shared + 4]} and "
        f"{other[shared : shared + 4]}): look at tokenizer, special tokens and chat template"
    )


def _drift(deltas: Sequence[np.ndarray], tolerance: float, parted: int) -> list[str]:
    above = sum(bool((d > tolerance).any()) for d in deltas)
    if not above:
        return [
            f"no |Δ logprob| above {tolerance:g} while the tokens are the same, and {parted} of {len(deltas)} samples "
            "chose another token then: two were nearly as likely, or seed or sampling are not the same"
        ]
    findings = [
        f"|Δ logprob| passes {tolerance:g} without a jump in {above} of {len(deltas)} samples, as rounding does"
    ]
    quarters = [(float(np.mean(d[: len(d) // 4])), float(np.mean(d[-(len(d) // 4) :]))) for d in deltas if len(d) >= 4]
    if quarters:
        first, last = (float(np.mean(column)) for column in zip(*quarters, strict=True))
        findings.append(f"its mean is {first:.3g} over the first quarter of the tokens and {last:.3g} over the last")
    if parted:
        findings.append(f"{parted} samples chose another token, where two were nearly as likely")
    return [*findings, "look at dtypes of weights, pages and sums, not at positions or pages"]


def _prompt_path(pairs: Sequence[Pair], wrong: Sequence[Pair], page_size: int | None) -> list[str]:
    findings = [f"wrong from the first token on, in {len(wrong)} of {len(pairs)} samples"]
    lens = {id(pair): len(pair.one.prompt_token_ids) for pair in pairs}
    shortest = min(lens[id(pair)] for pair in wrong)
    right = [lens[id(pair)] for pair in pairs if not any(pair is other for other in wrong)]
    if right and max(right) < shortest:
        at = "" if page_size is None else f" (pages have {page_size} tokens)"
        findings.append(
            f"prompts of up to {max(right)} tokens are right and those of {shortest} and more are not{at}: look at "
            "what happens to a prompt in between: its second prompt chunk, its second page, a window"
        )
    else:
        findings.append("look at how prompts are computed: chat template, tokenizer, positions, last logits")
    return findings


def _scramble(
    worst: _Broken, broken: Sequence[_Broken], num_pairs: int, tolerance: float, page_size: int | None
) -> list[str]:
    findings = [
        f"wrong by up to {float(np.max(worst.deltas)):.3g} from one token on, in {len(broken)} of {num_pairs} samples",
        f"request {worst.pair.id}, sample {worst.pair.index}: right up to generated token {worst.onset - 1}, wrong at "
        f"{worst.onset}, which is computed from position {worst.query}",
        _common_position(broken, page_size),
    ]
    healed = sum(sample.deltas[-1] <= tolerance for sample in broken)
    return [*findings, f"{healed} of them are right again at their end"] if healed else findings


def _common_position(broken: Sequence[_Broken], page_size: int | None) -> str:
    most = _MOST * len(broken)
    queries = sorted({sample.query for sample in broken})
    token, count = Counter(sample.onset for sample in broken).most_common(1)[0]
    if page_size is not None and sum(sample.query % page_size == 0 for sample in broken) >= most:
        pages = ", ".join(str(query // page_size) for query in queries[:6] if query % page_size == 0)
        return (
            f"it starts where a page starts, at a multiple of {page_size} (logical page {pages}): look at the page "
            "table and at where keys and values are written"
        )
    if len(broken) > 1 and count >= most:
        what = "the first one that is not computed with the prompt" if token == 1 else f"generated token {token}"
        return f"it starts at the same token everywhere, {what}: look at what changes in that step"
    if len(broken) > 1 and len(queries) == 1:
        return f"it starts at position {queries[0]} everywhere: look at what has this size (window, chunk, bucket)"
    return (
        "no page boundary and no position is common to them: look at what other sequences do at that moment: prefix "
        "sharing, copy-on-write, preemption, pages that are reused"
    )


def where_stored_differs(
    stored: Mapping[int, np.ndarray], expected: Mapping[int, np.ndarray], page_size: int
) -> str | None:
    """The first layer that stores wrong keys or values, in words; None if all are right.

    Args:
        stored, expected: [position, head, 2 or 1 (keys and values, or latents), head_size] of one sequence, by the
            number of the layer. What is stored may have several copies of each head, one after the other.
    """
    before = None
    for layer in sorted(expected):
        copies = stored[layer].shape[1] // expected[layer].shape[1]
        wrong = _differs(stored[layer], np.repeat(expected[layer], copies, axis=1))
        if wrong.any():
            if layer == 0:
                cause = "they depend on the embeddings alone: look at positions, at where they are written and at the "
                cause += "page table"
            elif before == layer - 1:
                cause = f"layer {before} stores the right ones: look at its attention and feed-forward"
            else:
                cause = f"look at layers {before or 0} to {layer - 1}, and at where its keys and values are written"
            where = _which(wrong, copies, page_size)
            return f"layer {layer} is the first to store wrong ones: {where}; {cause}"
        before = layer
    return None


def _which(wrong: np.ndarray, copies: int, page_size: int) -> str:
    """Heads, pages and first position of what `_differs` has found."""
    positions, pairs = np.flatnonzero(wrong.any(axis=(1, 2))), wrong.any(axis=0)
    pages = ", ".join(map(str, sorted({int(p) // page_size for p in positions})[:8]))
    sides = ("keys", "values") if wrong.shape[2] == 2 else ("latents",)
    what = dict.fromkeys(f"{sides[side]} of head {head // copies}" for head, side in np.argwhere(pairs))
    heads = f"{' and '.join(sides)} of all heads" if pairs.all() else ", ".join(what)
    return f"{heads}, in logical page {pages}, from position {positions[0]} on"


def _differs(stored: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where the vectors of one layer differ, bool[position, head, side]."""
    size = np.sqrt(np.mean(np.square(expected), axis=(0, 3), keepdims=True))
    return ~np.all(np.isclose(stored, expected, rtol=0, atol=_STORED * size), axis=3)
