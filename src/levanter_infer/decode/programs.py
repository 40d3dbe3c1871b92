"""Every compiled program of the engine. The only place with `jit`."""

import contextlib
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from levanter_infer.cache.cache import Cache
from levanter_infer.decode.admission import Admission
from levanter_infer.decode.beam_table import BeamTable, Hypotheses, hypotheses
from levanter_infer.decode.constraints import ConstraintLoad, load_constraints
from levanter_infer.decode.kv_offload import (
    TableSnapshot,
    mark_swapped,
    read_pages,
    read_window_pages,
    snapshot,
    swap_in,
    write_pages,
    write_window_pages,
)
from levanter_infer.decode.logits_mod import LogitsFunction, LogitsMod
from levanter_infer.decode.loop import run_round
from levanter_infer.decode.outputs import RoundOutputs
from levanter_infer.decode.resampling import resample_samples
from levanter_infer.decode.routes import read_routes
from levanter_infer.decode.scoring import READ_PAGES, read_scores
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState, GenState, empty_cache
from levanter_infer.decode.weight_updates import on_weight_update
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.layers.layout import Layout


class RecompilationError(RuntimeError):
    """A program that is compiled once for all requests was compiled again."""


@contextlib.contextmanager
def without_callers_context() -> Iterator[None]:
    """A context without the caller's mesh, `jax_enable_x64` and `jax_disable_jit`: programs are traced for 32 bits,
    `shard_map` over the mesh of a program refuses to be traced under another one, such as a trainer's, and what is
    compiled ahead cannot be left uncompiled."""
    with contextlib.ExitStack() as context:
        if not jax.sharding.get_abstract_mesh().empty:
            context.enter_context(jax.set_mesh(Mesh(np.empty((), object), ())))
        context.enter_context(jax.enable_x64(False))
        context.enter_context(jax.disable_jit(False))
        yield


class Program:
    """One function, compiled once for arguments of one type.

    A call dispatches to the executable itself: nothing can be traced or compiled behind the caller's back.
    """

    def __init__(
        self,
        function,
        *,
        donate: tuple[int, ...] = (),
        options: Mapping[str, str | bool] | None = None,
        required: Collection[str] = (),
        fingerprint: bool = False,
    ):
        """
        Args:
            options: for XLA's compiler; those that it does not know are left out, or an error if they are `required`.
            fingerprint: note one when it is lowered.
        """
        self._options, self._required, self._wants_fingerprint = dict(options or {}), required, fingerprint
        self.fingerprint = ""
        """SHA-256 of what the compiler is given, if it was asked for."""
        self.function = function
        self.jitted = jax.jit(function, donate_argnums=donate)
        self.compilations = 0
        self._names = tuple(inspect.signature(function).parameters)
        self.types: dict[str, str] = {}
        """Types of the arrays that the program takes, by the name of the argument."""
        self._compiled: Future[jax.stages.Compiled] | None = None

    def __call__(self, *arguments):
        if self._compiled is None:
            self.compile(*arguments)
        program = self.wait()
        try:
            if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
                return program(*arguments)
            with jax.disable_jit(False):  # 4 µs, on the path of every round
                return program(*arguments)
        except Exception as error:
            interrupt = _interrupt_behind(error)
            if interrupt is None:
                raise
            raise interrupt from None

    @property
    def is_begun(self) -> bool:
        return self._compiled is not None

    @property
    def is_ready(self) -> bool:
        return self._compiled is not None and self._compiled.done()

    def compile(self, *arguments) -> None:
        """Get ready for arguments of these types, arrays or `jax.ShapeDtypeStruct`s.

        Traces here and compiles in the background; the next call waits for it.
        """
        self.types = self.types_of(arguments)
        with without_callers_context():
            lowered = self.jitted.lower(*arguments)
        if self._wants_fingerprint:
            self.fingerprint = hashlib.sha256(f"{lowered.as_text()} {self._options}".encode()).hexdigest()
        compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled = compiler.submit(self.compile_lowered, lowered)
        compiler.shutdown(wait=False)
        self.compilations += 1

    def lower(self, *arguments, platform: str) -> jax.stages.Lowered:
        """The program for devices of `platform` that are not here; `compile_lowered` goes on with it."""
        return self.jitted.trace(*arguments).lower(lowering_platforms=(platform,))

    def compile_lowered(self, lowered: jax.stages.Lowered, **further: str | bool) -> jax.stages.Compiled:
        """Compile with those of this program's options, and `further` ones, that the compiler knows."""
        options = {**self._options, **further}
        while True:
            try:
                return lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                unknown = re.search("No such compile option: '(.*?)'", str(error))
                if unknown is not None and unknown[1] in self._required:
                    raise ValueError(
                        f"the round needs XLA's option {unknown[1]}, which this jaxlib does not know; install jaxlib "
                        'of a version that pyproject.toml names, or use engine.numerics="default"'
                    ) from error
                if unknown is None or options.pop(unknown[1], None) is None:
                    raise

    def wait(self) -> jax.stages.Compiled:
        """The program, when it is compiled. Requires: that has begun."""
        assert self._compiled is not None
        try:
            return self._compiled.result()
        except BaseException:
            self._compiled = None  # the next call tries again
            raise

    def types_of(self, arguments: tuple) -> dict[str, str]:
        """Type of every array, by the name of its place."""
        leaves = jax.tree_util.tree_leaves_with_path(dict(zip(self._names, arguments, strict=True)))
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            + _placement(leaf)
            for path, leaf in leaves
        }


def _interrupt_behind(error: Exception) -> BaseException | None:
    """The KeyboardInterrupt, or another exception that is no error, that JAX has made an error of.

    JAX compares the static fields of the arguments in Python, and turns whatever is raised meanwhile into a
    ValueError.
    """
    cause = error.__cause__
    while isinstance(cause, Exception):
        cause = cause.__cause__
    return cause


def _placement(leaf) -> str:
    """The sharding of an array over several devices; empty for one device."""
    sharding = getattr(leaf, "sharding", None)
    return f" on {sharding}" if sharding is not None and sharding.num_devices > 1 else ""


class OffloadPrograms:
    """The programs of `decode/kv_offload.py`, compiled when they are first called."""

    def __init__(self, shapes: Shapes):
        def take_snapshot(state: DecodeState) -> TableSnapshot:
            return snapshot(state, shapes)

        self.snapshot = Program(take_snapshot)
        self.read_pages, self.write_pages = Program(read_pages), Program(write_pages, donate=(0,))
        self.read_window_pages, self.write_window_pages = [], []
        for group in range(1, len(shapes.windows) + 1):
            read, write = _window_functions(group)
            self.read_window_pages.append(Program(read))
            self.write_window_pages.append(Program(write, donate=(0,)))
        self.mark_swapped, self.swap_in = Program(mark_swapped, donate=(0,)), Program(swap_in, donate=(0,))
        self._programs = {name: each for name, each in vars(self).items() if isinstance(each, Program)}
        for name in ("read_window_pages", "write_window_pages"):
            self._programs |= {f"{name}_{i}": each for i, each in enumerate(getattr(self, name))}

    def compilations(self) -> dict[str, int]:
        """Compilations of each program that has been called."""
        return {name: program.compilations for name, program in self._programs.items() if program.is_begun}


def _window_functions(group: int) -> tuple[Callable, Callable]:
    """`read_window_pages` and `write_window_pages` of one numbering of pages."""

    def read(cache: Cache, attached, pages):
        return read_window_pages(cache, attached, pages, group)

    def write(cache: Cache, attached, contents, pages, places) -> Cache:
        return write_window_pages(cache, attached, contents, pages, places, group)

    return read, write


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """The choices that an engine's programs of all `Shapes` share."""

    attention: AttentionSpec
    kv_dtype: jnp.dtype
    """Dtype of the stored keys and values."""
    backend: Backend = XLA
    """The pool's; it computes attention."""
    layout: Layout | None = None
    """The sharding of model and state over a mesh; every device runs the programs on its parts. None: the mesh has one
    device."""
    compiler_options: Mapping[str, str | bool] | None = None
    """Options for XLA's compiler, where it knows them."""
    required_options: Collection[str] = ()
    """Those without which the round does not keep its promises: it is an error if the compiler does not know them."""
    on_recompile: Callable[[str], None] | None = None
    """Called with a message if the round is compiled again, instead of `RecompilationError`."""
    fingerprints: bool = False
    """Whether each program notes one when it is lowered."""
    logits_mod: tuple[LogitsFunction, Any] | None = None
    """A caller's function of the logits, and its memory of a sequence before the first token."""


class Programs:
    """The programs of one engine: `init`, `round`, `reset` and `zero_cache`, each compiled once.

    Others are compiled when they are first called.

    All that changes between calls is array contents, so that whatever the requests look like, nothing is compiled
    again. The state is donated: a caller goes on with the returned one.

    What few engines do is in no program until it is wanted: then `extended` makes programs for larger `Shapes`, once,
    and their `extend` brings the state along.
    """

    def __init__(self, model, shapes: Shapes, options: ProgramOptions, *, smaller: "Programs | None" = None):
        """
        Args:
            model: of the form that the round takes; types will do.
            smaller: the programs that these take over from (`extended`).
        """
        layout = Layout.of(None, model.config) if options.layout is None else options.layout
        self._options, self._layout, self._shapes = options, layout, shapes
        self._smaller = None if smaller is None else (smaller.state_types, smaller.compilations())
        with without_callers_context():
            functions = _spmd(_functions(shapes, model.config, layout.local_kv_heads, options), layout)
            self.state_types = layout.types(jax.eval_shape(functions["init"]), stacked=True)
        """The types of the state, as `jax.ShapeDtypeStruct`s."""

        def program(name: str, **own) -> Program:
            self._programs[name] = Program(functions[name], fingerprint=options.fingerprints, **own)
            return self._programs[name]

        self._programs: dict[str, Program] = {}
        self._wanted: tuple[str, ...] = ()
        self.init = program("init")
        self._round = program("round", donate=(1,), options=options.compiler_options, required=options.required_options)
        self.reset = program("reset", donate=(0,))
        self.zero_cache = program("zero_cache", donate=(0,))
        self.extend = program("extend", donate=(0,))
        self.read_scores = program("read_scores")
        self.read_routes = program("read_routes")
        self.resample = program("resample", donate=(0,))
        self.found = program("found")
        self.on_weight_update = program("on_weight_update", donate=(0,))
        self.load_constraints = program("load_constraints", donate=(0,))
        self.tier = OffloadPrograms(shapes)

    def extended(self, model, shapes: Shapes) -> "Programs":
        """Programs for `shapes`, which ask for more tables than these have; their `extend` takes a state of these."""
        return Programs(model, shapes, self._options, smaller=self)

    def needed(self, model, admission) -> dict[str, tuple[Program, tuple]]:
        """The programs that every engine compiles before its first request, by name, each with its arguments.

        Args:
            model, admission: as the round takes them; types will do.
        """
        arguments = {
            "init": (),
            "round": (model, self.state_types, admission),
            "reset": (self.state_types,),
            "zero_cache": (self.state_types,),
        }
        if self._smaller is not None:
            arguments["extend"] = (self._smaller[0],)
        places = self._layout.stacked_types(jax.ShapeDtypeStruct((READ_PAGES,), jnp.int32))
        places = self._layout.types(places, stacked=True)
        for name, table in (("read_scores", self.state_types.scores), ("read_routes", self.state_types.routes)):
            if table is not None:
                arguments[name] = (table, places, places)
        if self.state_types.decode.constraints is not None:
            arguments["load_constraints"] = (self.state_types.decode, self._load_types())
        return {name: (self._programs[name], types) for name, types in arguments.items()}

    def _load_types(self) -> ConstraintLoad:
        """The types of an upload of constraints."""
        shapes = self._shapes
        assert shapes.constraints is not None
        sizes = (shapes.constraints, shapes.limits.vocab_size, shapes.num_slots)
        one = jax.eval_shape(lambda: ConstraintLoad.empty(*sizes))
        return self._layout.types(self._layout.stacked_types(one), stacked=True)

    def compile_all(self, model, admission) -> None:
        """Begin to compile the programs that every engine needs, side by side. Types of arguments will do."""
        needed = self.needed(model, admission)
        self._wanted = tuple(needed)
        for program, types in needed.values():
            if not program.is_begun:
                program.compile(*types)

    def wait(self) -> None:
        """Return when nothing is being compiled any more."""
        for program in self._programs.values():
            if program.is_begun:
                program.wait()

    def progress(self) -> str:
        """The number of compiled programs among those asked for, and the others' names; from any thread."""
        left = [name for name in self._wanted if not self._programs[name].is_ready]
        if not left:
            return ""
        return f"{len(self._wanted) - len(left)} of {len(self._wanted)} programs are ready, not yet {', '.join(left)}"

    def round(self, model, state: GenState, admission: Admission) -> tuple[GenState, RoundOutputs]:
        """`run_round` on the device.

        Raises: RecompilationError if these arguments are of other types than those of the first call, and
            `on_recompile` is not given.
        """
        program, arguments = self._round, (model, state, admission)
        try:
            return program(*arguments)
        except (TypeError, ValueError):  # before anything ran
            changed = _changes(program.types, program.types_of(arguments))
            if not changed:
                raise
        message = f"the round has to be compiled again: {'; '.join(changed[:5])}"
        if self._options.on_recompile is None:
            raise RecompilationError(message)
        self._options.on_recompile(message)
        program.compile(*arguments)
        return program(*arguments)

    def compilations(self) -> dict[str, int]:
        """Compilations of each program: in a healthy engine once, and once more per extension."""
        before = {} if self._smaller is None else self._smaller[1]
        now = {name: program.compilations for name, program in self._programs.items() if program.is_begun}
        now |= self.tier.compilations()
        return {name: now.get(name, 0) + before.get(name, 0) for name in before | now}

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each program that is compiled or being compiled; empty if it was not asked for."""
        return {name: program.fingerprint for name, program in self._programs.items() if program.is_begun}

    @property
    def round_function(self) -> Callable:
        """The function that `round` compiles, with its argument `state` donated; for inspection."""
        return self._round.function

    @property
    def compiled_round(self) -> jax.stages.Compiled:
        """The executable of `round`, for inspection; waits for its compilation, which has begun."""
        return self._round.wait()

    def trace_round(self, model, state, admission):
        """The round program, traced for inspection; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._round.jitted.trace(model, state, admission)


def _spmd(functions: dict[str, Callable], layout: Layout) -> dict[str, Callable]:
    """The same, run by every device of a mesh on its parts."""
    state = jax.eval_shape(functions["init"])
    results: dict[str, object] = {name: state for name in ("init", "reset", "zero_cache", "extend", "resample")}
    results["round"] = (state, None)
    results["on_weight_update"] = results["load_constraints"] = state.decode
    return {name: layout.spmd(function, results.get(name)) for name, function in functions.items()}


def _functions(
    shapes: Shapes, config, local_heads: Callable[[int], int], options: ProgramOptions
) -> dict[str, Callable]:
    """The functions of an engine's programs by name; `local_heads` as in `empty_cache`."""

    def no_memory() -> LogitsMod | None:
        return options.logits_mod and LogitsMod.init(*options.logits_mod, shapes.num_slots)

    def init() -> GenState:
        cache = empty_cache(config, shapes, options.backend, dtype=options.kv_dtype, local_heads=local_heads)
        return GenState.init(shapes, cache, no_memory())

    def one_round(model, state: GenState, admission: Admission) -> tuple[GenState, RoundOutputs]:
        return run_round(model, state, admission, shapes, options.attention)

    def reset(state: GenState) -> GenState:
        return GenState.init(shapes, state.cache, no_memory())

    def zero_cache(state: GenState) -> GenState:
        decode = state.decode
        if decode.prefix is not None:  # nothing of what it names is there any more
            fresh = DecodeState.init(shapes)
            decode = dataclasses.replace(decode, prefix=fresh.prefix, snapshots=fresh.snapshots)
        return dataclasses.replace(state, decode=decode, cache=state.cache.zero())

    def extend(state: GenState) -> GenState:
        return state.extended(shapes)

    def resample(state: GenState, mask, ancestors, sample_index, arrival) -> GenState:
        decode = resample_samples(state.decode, mask, ancestors, sample_index, arrival)
        slots = jnp.where(mask, jnp.arange(shapes.num_slots, dtype=jnp.int32), shapes.num_slots)
        own = jnp.where(mask, ancestors, jnp.arange(shapes.num_slots, dtype=jnp.int32))
        logits_mod = state.logits_mod and state.logits_mod.moved(own)
        cache = state.cache.copy_slots(ancestors, slots)
        return dataclasses.replace(state, decode=decode, cache=cache, logits_mod=logits_mod)

    def found(state: GenState, slots) -> Hypotheses:
        assert isinstance(state.decode.beams, BeamTable), "no request has asked for beams"
        return hypotheses(state.decode.beams, slots)

    return {
        "init": init,
        "round": one_round,
        "reset": reset,
        "zero_cache": zero_cache,
        "extend": extend,
        "read_scores": read_scores,
        "read_routes": read_routes,
        "resample": resample,
        "found": found,
        "on_weight_update": on_weight_update,
        "load_constraints": load_constraints,
    }


def _changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def compile_program(function, donate: tuple[int, ...] = ()):
    """Compile a device function that is not part of an engine: a bench, or one operation of a test."""
    return jax.jit(function, donate_argnums=donate)
