"""`RoundLengthController`: how many steps fit into a round. Imports no JAX."""

import contextlib
from collections.abc import Iterator, Sequence

_FIRST_STEPS = 8
_FIRST_STEPS_WITH_PROMPTS = 2
_MAX_IDLE = 0.05
"""Fraction of the steps of all ranks that may be idle before rounds become shorter."""
_LONGER, _MIN_LONGER = 0.03, 0.25
"""Growth from one round to the next, as a fraction and in steps: one round that is too long costs as much as many that
are a little too short."""
_MOST_OVERSHOOT = 8
"""Largest ratio of a round's time to its target, where it computes prompts after rounds that could have and did not."""


class RoundLengthController:
    """Chooses the steps of a round so that it stays under a time, from the rounds before.

    A step that computes a prompt chunk takes several times as long as one that only decodes, so rounds with and without
    prompts are measured separately. A round that takes longer than expected is followed by at most one more of its
    length, which has been launched by then.

    Args:
        max_steps: steps of a round, at most.
        max_seconds: what a round should take, at most.
    """

    def __init__(self, max_steps: int, max_seconds: float):
        self._max_steps, self._max_seconds = max_steps, max_seconds
        self._steps = {False: min(_FIRST_STEPS, max_steps), True: min(_FIRST_STEPS_WITH_PROMPTS, max_steps)}
        self._step_s = {False: 0.0, True: 0.0}
        self._balanced = {False: float(max_steps), True: float(max_steps)}
        """Steps for which all ranks have enough requests, as far as is known."""

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Until the context ends rounds should take at most `seconds`, if that is less than what they may take now."""
        before, steps = self._max_seconds, dict(self._steps)
        self._max_seconds = min(seconds, self._max_seconds)
        for kind, step_s in self._step_s.items():
            if step_s > 0:
                self._steps[kind] = max(1, min(self._steps[kind], int(self._max_seconds / step_s)))
        try:
            yield
        finally:
            self._max_seconds = before
            self._steps = {kind: max(own, steps[kind]) for kind, own in self._steps.items()}

    def steps(self, with_prompts: bool, wanted: int | None = None) -> int:
        """Steps of the next round, at most: the smaller of what fits and what is wanted. Raises: ValueError."""
        fitting = min(self._steps[with_prompts], int(self._balanced[with_prompts]))
        if wanted is None:
            return fitting
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise ValueError(f"max_steps: expected a positive whole number of steps, got {wanted!r}")
        return min(wanted, fitting)

    def seconds(self, with_prompts: bool, steps: int) -> float:
        """Expected seconds of a round of so many steps; 0 before the first of its kind."""
        return steps * self._step_s[with_prompts]

    def on_ranks(self, with_prompts: bool, steps: Sequence[int]) -> None:
        """Learn from a round of several data-parallel ranks.

        A round ends with its slowest rank, and the host can admit requests to the others only then. After a round in
        which ranks were idle, rounds of its kind become half as long; otherwise a little longer.

        Args:
            steps: of each rank; empty if no request waits for a slot or there is one rank, so that nothing speaks
                against long rounds.
        """
        if not steps:
            self._balanced = dict.fromkeys(self._balanced, float(self._max_steps))
            return
        longest, balanced = max(steps), self._balanced[with_prompts]
        if sum(steps) >= (1 - _MAX_IDLE) * longest * len(steps):
            self._balanced[with_prompts] = min(balanced + max(_LONGER * balanced, _MIN_LONGER), self._max_steps)
        elif longest > 1:
            self._balanced[with_prompts] = max(1.0, longest / 2)

    def on_round(self, with_prompts: bool, steps: int, seconds: float, *, expected_prompts: bool = False) -> None:
        """Learn from a round: whether it computed prompts, its steps, what it took, and whether it could have computed
        prompts when it was launched."""
        if steps == 0:
            return
        self._step_s[with_prompts] = seconds / steps
        fitting = int(self._max_seconds * steps / seconds)
        self._steps[with_prompts] = max(1, min(fitting, 2 * self._steps[with_prompts], self._max_steps))
        if expected_prompts and not with_prompts:
            # Requests wait, and all slots decode: such rounds need not be as short as if each step computed a prompt.
            slowest = self._step_s[True] or seconds / steps
            fitting = min(fitting, int(_MOST_OVERSHOOT * self._max_seconds / slowest))
            self._steps[True] = max(self._steps[True], min(fitting, 2 * self._steps[True], self._max_steps))
