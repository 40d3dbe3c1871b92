"""`Runner`: the device's half of an engine: prepared weights, state and compiled programs.

It takes and returns arrays and knows nothing of requests or of the scheduler; the scheduler knows nothing of it.
`RoundLoop` carries the scheduler's admissions here, and what comes back to the scheduler.

Arrays at this boundary are NumPy arrays with a leading axis of data-parallel ranks. `without_ranks` drops it where
there is one rank, whose programs have no such axis.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from levanter_infer.checkpoints.load import StoredModel
from levanter_infer.decode.admission import Admission
from levanter_infer.decode.beam_table import BeamParams, Hypotheses
from levanter_infer.decode.constraints import ConstraintLoad, ConstraintParams
from levanter_infer.decode.kv_offload import HostTerms
from levanter_infer.decode.outputs import RoundOutputs
from levanter_infer.decode.programs import Program, ProgramOptions, Programs
from levanter_infer.decode.sampling_table import SamplingTable
from levanter_infer.decode.scoring import READ_PAGES
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.decode.state import GenState
from levanter_infer.engine.admission import nothing_to_admit
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.constraints import Resident, constraint_shapes, loads_of, mask_load, nothing_to_load
from levanter_infer.engine.routes import routing_shapes
from levanter_infer.engine.scoring import score_shapes
from levanter_infer.engine.sizes import beams_for, kv_dtype, resolve_shapes, window_shapes
from levanter_infer.engine.tile_search import check_given_tiles
from levanter_infer.kernels.cpu import huge_pages
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.protocol import Model
from levanter_infer.policies import Recompilation
from levanter_infer.runtime.garbage_collection import gc_disabled
from levanter_infer.runtime.hosts import Hosts, agree, agree_min
from levanter_infer.runtime.memory import check_host_memory, return_free_memory
from levanter_infer.runtime.progress import stage
from levanter_infer.structured.automaton import packed

logger = logging.getLogger(__name__)

_HYPOTHESES = 8
"""Hypotheses of beam searches that are fetched together."""


class Runner:
    """Runs an engine's programs on its devices.

    Args:
        model: with the weights, or a `StoredModel`, which is read after its compilation has begun.
        config: sizes and policies.
        backend: the implementations for the devices.
        num_eos: end-of-sequence ids of the tokenizer.
        hosts: processes that make runners like this one; they agree on sizes and programs before the first launch.
        donate_model: the arrays of the model may be deleted as the runner lays out its own.
        scoring: compile for prompt logprobs at once.
        routing: compile for routed experts at once.
        constraints: compile for structured output at once.
        num_beams: compile for beam searches of so many beams at once.
        logits_mod: as in `ProgramOptions`.
    Raises: ValueError as `shapes_for` and `programs_for`, and for an engine that a CPU's memory cannot hold.
    """

    def __init__(
        self,
        model: "Model | StoredModel",
        config: EngineConfig,
        backend: BackendChoice,
        *,
        num_eos: int,
        hosts: Hosts | None = None,
        donate_model: bool = False,
        scoring: bool = False,
        routing: bool = False,
        constraints: bool = False,
        num_beams: int = 1,
        score_mod=None,
        mask_mod=None,
        logits_mod=None,
    ):
        self.backend, self._config, self._hosts = backend, config, hosts
        stored = model if isinstance(model, StoredModel) else None
        types = model.types if isinstance(model, StoredModel) else model
        self.weights_bytes: int = backend.weights_bytes(types)
        shapes = shapes_for(
            config,
            types,
            backend,
            num_eos=num_eos,
            is_loaded=stored is None,
            scoring=scoring,
            routing=routing,
            constraints=constraints,
            num_beams=num_beams,
        )
        self.shapes = self._agreed(shapes, types.config)
        attention = backend.attention_spec(self.shapes, score_mod, mask_mod)
        self.programs = programs_for(
            config, types, backend, self.shapes, attention, fingerprints=hosts is not None, logits_mod=logits_mod
        )
        self._check_memory(types, is_loaded=stored is None, is_donated=donate_model)
        self._enter_nothing(backend.put(empty_admission(self.shapes, self.num_ranks)))
        self.compile_s, self.is_warm = 0.0, False
        if stored is not None:
            self._compile_ahead(types)
            with stage("reading weights"):
                model, donate_model = stored.read(backend.layout, backend.quantizes), True
        self.types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), types)
        """The model as its checkpoint or its training program has it, with types in place of arrays."""
        self.model = backend.prepare(model, donate=donate_model)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self.model)
        if hosts is not None:  # equal configurations do not prove equal programs
            self.programs.compile_all(self.model, self.nothing)
            with stage("waiting for the other processes to trace their programs"):
                agree(hosts, "programs", self.programs.fingerprints())
        self.state: GenState = self._fresh_state()
        self._no_cache: Any = None
        """Types in place of the arrays of the pool, while it is given up."""
        self._is_dropped = False
        """Whether `sleep` was the last to give up the weights."""

    def _fresh_state(self) -> GenState:
        """A new state. On a CPU its pool is in huge pages: each step writes to pages anywhere in it."""
        state = self.programs.init()
        huge_pages.remap_zeros(state.cache)
        return state

    def _check_memory(self, types, *, is_loaded: bool, is_donated: bool) -> None:
        """Refuse an engine that this machine cannot hold, if the devices use its memory; others refuse by themselves.

        Args:
            types: the model, with arrays if it `is_loaded`. Its arrays stay beside those that are laid out otherwise,
                unless it `is_donated`.
        Raises: ValueError
        """
        if not self.backend.platform.shares_memory:
            return
        weights = []
        if not (is_loaded and is_donated):
            there = collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(types) if is_loaded)
            for leaf in jax.tree.leaves(self.backend.prepared_types(types)):
                if there[leaf.shape, leaf.dtype]:
                    there[leaf.shape, leaf.dtype] -= 1
                else:
                    weights.append(leaf)
        needed = {"KV cache and tables": self.programs.state_types, "weights": weights}
        shapes = self.shapes
        sizes = f"{shapes.num_pages}), engine.max_seqs ({shapes.max_seqs}) or engine.max_seq_len ({shapes.max_seq_len})"
        check_host_memory(
            "the engine",
            {name: self.backend.device_bytes(tree) for name, tree in needed.items()},
            f"lower engine.max_pages ({sizes}, or free some memory",
        )

    def _agreed(self, shapes: Shapes, arch: DecoderConfig) -> Shapes:
        """The smallest pool of all processes, and the same sizes in all others."""
        if self._hosts is None:
            return shapes
        with stage("waiting for the other processes to size their pools"):
            least = agree_min(self._hosts, "max_pages", {"max_pages": shapes.num_pages})
        shapes = dataclasses.replace(shapes, num_pages=least["max_pages"])
        shapes = dataclasses.replace(shapes, windows=window_shapes(self._config, arch, shapes))
        backend = self.backend
        plan = {**dataclasses.asdict(shapes), "mesh": backend.mesh_sizes, "platform": backend.platform.name}
        agree(self._hosts, "sizes", {name: str(value) for name, value in plan.items()})
        return shapes

    def _compile_ahead(self, types) -> None:
        """Begin to compile for a model that is yet to be read."""
        begin = time.perf_counter()
        with stage("compiling", self.programs.progress):
            self.programs.compile_all(self.backend.prepared_types(types), self.nothing)
            if self.backend.platform.shares_memory:  # the compiler's memory is then the weights'
                self.programs.wait()
                return_free_memory()
        self.compile_s = time.perf_counter() - begin

    def _enter_nothing(self, nothing: Admission) -> None:
        self.nothing = nothing
        """The admission that admits nothing, on the device."""
        self._idle_admissions: dict[tuple[bytes, bytes], Admission] = {}

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: each has tables, a pool and a loop of its own."""
        return self.backend.num_ranks

    # Rounds

    def run(self, admission: Admission) -> RoundOutputs:
        """Launch a round, and begin to copy its outputs to the host; returns before the device has finished.

        Raises: RuntimeError as `check_weights`.
        """
        self.check_weights()
        self.state, outputs = self.programs.round(self.model, self.state, admission)
        outputs.packed.copy_to_host_async()
        return outputs

    def upload(self, fields: Mapping[str, Any]) -> Admission:
        """An admission on the device. One that admits and cancels nothing serves many rounds, and is uploaded once.

        Args:
            fields: of `HostAdmission.arrays()`, and "host" where pages are moved. A field that is left out admits
                nothing.
        """
        idle = is_idle(fields)
        key = (fields["max_steps"].tobytes(), fields["min_free_slots"].tobytes())
        if idle and key in self._idle_admissions:
            return self._idle_admissions[key]
        arrays = admission_fields(fields, self.shapes.limits, self.num_ranks)
        admission = dataclasses.replace(self.nothing, **self.backend.put(arrays))
        if idle:
            self._idle_admissions[key] = admission
        return admission

    # Programs

    def compile_weight_update(self) -> None:
        """Compile what `on_weight_update` runs, unless that has been done."""
        program, shape = self.programs.on_weight_update, (self.num_ranks, self.shapes.num_slots)
        if not program.is_begun:
            arrays = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape[:1], bool)
            program.compile(self.state.decode, *self._put(arrays))
        program.wait()

    @gc_disabled()
    def warmup(self) -> bool:
        """Compile all programs and run a round that admits nothing. Returns: False if that had been done before."""
        if self.is_warm:
            return False
        return_free_memory()  # of loading the model: compiling needs much
        start = time.perf_counter()
        with stage("compiling", self.programs.progress):
            self.programs.compile_all(self.model, self.nothing)
            self.programs.wait()
        with stage("running the first round"):
            try:
                self.state, outputs = self.programs.round(self.model, self.state, self.nothing)
                jax.block_until_ready(outputs)
            except BaseException:
                self.reset()  # an interrupt may have taken the state
                raise
        self.is_warm = True
        self.compile_s += time.perf_counter() - start
        return_free_memory()
        return True

    @gc_disabled()
    def extend(self, **changes) -> None:
        """Go on with programs that can do more: `changes` to the shapes that add tables to the state.

        To be called between launches. What runs keeps its slots and pages, and a round in flight is read as ever.
        """
        start = time.perf_counter()
        shapes = dataclasses.replace(self.shapes, **changes)
        logger.info("compiling again, for %s", ", ".join(changes))
        programs = self.programs.extended(self.model, shapes)
        nothing = self.backend.put(empty_admission(shapes, self.num_ranks))
        with stage(f"compiling again, for {', '.join(changes)}", programs.progress):
            programs.compile_all(self.model, nothing)
            programs.wait()
        if self._hosts is not None and self.backend.spans_hosts:
            agree(self._hosts, "programs", programs.fingerprints())
        self.state = programs.extend(self.state)
        self.programs, self.shapes = programs, shapes
        self._enter_nothing(nothing)
        self.compile_s += time.perf_counter() - start

    # State

    @property
    def is_asleep(self) -> bool:
        """Whether the pool has been given up."""
        return self.state.cache is self._no_cache

    def sleep(self) -> None:
        """Give up the pool; its memory goes back to the system.

        Requires: no launch is in flight, and no sequence holds pages with contents.
        """
        cache = self.state.cache
        self._no_cache = self.programs.state_types.cache
        self.state = dataclasses.replace(self.state, cache=self._no_cache)
        for leaf in jax.tree.leaves(cache):
            leaf.delete()
        return_free_memory()

    def drop_weights(self) -> None:
        """Give up the weights until `swap_weights`; the memory of the engine's own copies goes back to the system."""
        self.model, self._is_dropped = None, True
        return_free_memory()

    def wake(self) -> None:
        """Make the pool again, with a table in which no prefix is found: nothing of what it named is there."""
        fresh = self._fresh_state()
        decode = dataclasses.replace(self.state.decode, prefix=fresh.decode.prefix, snapshots=fresh.decode.snapshots)
        self.state = dataclasses.replace(self.state, decode=decode, cache=fresh.cache)
        self._no_cache = None

    def reset(self) -> None:
        """Empty the tables; the pool is not written. If an interrupted launch has taken the state, make a new one."""
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        self.state = self._fresh_state() if lost else self.programs.reset(self.state)

    def zero_cache(self) -> None:
        """Overwrite every stored key and value with zeros."""
        self.state = self.programs.zero_cache(self.state)

    def resample(self, fields: tuple[np.ndarray, ...], rank: int) -> None:
        """Let sequences of one rank go on from others. Args: fields: of `resample_samples`, by slot."""
        of_ranks = tuple(np.stack([field * (i == rank) for i in range(self.num_ranks)]) for field in fields)
        self.state = self.programs.resample(self.state, *self._put(of_ranks))

    def _put(self, arrays):
        """Arrays with a leading axis of ranks on the devices, as the programs take them."""
        return self.backend.put(without_ranks(arrays, self.num_ranks))

    # Weights

    @property
    def has_weights(self) -> bool:
        """Whether the weights are there: arrays that are shared with a training program may have been donated, and
        `swap_weights` may have failed."""
        return self.model is not None and not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.model))

    def check_weights(self) -> None:
        """Raises: RuntimeError if `sleep` has given up the weights, or `swap_weights` has failed after it had."""
        if self.model is None:
            reason = "sleep(drop_weights=True) has given them up; call swap_weights"
            if not self._is_dropped:
                reason = "the last swap_weights failed after it had given up the old ones; call swap_weights again"
            raise RuntimeError(f"the engine has no weights: {reason}")

    def on_weight_update(self, roots: np.ndarray, swapped: np.ndarray, *, recompute: bool) -> None:
        """Make the tables ready for other weights.

        Args:
            roots: i32[rank, slot], the prefix-cache root of each slot under the new weights, -1 for free slots.
            swapped: bool[rank, slot], slots whose pages are in host memory.
            recompute: whether running sequences recompute their keys and values.
        """
        arguments = self._put((roots, swapped, np.full(roots.shape[:-1], recompute)))
        self._replace_decode(self.programs.on_weight_update(self.state.decode, *arguments))

    def swap_weights(self, model, *, donate: bool = False) -> None:
        """Run with the weights of `model` from the next launch on. The old ones are given up before the new ones are
        laid out, so there is never a third copy. A `StoredModel` is read now, into the memory of the old ones.
        Requires: `model` has the types of `self.types`."""
        self.model, self._is_dropped = None, False  # its memory may be needed for the new one
        if isinstance(model, StoredModel):
            return_free_memory()  # malloc keeps arrays below 32 MiB, which the new ones need not fit into
            with stage("reading weights"):
                model, donate = model.read(self.backend.layout, self.backend.quantizes), True
        self.model = jax.tree.map(_placed, self.backend.prepare(model, donate=donate), self._shardings)

    # Reads

    def read_scores(self, ranks, slots, columns) -> "Gather":
        """Begin to fetch pages of prompt logprobs. Args: the rank, slot and column of each page."""
        return self._read_by_page(self.programs.read_scores, self.state.scores, ranks, slots, columns)

    def read_routes(self, ranks, slots, columns) -> "Gather":
        """Begin to fetch routed experts. Args: the rank, slot and page of the slot of each."""
        return self._read_by_page(self.programs.read_routes, self.state.routes, ranks, slots, columns)

    def _read_by_page(self, program: Program, table, ranks, slots, columns) -> "Gather":
        gather = Gather(ranks, self.num_ranks, READ_PAGES)
        none = self.state.decode.sequences.num_slots
        places = zip(gather.arguments(slots, fill=none), gather.arguments(columns, fill=0), strict=True)
        gather.results = [program(table, *self.backend.put(each)) for each in places]
        return gather

    def read_hypotheses(self, ranks, slots) -> Hypotheses:
        """The hypotheses of beam searches, in numpy. Args: the rank and slot of each. Waits for the round in flight."""
        gather = Gather(ranks, self.num_ranks, _HYPOTHESES)
        of_calls = gather.arguments(slots, fill=0)
        calls = [jax.device_get(self.programs.found(self.state, self.backend.put(slots))) for slots in of_calls]
        return jax.tree.map(lambda *results: gather.rows(results), *calls)

    # Constraints, between launches

    def load_automaton(self, resident: Resident) -> None:
        """Bring an automaton into the tables of all ranks."""
        for fields in loads_of(resident, self._nothing_to_load()):
            self._load(jax.tree.map(lambda leaf: np.stack([leaf] * self.num_ranks), fields))

    def load_masks(self, masks: Sequence[tuple[int, int, np.ndarray]]) -> None:
        """Bring the masks of slots to their ranks. Args: masks: rank, slot and bool[vocab] of each."""
        nothing, of_ranks = self._nothing_to_load(), [[] for _ in range(self.num_ranks)]
        size = len(nothing["masks"])
        for rank, slot, allowed in masks:
            of_ranks[rank].append((slot, packed(allowed[None])[0]))
        for begin in range(0, max(map(len, of_ranks)), size):
            loads = []
            for own in (each[begin : begin + size] for each in of_ranks):
                words = np.stack([mask for _, mask in own]) if own else nothing["masks"][:0]
                places = np.array([slot for slot, _ in own], np.int32)
                loads.append({**nothing, **mask_load(nothing, words, places)})
            self._load(jax.tree.map(lambda *leaves: np.stack(leaves), *loads))

    def _nothing_to_load(self) -> dict[str, Any]:
        assert self.shapes.constraints is not None
        return nothing_to_load(self.shapes.constraints, self.shapes.limits.vocab_size, self.shapes.num_slots)

    def _load(self, fields: dict[str, Any]) -> None:
        load = self._put(ConstraintLoad(**fields))
        self._replace_decode(self.programs.load_constraints(self.state.decode, load))

    # KV offload, between launches and with none in flight

    def table_snapshot(self) -> dict[str, Any]:
        """The fields of `TableSnapshot`, by name, with copies of the arrays."""
        return jax.tree.map(np.array, jax.device_get(vars(self.programs.tier.snapshot(self.state.decode))))

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of the tables in all layers that store it, and of one window page of each window."""
        cache = self.state.cache
        groups = [cache.paged(group) for group in range(1 + len(self.shapes.windows))]
        return tuple(sum(pool.nbytes // (pool.num_entries * self.num_ranks) for pool in pools) for pools in groups)

    def read_pages(self, pages: np.ndarray, group: int = 0) -> tuple[jax.Array, ...]:
        """Copy pages to host memory.

        Args:
            pages: i32[transfer_pages], filled up with `num_pages`.
            group: 0 for the layers that store every page; i for their window pages in the layers of window i - 1.
        """
        state, tier, chunk = self.state, self.programs.tier, self.backend.put(pages)
        if group == 0:
            return tier.read_pages(state.cache, chunk)
        return tier.read_window_pages[group - 1](state.cache, state.decode.windows[group - 1].attached, chunk)

    def write_pages(self, contents: tuple[jax.Array, ...], pages: jax.Array, chunk: np.ndarray, group: int = 0) -> None:
        """Copy contents of `read_pages` into the pools. Args: pages: of `swap_in`; chunk: which of them, for each."""
        state, tier, places = self.state, self.programs.tier, self.backend.put(chunk)
        if group == 0:
            cache = tier.write_pages(state.cache, contents, pages, places)
        else:
            attached = state.decode.windows[group - 1].attached
            cache = tier.write_window_pages[group - 1](state.cache, attached, contents, pages, places)
        self.state = dataclasses.replace(state, cache=cache)

    def swap_in(self, mask: np.ndarray, places: np.ndarray, computed: np.ndarray, count: int) -> jax.Array:
        """Give sequences their pages in the tables again, as `decode.kv_offload.swap_in`; returns the pages."""
        arguments = self.backend.put((mask, places, computed, np.asarray(count, np.int32)))
        decode, pages = self.programs.tier.swap_in(self.state.decode, *arguments)
        self._replace_decode(decode)
        return pages

    def mark_swapped(self, mask: np.ndarray, status: int) -> None:
        """Take the pages of the slots in `mask` from them, and give them `status`."""
        arguments = self.backend.put((mask, np.asarray(status, np.int32)))
        self._replace_decode(self.programs.tier.mark_swapped(self.state.decode, *arguments))

    def _replace_decode(self, decode) -> None:
        self.state = dataclasses.replace(self.state, decode=decode)


def _placed(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)


class Gather:
    """The call of a program, and the position in it, that reads each entry of tables of several ranks.

    Every call reads `size` entries of each rank, so that one compiled program serves however many are wanted.

    Args:
        ranks: which rank has the entry, for each entry that is wanted.
        num_ranks: number of ranks; the arrays of a single rank have no leading axis.
    """

    def __init__(self, ranks: Sequence[int] | np.ndarray, num_ranks: int, size: int):
        self._ranks, self._num_ranks, self._size = np.asarray(ranks, np.int64), num_ranks, size
        counts = np.bincount(self._ranks, minlength=num_ranks)
        order = np.argsort(self._ranks, kind="stable")
        self._offsets = np.empty_like(self._ranks)
        """The position of each entry among those of its rank."""
        self._offsets[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._num_calls = -(-int(counts.max(initial=0)) // size)
        self.results: Sequence = []
        """Results of the calls, if they have begun."""

    def arguments(self, values: Sequence[int] | np.ndarray, *, fill: int) -> list[np.ndarray]:
        """The argument of each call, of one value per entry: i32[size], or i32[rank, size] of several ranks.

        `fill`: stands where a call reads fewer entries.
        """
        padded = np.full((self._num_ranks, self._num_calls * self._size), fill, np.int32)
        padded[self._ranks, self._offsets] = values
        calls = np.split(padded, self._num_calls, axis=1) if self._num_calls else []
        return [call if self._num_ranks > 1 else call[0] for call in calls]

    def rows(self, results: Sequence | None = None) -> np.ndarray:
        """The entries in the order in which they are wanted, [entry, …].

        Args:
            results: of the calls, [size, …] or [rank, size, …] each; None: `self.results`. Waits for the device.
        """
        arrays = [np.asarray(result) for result in (self.results if results is None else results)]
        joined = np.concatenate([array if self._num_ranks > 1 else array[None] for array in arrays], axis=1)
        return joined[self._ranks, self._offsets]


# Admissions as the device's programs take them, made of what the scheduler admits


def is_idle(fields: Mapping[str, Any]) -> bool:
    """Whether a round with these fields admits and cancels nothing."""
    return not (np.any([fields["has_pieces"], fields["has_cancellations"]]) or "host" in fields)


def empty_admission(shapes: Shapes, num_ranks: int = 1) -> Admission:
    """An admission that admits nothing, in NumPy; its arrays stand in for those that a round does not upload."""
    fields = admission_fields(nothing_to_admit(shapes, num_ranks), shapes.limits, num_ranks)
    return Admission(**{"beams": None, "constraints": None, "host": host_terms() if shapes.offload else None, **fields})


def admission_fields(fields: Mapping[str, Any], limits: SamplingLimits, num_ranks: int) -> dict[str, Any]:
    """Fields of an `Admission` from those of a `HostAdmission`."""
    found = {name: value if name == "host" else without_ranks(value, num_ranks) for name, value in fields.items()}
    if "sampling" in found:
        found["sampling"] = SamplingTable(**found["sampling"], limits=limits)
    if "beams" in found:
        found["beams"] = BeamParams(**found["beams"])
    if "constraints" in found:
        found["constraints"] = ConstraintParams(**found["constraints"])
    return found


def without_ranks(arrays: Any, num_ranks: int) -> Any:
    """Arrays as the device's programs take them: those of one rank have no leading axis of ranks."""
    return jax.tree.map(lambda array: array[0, ...], arrays) if num_ranks == 1 else arrays


def host_terms(*, yields: bool = True, return_pages: int = 0) -> HostTerms:
    """KV offload's terms for the device's scheduler, in NumPy."""
    return HostTerms(np.asarray(yields), np.asarray(return_pages, np.int32))  # type: ignore[arg-type]


# Sizes and programs, also of an engine that is not in memory, for devices that may be elsewhere


def shapes_for(
    config: EngineConfig,
    types,
    backend: BackendChoice,
    *,
    num_eos: int,
    is_loaded: bool,
    device_bytes: int | None = None,
    scoring: bool = False,
    routing: bool = False,
    constraints: bool = False,
    num_beams: int = 1,
) -> Shapes:
    """The static sizes of an engine.

    Args:
        types: the model as it comes from a checkpoint or a training program, arrays or their types.
        num_eos: end-of-sequence ids of the model.
        is_loaded: whether the model is in memory already.
        device_bytes: memory of a device that is not here; None: what is free in this process's first.
        scoring: whether the round computes prompt logprobs from the start.
        routing: whether it records routed experts from the start.
        constraints: whether it has tables of constraints from the start.
        num_beams: beams of the widest searches that it computes from the start.
    Raises: ValueError as `resolve_shapes`.
    """
    unread = 0 if is_loaded else backend.device_bytes(backend.prepared_types(types))
    shapes = resolve_shapes(
        config, types, num_eos, unread, backend.page_bytes, device_bytes, backend.matmul_backend.step_tokens
    )
    shapes = backend.adapt(shapes)
    if scoring:
        shapes = dataclasses.replace(shapes, scoring=score_shapes(config, types))
    if routing:
        shapes = dataclasses.replace(shapes, routing=routing_shapes(types.config))
    if constraints:
        shapes = dataclasses.replace(shapes, constraints=constraint_shapes(config, shapes.limits.vocab_size))
    return dataclasses.replace(shapes, max_beams=beams_for(num_beams, shapes))


def programs_for(
    config: EngineConfig,
    types,
    backend: BackendChoice,
    shapes: Shapes,
    attention: AttentionSpec,
    *,
    fingerprints: bool = False,
    logits_mod=None,
) -> Programs:
    """The programs of an engine. Args: types: as in `shapes_for`; fingerprints, logits_mod: as in `ProgramOptions`.
    Raises: ValueError for `tiles` that no kernel can have, and for a memory of a `logits_mod` beside speculation."""
    dtype = kv_dtype(config, types)
    check_given_tiles(config.tiles, types.config, backend.layout, shapes, dtype)
    if shapes.speculation is not None and logits_mod is not None and jax.tree.leaves(logits_mod[1]):
        raise ValueError(
            f"engine.num_speculative_tokens={config.num_speculative_tokens} and a logits_mod with a memory: the memory "
            "goes on from token to token, and a draft may be rejected; leave one of them out"
        )
    options = ProgramOptions(
        attention,
        dtype,
        backend.attention_backend,
        backend.layout,
        compiler_options=backend.compiler_options,
        required_options=backend.required_options,
        on_recompile=logger.warning if config.recompilation == Recompilation.WARN else None,
        fingerprints=fingerprints,
        logits_mod=logits_mod,
    )
    return Programs(types, shapes, options)


def round_types(types, backend: BackendChoice, shapes: Shapes, programs: Programs) -> tuple:
    """The types of the round's arguments, model, state and admission, with their shardings."""
    admission = jax.eval_shape(lambda: empty_admission(shapes, backend.num_ranks))
    return backend.prepared_types(types), programs.state_types, backend.layout.types(admission, stacked=True)
