"""The engine's side of the host tier: pages that move to the host's memory and back, between rounds."""

import abc
from typing import Any

from levanter_infer.decode.programs import Programs
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.kv_offload import KvOffload
from levanter_infer.engine.request_state import SampleState
from levanter_infer.engine.scheduler import Scheduler
from levanter_infer.engine.turns import Turns, exclusive


class Spilling(abc.ABC):
    """What `InferenceEngine` can do with the pages of sequences that have to make room."""

    state: Any
    backend: Backend
    programs: Programs
    _scheduler: Scheduler
    _offload: KvOffload
    _known: list[SampleState]
    _turns: Turns

    @abc.abstractmethod
    def _is_in_progress(self) -> bool: ...

    @abc.abstractmethod
    def _flush(self) -> list[SampleState]:
        """Read the round in flight, if there is one."""

    @exclusive
    def spill_to_host(self, sequence: SampleState) -> int:
        """Move the pages of a submitted sequence to the host's memory. It goes on after `prefetch`, or in `drain`.

        What it shares with others is copied, and its own when it comes back.

        Returns: pages moved; 0 if it holds none, and then nothing changes.
        Raises: ValueError if `engine.host_bytes` does not suffice, or the engine runs on several devices.
        """
        if self.backend.layout is not None:
            raise ValueError("spill_to_host moves pages of one device, and this engine runs on a mesh; leave it out")
        self._known += self._flush()
        self.state, pages = self._offload.swap_out(self.programs.tier, self.state, sequence)
        return pages

    @exclusive
    def prefetch(self, sequence: SampleState) -> None:
        """Bring the pages of a offloaded sequence back, so that it goes on.

        Where there is no room for them now, it comes back as soon as there is, before anything younger starts; or, with
        `preempt: recompute`, is computed again.

        Raises: ValueError if it is not in the host's memory.
        """
        self._known += self._flush()
        self.state = self._offload.prefetch(self.programs.tier, self.state, sequence)

    def _move_pages(self) -> list[SampleState]:
        """What the last round asked for, with nothing under way; returns as `step_round`."""
        known = self._flush() if self._offload.is_called else []
        if self._offload.is_called:
            self.state = self._offload.move(self.programs.tier, self.state, self._scheduler.active)
        return known
