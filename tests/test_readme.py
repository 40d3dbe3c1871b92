"""The README does what it says: its programs run, its configuration loads, its commands and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


def test_the_engine_example_runs_and_adds():
    engine, _ = blocks("python")
    lines = run_example(engine).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("'17+25=' -> '42'") and lines[0].endswith("stop")
    assert lines[1].startswith("'Once upon a time'") and lines[1] != lines[2]
    assert float(lines[3]) > 0


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
    modules = set(re.findall(r"-m levanter_infer\.(\w+)", README))
    assert modules
    for module in modules:
        path = ROOT / "src" / "levanter_infer" / module
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_paths_named_in_documents_exist():
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:src|tests|scripts|docs|configs)/[\w./-]+\.\w+)`", document.read_text()):
            assert (ROOT / path).exists(), f"{document.relative_to(ROOT)} names {path}"
