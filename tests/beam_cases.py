"""Beam searches that HF transformers was asked for; `scripts/golden/make_beams.py` writes what it answered."""

import json
from dataclasses import dataclass

import numpy as np

from tests.golden_cases import GOLDEN_DIR, unit_noise

MODEL = "llama_tied"
"""The model, whose weights `golden_cases.make_weights` rebuilds."""
MAX_TOKENS = 14
ENDS = (80, 208, 189)
"""Tokens that end a hypothesis, unless a case says otherwise."""


@dataclass(frozen=True)
class BeamCase:
    """One search from each of PROMPT_LENS' prompts, given in HF's words but for `ends`."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ends: tuple[int, ...] = ENDS
    repetition_penalty: float = 1.0
    min_tokens: int = 0


PROMPT_LENS = (1, 6, 17)
CASES = {
    "plain": BeamCase(2),
    "early": BeamCase(2, early_stopping=True),
    "never": BeamCase(2, early_stopping="never"),
    "wide": BeamCase(4),
    "wide_early": BeamCase(4, early_stopping=True),
    "short": BeamCase(3, length_penalty=0.3),
    "short_early": BeamCase(3, length_penalty=-1.0, early_stopping=True),
    "short_never": BeamCase(3, length_penalty=-0.5, early_stopping="never"),
    "long": BeamCase(4, length_penalty=2.5),
    "long_never": BeamCase(4, length_penalty=1.7, early_stopping="never"),
    "endless": BeamCase(2, ends=()),
    "penalised": BeamCase(4, repetition_penalty=1.3),
    "at_least": BeamCase(3, length_penalty=0.0, min_tokens=5),
    "one_end": BeamCase(2, ends=(38,)),
}

STATE_MODELS = ("lfm2", "qwen3_next")
"""Models whose layers remember a state of fixed size: of a short convolution, of a recurrence."""
STATE_CASES = {
    "endless": BeamCase(2, ends=()),
    "wide": BeamCase(4, ends=()),
    "ends": BeamCase(3, length_penalty=0.3, ends=tuple(range(40))),
}


def prompt(length: int) -> list[int]:
    noise = unit_noise("beams", f"prompt {length}", (length,))
    return ((noise / np.sqrt(3.0) + 1.0) / 2.0 * 256).astype(np.int32).tolist()


def answers() -> dict[str, list[list[dict]]]:
    """By case, for each prompt its hypotheses, the best first: `tokens` and `score`."""
    return json.loads((GOLDEN_DIR / "beams.json").read_text())


def state_answers() -> dict[str, dict[str, list[list[dict]]]]:
    """As `answers`, of `STATE_CASES`, by model."""
    return json.loads((GOLDEN_DIR / "beams_state.json").read_text())
