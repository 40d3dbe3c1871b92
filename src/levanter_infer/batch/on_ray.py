"""The same job on Ray Data: its rows are shards, its actors are workers. Needs the extra `ray`.

Ray decides who works on which shard, and starts actors again that have died. That every row comes out once is the job's
own doing: an actor claims, commits and skips shards as any other worker does.
"""

from typing import Any

from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.drive import Totals
from levanter_infer.batch.plan import Plan
from levanter_infer.batch.worker import Worker, input_of, open_worker, plan_of
from levanter_infer.io.terminal import say

_SHARDS_AT_ONCE = 4
"""Given to an actor together: it goes from one to the next without a pause, and waits at the end of the last."""


class ShardSampler:
    """An actor: samples the shards that it is given.

    Args:
        config: of the job; Ray says who does what.
        plan: of its input.
    """

    def __init__(self, config: BatchRunConfig, plan: Plan):
        self._config, self._plan = config, plan
        self._worker: Worker | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Work off the shards whose numbers stand in `batch["shard"]`.

        Returns: for each of them the rows that this actor has finished in this call, 0 for what was finished before.
        """
        if self._worker is None or self._worker.engine is None:
            self._worker = open_worker(self._config, plan=self._plan)
        worker, numbers = self._worker, [int(number) for number in batch["shard"]]
        before = worker.job.committed()
        if worker.engine is not None:
            worker.work(lambda: False, [worker.job.plan.shards[number] for number in numbers])
        new = worker.job.committed() - before
        rows = [worker.job.plan.shards[number].rows if number in new else 0 for number in numbers]
        return {"shard": batch["shard"], "rows": rows}


def work_on_ray(config: BatchRunConfig) -> tuple[Worker, Totals]:
    """Do a job with `batch.ray_actors` actors of the Ray cluster that is there, or of one on this machine.

    Returns: the job, with no engine in this process, and what was done.
    Raises: ValueError if Ray is not installed, or for what stops the job.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise ValueError(
            "batch.ray_actors needs Ray: install this package with its extra, in a checkout pip install '.[ray]'"
        ) from e
    if not ray.is_initialized():
        ray.init(log_to_driver=True)
    plan = plan_of(config, input_of(config))
    say(f"ray       {config.batch.ray_actors} actors for {len(plan.shards)} shards")
    done = ray.data.from_items([{"shard": shard.index} for shard in plan.shards]).map_batches(
        ShardSampler,
        fn_constructor_args=[config, plan],
        batch_size=max(1, min(_SHARDS_AT_ONCE, len(plan.shards) // config.batch.ray_actors)),
        concurrency=config.batch.ray_actors,
        num_gpus=config.batch.ray_gpus or None,
    )
    rows = [row["rows"] for row in done.iter_rows()]
    worker = open_worker(config, begin=False)
    return worker, Totals(rows=sum(rows), shards=sum(count > 0 for count in rows))
