"""Sleep: an engine whose pool, and if wanted its weights, are not in memory while a training step needs the devices."""

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from levanter_infer.engine.intake import Intake
from levanter_infer.engine.kv_offload import KvOffload
from levanter_infer.engine.runner import Runner
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.engine.weight_updates import update_roots

Method = TypeVar("Method", bound=Callable[..., Any])


def awake(method: Method) -> Method:
    """A method of an engine that raises RuntimeError while the engine sleeps."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if self.is_asleep:
            raise RuntimeError(
                f"{method.__name__}() was called while the engine sleeps, without a pool for keys and values; call "
                "wake() first"
            )
        return method(self, *args, **kwargs)

    return cast(Method, call)


def check_nothing_to_compile(runner: Runner, changes: Collection[str]) -> None:
    """Raises: RuntimeError if requests need programs that are not there. Args: changes: those that they need."""
    if changes or not runner.is_warm:
        wanted = f"for {', '.join(changes)}" if changes else "for the first request"
        raise RuntimeError(f"programs have to be compiled {wanted}, and the engine sleeps; call wake() first")


def fall_asleep(runner: Runner, scheduler: Scheduler, offload: KvOffload, intake: Intake) -> None:
    """Let sequences keep their tokens and give up their pages, and then give up the pool.

    Requires: no round is in flight.
    """
    if scheduler.active:
        update_roots(runner, scheduler, offload, intake, recompute=True)
    runner.sleep()
