"""Write tests/golden/bfloat16.json: how far transformers in bfloat16 is from itself in float32.

Run as make_goldens.py, in the same environment: python scripts/golden/make_bfloat16.py

Of the first golden case of each family: the mean difference of a logit between the model in bfloat16 and the same
weights in float32, as a part of the largest logit of the prompt. Routers make the difference large where a token gets
another expert. Our own error is held to a multiple of it (tests/models/test_bfloat16.py).
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.golden.make_goldens import known_to_hf
from tests.golden_cases import BFLOAT16_ERRORS, GoldenCase, case_names, load_case, relative_errors, write_checkpoint


@torch.no_grad()
def error(case: GoldenCase) -> float:
    with tempfile.TemporaryDirectory() as directory:
        folder = write_checkpoint(Path(directory), case)
        (folder / "config.json").write_text(json.dumps(known_to_hf(case.config)))
        # Grouped matmuls of torch want sizes that these models do not have.
        options = dict(attn_implementation="eager", experts_implementation="eager")
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
        full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    full.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    logits = [
        [
            model(torch.from_numpy(tokens)[None].long(), use_cache=False).logits[0].float().numpy()
            for model in (half, full)
        ]
        for tokens in case.sequences
    ]
    return float(np.mean(np.concatenate([relative_errors(*pair) for pair in logits])))


def main() -> None:
    errors: dict[str, float] = {}
    families = set()
    for name in case_names():
        case = load_case(name)
        family = case.config["model_type"]
        if family in families or family == "grug_moe":  # which transformers does not have
            continue
        families.add(family)
        errors[name] = round(error(case), 5)
        print(f"{name:24s} {errors[name]:.5f}", flush=True)
    content = {"transformers": transformers.__version__, "errors": errors}
    BFLOAT16_ERRORS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
