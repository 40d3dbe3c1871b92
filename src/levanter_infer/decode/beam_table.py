"""`BeamTable`: the beams of each search and the hypotheses it has found; `NoBeams`: the seam to the scheduler."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from levanter_infer.cache.arrays import full, gather, replace, scatter, scatter_add
from levanter_infer.decode.codes import (
    ERROR,
    FINISHED,
    FREE,
    IMPOSSIBLE,
    NOT_FINISHED,
    PATIENT,
    RUNNING,
    WAITING,
    has_failed,
)
from levanter_infer.decode.sequence_table import SequenceTable

NO_SCORE = -float("inf")
"""Score of absent beams and hypotheses, and of all beams but the first at the start. HF transformers has -1e9 there,
which a large `logit_bias` makes equal to 0: all beams are the same one then."""


class BeamParams(eqx.Module):
    """Search parameters of each sequence, over `seq` at rest and `admitted` in an upload."""

    leaders: Int32[Array, " seq"]
    """Slot of the group's first beam; none: no beam search."""
    places: Int32[Array, " seq"]
    """Index of the beam in its group; the leader's is 0. Groups arrive together, in this order."""
    widths: Int32[Array, " seq"]
    """Beams of the group; 0: no beam search."""
    length_penalty: Float32[Array, " seq"]
    """A hypothesis of n tokens scores the sum of its log probabilities over n to this power."""
    early_stopping: Int32[Array, " seq"]

    @staticmethod
    def empty(size: int, num_slots: int) -> "BeamParams":
        return BeamParams(
            leaders=full(size, num_slots),
            places=full(size, 0),
            widths=full(size, 0),
            length_penalty=full(size, 0, jnp.float32),
            early_stopping=full(size, PATIENT),
        )


class NoBeams(eqx.Module):
    """The seam between the scheduler and beam search, without any search: every method returns what it is given.

    `BeamTable` overrides all of them. The scheduler calls them in every step, so a program for requests that do not
    search contains nothing of beam search.
    """

    def admit(self, slots: Array, params: BeamParams | None) -> "NoBeams":
        """Sequences start in `slots`, i32[admitted], with these parameters."""
        return self

    def without(self, slots: Array) -> "NoBeams":
        """The sequences of the slots in the mask `slots`, bool[seq], have ended."""
        return self

    def ready(self, table: SequenceTable, ready: Array) -> Array:
        """Slots that may start, bool[seq]: those in the mask `ready`, and beams whose leader computes their prompt."""
        return ready

    def num_first(self, order: Array, ready_in_order: Array) -> Array:
        """Sequences that start together when the first ready one in `order` does, i32[]."""
        return jnp.int32(1)

    def starting(self, starts: Array, running: Array) -> Array:
        """The slots of the mask `starts`, bool[seq], without those that would start a part of a group."""
        return starts

    def pending(self, table: SequenceTable) -> Array:
        """Tokens of each slot that may be computed now, i32[seq]."""
        return table.seq_lens - table.num_computed

    def num_survivors(self, table: SequenceTable, order: Array, survivors: Array) -> Array:
        """The number of slots at the start of `order` that are not preempted, i32[], moved to the bound of a group."""
        return survivors

    def sharing_again(self, fork_source: Array, slots: Array) -> Array:
        """`fork_source`, i32[seq], where the slots in the mask `slots` have lost their pages."""
        return fork_source

    def must_recompute(self, slots: Array, recomputes: Array) -> Array:
        """Slots that compute their tokens again when the weights change, bool[seq]: those in the mask `recomputes`, and
        the groups of beams in the mask `slots`, because beams continue one another page by page."""
        return recomputes

    def sampling(self, slots: Array) -> Array:
        """The slots of the mask `slots`, bool[seq], that sample: those without a search."""
        return slots

    def rows_that_emit(self, slots: Array, samples: Array, masks: tuple[Array, ...]) -> tuple[Array, ...]:
        """`masks` bool[row] without the rows of beams, and the rows of the mask `samples` that are beams.

        Args: slots: i32[row].
        """
        return *masks, jnp.zeros_like(samples)

    def fail_together(
        self, slots: Array, searches: Array, finished: Array, reasons: Array
    ) -> tuple[Array, Array, Array]:
        """A group fails with any of its beams.

        Args:
            slots, searches: i32[row] and bool[row], rows of beams.
            finished, reasons: bool[seq] and i32[seq], slots that end.
        Returns: `searches` without the rows that have failed, `finished` and `reasons`.
        """
        return searches, finished, reasons


class BeamTable(NoBeams):
    """Running beams and finished hypotheses, one of each per slot of a group.

    A group is in lockstep: all its beams sample in the same step, or none does. It starts, is preempted and ends as a
    whole. Which beam is stored in which of its slots changes with every step (`resample`); hypotheses are stored in the
    order of their scores. A group's hypotheses are final when its slots are FINISHED, and stay until these are used
    again.
    """

    params: BeamParams
    scores: Float32[Array, " seq"]
    """Sum of the log probabilities of the running beam's tokens."""
    logprobs: Float32[Array, "seq position"]
    """Log probabilities of the running beam's generated tokens under the model."""
    found_tokens: Int32[Array, "seq position"]
    """A hypothesis, prompt included."""
    found_logprobs: Float32[Array, "seq position"]
    found_lens: Int32[Array, " seq"]
    found_scores: Float32[Array, " seq"]
    found_reasons: Int32[Array, " seq"]
    """Finish reason of the hypothesis; NOT_FINISHED: there is none."""

    @staticmethod
    def init(num_slots: int, max_seq_len: int) -> "BeamTable":
        rows = (num_slots, max_seq_len)
        return BeamTable(
            params=BeamParams.empty(num_slots, num_slots),
            scores=full(num_slots, 0, jnp.float32),
            logprobs=full(rows, 0, jnp.float32),
            found_tokens=full(rows, 0),
            found_logprobs=full(rows, 0, jnp.float32),
            found_lens=full(num_slots, 0),
            found_scores=full(num_slots, NO_SCORE, jnp.float32),
            found_reasons=full(num_slots, NOT_FINISHED),
        )

    @property
    def searches(self) -> Array:
        """Slots that belong to a group, bool[seq]."""
        return self.params.widths > 0

    def admit(self, slots: Array, params: BeamParams | None) -> "BeamTable":
        assert params is not None

        def put(old: Array, values) -> Array:
            return scatter(old, slots, values)

        names = [field.name for field in dataclasses.fields(BeamParams)]
        columns = {name: put(getattr(self.params, name), getattr(params, name)) for name in names}
        return replace(
            self,
            params=replace(self.params, **columns),
            scores=put(self.scores, jnp.where(params.places == 0, 0.0, NO_SCORE)),
            found_scores=put(self.found_scores, NO_SCORE),
            found_reasons=put(self.found_reasons, NOT_FINISHED),
        )

    def without(self, slots: Array) -> "BeamTable":
        widths = jnp.where(slots, 0, self.params.widths)
        return replace(self, params=replace(self.params, widths=widths))

    def num_in_group(self, slots: Array) -> Array:
        """The number of slots in the mask `slots` that belong to the group of each slot, i32[seq]."""
        leaders = jnp.where(self.searches, self.params.leaders, slots.shape[0])
        count = scatter_add(jnp.zeros(slots.shape, jnp.int32), leaders, slots.astype(jnp.int32))
        return gather(count, leaders, 0)

    def whole(self, slots: Array) -> Array:
        """The slots of the mask `slots` whose group is in it as a whole, and those without a group, bool[seq]."""
        return slots & (~self.searches | (self.num_in_group(slots) == self.params.widths))

    def ready(self, table: SequenceTable, ready: Array) -> Array:
        return ready | (table.is_status(WAITING) & self.searches)

    def num_first(self, order: Array, ready_in_order: Array) -> Array:
        return jnp.maximum(jnp.int32(1), self.params.widths[order[jnp.argmax(ready_in_order)]])

    def starting(self, starts: Array, running: Array) -> Array:
        return starts & self.whole(starts | running)

    def pending(self, table: SequenceTable) -> Array:
        """All tokens wait while the leader computes the prompt that they will share, and the last one waits until every
        beam of the group has computed those before it."""
        pending = table.seq_lens - table.num_computed
        shares = table.fork_source < table.num_slots
        stands = table.is_status(RUNNING) & (pending == 1) & ~shares & self.searches
        last = self.searches & ~self.whole(stands)
        return pending - jnp.where(self.searches & shares, pending, last.astype(jnp.int32))

    def num_survivors(self, table: SequenceTable, order: Array, survivors: Array) -> Array:
        """`survivors` moved to the start of the group that it would divide; to its end if that group is the first, so
        that one group always runs."""
        status = table.status
        live = (status > FREE) & (status < FINISHED) & self.searches
        out = gather(order, survivors, table.num_slots)
        place = gather(jnp.where(live, self.params.places, 0), out, 0)
        width = gather(self.params.widths, out, 0)
        begin = survivors - place
        return jnp.where((place > 0) & (begin == 0), width, begin)

    def sharing_again(self, fork_source: Array, slots: Array) -> Array:
        """Beams share the prompt of their leader when they start again."""
        follows = slots & self.searches & (self.params.places > 0)
        return jnp.where(follows, self.params.leaders, fork_source)

    def must_recompute(self, slots: Array, recomputes: Array) -> Array:
        # Also beams without pages, which wait for their leader: while they run, it may lack free pages to start again
        return recomputes | (self.num_in_group(slots & self.searches) > 0)

    def sampling(self, slots: Array) -> Array:
        return slots & ~self.searches

    def rows_that_emit(self, slots: Array, samples: Array, masks: tuple[Array, ...]) -> tuple[Array, ...]:
        searches = samples & gather(self.searches, slots, False)
        return *(mask & ~searches for mask in masks), searches

    def fail_together(
        self, slots: Array, searches: Array, finished: Array, reasons: Array
    ) -> tuple[Array, Array, Array]:
        def with_group(mask: Array) -> Array:
            return mask | (self.num_in_group(mask) > 0)

        failed, broken = with_group(finished & has_failed(reasons)), with_group(finished & (reasons == ERROR))
        searches = searches & ~gather(failed, slots, False)
        return searches, finished | failed, jnp.where(failed, jnp.where(broken, ERROR, IMPOSSIBLE), reasons)


class Hypotheses(eqx.Module):
    """The hypotheses of some slots, as plain arrays."""

    tokens: Array
    """i32[n, position], prompt included."""
    logprobs: Array
    """f32[n, position], of generated tokens."""
    lens: Array
    """i32[n]"""
    scores: Array
    """f32[n]"""


def hypotheses(beams: BeamTable, slots: Array) -> Hypotheses:
    """The hypotheses stored in `slots`, i32[n]; any values for absent ones."""

    def rows(column: Array) -> Array:
        return column.at[slots].get(mode="clip")

    columns = (beams.found_tokens, beams.found_logprobs, beams.found_lens, beams.found_scores)
    return Hypotheses(*map(rows, columns))
