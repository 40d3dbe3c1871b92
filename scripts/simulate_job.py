"""A batch job on many chips, simulated: how long it takes, and what stragglers, failures and restarts cost of it.

A discrete-event model of `levanter_infer.batch`: workers claim shards in its order, hold a window of sequences, save
finished rows in journals, die, start again and go on. What a worker can do is given by a few constants, which
`--measured FILE` takes from a run on this machine (docs/scaling.md). Prints one JSON line a case.
"""

import argparse
import dataclasses
import heapq
import json
import random
import statistics
import sys

_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Job:
    """Work of the job, and its workers."""

    tokens: float = 1e9
    """Total number of generated tokens."""
    mean_tokens: float = 512
    """Mean tokens of a row; lengths are exponentially distributed, truncated at `max_tokens`."""
    max_tokens: float = 4096
    rows_per_shard: int = 1000
    workers: int = 64
    """Engines, each with its own part of the input and its own failures."""
    chips_per_worker: int = 4
    seqs: int = 256
    """Sequences that an engine runs at once."""
    tokens_per_s: float = 8000.0
    """Rate of a full engine; with fewer sequences it runs as many steps per second, up to `max_steps_per_s`."""
    max_steps_per_s: float = 80.0
    slow_share: float = 0.05
    """Share of slow workers."""
    slow_factor: float = 0.7
    """Relative rate of slow workers."""
    failures_per_chip_hour: float = 1e-4
    """A failure of one chip ends its worker."""
    restart_s: float = 300.0
    """Seconds from a failure until the worker runs again: new machine, weights, programs."""
    start_spread_s: float = 120.0
    """Seconds within which all workers start."""
    steals: bool = True
    """Workers that have finished their own shards claim unclaimed ones."""
    journal: bool = True
    """Finished rows of unfinished shards outlive a failure."""


@dataclasses.dataclass
class Shard:
    tokens: list[float]
    """Tokens of each row."""
    finished: set[int] = dataclasses.field(default_factory=set)
    state: str = "free"
    """free, claimed or done."""


class Worker:
    """An engine: a set of running rows that all advance by one token a step."""

    def __init__(self, index: int, job: Job, chance: random.Random):
        slow = chance.random() < job.slow_share
        self.index, self.job = index, job
        self.rate = job.slow_factor if slow else 1.0
        self.running: list[tuple[float, int, int]] = []  # (step at which it ends, shard, row)
        self.step = 0.0
        self.queue: list[tuple[int, int]] = []
        self.open: set[int] = set()  # claimed shards that are not finished
        self.generated = self.lost = 0.0
        self.busy_until = 0.0
        self.life = 0
        self.ended = 0.0

    def steps_per_s(self) -> float:
        """Memory-bound steps get shorter with fewer rows, down to a floor: the weights are read all the same."""
        full = self.job.tokens_per_s / self.job.seqs
        return self.rate * min(self.job.max_steps_per_s, full * self.job.seqs / max(1, len(self.running)))


def simulate(job: Job, seed: int) -> dict[str, float]:
    """Run one job to its end. Returns: times in hours and shares of chip time."""
    chance = random.Random(seed)
    shards = divide(job, chance)
    workers = [Worker(i, job, chance) for i in range(job.workers)]
    failures_per_s = job.failures_per_chip_hour * job.chips_per_worker / _HOUR
    events: list[tuple[float, int, str, int, int]] = []
    count = 0

    def push(time: float, kind: str, worker: Worker) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (time, count, kind, worker.index, worker.life))

    orders: list[list[int]] = [[] for _ in workers]
    for worker in workers:
        push(chance.uniform(0, job.start_spread_s) + job.restart_s, "start", worker)
    failures, now, down = 0, 0.0, 0.0
    while events:
        now, _, kind, index, life = heapq.heappop(events)
        worker = workers[index]
        if life != worker.life:
            continue
        if kind == "fail":
            failures += 1
            down += job.restart_s
            die(worker, shards, now)
            push(now + job.restart_s, "start", worker)
            continue
        if kind == "start":
            worker.busy_until = now
            orders[index] = order(index, job, len(shards))
            if failures_per_s:
                push(now + chance.expovariate(failures_per_s), "fail", worker)
        advance(worker, shards, now)
        feed(worker, shards, orders[index])
        if worker.running:
            first = worker.running[0][0]
            push(now + max(0.0, first - worker.step) / worker.steps_per_s(), "round", worker)
        else:
            worker.life += 1  # it ends; a failure after that costs nothing
            worker.ended = now
    end = max(worker.ended for worker in workers)
    assert all(shard.state == "done" for shard in shards), "rows were lost"
    return summary(job, workers, end, failures, down)


def divide(job: Job, chance: random.Random) -> list[Shard]:
    rows, tokens = [], 0.0
    while tokens < job.tokens:
        rows.append(min(job.max_tokens, 1.0 + chance.expovariate(1 / job.mean_tokens)))
        tokens += rows[-1]
    return [Shard(rows[i : i + job.rows_per_shard]) for i in range(0, len(rows), job.rows_per_shard)]


def order(worker: int, job: Job, count: int) -> list[int]:
    """As `batch.job.Job.shards_of`; reversed, to take from the end."""
    own = list(range(worker, count, job.workers))
    others = [i for i in range(count - 1, -1, -1) if i % job.workers != worker] if job.steals else []
    return (own + others)[::-1]


def advance(worker: Worker, shards: list[Shard], now: float) -> None:
    """Let time pass: rows that have ended are finished, and shards without any left are committed."""
    steps = (now - worker.busy_until) * worker.steps_per_s()
    worker.step += steps
    worker.generated += steps * len(worker.running)
    worker.busy_until = now
    while worker.running and worker.running[0][0] <= worker.step + 1e-6:
        _, index, row = heapq.heappop(worker.running)
        shards[index].finished.add(row)
        if len(shards[index].finished) == len(shards[index].tokens):
            shards[index].state = "done"
            worker.open.remove(index)


def feed(worker: Worker, shards: list[Shard], todo: list[int]) -> None:
    """Fill the places of the engine, from shards claimed before or now."""
    while len(worker.running) < worker.job.seqs:
        if not worker.queue:
            index = next_free(shards, todo)
            if index is None:
                return
            shards[index].state = "claimed"
            worker.open.add(index)
            left = set(range(len(shards[index].tokens))) - shards[index].finished
            worker.queue = [(index, row) for row in sorted(left, reverse=True)]
        index, row = worker.queue.pop()
        heapq.heappush(worker.running, (worker.step + shards[index].tokens[row], index, row))


def next_free(shards: list[Shard], todo: list[int]) -> int | None:
    """The next unclaimed shard; finished ones are forgotten, claimed ones kept in case their worker dies."""
    kept: list[int] = []
    found = None
    while todo and found is None:
        index = todo.pop()
        if shards[index].state == "free":
            found = index
        elif shards[index].state == "claimed":
            kept.append(index)
    todo[:0] = kept[::-1]
    return found


def die(worker: Worker, shards: list[Shard], now: float) -> None:
    """Lose the running rows, and without a journal the finished rows of open shards too."""
    advance(worker, shards, now)
    worker.lost += sum(shards[i].tokens[row] - max(0.0, end - worker.step) for end, i, row in worker.running)
    for index in worker.open:
        shards[index].state = "free"
        if not worker.job.journal:
            worker.lost += sum(shards[index].tokens[row] for row in shards[index].finished)
            shards[index].finished.clear()
    worker.running, worker.queue, worker.open = [], [], set()
    worker.life += 1


def summary(job: Job, workers: list[Worker], end: float, failures: int, down: float) -> dict[str, float]:
    time = end * job.workers
    useful = sum(worker.generated - worker.lost for worker in workers)
    waiting = sum(end - worker.ended for worker in workers)
    best = job.tokens / (job.workers * job.tokens_per_s)
    return {
        "hours": end / _HOUR,
        "ideal_hours": best / _HOUR,
        "efficiency": best / end,
        "tokens": useful,
        "failures": failures,
        "lost_tokens_share": sum(worker.lost for worker in workers) / useful,
        "restart_share": down / time,
        "idle_share": waiting / time,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate_job.py", description="Simulate a batch job on many chips.")
    defaults = Job()
    for field in dataclasses.fields(Job):
        default = getattr(defaults, field.name)
        kind = (lambda text: text == "true") if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=default)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = vars(parser.parse_args())
    seeds = arguments.pop("seeds")
    job = Job(**arguments)
    runs = [simulate(job, seed) for seed in range(seeds)]
    result = {key: round(statistics.mean(run[key] for run in runs), 5) for key in runs[0]}
    changed = {k: v for k, v in dataclasses.asdict(job).items() if v != getattr(defaults, k)}
    print(json.dumps({"simulate_job": changed, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
