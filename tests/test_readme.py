"""The README does what it says: its programs run, its configuration loads, its commands and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from levanter_infer import InferenceEngine
from levanter_infer.config import load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def run_example(code: str) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_first_example_prints_what_stands_under_it():
    engine, _ = blocks("python")
    (printed,) = blocks("text")
    assert len(engine.splitlines()) <= 6
    assert run_example(engine) == printed


@pytest.mark.slow
def test_the_pure_example_runs_inside_jit():
    _, pure = blocks("python")
    assert run_example(pure).strip() == "(2, 4, 8) (2, 4, 8)"


def test_the_configuration_loads(tmp_path):
    (text,) = blocks("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    config = load_config(path)
    assert config.prompts == yaml.safe_load(text)["prompts"] and config.model.path == "models/tiny"


def test_commands_name_files_and_modules_that_exist():
    commands = "\n".join(blocks(""))
    scripts = set(re.findall(r"\./(\S+\.sh)", commands))
    assert scripts == {"scripts/sample.sh", "scripts/test.sh"}
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK), f"{script} is not executable"
    modules = set(re.findall(r"(?:-m |`)levanter[_-]infer[. ](\w+)", README))
    assert modules >= {"sample", "batch", "score", "plan", "check", "audit", "doctor", "bench"}
    for module in modules:
        path = ROOT / "src" / "levanter_infer" / module
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_commands_load_the_configurations_that_they_name():
    for command in re.findall(r"`levanter-infer (?:sample|score|audit) --config (configs/\S+)`", README):
        load_config(ROOT / command)


def test_our_names_beside_those_of_vllm_exist():
    from levanter_infer import Completion, EngineConfig, Request, RequestOutput, SamplingParams
    from levanter_infer.config import MeshConfig

    table = README.partition("## Coming from vLLM")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 15

    def names(kind) -> set[str]:
        return {*getattr(kind, "__dataclass_fields__", ()), *dir(kind)}

    for theirs, ours in rows:
        for name in re.findall(r"`engine\.(\w+)(?::.*?)?`", ours):
            assert name in names(EngineConfig) | names(InferenceEngine), name
        for name in re.findall(r"`mesh\.(\w+)`", ours):
            assert name in names(MeshConfig), name
        for kind in (Request, RequestOutput, SamplingParams):
            for name in re.findall(rf"`{kind.__name__}\.(\w+)`", ours):
                assert name in names(kind), f"{kind.__name__}.{name}"
        if "the same names" in ours:
            kinds = (SamplingParams, Request, Completion)
            kind = next(kind for kind in kinds if f"`{kind.__name__}`" in theirs + ours)
            same = [name for name in re.findall(r"`(?:CompletionOutput\.)?(\w+)`", theirs) if name != kind.__name__]
            renamed = {"weight_versions"}
            assert not set(same) - renamed - names(kind), set(same) - names(kind)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_paths_named_in_documents_exist():
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:src|tests|scripts|docs|configs)/[\w./-]+\.\w+)`", document.read_text()):
            assert (ROOT / path).exists(), f"{document.relative_to(ROOT)} names {path}"
