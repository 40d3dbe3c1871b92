"""`Worker`: a process at work on a job: its input, its directory, its engine."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from levanter_infer.batch import tables
from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.drive import Driver, Totals
from levanter_infer.batch.job import Job, check_same, job_fingerprint, make_promise, read_promise
from levanter_infer.batch.layout import layout_of
from levanter_infer.batch.plan import Input, InputShard, Plan
from levanter_infer.batch.shard import JOB, dumps
from levanter_infer.batch.store import Store, open_store
from levanter_infer.batch.together import followed, told
from levanter_infer.checkpoints.chat_settings import CHAT_KEYS
from levanter_infer.cli.session import make_engine
from levanter_infer.fingerprint import device_fingerprint, model_fingerprint, tokenizer_fingerprint, version_fingerprint
from levanter_infer.io.prompts import chat_settings, columns_of
from levanter_infer.io.terminal import say
from levanter_infer.policies import Numerics
from levanter_infer.runtime.agreement import agree
from levanter_infer.runtime.hosts import Hosts
from levanter_infer.runtime.multihost import ONE_MESH

if TYPE_CHECKING:
    from levanter_infer.engine.engine import InferenceEngine

LOG_SECONDS = 10
"""Between lines about the job."""
_SCHEDULING = ("max_round_steps", "max_round_seconds", "recompilation", "host_bytes", "preempt", "admission")
"""Keys of the engine that decide when something is computed, and never what."""
_SIZES = ("page_size", "max_pages", "max_seq_len", "max_step_tokens", "kv_dtype", "attention", "matmul", "cpu_isa")
"""Keys that the first run chooses for all others, where the configuration does not: what is refused depends on them."""


@dataclasses.dataclass
class Worker:
    """A process at work on a job."""

    config: BatchRunConfig
    source: Input
    job: Job
    engine: "InferenceEngine | None"
    """None: nothing is left to do."""
    place: tuple[int, int]
    """Which worker this is, and of how many."""
    together: Hosts | None = None
    """The processes of one mesh, of which the first alone reads and writes the job's directory."""

    def work(self, should_stop: Callable[[], bool], shards: Iterable[InputShard] | None = None) -> tuple[bool, Totals]:
        """Work off this worker's shards, or the given ones. Returns: as `Driver.run`, and what was done."""
        assert self.engine is not None
        config, job, engine = self.config, self.job, self.engine
        driver = Driver(
            engine,
            lambda shard: self.source.rows(job.plan, shard),
            config.sampling,
            max_seqs=engine.shapes.max_seqs,
            equal_bytes=job.promise["guarantee"]["numerics"] == Numerics.BATCH_INVARIANT,
            chat=chat_settings(config),
            layout=layout_of(config, engine.tokenizer),
        )
        if shards is None:
            shards = job.shards_of(*self.place)
        hosts = self.together
        if hosts is not None and not hosts.is_lead:
            complete = driver.run(followed(hosts, job.plan), should_stop)
        else:
            claims = job.claim(shards) if hosts is None else told(hosts, job.claim(shards))
            complete = driver.run(claims, should_stop, Progress(job, engine, self.place[1]))
        if complete:
            engine.drain()
        return complete, driver.totals


def open_worker(
    config: BatchRunConfig, hosts: Hosts | None = None, *, plan: Plan | None = None, begin: bool = True
) -> Worker:
    """Find or begin the job, and make an engine if anything is left to do.

    Args:
        hosts: processes that do the job together, and make the same call.
        plan: of the input, if it is known; who knows it sees to finished shards, too.
        begin: False: only look at a job that has begun, without an engine.
    Raises: ValueError if the job began otherwise, or anything is wrong with model, input or output; HostsDiffer.
    """
    one_mesh = hosts if config.multihost.layout == ONE_MESH else None
    place = config.batch.worker_index, config.batch.num_workers
    if hosts is not None and one_mesh is None:
        place = hosts.index, hosts.count
    writes = one_mesh is None or one_mesh.is_lead
    store, source, compare = _store(config), input_of(config), plan is None
    config = dataclasses.replace(config, engine={"numerics": Numerics.BATCH_INVARIANT, **config.engine})
    facts = _fingerprints(config)
    plan = plan_of(config, source) if plan is None else plan
    wanted = _config_fingerprint(config)
    promise = read_promise(store)
    if hosts is not None:
        agree(hosts, "job", job_fingerprint(make_promise(wanted, facts, {}, plan), promise))
    engine = None
    while True:
        sizes = None
        if promise is not None:
            sizes = promise["sizes"]
            check_same(promise, make_promise(wanted, facts, sizes, plan))
            job = Job(store, promise)
            left = len(plan.shards) - len(job.committed())
            if hosts is not None and engine is None:
                left = hosts.decide("shards left", left)  # others of the job may be finishing some
            if left == 0 or engine is not None or not begin:
                return Worker(config, source, job, engine if left else None, place, one_mesh)
            say(f"job       {len(plan.shards) - left} of {len(plan.shards)} shards are finished, {left} are left")
            if writes and compare:
                _compare_finished(job, *place)
        engine = _engine(config, sizes, plan, hosts)
        if promise is None:
            sizes = {key: value for key, value in engine.describe().items() if key in _SIZES and value is not None}
            mine = make_promise(wanted, facts, sizes, plan)
            if writes:
                store.create(JOB, dumps(mine))  # unless another worker was first
            promise = read_promise(store) if writes else mine
            assert promise is not None
            if promise["sizes"] != mine["sizes"]:
                if hosts is not None:
                    raise ValueError(f"another job has begun in this output meanwhile; see {JOB} there")
                engine = None


def _compare_finished(job: Job, worker: int, workers: int) -> None:
    """Compare finished shards with what their records say: those that fall to this worker. Whoever finishes the job
    compares all. Raises: ValueError naming what has changed."""
    own = {index for index in job.committed() if index % workers == worker}
    begin = time.monotonic()
    size = sum(record["bytes"] for record in job.records(own))
    if own:
        say(f"compared  {len(own)} finished shards, {size / 1e6:.1f} MB, in {time.monotonic() - begin:.1f} s")


def _store(config: BatchRunConfig) -> Store:
    assert config.output is not None and config.output.path is not None
    if config.batch.format == "parquet":
        tables.check_available()
    return open_store(config.output.path)


def input_of(config: BatchRunConfig) -> Input:
    """The files of a job. Raises: ValueError as `Input`."""
    assert config.prompts_file is not None
    path = config.model.path
    names = [path, path.rstrip("/").rsplit("/", 1)[-1], *config.batch.model_names]
    carry = columns_of(config).carry
    return Input(config.prompts_file, as_chat=bool(config.chat), model_names=names, carry=carry)


def plan_of(config: BatchRunConfig, source: Input) -> Plan:
    """How the input is divided: as the job began, or found by reading the input. Raises: ValueError as `Input.plan`."""
    promise = read_promise(_store(config))
    if promise is not None:
        return _same_files(source, promise)
    begin = time.monotonic()
    plan = source.plan(config.batch.rows_per_shard)
    say(
        f"input     {plan.rows} rows in {len(plan.files)} files, {len(plan.shards)} shards, read once in "
        f"{time.monotonic() - begin:.1f} s"
    )
    return plan


def _same_files(source: Input, promise: dict[str, Any]) -> Plan:
    """The plan that the job began with. Names and sizes are compared here, shards by their SHA-256 as they are read."""
    plan = Plan.from_dict(promise["input"])
    there, here = [file.name for file in plan.files], [path.rsplit("/", 1)[-1] for path in source.paths]
    if there != here:
        only = sorted(set(there) ^ set(here))
        raise ValueError(
            f"the job began with {len(there)} input files and there are {len(here)}; not in both: "
            f"{', '.join(only[:5])}; put them back, or give another output"
        )
    source.check_unchanged(plan)
    return plan


def _fingerprints(config: BatchRunConfig) -> dict[str, Any]:
    from levanter_infer.checkpoints.source import resolve_source

    return {
        "model": model_fingerprint(resolve_source(config.model.path, config.model.revision)),
        "tokenizer": tokenizer_fingerprint(
            config.tokenizer or config.model.path, None if config.tokenizer else config.model.revision
        ),
        "versions": version_fingerprint(("pyarrow",) if config.batch.format == "parquet" else ()),
        "device": device_fingerprint(config.engine_config().cpu_isa),
    }


def _config_fingerprint(config: BatchRunConfig) -> dict[str, Any]:
    """What was asked for, with every default, without what cannot change a row."""
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


def _engine(config: BatchRunConfig, sizes: dict[str, Any] | None, plan: Plan, hosts: Hosts | None) -> "InferenceEngine":
    """An engine of the sizes that the job began with, if it has begun."""
    config = dataclasses.replace(config, engine={**config.engine, **_sizes_here(config, sizes or {})})
    try:
        return make_engine(config, plan.rows, hosts) if hosts is not None else make_engine(config, plan.rows)
    except ValueError as e:
        if "batch_invariant" not in str(e):
            raise
        raise ValueError(f"{e}; or, for a job without the promise of equal bytes, engine.numerics: default") from e


def _sizes_here(config: BatchRunConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes that the job began with, as this processor can have them.

    Raises: ValueError if it computes otherwise than the job began, and the job promises equal bytes.
    """
    from levanter_infer.kernels.cpu import bindings as cpu

    isa = sizes.get("cpu_isa")
    usable = cpu.isas() if isa is not None and cpu.available() else ()
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
    """Says every few seconds how a job goes."""

    def __init__(self, job: Job, engine: "InferenceEngine", workers: int):
        self._job, self._engine, self._workers = job, engine, workers
        self._begin = self._last = time.monotonic()

    def __call__(self, totals: Totals) -> None:
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            return
        self._last = now
        done = self._job.committed()
        rows_done = sum(shard.rows for shard in self._job.plan.shards if shard.index in done)
        seconds = now - self._begin
        rate = totals.rows / seconds
        left = self._job.plan.rows - rows_done
        metrics = self._engine.metrics()
        say(
            f"progress  {totals.rows} rows here ({totals.failed} failed), {rows_done}/{self._job.plan.rows} rows and "
            f"{len(done)}/{len(self._job.plan.shards)} shards committed in all, {rate:.1f} rows/s, "
            f"{totals.tokens / seconds:.0f} tokens/s, {_remaining(left, rate, self._workers)} left, "
            f"{metrics['pages_in_use']}/{metrics['pages_total']} pages in use, {metrics['running']} running"
        )


def _remaining(rows: int, rate: float, workers: int) -> str:
    """Time for so many rows, if all workers are as fast as this one."""
    if rate <= 0:
        return "unknown time"
    seconds = round(rows / (rate * workers))
    return f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
