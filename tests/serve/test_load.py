"""The load script: a server's memory and open files stay constant, and its figures are printed."""

import asyncio

import pytest
from scripts.fuzz_server import server
from scripts.load_server import load, quarters, request_bodies

pytestmark = pytest.mark.slow


def test_memory_and_files_are_constant_under_load(capsys):
    with server("--engine.max_seqs", "32", "--engine.max_seq_len", "64") as (url, pid):
        asyncio.run(load(url, request_bodies(500, 8), 32))  # what the first requests allocate is kept
        states = quarters(url, pid, request_bodies(2000, 8), 32)
    assert "2000 requests in" in capsys.readouterr().out
    memory, files = zip(*states, strict=True)
    assert max(memory) - memory[0] < 24 and max(files) <= files[0] + 2, states
