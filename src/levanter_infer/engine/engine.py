"""`InferenceEngine`: what callers use. It composes the parts of an engine and has no logic of a part itself.

`Runner` is the device, the scheduler decides on the host what runs there, and neither knows the other: `RoundLoop`
takes the scheduler's admissions to the runner, and the outputs back.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from levanter_infer.checkpoints.load import StoredModel
from levanter_infer.decode.logits_mod import LogitsFunction
from levanter_infer.decode.programs import Programs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import GenState
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.coordination import LeaderCoordinator, LocalCoordinator
from levanter_infer.engine.extension import needed_changes
from levanter_infer.engine.forks import checked_ancestors, further_samples
from levanter_infer.engine.intake import Intake
from levanter_infer.engine.memory_audit import audit
from levanter_infer.engine.mesh import MeshConfig, make_mesh
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import (
    Request,
    RequestOutput,
    as_request,
    names_are_checked,
)
from levanter_infer.engine.request_state import (
    RequestState,
    SampleState,
    check_sample,
    check_submitted,
    checked_prepared,
    counts,
)
from levanter_infer.engine.round_loop import RoundLoop
from levanter_infer.engine.runner import Runner
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.engine.sizes import kv_dtype
from levanter_infer.engine.sleep import awake, check_nothing_to_compile, fall_asleep
from levanter_infer.engine.stats import Stats
from levanter_infer.engine.turns import Turns, exclusive, waits_for_turn
from levanter_infer.engine.weight_updates import (
    check_weights_are_there,
    checked_policy,
    checked_version,
    new_weights,
    update_roots,
)
from levanter_infer.models.live import from_levanter
from levanter_infer.policies import WeightSwapPolicy
from levanter_infer.runtime.compile_cache import enable_compile_cache
from levanter_infer.runtime.garbage_collection import gc_disabled
from levanter_infer.runtime.hosts import Hosts
from levanter_infer.runtime.memory import peak_bytes
from levanter_infer.runtime.multihost import hosts_of_this_process
from levanter_infer.runtime.progress import sampling_progress, stage

logger = logging.getLogger(__name__)


class InferenceEngine:
    """Samples many requests together, with continuous batching, on one device or on a mesh of devices.

    A round is one launch of a jitted loop of many steps, with one upload of new requests and one download of sampled
    tokens; the next round is launched before the results of the last one are read.

    One thread uses an engine at a time. `generate`, `as_completed`, `score`, `warmup` and `drain` wait for their turn,
    in order of arrival, and until the requests that another thread has submitted have ended. Other methods that change
    the engine, such as `submit` and `step_round`, raise RuntimeError while another thread is in a call, and name it.
    `stats`, `metrics`, `describe`, `prepare` and `compile_constraint` may be called at any time.

    Args:
        model: a `DecoderModel`; a live model of Levanter's shape (`from_levanter`), whose weights are shared where the
            device reads their layout; or a `StoredModel`, which is read, and freed, after its compilation has begun.
        tokenizer: needed for text prompts, chats, text stops and the text of completions.
        config: sizes and policies.
        seed: of the engine; a request without a seed derives its own from this one and its id.
        donate_model: the engine may delete the model's arrays as it lays out its own, so that the weights are in memory
            once.
        scoring: compile the programs with `prompt_logprobs` from the start; otherwise the first request that asks for
            them makes the engine compile its programs again.
        routing: the same for `return_routed_experts`.
        constraints: the same for structured output (`regex`, `json_schema`, `choice`, `grammar`, `allowed_token_ids`,
            `bad_words`).
        num_beams: the same for beam searches of up to so many beams.
        logits_mod: a function (logits f32[vocab], `TokenHistory`, memory) -> (logits, memory) that JAX can trace, of
            one sequence; it is applied to the model's logits before everything else that a request asks for.
        logits_mod_init: its memory of a sequence before the first token, a pytree of arrays; None: it has none.
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
        routing: bool = False,
        constraints: bool = False,
        num_beams: int = 1,
        logits_mod: LogitsFunction | None = None,
        logits_mod_init: Any = None,
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
        backend = BackendChoice.choose(self.config, types, has_mods=has_mods, mesh=make_mesh(mesh))
        hosts = hosts_of_this_process() if hosts is None and backend.spans_hosts else hosts
        backend = backend.agreed(hosts)
        coordinator = LeaderCoordinator(hosts) if hosts and backend.spans_hosts else LocalCoordinator(hosts)
        self.runner = Runner(
            model,
            self.config,
            backend,
            num_eos=len(self._eos),
            hosts=hosts,
            donate_model=donate_model,
            scoring=scoring,
            routing=routing,
            constraints=constraints,
            num_beams=num_beams,
            score_mod=score_mod,
            mask_mod=mask_mod,
            logits_mod=None if logits_mod is None else (logits_mod, logits_mod_init),
        )
        self._stats = Stats(
            pages_total=self.shapes.num_pages * backend.num_ranks,
            page_bytes=sum(self.runner.page_bytes),
            pool_bytes=self.state.cache.nbytes,
            weights_bytes=self.runner.weights_bytes,
            num_ranks=self.runner.num_ranks,
        )
        seconds = self.config.max_round_seconds
        self._scheduler = Scheduler(self.shapes, self._eos, self.runner.num_ranks, max_round_seconds=seconds)
        self._rounds = RoundLoop(self.runner, self._scheduler, coordinator, self._stats, self.config.host_bytes)
        has_experts = types.config.experts is not None
        has = {"has_experts": has_experts, "has_logits_mod": logits_mod is not None}
        self._intake = Intake(self.shapes, self.config, tokenizer, seed, **has)
        self._turns, self._submissions = Turns(), 0
        logger.info("engine: %s", self.describe())

    @property
    def backend(self) -> BackendChoice:
        """The implementations for the devices."""
        return self.runner.backend

    @property
    def shapes(self) -> Shapes:
        """The static sizes of the programs."""
        return self.runner.shapes

    @property
    def programs(self) -> Programs:
        """The compiled programs."""
        return self.runner.programs

    @property
    def model(self) -> Any:
        """The weights as the device has them."""
        return self.runner.model

    @property
    def state(self) -> GenState:
        """Tables and pool on the device, after the rounds launched so far."""
        return self.runner.state

    @property
    def version(self) -> int:
        """Number of the weights that the next round uses."""
        return self._rounds.version

    def __repr__(self) -> str:
        shown = ("max_seqs", "max_seq_len", "max_pages", "page_size", "kv_dtype", "pool_mb", "device")
        described = self.describe()
        return f"InferenceEngine({', '.join(f'{name}={described[name]}' for name in shown)})"

    def describe(self) -> dict[str, object]:
        """The choices that the engine made, by name of the config key where there is one."""
        shapes, cache = self.shapes, self.state.cache
        return {
            "page_size": shapes.page_size,
            "max_pages": shapes.num_pages,
            "window_pages": {each.window: each.num_pages for each in shapes.windows},
            "state_snapshots": shapes.num_snapshots,
            "max_seqs": shapes.max_seqs,
            "max_seq_len": shapes.max_seq_len,
            "max_step_tokens": shapes.max_step_tokens,
            "prefix_cache": shapes.prefix_cache,
            "weight_dtype": self.backend.weight_dtype(self.runner.types),
            "kv_dtype": str(kv_dtype(self.config, self.runner.types)),
            "attention": self.backend.attention,
            "matmul": self.backend.matmul,
            "cpu_isa": self.backend.isa,
            "numerics": self.config.numerics,
            "preempt": self.config.preempt,
            "step_buckets": list(shapes.buckets),
            "pool_mb": round(cache.nbytes / 2**20, 1),
            "mesh": self.backend.mesh_sizes,
            "device": str(self.backend.layout.mesh.local_devices[0]),
        }

    # Requests

    @names_are_checked
    @waits_for_turn
    @awake
    def generate(
        self,
        prompts,
        sampling=None,
        *,
        on_update: Callable[[int, int, int], None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Sample continuations of all prompts.

        A request that cannot be served has an output with `error` and no completions; the others are not affected.

        Args:
            prompts: a list, each of its entries a string, a list of token ids, a chat (a list of messages) or a
                `Request`; or one of these alone.
            sampling: `SamplingParams` for prompts without their own (`Request.sampling`); or a list, one per prompt.
            on_update: called after each round with (sequences finished, sequences in all, tokens generated so far). It
                may call the engine.
            progress: whether a progress bar is drawn in a terminal or notebook; None: if it takes more than half a
                second. Elsewhere there is none.
        Returns: one output per prompt, in their order; for a prompt alone a list of one.
        Raises: ValueError if `prompts` or `sampling` as a whole is of another form; TypeError for an unknown name, with
            the nearest known one. Nothing has run then.
        """
        made = self._intake.states(prompts, sampling)
        with sampling_progress(progress, on_update) as update:
            self._serve([each for each in made if isinstance(each, RequestState)], update)
        return [each.output() if isinstance(each, RequestState) else each for each in made]

    @names_are_checked
    @awake
    def as_completed(self, prompts, sampling=None) -> Iterator[RequestOutput]:
        """Sample continuations of all prompts, as `generate` does, and yield each output as its request ends.

        Refused requests come first, with `error`. An output names its prompt by `id`: that of its `Request`, or the
        prompt's position in the list as a string. The engine belongs to the iterating thread from the first `next` to
        the end of the iterator; that thread may call the engine in between. Closing the iterator, or calling `next`
        while the engine sleeps, cancels the requests that have not ended.

        Args:
            prompts, sampling: as in `generate`.
        Raises: as `generate`, with the first `next`.
        """
        with self._turns.taken("as_completed", self._is_in_progress, waits=True):
            made = self._intake.states(prompts, sampling)
            yield from (each for each in made if isinstance(each, RequestOutput))
            pending = [each for each in made if isinstance(each, RequestState)]
            if not pending:
                return
            self._rounds.check_admits()
            self._prepare(pending)
            try:
                self._rounds.submit(pending)
                while pending:
                    self.step_round()
                    ended = [request for request in pending if request.is_done]
                    pending = [request for request in pending if not request.is_done] if ended else pending
                    yield from (request.output() for request in ended)
            except BaseException as error:
                self._give_up(pending, keep_others=isinstance(error, GeneratorExit))
                raise
            finally:
                if not self.is_asleep and all(request.is_done for request in self._scheduler.requests()):
                    self.drain()

    @waits_for_turn
    @awake
    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log probability under the model of each token of the sequences, given those before it in its sequence.

        With `engine.prefix_cache`, common prefixes are computed once. `SamplingParams.prompt_logprobs` gives the same
        with requests of any kind, and the likeliest tokens.

        Returns: for each sequence f32[tokens - 1], from its second token on; NaN where the model's logits are
            not finite.
        Raises: ValueError for a sequence that cannot be scored, which it names, or for what is no list of sequences;
            nothing has run then.
        """
        states = self._intake.scored(sequences)
        with sampling_progress(None, None, "scoring", "texts") as update:
            self._serve(states, update)
        return [state.prompt_scores.logprobs for state in states]  # type: ignore[union-attr]

    def compile_constraint(self, sampling: SamplingParams) -> None:
        """Compile the constraint of `sampling` now, so that `submit` does not wait for it. Any thread may call this at
        any time. Raises: ValueError for what cannot be applied."""
        if sampling.is_constrained:
            self._intake.constraint(sampling)

    def _serve(self, requests: list[RequestState], on_update=None) -> None:
        if not requests:
            return
        self._rounds.check_admits()
        self._prepare(requests)
        try:
            self._rounds.submit(requests)
            self._run(requests, on_update)
        except BaseException:
            self._give_up(requests)
            raise

    def _give_up(self, requests: Sequence[RequestState], *, keep_others: bool = False) -> None:
        """End requests whose caller gets no result of them; the engine stays usable. Unless `keep_others`, or the
        engine sleeps, all others end too: what a round that failed has left is not known."""
        if not keep_others and not self.is_asleep:
            return self.reset()
        for request in requests:
            self.cancel(request)

    def _prepare(self, requests: Sequence[RequestState]) -> None:
        """Give requests that are about to be queued their roots, and compile what they need: never for one that was
        refused."""
        for request in requests:
            request.root = self._intake.root(request)
        if not self.is_asleep:
            self.runner.check_weights()
        changes = needed_changes(requests, self.shapes, self.config, self.runner.types)
        if self.is_asleep:
            check_nothing_to_compile(self.runner, changes)
            return
        if changes:
            self.runner.extend(**changes)
            self._scheduler.shapes = self.shapes
            self._stats.registry.set("compile_s", self.runner.compile_s)
        self.warmup()

    def _is_in_progress(self) -> bool:
        """Whether requests have been added that have not ended."""
        return any(not request.is_done for request in self._scheduler.requests())

    def _run(self, requests: list[RequestState], on_update) -> None:
        total = sum(len(request.sequences) for request in requests)
        while not all(request.is_done for request in requests):
            self.step_round()
            if on_update is not None:
                on_update(lambda: counts(requests, total))
        if not self.is_asleep:  # `on_update` may have put it to sleep
            self.drain()

    @exclusive
    @awake
    def step_round(self, *, max_steps: int | None = None) -> list[SampleState]:
        """Launch the next round and read the one before; returns the sequences whose result became known.

        Args:
            max_steps: steps of the launched round, if fewer than the engine would choose: tokens are seen when their
                round is read. With 1 every token shows as soon as it is there and every step can be timed, at the
                price of a launch and a download each.
        Raises: ValueError for other than a positive whole number of them.
        """
        return self._rounds.step(max_steps)

    @exclusive
    def flush(self) -> list[SampleState]:
        """Read the round in flight, if there is one, and launch none: the host then knows what the device has sampled.

        Returns: the sequences whose result became known, as `step_round` does.
        """
        return self._rounds.flush()

    @exclusive
    def expire(self) -> tuple[list[SampleState], float | None]:
        """End the requests whose deadline has passed, as every round does: for a caller that runs none for a while.

        Returns: the sequences that have ended by it, and the seconds until the next deadline; None if there is none.
        """
        return self._rounds.expire()

    @exclusive
    @awake
    def wait_for_launch_window(self) -> None:
        """Wait until the round in flight has ended or is about to; returns at once if there is none.

        A request enters the next round that is launched, so one that comes just after a launch waits for two. A caller
        whose requests come at any time calls this before `step_round`, and submits in between all that have come: the
        next round is launched as late as it can be without the device standing idle.
        """
        self._rounds.wait_for_launch_window()

    @waits_for_turn
    @awake
    def drain(self) -> None:
        """Run until the device is idle: every page is free afterwards. Waits while another thread uses the engine,
        which may be as soon as the last request of this one has ended."""
        self._rounds.drain()

    def prepare(self, request: Request) -> RequestState:
        """Encode and check a request with an id, for `submit`, which then does neither. Any thread may call this at any
        time. Raises: ValueError if it cannot be served."""
        if request.id is None:
            raise ValueError("prepare was given a request without an id; give it one")
        state = self._intake.request_state(request, request.id)
        state.scheduler = self._scheduler
        return state

    @names_are_checked
    @exclusive
    def submit(self, prompt, sampling: SamplingParams | None = None) -> RequestState:
        """Queue a `Request`, another prompt as for `generate`, or what `prepare` returned; asleep too.

        Raises: ValueError if it cannot be served; RuntimeError if programs have to be compiled for it, and the engine
            sleeps.
        """
        if isinstance(prompt, RequestState):
            request = checked_prepared(prompt, self._scheduler)
        else:
            request = self._intake.request_state(as_request(prompt, sampling), str(self._submissions))
        self._submissions += 1
        self._prepare([request])
        try:
            self._rounds.submit([request])
        except BaseException:
            self._rounds.discard(request)  # the caller never gets it
            raise
        return request

    @exclusive
    def cancel(self, request: RequestState) -> None:
        """End a submitted request with reason "abort", at once; its pages are free two rounds later at the most.

        `step_round` does not return its sequences: the caller knows of them. On a mesh over several processes any one
        may call this; all end the request before the same round, one of the next two, and `step_round` returns its
        sequences in all of them.
        Raises: TypeError for what `submit` has not returned, ValueError for a request of another engine.
        """
        check_submitted("cancel", request, self._scheduler)
        self._rounds.cancel(request)

    @contextlib.contextmanager
    def held(self, call: str, max_round_seconds: float) -> Iterator[None]:
        """Keep the engine for this thread, once it is free; `call` names it to others. Rounds are limited meanwhile."""
        limited = self._scheduler.round_length.limited(max_round_seconds)
        with self._turns.taken(call, self._is_in_progress, waits=True), limited:
            yield

    @property
    def admits(self) -> bool:
        """Whether rounds give slots to requests that wait."""
        return self._scheduler.admits

    @exclusive
    def set_admits(self, admits: bool) -> None:
        """Let requests that wait enter the coming rounds, or keep them waiting; `drain` needs the former."""
        self._scheduler.admits = admits

    @property
    def has_active(self) -> bool:
        """Whether any sample has a slot."""
        return bool(self._scheduler.active)

    @property
    def is_stopping(self) -> bool:
        """Whether all processes of a mesh have agreed to stop, before the round that was launched last."""
        return self._rounds.coordinator.stopping

    @waits_for_turn
    @awake
    def warmup(self, *, weight_updates: bool = False) -> None:
        """Compile all programs now rather than with the first request; later calls do nothing.

        Args:
            weight_updates: also what `swap_weights`, and `sleep` while sequences are running, need.
        """
        if weight_updates:
            self.runner.compile_weight_update()
        if self.runner.warmup():
            self._stats.registry.set("compile_s", self.runner.compile_s)

    # Samples that go on from one another

    @exclusive
    @awake
    def resample(self, request: RequestState, ancestors: Sequence[int]) -> None:
        """Let sample i of a submitted request continue from the state of sample `ancestors[i]`, for all i at once.

        The round in flight is read first; a caller that weighs samples calls `flush` before. Pages are shared and not
        copied, and every sample keeps its own random numbers, so that descendants of one sample diverge. Finished
        samples take part: a descendant of one is finished like it, and a finished one that goes on from one that runs
        takes a free slot. What ends or begins here is not reported by `step_round`: the caller knows of it. On a mesh
        over several processes all of them call this, with the same ancestors.
        Raises: ValueError if `ancestors` does not name a sample for each, the prompt is not yet on the device, no slot
            is free, or the sample that sample 0 of a request with `prompt_logprobs` goes on from has no token yet; as
            `cancel`.
        """
        check_submitted("resample", request, self._scheduler)
        self._rounds.pause()
        self._rounds.continue_from(request, request.sequences, checked_ancestors(request, ancestors))

    @exclusive
    @awake
    def fork(self, request: RequestState, index: int, count: int = 1) -> list[SampleState]:
        """Add `count` samples to a submitted request, each in a slot of its own, which continue from the state of
        sample `index`; that sample continues too. Otherwise like `resample`.
        """
        check_submitted("fork", request, self._scheduler)
        self._rounds.pause()
        added = further_samples(request, index, count)
        ancestors = [*range(len(request.sequences)), *[index] * count]
        self._rounds.continue_from(request, [*request.sequences, *added], ancestors)
        request.sequences += added
        return added

    # Host memory

    @exclusive
    @awake
    def spill_to_host(self, sequence: SampleState) -> int:
        """Swap the pages of a submitted sequence out to host memory. It goes on after `prefetch`, or in `drain`.

        What it shares with others is copied, and its own when it comes back.

        Returns: pages moved; 0 if it holds none, and then nothing changes.
        Raises: ValueError if `engine.host_bytes` does not suffice, or the engine runs on several devices.
        """
        if self.backend.layout.mesh.size > 1:
            raise ValueError(
                "spill_to_host moves pages of one device, and the mesh of this engine has "
                f"{self.backend.layout.mesh.size}; leave it out"
            )
        check_sample("spill_to_host", sequence, self._scheduler)
        self._rounds.pause()
        return self._rounds.offload.swap_out(sequence)

    @exclusive
    @awake
    def prefetch(self, sequence: SampleState) -> None:
        """Bring the pages of an offloaded sequence back, so that it goes on.

        Where no pages are free for them now, it comes back as soon as they are, before any younger request starts; or,
        with `preempt: recompute`, is recomputed.

        Raises: ValueError if it is not in host memory.
        """
        check_sample("prefetch", sequence, self._scheduler)
        self._rounds.pause()
        self._rounds.offload.prefetch(sequence)

    # Weights

    @exclusive
    def swap_weights(
        self, model, *, adapter=None, version: int | None = None, policy: str = "drain", donate: bool = False
    ) -> None:
        """Sample with other weights from the next round on. The pool stays, and nothing is compiled again.

        The round in flight is read first. The engine gives up its old weights before it lays out the new ones, so
        there is never a third copy; where it shares the arrays of the model (`from_levanter`), nothing is moved at all,
        and they must live until the next swap.

        Args:
            model: as for `InferenceEngine`, with the same sizes and dtype. Arrays on other devices, or with
                another sharding, are moved to the sharding of the old ones. Or a checkpoint, as `load_model` takes
                it: its headers are checked first, and its tensors are cast to the dtype of the engine.
            adapter: of a checkpoint, as `load_model` takes it.
            version: names these weights, from 0 to 2^31 - 1; the next number by default. Pages are found only by
                requests of the version that computed them: a caller that returns to an earlier number gives the same
                weights again, and finds the pages that are left of it.
            policy: treatment of the sequences that are on the device. `drain`: they end first, with the old weights;
                requests that wait begin with the new ones. `keep_kv`: they continue at once on the keys and values that
                the old weights have computed, and share no pages with others from then on. `recompute`: they keep
                their tokens and recompute keys and values, which happens under every policy if the engine sleeps.
            donate: the engine may delete the model's arrays as it lays out its own.
        Raises: ValueError if the model is another one, or an argument is none; nothing has changed then. After any
            other failure the engine may have no weights, and says so, until another call succeeds.
        """
        version, wanted = checked_version(version, self.version, self.runner), checked_policy(policy)
        model = new_weights(self.runner.types, model, adapter)
        self._rounds.coordinator.on_input({"weights": np.asarray([version, list(WeightSwapPolicy).index(wanted)])})
        if wanted is WeightSwapPolicy.DRAIN and not self.is_asleep:
            check_weights_are_there(self.runner, self._scheduler.active)
            self._rounds.drain_active()
        self._rounds.pause()
        self._intake.version = version
        recompute = wanted is WeightSwapPolicy.RECOMPUTE
        update_roots(self.runner, self._scheduler, self._rounds.offload, self._intake, recompute=recompute)
        self.runner.swap_weights(model, donate=donate)
        self._rounds.version = version
        self._stats.registry.add("weight_swaps", 1)
        self._stats.registry.set("weights_version", version)

    # Sleep

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self.runner.is_asleep

    @exclusive
    def sleep(self, *, drop_weights: bool = False) -> None:
        """Give up the memory of the pool, for instance for a training step on the same devices, until `wake`.

        The round in flight is read first. Sequences in progress keep their tokens and recompute keys and values after
        `wake`; requests that wait go on waiting; no prefix is found any more. Until `wake`, calls that need the pool
        raise RuntimeError; `submit`, `cancel`, `expire`, `flush`, `swap_weights`, `stats` and `describe` do not. An
        engine that sleeps already keeps sleeping, and may drop its weights now.

        Args:
            drop_weights: give up the engine's weights too. Arrays that it shares with a training program stay there.
                `swap_weights` brings others, before or after `wake`.
        """
        self._rounds.coordinator.on_input({"sleep": np.asarray(drop_weights)})
        if not self.is_asleep:
            self._rounds.pause()
            fall_asleep(self.runner, self._scheduler, self._rounds.offload, self._intake)
        if drop_weights:
            self.runner.drop_weights()

    @exclusive
    def wake(self) -> None:
        """Make the pool again; nothing is compiled. An engine that is awake stays as it is.

        If the memory does not suffice, the engine goes on sleeping, and `wake` may be called again.
        """
        if self.is_asleep:
            self._rounds.coordinator.on_input({"wake": np.asarray(1)})
            self.runner.wake()

    # State

    @exclusive
    @awake
    def reset(self) -> None:
        """Forget all sequences; those in progress end with reason "abort".

        Touches tables only, never the pool; nothing is compiled for it. Only where an interrupted launch took the
        state with it, a new one is made.
        """
        self._rounds.reset()
        self._intake.forget_roots()  # nothing is stored for any of them

    @exclusive
    @awake
    def zero_cache(self) -> None:
        """Overwrite every stored key and value with zeros. Requires: no request in progress."""
        if self._scheduler.has_work:
            raise ValueError("zero_cache while requests are in progress would change their results; finish them first")
        self.runner.zero_cache()

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
    @awake
    def memory(self) -> dict[str, Any]:
        """Memory by owner, after the rounds launched so far; waits for them. Also enters it into `metrics`.

        Raises: ValueError on a mesh over several processes.
        """
        if self.backend.spans_hosts:
            raise ValueError(
                "memory() reads the tables of all ranks, and other processes hold some of them; use stats()"
            )
        registry = self._stats.registry
        values = audit(self.state.decode).metrics(
            page_bytes=self.runner.page_bytes, weights_bytes=self.runner.weights_bytes
        )
        for name, value in {**values, "peak_memory_bytes": peak_bytes()}.items():
            registry.set(name, value)
        return registry.as_dict("state")
