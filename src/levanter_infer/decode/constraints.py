"""`ConstraintTable`: the tokens that each sequence may generate next, as automata that stay on the device.

A constraint is a `structured.automaton.TokenAutomaton`: in each state a set of tokens may follow, and each of them
leads to a state. The sets are stored as masks of one bit a token, so that a step reads vocab/32 words for each
constrained row, and a transition as one number for each class of tokens, so that a state takes a few hundred bytes. The
rest is in the step: nothing is asked of the host between two tokens, and a batch may hold any mixture of constraints.

Constraints that are no finite automaton are the host's (`structured.guide`): it writes the mask of such a sequence
before each step, into the rows of `masks` that belong to the slots.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int16, Int32, UInt16, UInt32

from levanter_infer.cache.arrays import full, gather, replace, scatter
from levanter_infer.decode.shapes import ConstraintShapes
from levanter_infer.kernels.backend import Backend
from levanter_infer.layers.shard_axis import Vocabulary

_BITS = 32


class ConstraintParams(eqx.Module):
    """The constraint of each sequence, over `admitted`."""

    automata: Int32[Array, " admitted"]
    """The automaton's number in the table; none: no automaton."""
    guided: Bool[Array, " admitted"]
    """Whether the host writes its masks."""


class ConstraintLoad(eqx.Module):
    """A part of an automaton, and masks, for the table. What a number is absent for is dropped."""

    automaton: Int32[Array, ""]
    first_entry: Int32[Array, ""]
    """Index of its first transition."""
    first_mask: Int32[Array, ""]
    """Index of its first mask."""
    width: Int32[Array, ""]
    """Entries of a state."""
    class_of: UInt16[Array, " vocab"]
    entries: Int16[Array, " entry"]
    entry_places: Int32[Array, " entry"]
    masks: UInt32[Array, "mask word"]
    mask_places: Int32[Array, " mask"]
    forced: Int32[Array, " mask"]
    """As `ConstraintTable.forced`."""

    @staticmethod
    def empty(shapes: ConstraintShapes, vocab_size: int, num_slots: int) -> "ConstraintLoad":
        """One that changes nothing."""
        return ConstraintLoad(
            automaton=jnp.int32(shapes.num_automata),
            first_entry=jnp.int32(0),
            first_mask=jnp.int32(0),
            width=jnp.int32(0),
            class_of=full(vocab_size, 0, jnp.uint16),
            entries=full(shapes.load_entries, 0, jnp.int16),
            entry_places=full(shapes.load_entries, shapes.num_entries),
            masks=full((shapes.load_masks, shapes.mask_words), 0, jnp.uint32),
            mask_places=full(shapes.load_masks, num_slots + shapes.num_masks),
            forced=full(shapes.load_masks, vocab_size),
        )


class RowMasks(eqx.Module):
    """The masks of some rows."""

    words: UInt32[Array, "row word"]
    constrained: Bool[Array, " row"]
    forced: Int32[Array, " row"]
    """The only token that may follow; absent where there are others, or the row is not constrained."""

    def apply(self, logits: Array, vocab: Vocabulary) -> Array:
        """f32[row, vocab], of this device's part: -inf for tokens that may not follow in constrained rows."""
        bit = jnp.arange(_BITS, dtype=jnp.uint32)[None, :, None]
        rows, words = self.words.shape
        allowed = (self.words[:, None, :] >> bit & 1).reshape(rows, _BITS * words) != 0
        allowed = _fitted(allowed, vocab.padded_size) if vocab.shard_axis.parts > 1 else allowed[:, : vocab.size]
        allowed = vocab.shard_axis.own(allowed, 1)
        return jnp.where(allowed | ~self.constrained[:, None], logits, -jnp.inf)

    def best(self, logits: Array, vocab: Vocabulary, backend: Backend | None, num_rows: Array) -> tuple[Array, Array]:
        """The largest of the logits that `apply` leaves each row, f32[row], and the first token that has it, i32[row].
        The backend's kernel, if it has one, writes nothing of the logits' size.

        Args: num_rows: i32[], rows in use; the others may be anything.
        """
        if backend is not None and vocab.shard_axis.mesh_axis is None:
            found = backend.masked_best(logits, self.words, self.constrained, num_rows)
            if found is not None:
                return found
        z = self.apply(logits, vocab)
        peak = vocab.shard_axis.max(jnp.max(z, axis=1))
        return peak, vocab.first(z == peak[:, None])


def _fitted(allowed: Array, size: int) -> Array:
    more = size - allowed.shape[1]
    return jnp.pad(allowed, ((0, 0), (0, more))) if more > 0 else allowed[:, :size]


class ConstraintTable(eqx.Module):
    """Automata, the one of each slot, and the state that it is in."""

    first_entry: Int32[Array, " automaton"]
    first_mask: Int32[Array, " automaton"]
    width: Int32[Array, " automaton"]
    """Entries of a state: one more than there are classes."""
    class_of: UInt16[Array, "automaton vocab"]
    entries: Int16[Array, " entry"]
    """For each state: its mask, counted from `first_mask`, and the next state for each class; -1: may not follow."""
    masks: UInt32[Array, "mask word"]
    """As `structured.automaton.packed`. The first ones belong to the slots, for constraints of the host's."""
    forced: Int32[Array, " mask"]
    """The token of each mask that allows one alone; absent for the others."""
    automata: Int32[Array, " seq"]
    states: Int32[Array, " seq"]
    guided: Bool[Array, " seq"]

    @staticmethod
    def init(shapes: ConstraintShapes, vocab_size: int, num_slots: int) -> "ConstraintTable":
        """No automaton, and no constrained sequence."""
        count = shapes.num_automata
        return ConstraintTable(
            first_entry=full(count, 0),
            first_mask=full(count, 0),
            width=full(count, 1),
            class_of=full((count, vocab_size), 0, jnp.uint16),
            entries=full(shapes.num_entries, -1, jnp.int16),
            masks=full((num_slots + shapes.num_masks, shapes.mask_words), 0, jnp.uint32),
            forced=full(num_slots + shapes.num_masks, vocab_size),
            automata=full(num_slots, count),
            states=full(num_slots, 0),
            guided=full(num_slots, False, jnp.bool_),
        )

    @property
    def num_automata(self) -> int:
        return self.width.shape[0]

    def admit(self, slots: Array, params: ConstraintParams) -> "ConstraintTable":
        """Sequences start in `slots`, i32[admitted], with these constraints, in their first state."""
        return replace(
            self,
            automata=scatter(self.automata, slots, params.automata),
            guided=scatter(self.guided, slots, params.guided),
            states=scatter(self.states, slots, jnp.zeros_like(slots)),
        )

    def moved(self, ancestors: Array) -> "ConstraintTable":
        """Each slot goes on with the automaton and the state of its ancestor, i32[seq]."""
        moved = {name: getattr(self, name)[ancestors] for name in ("automata", "states", "guided")}
        return replace(self, **moved)

    def rows(self, slots: Array, states: Array) -> RowMasks:
        """The masks of the sequences in `slots`, i32[row], in these `states`, i32[row]; absent slots are not
        constrained."""
        automaton = gather(self.automata, slots, self.num_automata)
        mask = gather(self.entries, self._entry(automaton, states), 0).astype(jnp.int32)
        own = gather(self.first_mask, automaton, 0) + mask
        guided = gather(self.guided, slots, False)
        constrained = guided | (automaton < self.num_automata)
        place = jnp.where(constrained, jnp.where(guided, slots, own), 0)
        forced = jnp.where(constrained, self.forced[place], self.class_of.shape[1])
        return RowMasks(self.masks[place], constrained, forced)

    def advance(self, slots: Array, states: Array, tokens: Array) -> "ConstraintTable":
        """The sequences in `slots`, i32[row], in these `states`, i32[row], have got the tokens i32[row]; absent slots
        are dropped."""
        constrained = gather(self.automata, slots, self.num_automata) < self.num_automata
        slots = jnp.where(constrained, slots, self.states.shape[0])
        return replace(self, states=scatter(self.states, slots, self.following(slots, states, tokens)))

    def following(self, slots: Array, states: Array, tokens: Array) -> Array:
        """The states, i32[row], behind the tokens i32[row]; any state behind a token that may not follow. Args: as of
        `advance`."""
        automaton = gather(self.automata, slots, self.num_automata)
        token_class = gather(self.class_of, (automaton, tokens), 0).astype(jnp.int32)
        states = gather(self.entries, self._entry(automaton, states) + 1 + token_class, 0)
        return jnp.maximum(states, 0).astype(jnp.int32)

    def _entry(self, automaton: Array, states: Array) -> Array:
        """Index of the first entry of each row's state, i32[row]."""
        return gather(self.first_entry, automaton, 0) + states * gather(self.width, automaton, 0)

    def loaded(self, load: ConstraintLoad) -> "ConstraintTable":
        """The table with a part of an automaton, or with masks."""
        place = load.automaton
        return replace(
            self,
            first_entry=scatter(self.first_entry, place, load.first_entry),
            first_mask=scatter(self.first_mask, place, load.first_mask),
            width=scatter(self.width, place, load.width),
            class_of=scatter(self.class_of, place, load.class_of),
            entries=scatter(self.entries, load.entry_places, load.entries),
            masks=scatter(self.masks, load.mask_places, load.masks),
            forced=scatter(self.forced, load.mask_places, load.forced),
        )


def advanced(
    table: ConstraintTable | None, slots: Array, states: Array | None, tokens: Array
) -> ConstraintTable | None:
    """`ConstraintTable.advance`, where there is a table."""
    return None if table is None or states is None else table.advance(slots, states, tokens)


def masks_of(table: ConstraintTable | None, slots: Array, states: Array | None) -> RowMasks | None:
    """`ConstraintTable.rows`, where there is a table."""
    return None if table is None or states is None else table.rows(slots, states)


def load_constraints(state, load: ConstraintLoad):
    """A `DecodeState` with a part of an automaton, or masks, in its table."""
    return replace(state, constraints=state.constraints.loaded(load))
