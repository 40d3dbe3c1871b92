"""`BeamTable`: groups of slots that search together, and what they have found."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from levanter_infer.cache.arrays import full, gather, replace, scatter, scatter_add
from levanter_infer.decode.codes import FINISHED, FREE, NOT_FINISHED, RUNNING
from levanter_infer.decode.sequence_table import SequenceTable

# When a group ends
PATIENT = 0  # once it seems that no running beam can beat the worst hypothesis, by its score at its present length
EARLY = 1  # once it has as many hypotheses as beams
NEVER = 2  # once no running beam can beat the worst hypothesis at any length

NO_SCORE = -1e9
"""Score of what is not there, as in HF transformers: beams other than the first at the start, hypotheses not found."""


class BeamParams(eqx.Module):
    """What a sequence is told about its search; over `seq` at rest and `admitted` in an upload."""

    leaders: Int32[Array, " seq"]
    """Slot of the group's first beam; none: no beam search."""
    places: Int32[Array, " seq"]
    """Which beam of its group it is; the leader is 0. Groups arrive together, in this order."""
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


class BeamTable(eqx.Module):
    """Running beams and finished hypotheses, one of each per slot of a group.

    A group is in lock step: all its beams sample in the same step, or none does. It starts, gives way and ends as a
    whole. Which beam stands in which of its slots changes with every step (`resample`); hypotheses stand in the order
    of their scores. A group's hypotheses are final when its slots are FINISHED, and stay until these are used again.
    """

    params: BeamParams
    scores: Float32[Array, " seq"]
    """Sum of the log probabilities of the running beam's tokens."""
    logprobs: Float32[Array, "seq position"]
    """Of the running beam's generated tokens under the model."""
    found_tokens: Int32[Array, "seq position"]
    """A hypothesis, prompt included."""
    found_logprobs: Float32[Array, "seq position"]
    found_lens: Int32[Array, " seq"]
    found_scores: Float32[Array, " seq"]
    found_reasons: Int32[Array, " seq"]
    """Why the hypothesis ends; NOT_FINISHED: there is none."""

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

    def admit(self, slots: Array, params: BeamParams) -> "BeamTable":
        """Sequences begin in `slots` i32[admitted]; those that do not search are told so too."""

        def put(old: Array, values) -> Array:
            return scatter(old, slots, values)

        names = [field.name for field in dataclasses.fields(BeamParams)]
        told = {name: put(getattr(self.params, name), getattr(params, name)) for name in names}
        return replace(
            self,
            params=replace(self.params, **told),
            scores=put(self.scores, jnp.where(params.places == 0, 0.0, NO_SCORE)),
            found_scores=put(self.found_scores, NO_SCORE),
            found_reasons=put(self.found_reasons, NOT_FINISHED),
        )

    def without(self, slots: Array) -> "BeamTable":
        """The sequences of the slots in the mask `slots`, bool[seq], have ended."""
        widths = jnp.where(slots, 0, self.params.widths)
        return replace(self, params=replace(self.params, widths=widths))

    def of_group(self, slots: Array) -> Array:
        """How many of the slots in the mask `slots` belong to the group of each slot, i32[seq]."""
        leaders = jnp.where(self.searches, self.params.leaders, slots.shape[0])
        count = scatter_add(jnp.zeros(slots.shape, jnp.int32), leaders, slots.astype(jnp.int32))
        return gather(count, leaders, 0)

    def whole(self, slots: Array) -> Array:
        """Those slots of the mask `slots` whose whole group is in it, and those without a group, bool[seq]."""
        return slots & (~self.searches | (self.of_group(slots) == self.params.widths))

    def held_back(self, table: SequenceTable) -> Array:
        """Tokens of each slot that wait for its group, i32[seq]: all while the leader computes the prompt that they
        will share, and the last one until every beam has come so far."""
        pending = table.seq_lens - table.num_computed
        shares = table.fork_source < table.num_slots
        stands = table.is_status(RUNNING) & (pending == 1) & ~shares & self.searches
        last = self.searches & ~self.whole(stands)
        return jnp.where(self.searches & shares, pending, last.astype(jnp.int32))

    def whole_survivors(self, table: SequenceTable, order: Array, survivors: Array) -> Array:
        """The number of first slots in `order` that stay, moved to the edge of a group: to its end if nobody is before
        it, so that somebody goes on."""
        status = table.status
        live = (status > FREE) & (status < FINISHED) & self.searches
        out = gather(order, survivors, table.num_slots)
        place = gather(jnp.where(live, self.params.places, 0), out, 0)
        width = gather(self.params.widths, out, 0)
        begin = survivors - place
        return jnp.where((place > 0) & (begin == 0), width, begin)

    def sharing_again(self, fork_source: Array, slots: Array) -> Array:
        """`fork_source` where the slots in the mask `slots` have lost their pages: they share the prompt on return."""
        follows = slots & self.searches & (self.params.places > 0)
        return jnp.where(follows, self.params.leaders, fork_source)


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
    """What stands in `slots`, i32[n]; anything for absent ones."""

    def rows(column: Array) -> Array:
        return column.at[slots].get(mode="clip")

    columns = (beams.found_tokens, beams.found_logprobs, beams.found_lens, beams.found_scores)
    return Hypotheses(*map(rows, columns))
