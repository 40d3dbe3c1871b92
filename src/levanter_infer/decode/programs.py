"""Every compiled program of the engine. The only place with `jit`."""

import dataclasses
import functools

import jax

from levanter_infer.decode.admission import Admission
from levanter_infer.decode.loop import run_round
from levanter_infer.decode.outputs import RoundOutputs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import GenState, empty_cache
from levanter_infer.layers.attention import AttentionSpec


class Programs:
    """The programs of one engine: `init`, `round`, `reset` and `zero_cache`, each compiled once.

    All that changes between calls is array contents, so that whatever the requests look like, nothing is compiled
    again. The state is donated: a caller goes on with the returned one.
    """

    def __init__(self, model, shapes: Shapes, attention: AttentionSpec, *, kv_dtype, as_bits: bool):
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
        self.round = functools.partial(self._compiled["round"], model)
        self.reset = self._compiled["reset"]
        self.zero_cache = self._compiled["zero_cache"]

    def compilations(self) -> dict[str, int]:
        """How many times each program has been compiled; 1 at most in a healthy engine."""
        # The number that JAX itself keeps; it has no public name.
        return {
            name: program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
            for name, program in self._compiled.items()
        }

    def trace_round(self, model, state, admission):
        """The round program, traced for inspection; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._compiled["round"].trace(model, state, admission)


def compile_program(function, donate: tuple[int, ...] = ()):
    """Compile a device function that is not part of an engine: a bench, or one operation of a test."""
    return jax.jit(function, donate_argnums=donate)
