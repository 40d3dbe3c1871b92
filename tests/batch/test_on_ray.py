"""A job on a local cluster of Ray: the bytes of one process, also when an actor is killed."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from levanter_infer.batch.__main__ import main
from levanter_infer.checkpoints.save import save_model
from tests.tiny_models import tiny_model
from tests.tokenizer_files import byte_level, write

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")
pytest.importorskip("ray.data")


@pytest.fixture
def cluster(monkeypatch):
    root = str(Path(__file__).parents[2])
    settings = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in {**settings, "PYTHONPATH": f"{root}/src:{root}:{os.environ.get('PYTHONPATH', '')}"}.items():
        monkeypatch.setenv(name, value)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def arguments(tmp_path):
    tokenizer = byte_level()
    save_model(tiny_model(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256), tmp_path / "model")
    write(tmp_path / "model", tokenizer, generation_config={"eos_token_id": 1})
    rows = [json.dumps({"prompt": f"hello {i}", "sampling": {"n": 1 + i % 2}}) for i in range(120)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    values = {
        "model": tmp_path / "model",
        "prompts_file": tmp_path / "in.jsonl",
        "sampling.max_tokens": 100,
        "sampling.ignore_eos": "true",
        "engine.max_seqs": 4,
        "engine.max_round_seconds": 0.01,
        "batch.rows_per_shard": 5,
    }
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def contents(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


def kill_one_actor(output: Path, killed: list[int]) -> None:
    """Once two shards are there, kill a process that works on one."""
    until = time.monotonic() + 240
    while len(list(output.glob("_commits/*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    actors = [p for p in psutil.Process().children(recursive=True) if "ShardSampler" in " ".join(p.cmdline())]
    if actors:
        actors[0].send_signal(signal.SIGKILL)
        killed.append(actors[0].pid)


def test_a_job_on_ray_has_the_bytes_of_one_process_whoever_dies(cluster, arguments, tmp_path, capsys):
    output, killed = tmp_path / "on-ray", []
    killer = threading.Thread(target=kill_one_actor, args=(output, killed))
    killer.start()
    status = main([*arguments, "--output", str(output), "--batch.ray_actors", "2"])
    killer.join()
    said = capsys.readouterr().err
    assert status == 0 and "2 actors for 24 shards" in said and "complete: 120 rows" in said
    assert killed, "no actor was found to be killed"
    assert main([*arguments, "--output", str(tmp_path / "alone")]) == 0
    assert contents(output) == contents(tmp_path / "alone")
