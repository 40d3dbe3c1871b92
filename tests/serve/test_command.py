"""The command of docs/serving.md, as a process: it serves, drains on SIGTERM, and refuses what it must."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from levanter_infer import SamplingParams
from levanter_infer.cli.common import parse_arguments
from levanter_infer.cli.session import make_engine
from levanter_infer.config import load_config
from levanter_infer.policies import ToolCallParser
from levanter_infer.serve.__main__ import allow_files
from levanter_infer.serve.config import ServeConfig, ServeRunConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/serving.md").read_text()


def documented_command() -> list[str]:
    (line,) = re.findall(r"^levanter-infer (serve .*)$", DOCUMENT, flags=re.MULTILINE)
    return [sys.executable, "-m", "levanter_infer", *line.split()]


def test_documented_command_serves_and_drains():
    command = documented_command()
    command[command.index("--port") + 1] = "0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = next(found[1] for line in process.stderr if (found := re.match(r"serving +(http\S+)", line)))
            body = {"prompt": "17+25=", "max_tokens": 200, "ignore_eos": True, "stream": True}
            lines: list[str] = []
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line and not lines:
                        process.send_signal(signal.SIGTERM)  # with its first tokens under way
                    lines += [line] if line else []
            assert lines[-1] == "data: [DONE]" and '"finish_reason": "length"' in lines[-2]
            threading.Thread(target=process.stderr.read, daemon=True).start()
            assert process.wait(60) == 0
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
        finally:
            process.kill()


def test_limit_of_open_files_follows_the_connections(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
        allow_files(400)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 656 and not caplog.records
        allow_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 656
        if hard != resource.RLIM_INFINITY:
            allow_files(hard)
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard and "ulimit -n" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_other_addresses_need_a_key(monkeypatch, tmp_path):
    monkeypatch.delenv("LEVANTER_INFER_API_KEY", raising=False)
    assert ServeConfig().api_key() is None and ServeConfig(host="::1").api_key() is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(ValueError, match="API key"):
            ServeConfig(host=host).api_key()
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert ServeConfig(host="0.0.0.0", api_key_file=str(file)).api_key() == "secret"
    monkeypatch.setenv("LEVANTER_INFER_API_KEY", "other\n")
    assert ServeConfig().api_key() == "other"  # as clients send it
    file.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        ServeConfig(api_key_file=str(file)).api_key()


def test_widths_of_searches_can_be_compiled_ahead():
    assert ServeConfig(compile_num_beams=4).compile_num_beams == 4
    with pytest.raises(ValueError, match="serve.compile_num_beams=0: expected 1 to"):
        ServeConfig(compile_num_beams=0)


def test_tool_call_parser_is_read_and_checked():
    options = {"tool_call_parser": "serve.tool_call_parser"}
    for name in ToolCallParser:
        given = parse_arguments("serve", ["--model", "m", "--tool_call_parser", name], ServeRunConfig, options)
        assert load_config(*given, ServeRunConfig).serve.tool_call_parser == name
    with pytest.raises(ValueError, match="tool_call_parser='x': expected none, hermes, llama3_json or mistral"):
        ServeConfig(tool_call_parser="x")


@pytest.mark.slow
def test_what_is_compiled_ahead_is_not_compiled_by_the_first_request():
    words = ["--model", "models/tiny", "--serve.compile_ahead", "[constraints, scoring]"]
    words += ["--engine.max_seqs", "2", "--engine.max_seq_len", "32", "--engine.max_step_tokens", "16"]
    config = load_config(*parse_arguments("serve", words, ServeRunConfig, {}), ServeRunConfig)
    engine = make_engine(config, 0, ahead=config.serve.compile_ahead)
    engine.warmup()
    before = engine.stats()["compilations"]
    asked = [SamplingParams(max_tokens=4, regex="[0-9]{2}"), SamplingParams(max_tokens=2, prompt_logprobs=0)]
    assert not any(output.error for output in engine.generate(["17+25=", "3+4="], asked))
    assert engine.stats()["compilations"] == before
    with pytest.raises(ValueError, match="serve.compile_ahead has 'beams'; expected constraints, scoring, routing"):
        ServeConfig(compile_ahead=["beams"])
