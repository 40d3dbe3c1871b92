"""guidellm, unmodified, by the command of docs/serving.md; skipped where it is missing (scripts/compat.sh clients)."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm")

from scripts.fuzz_server import server  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_all_requests_complete(path, tmp_path):
    text = (ROOT / "docs" / "serving.md").read_text()
    found = re.search(r"```\n(guidellm run .*?)```", text, re.S)
    assert found is not None
    report = tmp_path / "report.json"
    with server("--engine.max_seqs", "64", "--engine.max_seq_len", "256") as (url, _):
        command = found[1].replace("http://127.0.0.1:8000", url).replace("/v1/completions", path)
        _, *arguments = shlex.split(command.replace("\\\n", " "))
        program = Path(sys.executable).with_name("guidellm")
        more = ["--output", f"kind=json,path={report}", "--disable-progress"]
        done = subprocess.run([program, *arguments, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 320, "errored": 0, "incomplete": 0, "total": 320}
    print(done.stdout[-6000:])
