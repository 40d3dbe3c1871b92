"""`Worker`: one process of a job: its input, its directory, its engine."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from levanter_infer.batch import tables
from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.drive import Driver, OutputFormat, RowFormat, Totals
from levanter_infer.batch.input import Input, InputShard, InputShards
from levanter_infer.batch.job import (
    JOB,
    Job,
    broadcast_claims,
    check_same,
    dumps,
    job_fingerprint,
    make_job_spec,
    read_job_spec,
    receive_claims,
)
from levanter_infer.batch.openai import ResultLines
from levanter_infer.batch.store import Store, file_system, open_store, protocols
from levanter_infer.checkpoints.chat import CHAT_KEYS
from levanter_infer.cli.session import make_engine
from levanter_infer.fingerprint import device_fingerprint, model_fingerprint, tokenizer_fingerprint, version_fingerprint
from levanter_infer.io.prompts import chat_settings, columns_of
from levanter_infer.io.terminal import say
from levanter_infer.policies import Numerics
from levanter_infer.runtime.hosts import Hosts, agree
from levanter_infer.runtime.multihost import ONE_MESH

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer
    from levanter_infer.engine.engine import InferenceEngine

LOG_SECONDS = 10
"""Seconds between two progress lines."""
_SCHEDULING = (
    *("max_round_steps", "max_round_seconds", "recompilation", "host_bytes", "preempt", "admission"),
    *("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
)
"""Engine keys that change the schedule and never the results."""
_SIZES = ("page_size", "max_pages", "max_seq_len", "max_step_tokens", "kv_dtype", "attention", "matmul", "cpu_isa")
"""Engine keys that the first run chooses for all later ones, unless the configuration does: limits depend on them."""


@dataclasses.dataclass
class Worker:
    """One process of a job."""

    config: BatchRunConfig
    source: Input
    job: Job
    engine: "InferenceEngine | None"
    """None: all shards are finished."""
    rank: tuple[int, int]
    """Number of this worker, and of workers."""
    mesh_hosts: Hosts | None = None
    """The processes of one mesh; process 0 alone reads and writes the job's directory."""

    def work(self, should_stop: Callable[[], bool], shards: Iterable[InputShard] | None = None) -> tuple[bool, Totals]:
        """Process this worker's shards, or the given ones. Returns: as `Driver.run`, and the totals."""
        assert self.engine is not None
        config, job, engine = self.config, self.job, self.engine
        driver = Driver(
            engine,
            lambda shard: self.source.rows(job.input, shard),
            config.sampling,
            max_seqs=engine.shapes.max_seqs,
            equal_bytes=job.spec["guarantee"]["numerics"] == Numerics.BATCH_INVARIANT,
            chat=chat_settings(config),
            named=job.input.named,
            output_format=output_format(config, engine.tokenizer, self.source.model_names),
        )
        if shards is None:
            shards = job.shards_of(*self.rank)
        hosts = self.mesh_hosts
        if hosts is not None and not hosts.is_lead:
            complete = driver.run(receive_claims(hosts, job.input), should_stop)
        else:
            claims = job.claim(shards) if hosts is None else broadcast_claims(hosts, job.claim(shards))
            complete = driver.run(claims, should_stop, Progress(job, engine, self.rank[1]))
        if complete:
            engine.drain()
        return complete, driver.totals


def open_worker(
    config: BatchRunConfig, hosts: Hosts | None = None, *, inputs: InputShards | None = None, begin: bool = True
) -> Worker:
    """Open or begin the job, and make an engine if shards are left.

    Args:
        hosts: the processes of the job, which all make the same call.
        inputs: files and shards of the input, if they are known; the caller then has compared the finished shards.
        begin: False: only open a job that has begun, without an engine.
    Raises: ValueError if the job began with another configuration, or for a fault of model, input or output;
        HostsDiffer.
    """
    one_mesh = hosts if config.multihost.layout == ONE_MESH else None
    rank = config.batch.worker_index, config.batch.num_workers
    if hosts is not None and one_mesh is None:
        rank = hosts.index, hosts.count
    writes = one_mesh is None or one_mesh.is_lead
    store, source, compare = output_store(config), input_of(config), inputs is None
    config = dataclasses.replace(config, engine={"numerics": Numerics.BATCH_INVARIANT, **config.engine})
    fingerprints = _fingerprints(config)
    inputs = split_input(config, source) if inputs is None else inputs
    wanted = _config_fingerprint(config)
    spec = read_job_spec(store)
    if hosts is not None:
        agree(hosts, "job", job_fingerprint(make_job_spec(wanted, fingerprints, {}, inputs), spec))
    engine = None
    while True:
        sizes = None
        if spec is not None:
            sizes = spec["sizes"]
            check_same(spec, make_job_spec(wanted, fingerprints, sizes, inputs))
            job = Job(store, spec)
            source.model_names = spec["model"].get("names", source.model_names)
            left = len(inputs.shards) - len(job.committed())
            if hosts is not None and (engine is None or one_mesh is not None):
                left = hosts.broadcast("shards left", left)  # processes of other runs may finish some meanwhile
            if left == 0 or engine is not None or not begin:
                return Worker(config, source, job, engine if left else None, rank, one_mesh)
            say(f"job       {len(inputs.shards) - left} of {len(inputs.shards)} shards are finished, {left} are left")
            if writes and compare:
                _compare_finished(job, *rank)
        engine = _engine(config, sizes, inputs, hosts)
        if spec is None:
            sizes = {key: value for key, value in engine.describe().items() if key in _SIZES and value is not None}
            mine = make_job_spec(wanted, fingerprints, sizes, inputs)
            if writes:
                store.create(JOB, dumps(mine))  # unless another worker was first
            spec = read_job_spec(store) if writes else mine
            assert spec is not None
            if spec["sizes"] != mine["sizes"]:
                if hosts is not None:
                    raise ValueError(f"another job has begun in this output meanwhile; see {JOB} there")
                engine = None


def _compare_finished(job: Job, worker: int, workers: int) -> None:
    """Compare this worker's finished shards with their records; the worker that finishes the job compares all.

    Raises: ValueError naming what has changed.
    """
    own = {index for index in job.committed() if index % workers == worker}
    begin = time.monotonic()
    size = sum(record["bytes"] for record in job.records(own))
    if own:
        say(f"compared  {len(own)} finished shards, {size / 1e6:.1f} MB, in {time.monotonic() - begin:.1f} s")


def output_format(
    config: BatchRunConfig, tokenizer: "Tokenizer | None", model_names: Sequence[str] | None = None
) -> OutputFormat:
    """The format of a job's output rows. Args: model_names: those of the job; by default, of the configuration."""
    if config.batch.format != "openai":
        return RowFormat(columns_of(config))
    return ResultLines((model_names or _model_names(config))[0], tokenizer)


def _model_names(config: BatchRunConfig) -> list[str]:
    """The names that requests may give the model; results have the first. A job keeps those of its first start, because
    the path of the model may change."""
    path = config.model.path
    return list(dict.fromkeys([*config.batch.model_names, path.rstrip("/").rsplit("/", 1)[-1], path]))


def output_store(config: BatchRunConfig) -> Store:
    """The directory of a job. Raises: ValueError if it cannot be opened, or would not outlive this process."""
    assert config.output is not None and config.output.path is not None
    url = config.output.path
    if "memory" in protocols(file_system(url)[0]):
        raise ValueError(
            f"output {url} is in this process's memory and gone at its end; give a directory or another URL"
        )
    if url.rstrip("/") in ("file:", "local:"):
        raise ValueError(f"output {url} has no path; give file:///DIRECTORY or a directory")
    if config.batch.format == "parquet":
        tables.check_available()
    return open_store(url)


def input_of(config: BatchRunConfig) -> Input:
    """The files of a job. Raises: ValueError as `Input`."""
    assert config.prompts_file is not None
    carry = columns_of(config).carry
    return Input(config.prompts_file, as_chat=bool(config.chat), model_names=_model_names(config), carry=carry)


def split_input(config: BatchRunConfig, source: Input) -> InputShards:
    """Files and shards of the input: from `job.json`, or by reading the input. Raises: ValueError as `Input.split`."""
    spec = read_job_spec(output_store(config))
    if spec is not None:
        return _same_files(source, spec)
    begin = time.monotonic()
    inputs = source.split(config.batch.rows_per_shard)
    say(
        f"input     {inputs.rows} rows in {len(inputs.files)} files, {len(inputs.shards)} shards, read once in "
        f"{time.monotonic() - begin:.1f} s"
    )
    return inputs


def _same_files(source: Input, spec: dict[str, Any]) -> InputShards:
    """The shards of `job.json`. Compares names and sizes of files; shards are compared by SHA-256 as they are read."""
    inputs = InputShards.from_dict(spec["input"])
    there, here = [file.name for file in inputs.files], [path.rsplit("/", 1)[-1] for path in source.paths]
    if there != here:
        only = sorted(set(there) ^ set(here))
        raise ValueError(
            f"the job began with {len(there)} input files and there are {len(here)}; not in both: "
            f"{', '.join(only[:5])}; put them back, or give another output"
        )
    source.check_unchanged(inputs)
    return inputs


def _fingerprints(config: BatchRunConfig) -> dict[str, Any]:
    return {
        "model": {**model_fingerprint(config.model.resolve()), "names": _model_names(config)},
        "tokenizer": tokenizer_fingerprint(
            config.tokenizer or config.model.path, None if config.tokenizer else config.model.revision
        ),
        "versions": version_fingerprint(("pyarrow",) if config.batch.format == "parquet" else ()),
        "device": device_fingerprint(config.engine_config().cpu_isa),
    }


def _config_fingerprint(config: BatchRunConfig) -> dict[str, Any]:
    """The configuration with every default, without the keys that cannot change a row."""
    engine = dataclasses.asdict(config.engine_config())
    batch = dataclasses.asdict(config.batch)
    return {
        "model": dataclasses.asdict(config.model),
        "tokenizer": config.tokenizer,
        "prompts_file": config.prompts_file,
        "chat": config.chat,
        **{key: getattr(config, key) for key in CHAT_KEYS},
        "output": {
            "include": sorted(set(config.output.include)) if config.output else [],
            "carry": config.output.carry if config.output else [],
        },
        "sampling": dataclasses.asdict(config.sampling) | {"seed": config.sampling.seed or 0},
        "engine": {key: value for key, value in engine.items() if key not in _SCHEDULING},
        "mesh": dataclasses.asdict(config.mesh),
        "batch": {key: batch[key] for key in ("rows_per_shard", "format", "model_names")},
    }


def _engine(
    config: BatchRunConfig, sizes: dict[str, Any] | None, inputs: InputShards, hosts: Hosts | None
) -> "InferenceEngine":
    """An engine with the sizes of `job.json`, if there is one."""
    config = dataclasses.replace(config, engine={**config.engine, **_sizes_here(config, sizes or {})})
    try:
        return make_engine(config, inputs.rows, hosts) if hosts is not None else make_engine(config, inputs.rows)
    except ValueError as e:
        if "batch_invariant" not in str(e):
            raise
        raise ValueError(f"{e}; or, for a job without equal bytes, engine.numerics: default") from e


def _sizes_here(config: BatchRunConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes of `job.json` that this processor supports.

    Raises: ValueError if its results would differ and the job promises equal bytes.
    """
    from levanter_infer.engine.instructions import usable_isas
    from levanter_infer.kernels.cpu import bindings as cpu

    isa = sizes.get("cpu_isa")
    usable = usable_isas() if isa is not None and cpu.available() else ()
    if isa is None or isa in usable:
        return sizes
    if config.engine["numerics"] == Numerics.BATCH_INVARIANT:
        here = f"this processor has {', '.join(usable)}" if usable else "there are no kernels for CPUs here"
        raise ValueError(
            f"the job began with engine.cpu_isa={isa}, and {here}: its rows would have other bytes. Resume it on a "
            "processor with that instruction set, or give another output"
        )
    return {key: value for key, value in sizes.items() if key != "cpu_isa"}


class Progress:
    """Writes a progress line every few seconds."""

    def __init__(self, job: Job, engine: "InferenceEngine", workers: int):
        self._job, self._engine, self._workers = job, engine, workers
        self._begin = self._last = time.monotonic()

    def __call__(self, totals: Totals) -> None:
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            return
        self._last = now
        done = self._job.committed()
        rows_done = sum(shard.rows for shard in self._job.input.shards if shard.index in done)
        seconds = now - self._begin
        rate = totals.rows / seconds
        left = self._job.input.rows - rows_done
        metrics = self._engine.metrics()
        say(
            f"progress  {totals.rows} rows here ({totals.failed} failed), {rows_done}/{self._job.input.rows} rows and "
            f"{len(done)}/{len(self._job.input.shards)} shards committed in all, {rate:.1f} rows/s, "
            f"{totals.tokens / seconds:.0f} tokens/s, {_remaining(left, rate, self._workers)} left, "
            f"{metrics['pages_in_use']}/{metrics['pages_total']} pages in use, {metrics['running']} running"
        )


def _remaining(rows: int, rate: float, workers: int) -> str:
    """Estimated time for `rows` more rows, if all workers are as fast as this one."""
    if rate <= 0:
        return "unknown time"
    seconds = round(rows / (rate * workers))
    return f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
