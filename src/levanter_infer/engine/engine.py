"""`InferenceEngine`: adds requests and reads results; everything per token happens on the device."""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from levanter_infer.checkpoints.load import StoredModel
from levanter_infer.decode.outputs import RoundOutputs
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.beams import beams_for, enter_hypotheses
from levanter_infer.engine.blueprint import programs_for, shapes_for
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.coordination import LeaderCoordinator, LocalCoordinator, RoundTerms
from levanter_infer.engine.forks import Forks
from levanter_infer.engine.intake import Intake
from levanter_infer.engine.kv_offload import KvOffload
from levanter_infer.engine.memory_audit import audit
from levanter_infer.engine.mesh import MeshConfig, make_mesh
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.outputs import RoundResult
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import (
    Request,
    RequestOutput,
    as_request,
    as_requests,
    as_sequences,
    names_are_checked,
    refused,
)
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.engine.scoring import SCORE_ONLY, ScoreReader, score_shapes
from levanter_infer.engine.spilling import Spilling
from levanter_infer.engine.stats import Stats
from levanter_infer.engine.turns import Turns, exclusive, waits_for_turn
from levanter_infer.engine.uploads import Uploads
from levanter_infer.engine.weight_updates import Versions
from levanter_infer.models.live import from_levanter
from levanter_infer.policies import Recompilation
from levanter_infer.runtime.compile_cache import enable_compile_cache
from levanter_infer.runtime.garbage_collection import gc_disabled
from levanter_infer.runtime.hosts import Hosts, agree, agree_min
from levanter_infer.runtime.memory import peak_bytes, return_free_memory
from levanter_infer.runtime.multihost import hosts_of_this_process
from levanter_infer.runtime.progress import sampling_progress, stage

logger = logging.getLogger(__name__)

_POLL_S = 0.0005


@dataclasses.dataclass
class _Launched:
    round_id: int
    outputs: RoundOutputs
    started: float
    """When the device could begin with it, if it had nothing else to do."""
    launch_s: float
    expected_s: float
    """What it should take on the device."""
    version: int
    """Of the weights."""


class InferenceEngine(Forks, Spilling, Versions):
    """Samples many requests together on one device.

    The host and the device meet once a round: one upload of new requests, one download of sampled tokens, and the
    next round is launched before the last one is read.

    One thread uses an engine at a time. `generate`, `score` and `warmup` may be called from any thread and wait for
    their turn, in order of arrival; they also wait until the requests that another thread has submitted have ended. All
    other methods that change the engine, `submit` and `step_round` among them, raise RuntimeError while another thread
    is in a call, and name it. `stats`, `metrics` and `describe` may be called at any time.

    Args:
        model: a `DecoderModel`; a live model of Levanter's shape (`from_levanter`), whose weights are shared where the
            device reads them as they lie; or a `StoredModel`, which is read, and given up, after its compilation has
            begun.
        tokenizer: needed for text prompts, chats, text stops and the text of completions.
        config: sizes and policies.
        seed: from which, with its id, a request without a seed derives its own.
        donate_model: the engine may delete the model's arrays as it lays out its own, so that the weights are in memory
            once.
        scoring: compile for `prompt_logprobs` at once, and not again with the first request that asks for them.
        mesh: over which devices the engine runs, as sizes or as a mesh with the axes `data` and `model`. Where they
            belong to several processes, each makes an engine like this one, and calls it alike.
        hosts: processes that make engines like this one, with or without a mesh over all of them: they agree on sizes
            and programs before the first launch.
    """

    @stage("making the engine")
    @gc_disabled()
    def __init__(
        self,
        model,
        tokenizer=None,
        config: EngineConfig | None = None,
        *,
        seed: int = 0,
        score_mod=None,
        mask_mod=None,
        donate_model: bool = False,
        scoring: bool = False,
        mesh: MeshConfig | Mesh | None = None,
        hosts: Hosts | None = None,
    ):
        enable_compile_cache()
        self.config = config or EngineConfig()
        self.tokenizer, self.seed = tokenizer, seed
        self._eos = tuple(tokenizer.eos_token_ids) if tokenizer is not None else ()
        has_mods = score_mod is not None or mask_mod is not None
        model = model if isinstance(model, StoredModel) else from_levanter(model)
        types = model.types if isinstance(model, StoredModel) else model
        self._weights_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(types))
        self.backend = Backend.choose(self.config, types, has_mods=has_mods, mesh=make_mesh(mesh))
        self._hosts = hosts_of_this_process() if hosts is None and self.backend.spans_hosts else hosts
        self.backend = self.backend.agreed(self._hosts)
        self._coordinator = (
            LeaderCoordinator(self._hosts)
            if self._hosts and self.backend.spans_hosts
            else LocalCoordinator(self._hosts)
        )
        is_loaded = not isinstance(model, StoredModel)
        self.shapes = shapes_for(
            self.config, types, self.backend, num_eos=len(self._eos), is_loaded=is_loaded, scoring=scoring
        )
        self._agree_on_sizes()
        self.programs = programs_for(
            self.config,
            types,
            self.backend,
            self.shapes,
            score_mod=score_mod,
            mask_mod=mask_mod,
            on_recompile=logger.warning if self.config.recompilation == Recompilation.WARN else None,
            fingerprints=self._hosts is not None,
        )
        self._uploads = Uploads(self.backend, self.shapes)
        self._compile_s = 0.0
        if isinstance(model, StoredModel):
            self._compile_ahead(types)
            with stage("reading weights"):
                model, donate_model = model.read(self.backend.layout), True
        self._types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), types)
        self.model = self.backend.prepare(model, donate=donate_model)
        self._agree_on_programs()
        self.state = self.programs.init()
        self._stats = Stats(
            pages_total=self.shapes.num_pages * self.backend.num_shards,
            pool_bytes=self.state.kv.pages.array.nbytes,
            weights_bytes=self._weights_bytes,
            num_ranks=self.backend.num_shards,
        )
        self._rounds = self._submissions = 0
        self._scheduler = Scheduler(
            self.shapes, self._eos, self.backend.num_shards, max_round_seconds=self.config.max_round_seconds
        )
        self._turns, self._warm, self._last_end = Turns(), False, 0.0
        self._intake = Intake(self.shapes, self.config, tokenizer, seed)
        self._start_over()
        logger.info("engine: %s", self.describe())

    def _compile_ahead(self, types) -> None:
        """Begin to compile for a model that is yet to be read."""
        begin = time.perf_counter()
        with stage("compiling", self.programs.progress):
            self.programs.compile_all(self.backend.prepared_types(types), self._uploads.nothing)
            if self.backend.platform.shares_memory:  # the compiler's memory is then the weights'
                self.programs.wait()
                return_free_memory()
        self._compile_s = time.perf_counter() - begin

    def _agree_on_sizes(self) -> None:
        """The smallest budget of all processes, and the same sizes in all others."""
        if self._hosts is None:
            return
        with stage("waiting for the other processes to size their pools"):
            least = agree_min(self._hosts, "max_pages", {"max_pages": self.shapes.num_pages})
        self.shapes = dataclasses.replace(self.shapes, num_pages=least["max_pages"])
        mesh, platform = self.backend.mesh_sizes, self.backend.platform.name
        plan = {**dataclasses.asdict(self.shapes), "mesh": mesh, "platform": platform}
        agree(self._hosts, "sizes", {name: str(value) for name, value in plan.items()})

    def _agree_on_programs(self) -> None:
        """Equal configurations do not prove equal programs: those that will run are compared before one does."""
        if self._hosts is not None:
            self.programs.compile_all(self.model, self._uploads.nothing)
            with stage("waiting for the other processes to trace their programs"):
                agree(self._hosts, "programs", self.programs.fingerprints())

    def _start_over(self) -> None:
        self._scores = ScoreReader(self._stats.registry, self.backend)
        self._offload = KvOffload(self.shapes, self._stats.registry, self.config.host_bytes)
        self._in_flight: _Launched | None = None
        self._known: list[SampleState] = []

    def __repr__(self) -> str:
        shown = ("max_seqs", "max_seq_len", "max_pages", "page_size", "kv_dtype", "pool_mb", "device")
        described = self.describe()
        return f"InferenceEngine({', '.join(f'{name}={described[name]}' for name in shown)})"

    def describe(self) -> dict[str, object]:
        """What was chosen, by name of the config key where there is one."""
        shapes, kv = self.shapes, self.state.kv
        return {
            "page_size": shapes.page_size,
            "max_pages": shapes.num_pages,
            "max_seqs": shapes.max_seqs,
            "max_seq_len": shapes.max_seq_len,
            "max_step_tokens": shapes.max_step_tokens,
            "kv_dtype": str(kv.dtype),
            "attention": self.backend.attention,
            "matmul": self.backend.matmul,
            "cpu_isa": self.backend.isa,
            "numerics": self.config.numerics,
            "preempt": self.config.preempt,
            "step_buckets": list(shapes.buckets),
            "pool_mb": round(kv.pages.array.nbytes / 2**20, 1),
            "mesh": self.backend.mesh_sizes,
            "device": str(jax.local_devices()[0]),
        }

    # Requests

    @names_are_checked
    @waits_for_turn
    def generate(
        self,
        prompts,
        sampling=None,
        *,
        on_update: Callable[[int, int, int], None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Sample continuations of all prompts.

        What cannot be served comes back with `error` and no completions; the others are not affected.

        Args:
            prompts: a list, each of its entries a string, a list of token ids, a chat (a list of messages) or a
                `Request`; or one of these alone.
            sampling: `SamplingParams` for those that bring none; or a list, with one for each prompt.
            on_update: called after each round with (sequences finished, sequences in all, tokens generated so far). It
                may call the engine.
            progress: whether a progress bar is drawn in a terminal or notebook; None: if it takes more than half a
                second. Elsewhere there is none.
        Returns: one output per prompt, in their order; for a prompt alone a list of one.
        Raises: ValueError if `prompts` or `sampling` as a whole is of another form; TypeError for an unknown name, with
            the nearest known one. Nothing has run then.
        """
        made: list[RequestState | RequestOutput] = []
        for i, request in enumerate(as_requests(prompts, sampling)):
            if isinstance(request, ValueError):
                made.append(refused(None, str(i), str(request)))
                continue
            try:
                made.append(self._intake.request_state(request, str(i)))
            except ValueError as error:
                made.append(refused(request, str(i), str(error)))
        with sampling_progress(progress, on_update) as update:
            self._serve([each for each in made if isinstance(each, RequestState)], update)
        return [each.output() if isinstance(each, RequestState) else each for each in made]

    @waits_for_turn
    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log probability under the model of each token of the sequences, given those before it in its sequence.

        With `engine.prefix_cache`, equal beginnings are computed once. `SamplingParams.prompt_logprobs` gives the same
        with requests of any kind, and the likeliest tokens.

        Returns: for each sequence f32[tokens - 1], beginning with its second token; NaN where the model's logits are
            not finite.
        Raises: ValueError for a sequence that cannot be scored, which it names, or for what is no list of sequences;
            nothing has run then.
        """
        requests = [Request(prompt_token_ids=ids, sampling=SCORE_ONLY) for ids in as_sequences(sequences)]
        groups = []
        for i, request in enumerate(requests):
            try:
                groups.append(self._intake.request_state(request, str(i)))
            except ValueError as error:
                raise ValueError(f"sequences[{i}]: {error}") from None
        with sampling_progress(None, None, "scoring", "texts") as update:
            self._serve(groups, update)
        return [group.prompt_scores.logprobs for group in groups]

    def _serve(self, groups: list[RequestState], on_update=None) -> None:
        if not groups:
            return
        self._prepare(groups)
        try:
            self._add(groups)
            self._run(groups, on_update)
        except BaseException:
            self.reset()  # what was running is lost to its caller; the engine stays usable
            raise

    def _prepare(self, groups: Sequence[RequestState]) -> None:
        """Compile what these need and has not been compiled yet: never for a request that was refused."""
        changes: dict[str, Any] = {}
        if self.shapes.scoring is None and any(group.wants_scores for group in groups):
            changes["scoring"] = score_shapes(self.config, self.model)
        max_beams = beams_for((group.params for group in groups), self.shapes)
        if max_beams != self.shapes.max_beams:
            changes["max_beams"] = max_beams
        if changes:
            self._extend(**changes)
        self.warmup()

    def _is_in_progress(self) -> bool:
        """Whether requests have been added that have not ended."""
        return any(not group.is_done for group in self._scheduler.requests())

    def _add(self, groups: Sequence[RequestState]) -> None:
        has_deadline = any(group.timeout_s is not None for group in groups)
        self._scheduler.submit(groups, self._coordinator.now() if has_deadline else 0.0)
        for group in groups:
            self._coordinator.enter(group)
            self._stats.on_submit(len(group.prompt_token_ids))

    def _run(self, groups: list[RequestState], on_update) -> None:
        total = sum(len(group.sequences) for group in groups)
        while not all(group.is_done for group in groups):
            self.step_round()
            if on_update is not None:
                on_update(lambda: _counts(groups, total))
        self.drain()

    @exclusive
    def step_round(self, *, max_steps: int | None = None) -> list[SampleState]:
        """Launch the next round and read the one before; returns the sequences whose result became known.

        Args:
            max_steps: steps of the launched round, if fewer than the engine would choose: tokens are seen when their
                round is read. With 1 every token shows as soon as it is there and every step can be timed, at the
                price of a launch and a download each.
        Raises: ValueError for other than a positive whole number of them.
        """
        terms = self._agree_on_round(max_steps)
        known = self._scheduler.expire(terms.now) + self._known + self._move_pages()
        self._known = []
        launched = self._launch(terms.max_steps)
        previous, self._in_flight = self._in_flight, launched
        return known + (self._read(previous) if previous is not None else [])

    @exclusive
    def flush(self) -> list[SampleState]:
        """Read the round in flight, if there is one, and launch none: the host then knows what the device has sampled.

        Returns: the sequences whose result became known, as `step_round` does.
        """
        known, self._known = self._known, []
        return known + self._flush()

    @exclusive
    def wait_for_launch_window(self) -> None:
        """Wait until the round in flight has ended or is about to; returns at once if there is none.

        A request enters the next round that is launched, so one that comes just after a launch waits for two. Who has
        requests coming at any time calls this before `step_round`, and submits in between all that have come: the
        next round is launched as late as it can be without the device standing idle.
        """
        launched = self._in_flight
        if launched is None:
            return
        until = max(launched.started, self._last_end) + launched.expected_s - 2 * launched.launch_s
        packed = launched.outputs.packed
        while time.perf_counter() < until and not packed.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(_POLL_S)

    @waits_for_turn
    def drain(self) -> None:
        """Run until the device is idle: every page is free afterwards.

        Waits while another thread uses the engine, which may be as soon as the last request of this one has ended.
        """
        self._flush()
        self.state = self._offload.recall(self.programs.tier, self.state)
        while self._scheduler.has_work:
            terms = self._agree_on_round()
            self._scheduler.expire(terms.now)
            self._move_pages()
            self._in_flight = self._launch(terms.max_steps)
            self._flush()
        self._scores.take()
        self._stats.on_idle()

    @names_are_checked
    @exclusive
    def submit(self, prompt, sampling: SamplingParams | None = None) -> RequestState:
        """Queue a `Request`, or another prompt as for `generate`, for the coming rounds.

        Raises: ValueError if it cannot be served.
        """
        group = self._intake.request_state(as_request(prompt, sampling), str(self._submissions))
        self._submissions += 1
        self._prepare([group])
        try:
            self._add([group])
        except BaseException:
            self._discard(group)  # nobody else knows of it
            raise
        return group

    @exclusive
    def cancel(self, group: RequestState) -> None:
        """End a submitted request with reason "abort", at once; its pages are free two rounds later at the most.

        `step_round` does not return its sequences: the caller knows of them. On a mesh over several processes any one
        may call this; all end the request before the same round, one of the next two, and `step_round` returns its
        sequences in all of them.
        Raises: TypeError for what `submit` has not returned.
        """
        if not isinstance(group, RequestState):
            raise TypeError(
                f"cancel was given {brief(group)} ({type(group).__name__}); expected what submit() returned for the "
                "request: group = engine.submit(...), and then engine.cancel(group)"
            )
        if self._coordinator.cancel(group):
            self._discard(group)

    def _discard(self, group: RequestState) -> None:
        self._scheduler.cancel(group)
        self._offload.forget_finished()

    @property
    def is_stopping(self) -> bool:
        """Whether all processes of a mesh have agreed to stop, before the round that was launched last."""
        return self._coordinator.stopping

    def _agree_on_round(self, max_steps: int | None = None) -> RoundTerms:
        """What the next round is launched with; ends what was cancelled."""
        steps = self._scheduler.steps(max_steps)
        terms = self._coordinator.terms(self._rounds, steps)
        for group in terms.cancelled:
            self._known += [sequence for sequence in group.sequences if sequence.finish_reason is None]
            self._discard(group)
        return terms

    def _flush(self) -> list[SampleState]:
        """Read the round in flight, if there is one."""
        launched, self._in_flight = self._in_flight, None
        return self._read(launched) if launched is not None else []

    @waits_for_turn
    @gc_disabled()
    def warmup(self) -> None:
        """Compile all programs now rather than with the first request; later calls do nothing."""
        if self._warm:
            return
        return_free_memory()  # of loading the model: compiling needs much
        start = time.perf_counter()
        with stage("compiling", self.programs.progress):
            self.programs.compile_all(self.model, self._uploads.nothing)
            self.programs.wait()
        with stage("running the first round"):
            try:
                self.state, outputs = self.programs.round(self.model, self.state, self._uploads.nothing)
                jax.block_until_ready(outputs)
            except BaseException:
                self.reset()  # an interrupt may have taken the state
                raise
        self._warm = True
        self._compile_s += time.perf_counter() - start
        self._stats.registry.set("compile_s", self._compile_s)
        return_free_memory()

    @gc_disabled()
    def _extend(self, **changes) -> None:
        """Go on with programs that can do more: `changes` to the shapes that add tables to the state.

        To be called between rounds. What runs keeps its place and its pages, and a round in flight is read as ever.
        """
        start = time.perf_counter()
        shapes = dataclasses.replace(self.shapes, **changes)
        logger.info("compiling again, for %s", ", ".join(changes))
        programs, uploads = self.programs.extended(self.model, shapes), Uploads(self.backend, shapes)
        with stage(f"compiling again, for {', '.join(changes)}", programs.progress):
            programs.compile_all(self.model, uploads.nothing)
            programs.wait()
        if self._hosts is not None and self.backend.spans_hosts:
            agree(self._hosts, "programs", programs.fingerprints())
        self.state = programs.extend(self.state)
        self.programs, self.shapes, self._uploads = programs, shapes, uploads
        self._scheduler.shapes = shapes
        self._compile_s += time.perf_counter() - start
        self._stats.registry.set("compile_s", self._compile_s)

    def _launch(self, steps: int) -> _Launched:
        """Launch a round. A failure here has taken requests from their queue, or the state: all are forgotten then."""
        try:
            return self._launch_round(steps)
        except BaseException:
            self.reset()
            raise

    def _launch_round(self, steps: int) -> _Launched:
        begin = time.perf_counter()
        with_prompts = self._scheduler.has_prompts
        fields = self._scheduler.next_admission(self._rounds, steps).arrays() | self._offload.terms()
        self._coordinator.on_input(fields)
        admission = self._uploads.admission(fields)
        started = time.perf_counter()
        self.state, outputs = self.programs.round(self.model, self.state, admission)
        outputs.packed.copy_to_host_async()
        launched = _Launched(
            self._rounds,
            outputs,
            started,
            launch_s=time.perf_counter() - begin,
            expected_s=self._scheduler.round_length.seconds(with_prompts, steps),
            version=self.version,
        )
        self._rounds += 1
        self._stats.on_time(launch=time.perf_counter() - begin)
        return launched

    def _read(self, launched: _Launched) -> list[SampleState]:
        begin = time.perf_counter()
        jax.block_until_ready(launched.outputs.packed)
        ready = time.perf_counter()
        outputs = RoundResult(launched.outputs, self.shapes, self.backend.num_shards)
        end = time.perf_counter()
        seconds = end - max(launched.started, self._last_end)
        self._last_end = end
        steps, prompt_steps = self._stats.on_round(outputs, seconds)
        self._scheduler.on_round(
            steps=steps, prompt_steps=prompt_steps, seconds=seconds, rank_steps=self._stats.rank_steps
        )
        found = self._scheduler.finished_searches(outputs.ranks, launched.round_id, launched.version)
        enter_hypotheses(self.programs, self.state, found, self.backend)
        known = self._scheduler.collect(outputs.ranks, launched.round_id, launched.version)
        self._offload.on_round(outputs.scalars["host_call"])
        self._scores.take()
        self._scores.ask(self.programs, self.state, self._scheduler.pop_scored())
        self._stats.on_time(wait=ready - begin, download=end - ready, collect=time.perf_counter() - end)
        return known

    # State

    @exclusive
    def reset(self) -> None:
        """Forget all sequences; those in progress end with reason "abort".

        Touches tables only, never the pool; nothing is compiled for it. Only where an interrupted launch took the
        state with it, a new one is made.
        """
        self._in_flight = None
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        self.state = self.programs.init() if lost else self.programs.reset(self.state)
        self._scheduler.abort_all()
        self._scores.abandon()
        self._intake.forget_roots()  # nothing is stored for any of them
        self._stats.on_reset()
        self._start_over()

    @exclusive
    def zero_cache(self) -> None:
        """Overwrite every stored key and value with zeros. Requires: no request in progress."""
        if self._scheduler.has_work:
            raise ValueError("zero_cache while requests are in progress would change their results; finish them first")
        self.state = self.programs.zero_cache(self.state)

    # Metrics

    def metrics(self) -> Registry:
        """Everything that was counted since the engine was made, as of the last round that was read."""
        programs = self.programs.compilations()
        self._stats.registry.set("compilations", sum(programs.values()))
        self._stats.registry.set("programs", dict(programs))
        return self._stats.registry

    def stats(self) -> dict[str, Any]:
        """`metrics` as a dict: tokens, rates, pages, preemptions, steps, rounds, compilations, …"""
        return self.metrics().as_dict("round")

    @exclusive
    def memory(self) -> dict[str, Any]:
        """Who holds how much, after the rounds launched so far; waits for them. Also enters it into `metrics`.

        Raises: ValueError on a mesh over several processes.
        """
        if self.backend.spans_hosts:
            raise ValueError("memory() looks at all tables, and here other hosts have some of them; look at stats()")
        registry, kv = self._stats.registry, self.state.kv
        values = audit(self.state.decode).metrics(
            page_bytes=kv.pages.array.nbytes // (kv.num_pages * self.backend.num_shards),
            weights_bytes=self._weights_bytes,
        )
        for name, value in {**values, "peak_memory_bytes": peak_bytes()}.items():
            registry.set(name, value)
        return registry.as_dict("state")


def _counts(groups: Sequence[RequestState], total: int) -> tuple[int, int, int]:
    """(sequences finished, `total`, tokens generated); looks at every sequence."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    finished = sum(sequence.finish_reason is not None for sequence in sequences)
    return finished, total, sum(len(sequence.token_ids) for sequence in sequences)
