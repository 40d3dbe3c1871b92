"""`run`: one process of a job, from its configuration to its manifest."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from levanter_infer.batch import tables
from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.drive import Driver, Totals
from levanter_infer.batch.facts import device_facts, model_facts, version_facts
from levanter_infer.batch.job import JOB, Job, check_same, make_promise, read_promise
from levanter_infer.batch.plan import Input, InputShard, Plan
from levanter_infer.batch.shard import dumps
from levanter_infer.batch.store import Store, open_store
from levanter_infer.frontend import make_engine, metrics_text, one_line, say
from levanter_infer.rows import RowWriter

if TYPE_CHECKING:
    from levanter_infer.engine.engine import InferenceEngine

LOG_SECONDS = 10
"""Between lines about the job."""
_SCHEDULING = ("max_round_steps", "max_round_seconds", "recompilation", "host_bytes", "preempt", "admission")
"""Keys of the engine that decide when something is computed, and never what."""
_SIZES = ("page_size", "max_pages", "max_seq_len", "max_step_tokens", "kv_dtype", "attention", "products")
"""Keys that the first run chooses for all others, where the configuration does not: what is refused depends on them."""


class Stopped(Exception):
    """SIGTERM or SIGINT came while nothing was in progress."""


class StopSignal:
    """Notes SIGTERM and SIGINT. Until `defer`, they interrupt; afterwards the job asks `is_set` after each round."""

    def __init__(self):
        self.received: int | None = None
        self._deferred = False

    def defer(self) -> None:
        self._deferred = True
        if self.received is not None:
            raise Stopped

    def is_set(self) -> bool:
        return self.received is not None

    def _receive(self, number: int, _) -> None:
        again = self.received is not None
        self.received = number
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._deferred:
            raise Stopped

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        if threading.current_thread() is not threading.main_thread():
            yield self  # whoever runs us there has handlers of their own
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(config: BatchRunConfig) -> int:
    """Do this worker's share of a job; returns the exit status. Raises: ValueError for what stops the run."""
    stop = StopSignal()
    with stop.installed():
        try:
            return _run(config, stop)
        except Stopped:
            say("stopped   before anything was in progress; the same command goes on")
            return 130 if stop.received == signal.SIGINT else 0


def _run(config: BatchRunConfig, stop: StopSignal) -> int:
    assert config.output is not None
    with contextlib.ExitStack() as stack:
        metrics = None
        if config.output.metrics is not None:
            metrics = stack.enter_context(RowWriter(config.output.metrics, overwrite=config.output.overwrite))
        begin = time.monotonic()
        if config.batch.ray_actors:
            from levanter_infer.batch.on_ray import work_on_ray

            session, totals = work_on_ray(config)
            return _end(session, totals, time.monotonic() - begin)
        session = open_session(config)
        if session.engine is None:
            return _end(session, Totals(), 0.0)
        engine = session.engine
        stop.defer()
        begin = time.monotonic()
        complete, totals = session.work(stop.is_set)
        seconds = time.monotonic() - begin
        if metrics is not None:
            metrics.write_text(metrics_text(engine, as_prometheus=metrics.path.suffix == ".prom"))
            metrics.commit()
        if not complete:
            say(f"stopped   {_done_text(totals, seconds)}; all of it is safe, and the same command goes on")
            return 130 if stop.received == signal.SIGINT else 0
        return _end(session, totals, seconds)


@dataclasses.dataclass
class Session:
    """A process at work on a job."""

    config: BatchRunConfig
    source: Input
    job: Job
    engine: "InferenceEngine | None"
    """None: nothing is left to do."""

    def work(self, should_stop: Callable[[], bool], shards: Iterable[InputShard] | None = None) -> tuple[bool, Totals]:
        """Work off this worker's shards, or the given ones. Returns: as `Driver.run`, and what was done."""
        assert self.engine is not None
        config, job, engine = self.config, self.job, self.engine
        driver = Driver(
            engine,
            lambda shard: self.source.rows(job.plan, shard),
            config.sampling,
            max_seqs=engine.shapes.max_seqs,
            equal_bytes=job.promise["guarantee"]["numerics"] == "batch_invariant",
        )
        if shards is None:
            shards = job.shards_of(config.batch.worker_index, config.batch.num_workers)
        complete = driver.run(job.claim(shards), should_stop, Progress(job, engine, config.batch.num_workers))
        if complete:
            engine.drain()
        return complete, driver.totals


def open_session(config: BatchRunConfig, *, plan: Plan | None = None, begin: bool = True) -> Session:
    """Find or begin the job, and make an engine if anything is left to do.

    Args:
        plan: of the input, if it is known.
        begin: False: only look at a job that has begun, without an engine.
    Raises: ValueError if the job began otherwise, or anything is wrong with model, input or output.
    """
    store, source = _store(config), input_of(config)
    config = dataclasses.replace(config, engine={"numerics": "batch_invariant", **config.engine})
    facts = _facts(config)
    plan = plan_of(config, source) if plan is None else plan
    wanted = _config_facts(config)
    promise = read_promise(store)
    engine = None
    while True:
        sizes = None
        if promise is not None:
            sizes = promise["sizes"]
            check_same(promise, make_promise(wanted, facts, sizes, plan))
            job = Job(store, promise)
            left = len(plan.shards) - len(job.committed())
            if left == 0 or engine is not None or not begin:
                return Session(config, source, job, engine if left else None)
            say(f"job       {len(plan.shards) - left} of {len(plan.shards)} shards are finished, {left} are left")
        engine = _engine(config, sizes, plan)
        if promise is None:
            sizes = {key: value for key, value in engine.describe().items() if key in _SIZES}
            if not store.create(JOB, dumps(make_promise(wanted, facts, sizes, plan))):
                engine = None  # another worker was first, and may have chosen other sizes
            promise = read_promise(store)


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
    return Input(config.prompts_file, as_chat=bool(config.chat), model_names=names)


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
    """The plan that the job began with. Its shards are compared when they are read."""
    plan = Plan.from_dict(promise["input"])
    there, here = [file.name for file in plan.files], [path.rsplit("/", 1)[-1] for path in source.paths]
    if there != here:
        only = sorted(set(there) ^ set(here))
        raise ValueError(
            f"the job began with {len(there)} input files and there are {len(here)}; not in both: "
            f"{', '.join(only[:5])}; put them back, or give another output"
        )
    return plan


def _facts(config: BatchRunConfig) -> dict[str, Any]:
    from levanter_infer.checkpoints.source import resolve_source

    return {
        "model": model_facts(resolve_source(config.model.path, config.model.revision)),
        "tokenizer": _tokenizer_facts(config),
        "versions": version_facts(parquet=config.batch.format == "parquet"),
        "device": device_facts(),
    }


def _tokenizer_facts(config: BatchRunConfig) -> dict[str, str]:
    from levanter_infer.checkpoints.source import resolve_source
    from levanter_infer.checkpoints.tokenizer import Tokenizer

    name = config.tokenizer or config.model.path
    source = resolve_source(name, None if config.tokenizer else config.model.revision, weights=False)
    if not source.has("tokenizer.json"):
        return {"name": "", "sha256": ""}
    return {"name": source.name, "sha256": Tokenizer.from_directory(source.directory).fingerprint}


def _config_facts(config: BatchRunConfig) -> dict[str, Any]:
    """What was asked for, with every default, without what cannot change a row."""
    engine = dataclasses.asdict(config.engine_config())
    batch = dataclasses.asdict(config.batch)
    return {
        "model": dataclasses.asdict(config.model),
        "tokenizer": config.tokenizer,
        "prompts_file": config.prompts_file,
        "chat": config.chat,
        "sampling": dataclasses.asdict(config.sampling) | {"seed": config.sampling.seed or 0},
        "engine": {key: value for key, value in engine.items() if key not in _SCHEDULING},
        "mesh": dataclasses.asdict(config.mesh),
        "batch": {key: batch[key] for key in ("rows_per_shard", "format", "model_names")},
    }


def _engine(config: BatchRunConfig, sizes: dict[str, Any] | None, plan: Plan) -> "InferenceEngine":
    """An engine of the sizes that the job began with, if it has begun."""
    config = dataclasses.replace(config, engine={**config.engine, **(sizes or {})})
    try:
        return make_engine(config, plan.rows)
    except ValueError as e:
        if "batch_invariant" not in str(e):
            raise
        raise ValueError(f"{e}; or, for a job without the promise of equal bytes, engine.numerics: default") from e


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


def _done_text(totals: Totals, seconds: float) -> str:
    return (
        f"{totals.rows} rows ({totals.failed} failed), {totals.tokens} tokens and {totals.shards} shards in "
        f"{seconds:.1f} s"
    )


def _end(session: Session, totals: Totals, seconds: float) -> int:
    """Say what was done, and finish the job if it is."""
    say(f"done      {_done_text(totals, seconds)}")
    manifest = session.job.finish()
    job = session.job
    if manifest is None:
        left = len(job.plan.shards) - len(job.committed())
        say(
            f"job       {left} of {len(job.plan.shards)} shards are left to other workers, or to this command once more"
        )
        return 1 if totals.failed else 0
    counts = manifest["counts"]
    say(one_line(f"job       complete: {', '.join(f'{value} {key}' for key, value in counts.items())}"))
    return 1 if counts["failed_rows"] else 0
