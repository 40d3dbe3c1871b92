"""scripts/peers: what needs no other engine. Sides here are scripts of a few lines that talk as `protocol.py` says."""

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scripts.peers import side, to_gguf, verdict

from levanter_infer.checkpoints.save import save_model
from tests.tiny_models import tiny_model, uncached_greedy

PEERS = Path(side.__file__).parent
SIDE = """
import sys, time
sys.path.insert(0, {peers!r})
from protocol import serve

def start(setup):
    def generate(prompts, count):
        {body}
        return [[(prompt[0] + i * {step}) % 7 for i in range(count)] for prompt in prompts]
    return generate

serve(start, ())
"""


@pytest.fixture
def run(monkeypatch):
    """`run.py`, which finds its neighbours as a script does."""
    monkeypatch.syspath_prepend(str(PEERS))
    return importlib.import_module("run")


@pytest.fixture
def script(tmp_path):
    """`script(name, body="pass", step=1)`: a side that does `body` and counts in steps."""

    def write(name: str, body: str = "pass", step: int = 1) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(SIDE.format(peers=str(PEERS), body=body, step=step))
        return path

    return write


def state_of(process) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """HF's rotation of one head."""
    a, b = np.split(x, 2)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])


def rotate_neighbours(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """llama.cpp's rotation of one head."""
    a, b = x[0::2], x[1::2]
    return np.stack([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=1).ravel()


def test_permuted_rows_rotate_to_the_same_scores():
    rng = np.random.default_rng(0)
    heads, size, width = 3, 8, 5
    q, k, x, y = (rng.normal(size=shape) for shape in ((heads * size, width),) * 2 + ((width,),) * 2)
    near, far = rng.normal(size=size // 2), rng.normal(size=size // 2)
    permuted_q, permuted_k = to_gguf.permute(q, heads), to_gguf.permute(k, heads)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        expected = rotate_halves(q[rows] @ x, near) @ rotate_halves(k[rows] @ y, far)
        score = rotate_neighbours(permuted_q[rows] @ x, near) @ rotate_neighbours(permuted_k[rows] @ y, far)
        np.testing.assert_allclose(score, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_checkpoint_is_read_for_gguf(tmp_path, dtype):
    model = tiny_model(dtype=dtype, tie_word_embeddings=True)
    save_model(model, tmp_path)
    tensors = to_gguf.read_safetensors(tmp_path / "model.safetensors")
    names = {to_gguf.gguf_name(name) for name in tensors}
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm")
    assert names == {"token_embd.weight", "output_norm.weight"} | {
        f"blk.{i}.{part}.weight" for i in range(2) for part in layer
    }
    read = to_gguf.widen(tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(read, np.asarray(model.embeddings.weight.array, np.float32))


def test_a_side_is_stopped_while_it_is_not_asked(script, tmp_path):
    one = side.Side([sys.executable, script("one")], {}, tmp_path / "one.log")
    try:
        measured = one.measure([[3]], 4)
        assert measured.tokens == [[3, 4, 5, 6]] and measured.seconds < 5
        deadline = time.monotonic() + 10
        while state_of(one.process) != "T":
            assert time.monotonic() < deadline, state_of(one.process)
    finally:
        one.close()
    assert one.process.returncode == 0


def test_what_a_side_does_untimed_is_none_of_its_seconds(script, tmp_path):
    body = "from protocol import untimed\n        time.sleep(0.2)\n        with untimed(): time.sleep(0.6)"
    one = side.Side([sys.executable, script("one", body)], {}, tmp_path / "one.log")
    try:
        for _ in range(2):  # the second task does not pay for the first one's
            assert 0.2 <= one.measure([[3]], 1).seconds < 0.6
    finally:
        one.close()


def test_processor_time_of_others_is_noticed(script, tmp_path):
    spin = "end = time.process_time() + 0.3\n        while time.process_time() < end: pass"
    busy = side.Side([sys.executable, script("busy", spin)], {}, tmp_path / "busy.log")
    idle = side.Side([sys.executable, script("idle", "time.sleep(0.3)")], {}, tmp_path / "idle.log")
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert idle.measure([[3]], 1).disturbed > 0.1 / (os.cpu_count() or 1)
        own = side.group_ticks(busy.process.pid)
        busy.measure([[3]], 1)
        assert side.group_ticks(busy.process.pid) - own >= 0.25 * os.sysconf("SC_CLK_TCK")
    finally:
        other.kill()
        other.wait()
        busy.close()
        idle.close()


def test_a_side_that_ends_says_what_it_printed_last(script, tmp_path):
    one = side.Side([sys.executable, script("one", 'raise RuntimeError("no such token")')], {}, tmp_path / "one.log")
    with pytest.raises(side.SideError, match="status 1: RuntimeError: no such token"):
        one.measure([[3]], 4)
    with pytest.raises(side.SideError, match="No such file"):
        side.Side([sys.executable, tmp_path / "none.py"], {}, tmp_path / "none.log")


def test_a_run_gives_ratios_to_those_that_did_the_same_work(run, script, tmp_path):
    slow = "time.sleep(0.01 * count)"
    peers = [
        run.Peer("ours", sys.executable, script("ours", slow)),
        run.Peer("slower", sys.executable, script("slower", "time.sleep(0.03 * count)")),
        run.Peer("faster", sys.executable, script("faster", "time.sleep(0.002 * count)")),
        run.Peer("other", sys.executable, script("other", step=2)),
        run.Peer("missing", sys.executable, tmp_path / "none.py"),
        run.Peer("broken", sys.executable, script("broken", "assert count == 1, 'one token at most'")),
    ]
    sizes = dict(shape="tiny", dtype="float32", prompt=2, output=5, repeats=2, tries=1, threads=1, check=1)
    args = argparse.Namespace(**sizes, sampling={})
    case = run.compare(peers, args, 2, tmp_path)
    assert case["ours"]["decode"]["runs"] == 2
    assert 2 < case["ours/slower"]["decode"] < 4 and case["ours/slower"]["tokens_agreed"] == 6
    assert 0.1 < case["ours/faster"]["decode"] < 0.5
    assert case["ours/best"]["decode"] == {"peer": "faster", "ratio": case["ours/faster"]["decode"]}
    assert case["ours/other"] == {
        "tokens_agreed": 1, "tokens": 6, "refused": "the outputs differ: only 1 of 6 tokens agree"
    }  # fmt: skip
    assert "No such file" in case["missing"]["error"] and "ours/missing" not in case
    assert "one token at most" in case["broken"]["error"] and "ours/broken" not in case
    args.sampling, other = {"temperature": 1.0}, peers[3]
    sampled = run.compare([peers[0], other], args, 2, tmp_path)["ours/other"]
    assert "decode" in sampled and "refused" not in sampled  # other tokens are no other work


def test_a_disturbed_measurement_is_repeated(run):
    class Disturbed:
        seen = [0.4, 0.0, 0.0, 0.3, 0.01, 0.02, 0.5, 0.5]  # of the call for one token, and of the whole, in turn

        def measure(self, prompts, count):
            return side.Measurement(count, [[0] * count], self.seen.pop(0))

    one, args = Disturbed(), argparse.Namespace(output=4, tries=3)
    first, whole = run.measure_side(one, [[1]], args)
    assert (first.disturbed, whole.disturbed, whole.seconds) == (0.01, 0.02, 5)
    args.tries = 1
    assert run.measure_side(one, [[1]], args)[0].disturbed == 0.5


def test_peers_are_named_with_their_python(run):
    peer = run.Peer.parse("llamacpp:float16=/usr/bin/python")
    assert (peer.label, peer.python, peer.dtype) == ("llamacpp:float16", "/usr/bin/python", "float16")
    assert peer.script == PEERS / "llamacpp.py"
    for wrong in ("llamacpp", "unknown=python", "llamacpp:float8=python", "=python"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            run.Peer.parse(wrong)


def test_tokens_that_the_model_would_not_choose_fall_short():
    model, prompt = tiny_model(), [5, 3, 8]
    output = uncached_greedy(model, prompt, 4)
    assert verdict.largest_shortfall(model, [prompt], [output]) == 0
    for place in range(4):
        wrong = list(output)
        wrong[place] = (wrong[place] + 1) % 61
        assert verdict.largest_shortfall(model, [prompt] * 2, [output, wrong]) > verdict.MAX_SHORTFALL


def test_outputs_of_different_work_are_refused():
    ours = [[1, 2, 3], [4, 5, 6]]
    assert verdict.differs(ours, ours, {}) is None
    assert "only 1 of 3 tokens" in verdict.differs(ours, [[1, 2, 3], [4, 0, 6]], {})
    assert "length" in verdict.differs(ours, [[1, 2, 3], [4, 5]], {})
    near = {"ours": 0.001, "hf": 0.02}
    assert verdict.differs(ours, [[1, 2, 3], [4, 0, 6]], near) is None
    assert "'hf': 0.3" in verdict.differs(ours, ours, {**near, "hf": 0.3})
    assert "'ours': nan" in verdict.differs(ours, ours, {**near, "ours": float("nan")})


def test_sampled_outputs_are_compared_by_their_lengths():
    assert verdict.differs_in_length([[1, 2], [3, 4]], [[5, 6], [7, 8]]) is None
    assert verdict.differs_in_length([[1, 2], [3, 4]], [[5, 6], [7]]) == "the outputs differ in length"


def test_ratios_are_of_medians_and_the_best_peer_is_the_one_to_beat():
    ours = {"prefill": [100.0, 1.0, 300.0], "decode": [10.0, 20.0, 90.0]}
    hf = {"prefill": [50.0, 50.0, 50.0], "decode": [40.0, 40.0, 40.0]}
    assert verdict.ratio(ours, hf) == {"prefill": 2.0, "decode": 0.5}
    best = verdict.to_best({"hf": {"prefill": 2.0, "decode": 0.5}, "llamacpp": {"prefill": 0.6, "decode": 1.1}})
    assert best == {"prefill": {"peer": "llamacpp", "ratio": 0.6}, "decode": {"peer": "hf", "ratio": 0.5}}


def test_checked_sequences_are_spread_over_the_batch():
    assert verdict.spaced(1, 4) == [0]
    assert verdict.spaced(32, 4) == [0, 10, 21, 31]
    assert verdict.spaced(3, 4) == [0, 1, 2]


def test_the_table_has_a_row_for_each_engine_and_no_ratio():
    from scripts.peers.table import table

    def case(batch, **sides):
        rates = {name: {"decode": {"median": d}, "prefill": {"median": p}} for name, (d, p) in sides.items()}
        setup = {"shape": "S", "dtype": "bfloat16", "prompt": 128, "output": 64, "versions": {"jax": "0"}}
        return {**setup, "batch": batch, **rates, "ours/llamacpp:float16": {"decode": 2.0}, "hf": {"error": "no"}}

    sides = {"ours": (81.25, 480.0), "llamacpp:float16": (40.5, 1432.0)}
    lines = table([case(1, **sides), case(8, ours=(277.4, 565.0))])
    assert lines == [
        "| decode / prefill, tokens/s | batch 1 | batch 8 |",
        "|---|---|---|",
        "| levanter_infer | 81.2 / 480 | 277 / 565 |",
        "| llama.cpp, float16 | 40.5 / 1,432 | – |",
    ]
    with pytest.raises(ValueError, match="2 setups"):
        table([case(1, **sides), {**case(8, **sides), "dtype": "float32"}])
