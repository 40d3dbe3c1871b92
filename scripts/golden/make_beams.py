"""Write tests/golden/beams.json: what HF transformers' beam search finds on small random checkpoints.

Run from the repository root in the environment of make_goldens.py:

    .venv-hf/bin/python scripts/golden/make_beams.py

Every prompt is searched alone. A case is refused if its answer is a close call (noise on the scores changes it) or if
all cases together do not show what they are for.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LogitsProcessor, LogitsProcessorList

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.golden.cases import CASES as MODELS
from scripts.golden.make_goldens import build_model
from tests.beam_cases import CASES, MAX_TOKENS, MODEL, PROMPT_LENS, STATE_CASES, STATE_MODELS, BeamCase, prompt
from tests.golden_cases import GOLDEN_DIR

NOISE = 1e-3
"""Allowed noise of a log probability; an engine may differ by a tenth of it."""


class Noise(LogitsProcessor):
    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        return scores + NOISE * (2 * torch.rand(scores.shape, generator=self.random) - 1)


@torch.no_grad()
def search(model, case: BeamCase, ids: list[int], noise: int | None = None) -> list[dict]:
    tokens = torch.tensor([ids])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        num_beams=case.num_beams,
        num_return_sequences=case.num_beams,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        repetition_penalty=case.repetition_penalty,
        min_new_tokens=case.min_tokens,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=list(case.ends) or None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([] if noise is None else [Noise(noise)]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for sequence, score in zip(output.sequences[:, len(ids) :].tolist(), output.sequences_scores.tolist(), strict=True):
        ends = [i + 1 for i, token in enumerate(sequence) if token in case.ends]
        found.append({"tokens": sequence[: ends[0]] if ends else sequence, "score": score})
    return found


def main() -> None:
    torch.set_num_threads(1)
    answers = answers_of(MODEL, CASES)
    check(answers)
    (GOLDEN_DIR / "beams.json").write_text(json.dumps(answers) + "\n")
    answers = {name: answers_of(name, STATE_CASES) for name in STATE_MODELS}
    (GOLDEN_DIR / "beams_state.json").write_text(json.dumps(answers) + "\n")


def answers_of(model_name: str, cases: dict[str, BeamCase]) -> dict[str, list[list[dict]]]:
    model = build_model(model_name, MODELS[model_name].config)
    model.generation_config.eos_token_id = None
    answers = {}
    for name, case in cases.items():
        answers[name] = []
        for length in PROMPT_LENS:
            found = search(model, case, prompt(length))
            for seed in range(5):
                noisy = search(model, case, prompt(length), seed)
                if [f["tokens"] for f in noisy] != [f["tokens"] for f in found]:
                    raise ValueError(f"{name}, prompt of {length}: a close call; change the case\n{found}\n{noisy}")
            lens = [len(f["tokens"]) for f in found]
            scores = [round(f["score"], 3) for f in found]
            print(f"{model_name} {name:12s} prompt {length:2d} lengths {lens} scores {scores}")
            answers[name].append(found)
    return answers


def check(answers: dict) -> None:
    """Check that the answers show the property that each case is for."""
    for a, b in (
        ("plain", "never"),
        ("wide", "wide_early"),
        ("wide", "long"),
        ("wide", "penalised"),
        ("short", "at_least"),
    ):
        if answers[a] == answers[b]:
            raise ValueError(f"{a} and {b} give the same answers; change ENDS or the penalties")
    mixed = [len({len(f["tokens"]) for f in found}) for case in answers.values() for found in case]
    if max(mixed) < 3:
        raise ValueError("no search finds hypotheses of three lengths; change ENDS")


if __name__ == "__main__":
    main()
