"""`BeamTable`: groups of slots that search together, and what they have found."""

import dataclasses

import equinox as eqx
import haliax.haxtyping as ht
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

from levanter_infer.axes import POSITION, SEQ
from levanter_infer.cache.named import full, replace
from levanter_infer.decode.codes import FINISHED, FREE, NOT_FINISHED, PATIENT, RUNNING
from levanter_infer.decode.sequence_table import SequenceTable

NO_SCORE = -1e9
"""Score of what is not there, as in HF transformers: beams other than the first at the start, hypotheses not found."""


class BeamParams(eqx.Module):
    """What a sequence is told about its search; over `seq` at rest and `admitted` in an upload."""

    leaders: ht.i32[NamedArray, " seq"]
    """Slot of the group's first beam; none: no beam search."""
    places: ht.i32[NamedArray, " seq"]
    """Which beam of its group it is; the leader is 0. Groups arrive together, in this order."""
    widths: ht.i32[NamedArray, " seq"]
    """Beams of the group; 0: no beam search."""
    length_penalty: ht.f32[NamedArray, " seq"]
    """A hypothesis of n tokens scores the sum of its log probabilities over n to this power."""
    early_stopping: ht.i32[NamedArray, " seq"]

    @staticmethod
    def empty(axis: str, size: int, num_slots: int) -> "BeamParams":
        lead = ((axis, size),)
        return BeamParams(
            leaders=full(lead, num_slots),
            places=full(lead, 0),
            widths=full(lead, 0),
            length_penalty=full(lead, 0, jnp.float32),
            early_stopping=full(lead, PATIENT),
        )


class BeamTable(eqx.Module):
    """Running beams and finished hypotheses, one of each per slot of a group.

    A group is in lock step: all its beams sample in the same step, or none does. It starts, gives way and ends as a
    whole. Which beam stands in which of its slots changes with every step (`resample`); hypotheses stand in the order
    of their scores. A group's hypotheses are final when its slots are FINISHED, and stay until these are used again.
    """

    params: BeamParams
    scores: ht.f32[NamedArray, " seq"]
    """Sum of the log probabilities of the running beam's tokens."""
    logprobs: ht.f32[NamedArray, "seq position"]
    """Of the running beam's generated tokens under the model."""
    found_tokens: ht.i32[NamedArray, "seq position"]
    """A hypothesis, prompt included."""
    found_logprobs: ht.f32[NamedArray, "seq position"]
    found_lens: ht.i32[NamedArray, " seq"]
    found_scores: ht.f32[NamedArray, " seq"]
    found_reasons: ht.i32[NamedArray, " seq"]
    """Why the hypothesis ends; NOT_FINISHED: there is none."""

    @staticmethod
    def init(num_slots: int, max_seq_len: int) -> "BeamTable":
        seq, rows = ((SEQ, num_slots),), ((SEQ, num_slots), (POSITION, max_seq_len))
        return BeamTable(
            params=BeamParams.empty(SEQ, num_slots, num_slots),
            scores=full(seq, 0, jnp.float32),
            logprobs=full(rows, 0, jnp.float32),
            found_tokens=full(rows, 0),
            found_logprobs=full(rows, 0, jnp.float32),
            found_lens=full(seq, 0),
            found_scores=full(seq, NO_SCORE, jnp.float32),
            found_reasons=full(seq, NOT_FINISHED),
        )

    @property
    def searches(self) -> Array:
        """Slots that belong to a group, bool[seq]."""
        return self.params.widths.array > 0

    def admit(self, slots: Array, params: BeamParams) -> "BeamTable":
        """Sequences begin in `slots` i32[admitted]; those that do not search are told so too."""

        def put(old: NamedArray, values) -> Array:
            return old.array.at[slots].set(values, mode="drop")

        names = [field.name for field in dataclasses.fields(BeamParams)]
        told = {name: put(getattr(self.params, name), getattr(params, name).array) for name in names}
        return replace(
            self,
            params=replace(self.params, **told),
            scores=put(self.scores, jnp.where(params.places.array == 0, 0.0, NO_SCORE)),
            found_scores=put(self.found_scores, NO_SCORE),
            found_reasons=put(self.found_reasons, NOT_FINISHED),
        )

    def without(self, slots: Array) -> "BeamTable":
        """The sequences of the slots in the mask `slots`, bool[seq], have ended."""
        widths = jnp.where(slots, 0, self.params.widths.array)
        return replace(self, params=replace(self.params, widths=widths))

    def of_group(self, slots: Array) -> Array:
        """How many of the slots in the mask `slots` belong to the group of each slot, i32[seq]."""
        leaders = jnp.where(self.searches, self.params.leaders.array, slots.shape[0])
        count = jnp.zeros(slots.shape, jnp.int32).at[leaders].add(slots.astype(jnp.int32), mode="drop")
        return count.at[leaders].get(mode="fill", fill_value=0)

    def whole(self, slots: Array) -> Array:
        """Those slots of the mask `slots` whose whole group is in it, and those without a group, bool[seq]."""
        return slots & (~self.searches | (self.of_group(slots) == self.params.widths.array))

    def held_back(self, table: SequenceTable) -> Array:
        """Tokens of each slot that wait for its group, i32[seq]: all while the leader computes the prompt that they
        will share, and the last one until every beam has come so far."""
        pending = table.seq_lens.array - table.num_computed.array
        shares = table.fork_source.array < table.num_slots
        stands = table.is_status(RUNNING) & (pending == 1) & ~shares & self.searches
        last = self.searches & ~self.whole(stands)
        return jnp.where(self.searches & shares, pending, last.astype(jnp.int32))

    def whole_survivors(self, table: SequenceTable, order: Array, survivors: Array) -> Array:
        """The number of first slots in `order` that stay, moved to the edge of a group: to its end if nobody is before
        it, so that somebody goes on."""
        status = table.status.array
        live = (status > FREE) & (status < FINISHED) & self.searches
        out = order.at[survivors].get(mode="fill", fill_value=table.num_slots)
        place = jnp.where(live, self.params.places.array, 0).at[out].get(mode="fill", fill_value=0)
        width = self.params.widths.array.at[out].get(mode="fill", fill_value=0)
        begin = survivors - place
        return jnp.where((place > 0) & (begin == 0), width, begin)

    def sharing_again(self, fork_source: Array, slots: Array) -> Array:
        """`fork_source` where the slots in the mask `slots` have lost their pages: they share the prompt on return."""
        follows = slots & self.searches & (self.params.places.array > 0)
        return jnp.where(follows, self.params.leaders.array, fork_source)


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

    def rows(column: NamedArray) -> Array:
        return column.array.at[slots].get(mode="clip")

    columns = (beams.found_tokens, beams.found_logprobs, beams.found_lens, beams.found_scores)
    return Hypotheses(*map(rows, columns))
