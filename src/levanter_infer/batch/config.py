"""`BatchRunConfig`: the configuration of a batch job."""

import dataclasses
import re

from levanter_infer.config import RunConfig
from levanter_infer.engine.params import brief
from levanter_infer.policies import Numerics

FORMATS = ("jsonl", "parquet", "openai")
_WORKER = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Division of a job into shards, and their distribution over workers."""

    rows_per_shard: int = 1000
    """Input rows per shard; the results of one shard are one output file."""
    format: str = "jsonl"
    """Output format: jsonl or parquet, with rows as in `sample`, or openai, result lines of OpenAI's batch format."""
    worker: str = "0/1"
    """i/n: this process is worker i of n, from 0; the n workers share the job's shards."""
    model_names: list[str] = dataclasses.field(default_factory=list)
    """Further names of the job's model in the `model` of OpenAI batch lines."""
    ray_actors: int = 0
    """Number of Ray Data actors, each with an engine of its own. 0: run in this process."""
    ray_gpus: float = 0
    """GPUs per Ray actor."""

    def __post_init__(self):
        if self.rows_per_shard < 1:
            raise ValueError(f"batch.rows_per_shard={self.rows_per_shard}: expected at least 1")
        if self.ray_actors < 0 or self.ray_gpus < 0:
            raise ValueError("batch.ray_actors and batch.ray_gpus: expected at least 0")
        if self.ray_gpus and not self.ray_actors:
            raise ValueError(f"batch.ray_gpus={self.ray_gpus} without batch.ray_actors; say how many actors")
        if self.ray_actors and self.worker != "0/1":
            raise ValueError("batch.worker and batch.ray_actors are both given; Ray distributes the shards itself")
        if self.format not in FORMATS:
            raise ValueError(f"batch.format={brief(self.format)}: expected {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
        match = _WORKER.fullmatch(self.worker)
        if match is None or not int(match[1]) < int(match[2]):
            raise ValueError(f"batch.worker={brief(self.worker)}: expected i/n with i from 0 to n - 1, such as 0/4")

    @property
    def worker_index(self) -> int:
        return int(self.worker.split("/")[0])

    @property
    def num_workers(self) -> int:
        return int(self.worker.split("/")[1])


@dataclasses.dataclass(frozen=True)
class BatchRunConfig(RunConfig):
    """One run of `levanter_infer.batch`."""

    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)

    def __post_init__(self):
        if self.prompts_file is None:
            raise ValueError(
                "a batch job reads its rows from files: give prompts_file, a path or a pattern such as in/*"
            )
        super().__post_init__()
        if self.output is None or self.output.path is None:
            raise ValueError("a batch job needs output: a directory for its shards")
        if self.batch.format == "openai":
            for key in ("include", "carry"):
                if getattr(self.output, key):
                    raise ValueError(f"output.{key} with batch.format: openai, whose lines lack columns; leave it out")
            for key, is_asked in (
                ("prompt_logprobs", self.sampling.prompt_logprobs is not None),
                ("return_routed_experts", self.sampling.return_routed_experts),
            ):
                if is_asked:
                    raise ValueError(f"sampling.{key} with batch.format: openai, whose lines have no such field")
        numerics = self.engine.get("numerics", Numerics.BATCH_INVARIANT)
        if "num_cached_tokens" in self.output.include and numerics == Numerics.BATCH_INVARIANT:
            raise ValueError(
                "output.include names num_cached_tokens, which depend on what ran before, and this job promises equal "
                "bytes; leave it out or set engine.numerics: default"
            )
        if self.multihost.is_on:
            for key, given in (("worker", self.batch.worker != "0/1"), ("ray_actors", self.batch.ray_actors)):
                if given:
                    raise ValueError(f"batch.{key} and multihost are both given; each process of multihost is a worker")
        if self.output.metrics is not None and self.batch.ray_actors:
            raise ValueError(
                "output.metrics are those of an engine in this process; leave it out with batch.ray_actors"
            )
        if self.output.overwrite and self.output.metrics is None:
            raise ValueError("a batch job goes on with what is there and never replaces it; give another output")
