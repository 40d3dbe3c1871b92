"""`RoundLoop`: launches round N, and reads round N - 1 while the device computes.

It takes the scheduler's admission to the runner, and the outputs of the round before back to the scheduler. What enters
the device's tables between two rounds passes through here too: pages of host memory, samples that go on from others.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from levanter_infer.decode.outputs import RoundOutputs, RoundResult
from levanter_infer.engine.coordination import RoundCoordinator, RoundTerms
from levanter_infer.engine.forks import continue_from
from levanter_infer.engine.kv_offload import KvOffload
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.routes import RouteReader
from levanter_infer.engine.runner import Runner
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.engine.scoring import ScoreReader
from levanter_infer.engine.stats import Stats

_POLL_S = 0.0005


@dataclasses.dataclass
class Launched:
    """A round that the device computes, or has computed and the host has not read."""

    round_id: int
    outputs: RoundOutputs
    started: float
    """When the device could begin with it, if it had nothing else to do."""
    launch_s: float
    expected_s: float
    """Its expected time on the device."""
    version: int
    """Number of the weights."""
    with_prompts: bool
    """Whether it could compute prompts, as far as was known."""


class RoundLoop:
    """The rounds of an engine.

    `advance` is the overlap: it takes the round in flight, launches the next one, and reads the one that it was given.
    Whatever changes the tables between two launches calls `pause` first.

    Args:
        runner: the device.
        scheduler: the host's decisions.
        coordinator: agrees on each round with the other processes of a mesh.
        stats: counts rounds and times.
        host_bytes: `EngineConfig.host_bytes`.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        coordinator: RoundCoordinator,
        stats: Stats,
        host_bytes: int | None,
    ):
        self.coordinator = coordinator
        self.version = 0
        """Number of the weights that the next round uses."""
        self._runner, self._scheduler, self._stats, self._host_bytes = runner, scheduler, stats, host_bytes
        self._rounds, self._last_end = 0, 0.0
        self._start_over()

    def _start_over(self) -> None:
        self.scores = ScoreReader(self._stats.registry, self._runner.shapes.page_size)
        self.routes = RouteReader(self._runner.shapes.page_size)
        self.offload = KvOffload(self._runner, self._stats.registry, self._host_bytes)
        self.in_flight: Launched | None = None
        self._known: list[SampleState] = []
        """Samples whose result became known, for the next `step` or `flush` to return."""

    # Requests

    def submit(self, requests: Sequence[RequestState]) -> None:
        """Queue requests for the coming rounds."""
        has_deadline = any(request.timeout_s is not None for request in requests)
        self._scheduler.submit(requests, self.coordinator.now() if has_deadline else 0.0)
        for request in requests:
            self.coordinator.enter(request)
            self._stats.on_submit(len(request.prompt_token_ids))

    def cancel(self, request: RequestState) -> None:
        """End a request now; on a mesh over several processes, before the round on which all of them agree."""
        if self.coordinator.cancel(request):
            self.discard(request)

    def discard(self, request: RequestState) -> None:
        """End a request now, in this process."""
        self._scheduler.cancel(request)
        self.offload.forget_finished()

    def expire(self) -> tuple[list[SampleState], float | None]:
        """As `InferenceEngine.expire`."""
        now = self.coordinator.now()
        ended, following = self._scheduler.expire(now), self._scheduler.next_deadline()
        self.offload.forget_finished()
        return ended, None if following is None else max(following - now, 0.0)

    # Rounds

    def step(self, max_steps: int | None = None) -> list[SampleState]:
        """As `InferenceEngine.step_round`."""
        self._runner.check_weights()  # before anything changes: requests wait until there are weights again
        terms = self._agree(max_steps)
        with self._all_or_nothing():
            self._known = self._scheduler.expire(terms.now) + self._known + self._move_pages()
            if self._scheduler.is_guided:  # what may follow depends on the tokens of the round in flight
                self._known += self._read_in_flight()
            self.in_flight, newly_known = self.advance(self.in_flight, terms.max_steps)
        known, self._known = self._known, []
        return known + newly_known

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An exception within, KeyboardInterrupt included, ends all requests with reason "abort".

        It may have taken requests from their queue, the state from the runner, or tokens from a round: a request that
        went on would lose them in silence.
        """
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def advance(self, in_flight: Launched | None, max_steps: int) -> tuple[Launched, list[SampleState]]:
        """Launch round N, and read round N - 1, which is `in_flight`, while the device computes.

        Returns: the round that is in flight now, and the samples whose result became known.
        """
        return self.launch(max_steps), self.read(in_flight)

    def launch(self, max_steps: int) -> Launched:
        """Launch a round."""
        begin = time.perf_counter()
        with_prompts = self._scheduler.has_prompts
        fields = self._scheduler.next_admission(self._rounds, max_steps).arrays() | self.offload.terms()
        self.coordinator.on_input(fields)
        self._load_constraints()
        admission = self._runner.upload(fields)
        started = time.perf_counter()
        outputs = self._runner.run(admission)
        end = time.perf_counter()
        launched = Launched(
            self._rounds,
            outputs,
            started,
            launch_s=end - begin,
            expected_s=self._scheduler.round_length.seconds(with_prompts, max_steps),
            version=self.version,
            with_prompts=with_prompts,
        )
        self._rounds += 1
        self._stats.on_time(launch=launched.launch_s)
        return launched

    def _load_constraints(self) -> None:
        """Bring the automata of admitted samples to the device, and the masks of those that the host guides."""
        for resident in self._scheduler.automata.pop_loads():
            self._runner.load_automaton(resident)
        stale = self._scheduler.stale_guides() if self._scheduler.is_guided else []
        masks = []
        for sample in stale:
            assert sample.guide is not None and sample.slot is not None
            masks.append((sample.request.rank or 0, sample.slot, sample.guide.allowed()))
            sample.guide.is_stale = False
        if masks:
            self._runner.load_masks(masks)

    def read(self, launched: Launched | None) -> list[SampleState]:
        """Wait for a round and take what it has brought; returns the samples whose result became known."""
        if launched is None:
            return []
        begin = time.perf_counter()
        jax.block_until_ready(launched.outputs.packed)
        ready = time.perf_counter()
        outputs = RoundResult(launched.outputs, self._runner.shapes, self._runner.num_ranks)
        end = time.perf_counter()
        seconds = end - max(launched.started, self._last_end)
        self._last_end = end
        steps, prompt_steps = self._stats.on_round(outputs, seconds)
        self._scheduler.on_round(
            steps=steps,
            prompt_steps=prompt_steps,
            seconds=seconds,
            rank_steps=self._stats.rank_steps,
            expected_prompts=launched.with_prompts,
        )
        searches = self._scheduler.finished_searches(outputs.ranks, launched.round_id, launched.version)
        self._enter_hypotheses(searches)
        known = self._scheduler.collect(outputs.ranks, launched.round_id, launched.version)
        self.offload.on_round(outputs.scalars["host_call"])
        self.scores.take()
        self.scores.ask(self._runner.read_scores, self._scheduler.pop_scored())
        self.routes.take()
        self.routes.ask(self._runner.read_routes, self._scheduler.pop_recorded())
        self._stats.on_time(wait=ready - begin, download=end - ready, collect=time.perf_counter() - end)
        return known

    def _enter_hypotheses(self, searches: Sequence[RequestState]) -> None:
        """Fetch what finished beam searches have found and enter it into their samples, the best first.

        Waits for the round in flight: the slots are as they were left, because no other sequence has got them yet.
        """
        if not searches:
            return
        samples = [sample for request in searches for sample in request.sequences[: request.params.n]]
        found = self._runner.read_hypotheses([s.request.rank or 0 for s in samples], [s.slot for s in samples])
        for row, sample in enumerate(samples):
            generated = slice(len(sample.request.prompt_token_ids), int(found.lens[row]))
            tokens, logprobs = (np.asarray(array[row, generated]) for array in (found.tokens, found.logprobs))
            sample.extend(tokens, logprobs, np.zeros_like(logprobs), None, sample.request.search_versions)
            sample.score = float(found.scores[row])

    def _agree(self, max_steps: int | None = None) -> RoundTerms:
        """The admission that the next round is launched with; ends what was cancelled."""
        terms = self.coordinator.terms(self._rounds, self._scheduler.steps(max_steps))
        for request in terms.cancelled:
            self._known += [sample for sample in request.sequences if sample.finish_reason is None]
            self.discard(request)
        return terms

    def _move_pages(self) -> list[SampleState]:
        """Move the pages that the last round asked for, with no round in flight; returns as `read`."""
        known = self._read_in_flight() if self.offload.is_called else []
        if self.offload.is_called:
            self.offload.move(self._scheduler.active)
        return known

    def _read_in_flight(self) -> list[SampleState]:
        launched, self.in_flight = self.in_flight, None
        return self.read(launched)

    # Between rounds

    def pause(self) -> None:
        """Read the round in flight, if there is one; `step` and `flush` return what became known."""
        with self._all_or_nothing():
            self._known += self._read_in_flight()

    def flush(self) -> list[SampleState]:
        """As `InferenceEngine.flush`."""
        self.pause()
        known, self._known = self._known, []
        return known

    def wait_for_launch_window(self) -> None:
        """As `InferenceEngine.wait_for_launch_window`."""
        launched = self.in_flight
        if launched is None:
            return
        until = max(launched.started, self._last_end) + launched.expected_s - 2 * launched.launch_s
        packed = launched.outputs.packed
        while time.perf_counter() < until and not packed.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(_POLL_S)

    def check_admits(self) -> None:
        """Raises: RuntimeError if requests that wait get no slots, so that a call waits for them in vain."""
        if not self._scheduler.admits:
            raise RuntimeError(
                "the engine admits no request, so the call would wait forever; call set_admits(True) first, or resume "
                "its AsyncEngine"
            )

    def drain(self) -> None:
        """As `InferenceEngine.drain`. What becomes known here is not returned by later calls."""
        with self._all_or_nothing():
            self._read_in_flight()
            self.offload.recall()
        while self._scheduler.has_work:
            if not self._scheduler.active:
                self.check_admits()
            terms = self._agree()
            with self._all_or_nothing():
                self._scheduler.expire(terms.now)
                self._move_pages()
                self.read(self.launch(terms.max_steps))
        with self._all_or_nothing():
            self.scores.take()
            self.routes.take()
        self._stats.on_idle()

    def drain_active(self) -> None:
        """Let the samples that have slots end, and admit none."""
        with self._all_or_nothing():
            known = self._read_in_flight()
            self.offload.recall()
        admitted, self._scheduler.admits = self._scheduler.admits, False
        try:
            while self._scheduler.active:
                known += self.step()
        finally:
            self._scheduler.admits = admitted
            self._known = known + self._known

    def continue_from(self, request: RequestState, samples: list[SampleState], ancestors: list[int]) -> None:
        """Let samples of a request go on from others, as `forks.continue_from`. Requires: no round is in flight."""
        self.coordinator.on_input({"ancestors": np.asarray([samples[0].arrival, *ancestors])})
        self.offload.begin_anew(request)
        fields = continue_from(self._scheduler.slots_of(request), samples, ancestors, self._rounds)
        if fields is not None:
            with self._all_or_nothing():
                self._runner.resample(fields, request.rank or 0)

    def reset(self) -> None:
        """Forget all requests and the round in flight; requests in progress end with reason "abort"."""
        self.in_flight = None
        self._runner.reset()
        self._scheduler.abort_all()
        self.scores.abandon()
        self.routes.abandon()
        self._stats.on_reset()
        self._start_over()
