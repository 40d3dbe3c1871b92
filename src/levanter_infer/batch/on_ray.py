"""A job on Ray Data: one shard is one row of Ray's data set, one actor is one worker. Needs the extra `ray`.

Ray assigns shards to actors and restarts actors that have died. That each row is written once is the job's own work: an
actor claims, commits and skips shards as any other worker does.
"""

from typing import Any

from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.drive import Totals
from levanter_infer.batch.input import InputShards
from levanter_infer.batch.worker import Worker, input_of, open_worker, split_input
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

        Returns: for each of them the rows that this actor has finished in this call, 0 for a shard finished before.
        """
        if self._worker is None or self._worker.engine is None:
            limit_threads()  # an actor has a process of its own
            self._worker = open_worker(self._config, inputs=self._inputs)
        worker, numbers = self._worker, [int(number) for number in batch["shard"]]
        before = worker.job.committed()
        if worker.engine is not None:
            worker.work(lambda: False, [worker.job.input.shards[number] for number in numbers])
        new = worker.job.committed() - before
        rows = [worker.job.input.shards[number].rows if number in new else 0 for number in numbers]
        return {"shard": batch["shard"], "rows": rows}


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
        ray.init(log_to_driver=True)
    inputs = split_input(config, input_of(config))
    say(f"ray       {config.batch.ray_actors} actors for {len(inputs.shards)} shards")
    done = ray.data.from_items([{"shard": shard.index} for shard in inputs.shards]).map_batches(
        ShardSampler,
        fn_constructor_args=[config, inputs],
        batch_size=max(1, min(_SHARDS_AT_ONCE, len(inputs.shards) // config.batch.ray_actors)),
        concurrency=config.batch.ray_actors,
        num_gpus=config.batch.ray_gpus or None,
    )
    rows = [row["rows"] for row in done.iter_rows()]
    worker = open_worker(config, begin=False)
    return worker, Totals(rows=sum(rows), shards=sum(count > 0 for count in rows))
