"""The files in tests/golden: what a reference implementation answered, checked and written."""

import json
from collections.abc import Callable, Mapping

import numpy as np
from scripts.golden.cases import CASES, Case
from tests.golden_cases import (
    GOLDEN_DIR,
    NUM_GREEDY,
    RELATIVE_BOUND,
    GoldenPrompt,
    make_weights,
    save_case,
    unit_noise,
    weights_sha256,
)

VISIBLE = 50
"""How far a feature that is switched off must move a logit, times the bound of the tests."""
Logits = Callable[..., np.ndarray]
"""`logits(name, config, tokens, strict=True, zeroed=None)`: f32[len(tokens), vocab] of the reference with the case's
weights; `strict=False` leaves out tensors that a changed config has no use for, and tensors whose names end with
`zeroed` are zeros."""
Greedy = Callable[[str, dict, np.ndarray], np.ndarray]
"""`greedy(name, config, prompt)`: the reference's NUM_GREEDY tokens."""


def write_goldens(
    name: str,
    shapes: Mapping[str, tuple[int, ...]] | None,
    logits: Logits,
    greedy: Greedy,
    reference: str | None = None,
) -> None:
    """Write the golden file of a case and its entry in cases.json.

    The golden must be able to fail: with the case's feature switched off (`without`), the logits must move by at least
    50 times the bound that the tests allow, and with any option neutralised (`changes`, `zeroed`), by more than a
    hundredth of their scale.

    Args:
        shapes: tensors of the reference's own model; None: `golden_cases.tensor_shapes` knows them.
        reference: name and version of the implementation, if it is not transformers.
    Raises: ValueError if the golden proves too little.
    """
    case = CASES[name]
    GOLDEN_DIR.mkdir(exist_ok=True)
    prompts = [_prompt(name, case, length, logits, greedy) for length in case.prompt_lens]
    print(_checked(name, case, prompts, logits), flush=True)
    save_case(GOLDEN_DIR, name, prompts)
    file = GOLDEN_DIR / "cases.json"
    entries = json.loads(file.read_text()) if file.exists() else {}
    # The config keys as given, not as HF completes them: older checkpoints have no head_dim and no layer_types.
    entries[name] = {
        "config": case.config,
        **({"changes": case.changes} if case.changes else {}),
        **({"zeroed": case.zeroed} if case.zeroed else {}),
        **({"tensors": [f"{key} {' '.join(map(str, shape))}" for key, shape in shapes.items()]} if shapes else {}),
        "weights_sha256": weights_sha256(make_weights(name, case.config, dict(shapes) if shapes else None)),
        **({} if reference is None else {"reference": reference}),
    }
    entries = {name: entries[name] for name in CASES if name in entries}
    file.write_text(json.dumps(entries, indent=1) + "\n")


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def _prompt(name: str, case: Case, length: int, logits_of: Logits, greedy_tokens: Greedy) -> GoldenPrompt:
    noise = unit_noise(name, f"prompt {length}", (length,))
    tokens = ((noise / np.sqrt(3.0) + 1.0) / 2.0 * case.config["vocab_size"]).astype(np.int32)
    limit = case.length_threshold
    stays = limit is None or length + NUM_GREEDY <= limit or (length > limit and not case.changes_beyond)
    greedy = greedy_tokens(name, case.config, tokens) if stays else np.zeros(0, np.int32)
    logits = logits_of(name, case.config, np.concatenate([tokens, greedy[:-1]]))
    positions = np.unique(np.array([0, length // 3, length // 2, length - 2, length - 1]).clip(0))
    logprobs = _log_softmax(logits)
    steps = np.arange(len(greedy)) + length - 1
    best = np.sort(logits[steps], axis=-1)[:, -2:] if len(greedy) else np.zeros((0, 2), np.float32)
    return GoldenPrompt(
        tokens=tokens,
        positions=positions.astype(np.int32),
        logits=logits[positions],
        prompt_logprobs=logprobs[np.arange(length - 1), tokens[1:]].astype(np.float32),
        scale=float(np.abs(logits).max()),
        greedy=greedy,
        greedy_gaps=best[:, 1] - best[:, 0],
        greedy_logprobs=logprobs[steps, greedy].astype(np.float32),
    )


def _checked(name: str, case: Case, prompts: list[GoldenPrompt], logits_of: Logits) -> str:
    """Refuse a golden that proves little: an invisible feature, a dull continuation, a close call."""
    longest = max(prompts, key=lambda p: len(p.tokens))
    changed = logits_of(name, {**case.config, **case.without}, longest.tokens, strict=False)
    moved = float(np.abs(changed[longest.positions] - longest.logits).max()) / longest.bound
    distinct = min((len(set(p.greedy.tolist())) for p in prompts if len(p.greedy)), default=0)
    gap = min((float(p.greedy_gaps.min()) / p.bound for p in prompts if len(p.greedy)), default=np.inf)
    others = [(change, {}) for change in case.changes] + [({}, {"zeroed": end}) for end in case.zeroed]
    for change, options in others:
        other = logits_of(name, {**case.config, **change}, longest.tokens, **options)
        share = float(np.abs(other[longest.positions] - longest.logits).max()) / longest.scale
        if share < 0.01:
            raise ValueError(f"{name}: {change or options} moves the logits by {share:.2g} of their scale only")
    line = f"{name:22s} moved {moved:8.0f}x  distinct {distinct:2d}  gap {gap:7.1f}x  scale {longest.scale:5.1f}"
    if moved < VISIBLE:
        raise ValueError(f"{line}: without={case.without} moves no logit by {VISIBLE}x the bound {RELATIVE_BOUND}")
    if gap < 1.0:
        raise ValueError(f"{line}: a greedy choice closer than the bound; change the prompt lengths")
    if distinct < 6:
        raise ValueError(f"{line}: fewer than 6 distinct greedy tokens; change the gains or the prompt lengths")
    return line
