"""The Python blocks of pages run as they stand, one after the other; what a page takes as given comes from here."""

import json
import re
import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from levanter_infer import SamplingParams, load_model
from tests.live_models import live_model

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(DOCS.parent)

    def run(programs: list[str], **given) -> dict:
        path = tmp_path / "page.py"
        path.write_text("\n\n".join(programs))
        return runpy.run_path(str(path), given)

    return run


@pytest.mark.slow
def test_the_page_about_reinforcement_learning(run):
    first, *others = blocks("rl.md")
    assert re.search(r"^    \.\.\.$", first, re.MULTILINE) and not any(re.search(r"\.\.\.", each) for each in others)
    found = run(others)
    assert [len(output.completions) for output in found["last"]] == [4, 4]
    assert len(found["sample"].token_ids) == 32
    old, new = found["sample"].version_range
    assert 0 < old < new == found["engine"].version


@pytest.mark.slow
def test_the_page_about_calls_from_a_training_program(run):
    _, tokenizer = load_model("models/tiny")
    tensors = load_file("models/tiny/model.safetensors")
    weights = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    given = {
        "model": live_model(json.loads(Path("models/tiny/config.json").read_text()), weights),
        "tokenizer": tokenizer,
        "prompt_token_ids": jnp.asarray(np.full((2, 4), 5), jnp.int32),
        "prompt_lens": jnp.asarray([4, 2], jnp.int32),
        "sampling": SamplingParams(max_tokens=4),
        "seeds": jnp.zeros((2, 2), jnp.uint32),
        "rows": [],
        "done": 0,
    }
    found = run(blocks("library.md"), **given)
    assert found["output"].token_ids.shape == (2, 4, 64)
    assert all(output.error is None for output in found["outputs"])
