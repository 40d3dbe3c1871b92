"""`RoundLengthController`: how many steps fit into a round."""

from collections.abc import Sequence

_FIRST_STEPS = 8
_FIRST_STEPS_WITH_PROMPTS = 2
_MOST_IDLE = 0.05
"""Of the steps of all shards, what rounds are shortened for."""
_LONGER, _LEAST_LONGER = 0.03, 0.25
"""A share, and steps, from one round to the next: one that is too long costs as much as many a little too short."""


class RoundLengthController:
    """Steps per round, so that rounds stay under a time; learnt from the rounds before.

    A step that computes a chunk of a prompt takes several times as long as one that only decodes, so rounds with and
    without prompts are learnt apart. One that surprises is followed by another such at the most: it has been launched
    by then.
    """

    def __init__(self, max_steps: int, max_seconds: float):
        self._max_steps, self._max_seconds = max_steps, max_seconds
        self._steps = {False: min(_FIRST_STEPS, max_steps), True: min(_FIRST_STEPS_WITH_PROMPTS, max_steps)}
        self._step_s = {False: 0.0, True: 0.0}
        self._even = {False: float(max_steps), True: float(max_steps)}
        """Steps for which the requests that shards have suffice, as far as is known."""

    def steps(self, with_prompts: bool, wanted: int | None = None) -> int:
        """Steps of the next round, at most: the fewer of what fits and what is wanted. Raises: ValueError."""
        fitting = min(self._steps[with_prompts], int(self._even[with_prompts]))
        if wanted is None:
            return fitting
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise ValueError(f"max_steps: expected a positive whole number of steps, got {wanted!r}")
        return min(wanted, fitting)

    def seconds(self, with_prompts: bool, steps: int) -> float:
        """What a round of so many steps should take; 0 before the first of its kind."""
        return steps * self._step_s[with_prompts]

    def on_shards(self, with_prompts: bool, steps: Sequence[int]) -> None:
        """Learn from a round of several data shards.

        A round ends with its last shard, and only then can the host give the others something to do. Where they have
        stood still, rounds of this kind get half as long, and else a little longer.

        Args:
            steps: of each shard; empty where nothing can be learnt, because nobody waits for a slot or there is only
                one shard: then nothing speaks against long rounds.
        """
        if not steps:
            self._even = dict.fromkeys(self._even, float(self._max_steps))
            return
        longest, even = max(steps), self._even[with_prompts]
        if sum(steps) >= (1 - _MOST_IDLE) * longest * len(steps):
            self._even[with_prompts] = min(even + max(_LONGER * even, _LEAST_LONGER), self._max_steps)
        elif longest > 1:
            self._even[with_prompts] = max(1.0, longest / 2)

    def on_round(self, with_prompts: bool, steps: int, seconds: float) -> None:
        """Learn from a round: whether it computed prompts, its steps, and what it took."""
        if steps == 0:
            return
        self._step_s[with_prompts] = seconds / steps
        fitting = int(self._max_seconds * steps / seconds)
        self._steps[with_prompts] = max(1, min(fitting, 2 * self._steps[with_prompts], self._max_steps))
