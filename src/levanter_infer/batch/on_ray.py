"""A job on Ray Data: one shard is one row of Ray's data set, one actor is one worker. Needs the extra `ray`.

Ray assigns shards to actors and restarts actors that have died. That each row is written once is the job's own work: an
actor claims, commits and skips shards as any other worker does.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.drive import Totals
from levanter_infer.batch.input import InputShards
from levanter_infer.batch.job import Job, read_job_spec
from levanter_infer.batch.worker import Worker, input_of, open_worker, output_store, split_input
from levanter_infer.io.terminal import say
from levanter_infer.runtime.processor import limit_threads

_SHARDS_AT_ONCE = 4
"""Shards per call of an actor, which goes from one to the next without a pause and drains at the end of the last."""


class ShardSampler:
    """An actor: samples the shards that Ray assigns to it.

    Args:
        config: configuration of the job.
        inputs: files and shards of the job's input.
    """

    def __init__(self, config: BatchRunConfig, inputs: InputShards):
        self._config, self._inputs = config, inputs
        self._worker: Worker | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Process the shards whose numbers are in `batch["shard"]`.

        Returns: their numbers, when they are finished, by this actor or before.
        """
        if self._worker is None or self._worker.engine is None:
            limit_threads()  # an actor has a process of its own
            self._worker = open_worker(self._config, inputs=self._inputs)
        worker, numbers = self._worker, [int(number) for number in batch["shard"]]
        if worker.engine is not None:
            worker.work(lambda: False, [worker.job.input.shards[number] for number in numbers])
        return {"shard": batch["shard"]}


class ReportingShardSampler(ShardSampler):
    """An actor whose errors are values: of an exception, Ray keeps the text alone, within a traceback."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns: as `ShardSampler`, and in `error` why the shards are not finished, or ""."""
        try:
            return {**super().__call__(batch), "error": [""] * len(batch["shard"])}
        except ValueError as e:
            return {"shard": batch["shard"], "error": [str(e) or "ValueError"] * len(batch["shard"])}


def work_on_ray(config: BatchRunConfig) -> tuple[Worker, Totals]:
    """Run a job with `batch.ray_actors` actors of a running Ray cluster, or of a new one on this machine.

    Returns: the worker, without an engine in this process, and the totals of the run.
    Raises: ValueError if Ray is not installed, or for an error that stops the job.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise ValueError(
            "batch.ray_actors needs Ray: install this package with its extra, in a checkout pip install '.[ray]'"
        ) from e
    if not ray.is_initialized():
        with _own_signals():
            ray.init(log_to_driver=True)
    inputs = split_input(config, input_of(config))
    store = output_store(config)
    spec = read_job_spec(store)
    before = set() if spec is None else Job(store, spec).committed()
    say(f"ray       {config.batch.ray_actors} actors for {len(inputs.shards)} shards")
    done = ray.data.from_items([{"shard": shard.index} for shard in inputs.shards]).map_batches(
        ReportingShardSampler,
        fn_constructor_args=[config, inputs],
        batch_size=max(1, min(_SHARDS_AT_ONCE, len(inputs.shards) // config.batch.ray_actors)),
        compute=ray.data.ActorPoolStrategy(size=config.batch.ray_actors),
        num_gpus=config.batch.ray_gpus or None,
    )
    try:
        for row in done.iter_rows():
            if row["error"]:
                raise ValueError(row["error"])
    except ray.exceptions.RayError as e:
        raise ValueError(f"Ray has ended the job: {e}; the same command goes on") from e
    worker = open_worker(config, begin=False)
    new = worker.job.committed() - before
    counts = worker.job.counts(new)
    return worker, Totals(counts["rows"], 0, counts["failed_rows"], counts["generated_tokens"], len(new))


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers of signals: Ray's end the process, with a trace of its own code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that is not Python's
                signal.signal(number, handler)
