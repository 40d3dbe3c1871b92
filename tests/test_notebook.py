"""In a notebook: what is waited for is shown in the cell, results are readable, a restarted kernel starts warm."""

import ast

import pytest

from levanter_infer.checkpoints.save import save_model
from tests.tiny_models import tiny_model
from tests.tokenizer_files import byte_level, write

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = (
    """
from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, load_model

engine = InferenceEngine(*load_model({model!r}), EngineConfig(max_seqs=2, max_step_tokens=32))
""",
    """
sampling = SamplingParams(max_tokens=400, ignore_eos=True)
outputs = engine.generate([Request(prompt="hello", sampling=sampling) for _ in range(24)])
""",
    "outputs[0]",
    "engine.stats()['compile_s']",
    "quick = engine.generate([Request(prompt='a', sampling=SamplingParams(max_tokens=1))])",
)


@pytest.fixture
def model(tmp_path):
    tokenizer = byte_level()
    changes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    save_model(tiny_model(**changes), tmp_path / "model")
    return str(write(tmp_path / "model", tokenizer))


def run(model) -> list[list[dict]]:
    """The outputs of each cell, after a run in a kernel of its own."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell.format(model=model)) for cell in CELLS]
    nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


def texts(outputs) -> list[str]:
    return [output.get("data", {}).get("text/plain", output.get("text", "")) for output in outputs]


@pytest.mark.slow
def test_notebook_shows_progress_and_results_and_starts_warm_after_a_restart(model, tmp_path, monkeypatch):
    for name in (
        "COMPILATION_CACHE_DIR",
        "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
    ):
        monkeypatch.delenv(f"JAX_{name}", raising=False)
    monkeypatch.delenv("LEVANTER_INFER_COMPILE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    made, sampled, shown, compiled, quick = run(model)
    assert any(text.startswith("compiling") for text in texts(made + sampled)), (made, sampled)
    bar = sampled[-1]["data"]
    assert "sampling: 24/24 samples, 9600 tokens" in bar["text/plain"] and bar["text/plain"].startswith("[" + "#" * 20)
    assert '<progress max="24" value="24">' in bar["text/html"]
    (text,) = texts(shown)
    assert "hello" in text and "array(" not in text and len(text) < 1000
    assert quick == []  # nothing is shown of what is quick

    cold = ast.literal_eval(texts(compiled)[0])
    warm = ast.literal_eval(texts(run(model)[3])[0])
    print(f"compile_s: cold {cold:.1f}, after a restart {warm:.1f}")
    assert warm < cold / 2
