"""Every compiled program of the engine. The only place with `jit`."""

import dataclasses
from collections.abc import Callable

import jax

from levanter_infer.decode.admission import Admission
from levanter_infer.decode.loop import run_round
from levanter_infer.decode.outputs import RoundOutputs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import GenState, empty_cache
from levanter_infer.layers.attention import AttentionSpec


class RecompilationError(RuntimeError):
    """A program that is compiled once for all requests was compiled again."""


class Programs:
    """The programs of one engine: `init`, `round`, `reset` and `zero_cache`, each compiled once.

    All that changes between calls is array contents, so that whatever the requests look like, nothing is compiled
    again. The state is donated: a caller goes on with the returned one.
    """

    def __init__(
        self,
        model,
        shapes: Shapes,
        attention: AttentionSpec,
        *,
        kv_dtype,
        as_bits: bool,
        on_recompile: Callable[[str], None] | None = None,
    ):
        """`on_recompile`: called with a message if the round is compiled again, instead of `RecompilationError`."""
        config = model.config

        def init() -> GenState:
            return GenState.init(shapes, empty_cache(config, shapes, dtype=kv_dtype, as_bits=as_bits))

        def one_round(model, state: GenState, admission: Admission) -> tuple[GenState, RoundOutputs]:
            return run_round(model, state, admission, shapes, attention)

        def reset(state: GenState) -> GenState:
            return GenState.init(shapes, state.kv)

        def zero_cache(state: GenState) -> GenState:
            return dataclasses.replace(state, kv=state.kv.zero())

        self._compiled = {
            "init": jax.jit(init),
            "round": jax.jit(one_round, donate_argnums=(1,)),
            "reset": jax.jit(reset, donate_argnums=(0,)),
            "zero_cache": jax.jit(zero_cache, donate_argnums=(0,)),
        }
        self.init = self._compiled["init"]
        self._model = model
        self._on_recompile = on_recompile
        self._last_arguments: dict[str, str] = {}
        self.reset = self._compiled["reset"]
        self.zero_cache = self._compiled["zero_cache"]

    def round(self, state: GenState, admission: Admission) -> tuple[GenState, RoundOutputs]:
        """`run_round` on the device.

        Raises: RecompilationError if this call had to be compiled although the round had been compiled before, and
            `on_recompile` is not given. The state is gone then, like that of any call that fails.
        """
        before = self._compilations("round")
        result = self._compiled["round"](self._model, state, admission)
        if self._compilations("round") > before:
            # Of deleted arrays the types are still known.
            arguments = _describe({"model": self._model, "state": state, "admission": admission})
            if before > 0:
                self._report(arguments)
            self._last_arguments = arguments
        return result

    def _report(self, arguments: dict[str, str]) -> None:
        changed = [
            f"{name} was {self._last_arguments.get(name, 'absent')} and is {what}"
            for name, what in arguments.items()
            if self._last_arguments.get(name) != what
        ]
        message = "the round was compiled again: " + (
            "; ".join(changed[:5]) or "shapes and dtypes are as before, so a sharding or a setting of JAX has changed"
        )
        if self._on_recompile is None:
            raise RecompilationError(message)
        self._on_recompile(message)

    def compilations(self) -> dict[str, int]:
        """How many times each program has been compiled; 1 at most in a healthy engine."""
        return {name: self._compilations(name) for name in self._compiled}

    def _compilations(self, name: str) -> int:
        # The number that JAX itself keeps; it has no public name.
        return self._compiled[name]._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def trace_round(self, model, state, admission):
        """The round program, traced for inspection; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._compiled["round"].trace(model, state, admission)


def _describe(arguments) -> dict[str, str]:
    """Type of every array, by the name of its place."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{jax.typeof(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments)
    }


def compile_program(function, donate: tuple[int, ...] = ()):
    """Compile a device function that is not part of an engine: a bench, or one operation of a test."""
    return jax.jit(function, donate_argnums=donate)
