"""`Pace`: how many steps fit into a round."""

_FIRST_STEPS = 8
_FIRST_STEPS_WITH_PROMPTS = 2


class Pace:
    """Steps per round, so that rounds stay under a time; learnt from the rounds before.

    A step that computes a chunk of a prompt takes several times as long as one that only decodes, so rounds with and
    without prompts are learnt apart. One that surprises is followed by another such at the most: it has been launched
    by then.
    """

    def __init__(self, max_steps: int, max_seconds: float):
        self._max_steps, self._max_seconds = max_steps, max_seconds
        self._steps = {False: min(_FIRST_STEPS, max_steps), True: min(_FIRST_STEPS_WITH_PROMPTS, max_steps)}
        self._step_s = {False: 0.0, True: 0.0}

    def steps(self, with_prompts: bool, wanted: int | None = None) -> int:
        """Steps of the next round, at most: the fewer of what fits and what is wanted. Raises: ValueError."""
        fitting = self._steps[with_prompts]
        if wanted is None:
            return fitting
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise ValueError(f"max_steps: expected a positive whole number of steps, got {wanted!r}")
        return min(wanted, fitting)

    def seconds(self, with_prompts: bool, steps: int) -> float:
        """What a round of so many steps should take; 0 before the first of its kind."""
        return steps * self._step_s[with_prompts]

    def on_round(self, with_prompts: bool, steps: int, seconds: float) -> None:
        """Learn from a round: whether it computed prompts, its steps, and what it took."""
        if steps == 0:
            return
        self._step_s[with_prompts] = seconds / steps
        fitting = int(self._max_seconds * steps / seconds)
        self._steps[with_prompts] = max(1, min(fitting, 2 * self._steps[with_prompts], self._max_steps))
