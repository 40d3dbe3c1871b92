"""`levanter-infer batch --config FILE`: sample the rows of files, resumably.

Messages go to standard error. Exit status: `cli.EXIT_STATUS`; 0 also for a job that SIGTERM stopped.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("batch")

from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.drive import Totals
from levanter_infer.batch.job import JOB
from levanter_infer.batch.on_ray import work_on_ray
from levanter_infer.batch.worker import Worker, open_worker, output_store
from levanter_infer.cli.common import run_config
from levanter_infer.cli.session import join
from levanter_infer.io.output import RowWriter, metrics_text
from levanter_infer.io.terminal import say
from levanter_infer.runtime.hosts import Hosts

USAGE = """\
usage: levanter-infer batch --config FILE [--worker I/N] [--KEY VALUE ...]

Sample the rows of files, in shards, and go on where an interrupted run has stopped. FILE is YAML:

  model: models/tiny                 # a directory in Hugging Face's layout, or a hub id
  prompts_file: in/*.jsonl           # JSONL, Parquet, text or OpenAI batch lines; a path or URL for fsspec
  output: out                        # a directory, or a URL

The same command resumes the job. A job that was killed has, in the end, the same bytes as one that was not
(engine.numerics is batch_invariant unless it is given). docs/batch.md says more.

  --config FILE       the configuration
  --output DIR        the directory of the job
  --worker I/N        be worker I of N, from 0; all work on one job, in one directory
  --output.metrics FILE.json   write what the engine counted in this run; FILE.prom for Prometheus. A run that resumes
                      a job replaces the file; others do so with --overwrite
  --help              this text
"""
"""Read from the source by `cli.command_help`."""
_REPEAT_S = 0.01
"""Seconds after which a signal is sent again: Python is in another frame then."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_config("batch", argv, run, BatchRunConfig, {"worker": "batch.worker"})


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGINT came while nothing was in progress. As Python's own, so that no `except Exception` takes it."""


class StopSignal:
    """Records SIGTERM and SIGINT: until `defer` they interrupt, afterwards the job reads `is_set` after each round.

    The handler takes no lock and writes nothing but attributes: Python calls it in the main thread, between any two
    instructions of what that thread does.
    """

    def __init__(self):
        self.received: int | None = None
        """Number of the last signal."""
        self.hosts: Hosts | None = None
        """Processes that stop together with this one."""
        self._deferred = False

    def defer(self) -> None:
        self._deferred = True
        if self.received is not None:
            raise Stopped

    def is_set(self) -> bool:
        return self.received is not None

    @property
    def exit_status(self) -> int:
        """Exit status of a run that a signal has stopped."""
        return 130 if self.received == signal.SIGINT else 0

    def _receive(self, number: int, _) -> None:
        again = self.received is not None
        self.received = number
        if self.hosts is not None:
            self.hosts.stop_wanted = True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt  # at once
        if not self._deferred and not again:  # the first one is being handled otherwise
            raise Stopped

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        if threading.current_thread() is not threading.main_thread():
            yield self  # signals belong to the caller's main thread
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        hook, sys.unraisablehook = sys.unraisablehook, lambda lost: self._repeat(lost) or hook(lost)
        try:
            yield self
        finally:
            sys.unraisablehook = hook
            for number, handler in before.items():
                signal.signal(number, handler)

    def _repeat(self, lost) -> bool:
        """Send a signal again whose exception was `lost`, as Python loses those that a handler raises while an object
        is being deleted or garbage collected. Returns: False for other exceptions."""
        number = self.received
        if not isinstance(lost.exc_value, KeyboardInterrupt) or number is None:
            return False
        self.received = None
        threading.Timer(_REPEAT_S, os.kill, (os.getpid(), number)).start()
        return True


def run(config: BatchRunConfig) -> int:
    """Run one worker of a job; returns the exit status. Raises: ValueError for an error that stops the run."""
    stop = StopSignal()
    with stop.installed():
        try:
            with join(config, (Stopped,)) as stop.hosts:
                if stop.hosts is not None:
                    stop.hosts.advice = "What was finished is kept: the same command goes on"
                return _run(config, stop)
        except Stopped:
            say("stopped   before anything was in progress; the same command goes on")
            return stop.exit_status


def _run(config: BatchRunConfig, stop: StopSignal) -> int:
    assert config.output is not None
    with contextlib.ExitStack() as stack:
        metrics = None
        hosts = stop.hosts
        if config.output.metrics is not None and (hosts is None or hosts.is_lead):
            # What an earlier run of the same job has written must not keep the same command from going on with it
            replaces = config.output.overwrite or output_store(config).size(JOB) is not None
            metrics = stack.enter_context(RowWriter(config.output.metrics, overwrite=replaces))
        begin = time.monotonic()
        if config.batch.ray_actors:
            try:
                worker, totals = work_on_ray(config)
            except Stopped:
                say("stopped   what was finished is safe, and the same command goes on")
                return stop.exit_status
            return _end(worker, totals, time.monotonic() - begin)
        worker = open_worker(config, hosts)
        if worker.engine is None:
            return _end(worker, Totals(), 0.0)
        engine = worker.engine
        stop.defer()
        begin = time.monotonic()
        complete, totals = worker.work(stop.is_set if worker.mesh_hosts is None else lambda: engine.is_stopping)
        seconds = time.monotonic() - begin
        if metrics is not None:
            metrics.write_text(metrics_text(engine, as_prometheus=metrics.path.suffix == ".prom"))
            metrics.commit()
        if not complete:
            if worker.mesh_hosts is None or worker.mesh_hosts.is_lead:
                worker.job.check_current()
            say(f"stopped   {_done_text(totals, seconds)}; all of it is safe, and the same command goes on")
            return stop.exit_status
        return _end(worker, totals, seconds)


def _done_text(totals: Totals, seconds: float) -> str:
    return (
        f"{totals.rows} rows ({totals.failed} failed), {totals.tokens} tokens and {totals.shards} shards in "
        f"{seconds:.1f} s"
    )


def _end(worker: Worker, totals: Totals, seconds: float) -> int:
    """Report the work of this run, and write the manifest if the job is complete."""
    say(f"done      {_done_text(totals, seconds)}")
    if worker.mesh_hosts is None:
        return _finish(worker, totals)
    return worker.mesh_hosts.broadcast("status", _finish(worker, totals) if worker.mesh_hosts.is_lead else None)


def _finish(worker: Worker, totals: Totals) -> int:
    manifest = worker.job.finish()
    job = worker.job
    if manifest is None:
        count = len(job.input.shards)
        left = count - len(job.committed())
        say(f"job       {left} of {count} shards are left to other workers, or to this command once more")
        return 1 if totals.failed else 0
    counts = manifest["counts"]
    say(f"job       complete: {', '.join(f'{value} {key}' for key, value in counts.items())}")
    return 1 if counts["failed_rows"] else 0
