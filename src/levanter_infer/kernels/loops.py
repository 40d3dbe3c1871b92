"""Control flow of device code."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Value = TypeVar("Value")


def run_if(condition: Array, function: Callable[[Value], Value], value: Value) -> Value:
    """`function(value)` if `condition`, else `value`, as a loop of zero or one trips.

    `lax.cond` copies what it carries on a CPU; a loop keeps it in place. Every optional write to state goes this way.
    """

    def body(carry):
        return jnp.asarray(False), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (condition, value))[1]
