"""Walks over what JAX has traced."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

LOOPS = ("while", "scan")


def equations(jaxpr: Jaxpr, *, into_loops: bool = True) -> Iterator[JaxprEqn]:
    """All equations, those of calls, branches and kernels included; those inside loops only with `into_loops`."""
    for eqn in jaxpr.eqns:
        yield eqn
        if into_loops or eqn.primitive.name not in LOOPS:
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
                if _is_program(inner):
                    yield from equations(getattr(inner, "jaxpr", inner), into_loops=into_loops)


def body(loop: JaxprEqn) -> Jaxpr:
    """The body of a loop."""
    return loop.params["body_jaxpr" if loop.primitive.name == "while" else "jaxpr"].jaxpr


def _is_program(value) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
