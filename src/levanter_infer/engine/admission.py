"""`HostAdmission`: what the host uploads once a round, as NumPy arrays. Imports no JAX.

The device's form of it is `decode.admission.Admission`; the runner makes one of the other.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from levanter_infer.decode.codes import DEFAULT_ROOT, EARLY, NEVER, PATIENT
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.engine.params import SamplingParams, stop_sequences
from levanter_infer.engine.request_state import SampleState
from levanter_infer.kernels import MIN_EXPONENT

_STOPPING: dict[bool | str, int] = {False: PATIENT, True: EARLY, "never": NEVER}


class HostAdmission:
    """Prompt chunks of new sequences, cancellations, and how long the round may last.

    Arrays have a leading axis of data-parallel ranks and the names of the fields of `decode.admission.Admission`.
    Those that a round does not need are not made: a round that admits and cancels nothing uploads four numbers a rank.

    Args:
        shapes: sizes of the tables of each rank.
        num_ranks: data-parallel ranks.
        max_steps: steps after which the round ends.
    """

    def __init__(self, shapes: Shapes, num_ranks: int, max_steps: int):
        self._shapes, self._num_ranks = shapes, num_ranks
        self.max_steps = np.full(num_ranks, max_steps, np.int32)
        self.min_free_slots = np.full(num_ranks, shapes.num_slots + 1, np.int32)
        """Empty slots that the next request needs; more than there are slots: no request waits."""
        self.has_pieces, self.has_cancellations = np.zeros((2, num_ranks), bool)
        self._pieces: dict[str, np.ndarray] = {}
        """Prompt chunks, [rank, admitted]; "tokens" is [rank, upload]."""
        self._beams: dict[str, np.ndarray] = {}
        self._constraints: dict[str, np.ndarray] = {}
        self._sampling: SamplingColumns | None = None
        self._cancel: np.ndarray | None = None
        self._num_pieces, self._num_tokens = [0] * num_ranks, [0] * num_ranks

    def capacity(self, rank: int) -> int:
        """Prompt tokens that can still be uploaded to a rank in this round."""
        return self._shapes.upload_tokens - self._num_tokens[rank]

    def add(
        self,
        rank: int,
        sample: SampleState,
        start: int,
        length: int,
        eos_token_ids: Sequence[int],
        automaton: int | None = None,
    ) -> None:
        """Upload tokens `start` to `start + length` of a sample's prompt into its slot, and how to sample it.

        A sample other than the first of its request brings no tokens: it copies the first one's slot. `automaton` is
        the number of the one that constrains it, if any.
        Requires: the sample has a slot and no other piece in this admission; the tokens fit (`capacity`).
        """
        if self._sampling is None:
            self._sampling = self.allocate()
        request, none = sample.request, self._shapes.num_slots
        leader, prompt = request.sequences[0], request.prompt_token_ids
        piece, begin = self._num_pieces[rank], self._num_tokens[rank]
        self._pieces["tokens"][rank, begin : begin + length] = prompt[start : start + length]
        values = {
            "lens": length,
            "starts": start,
            "slot_ids": sample.slot,
            "complete": sample.index > 0 or start + length == len(prompt),
            "prompt_lens": len(prompt),
            "max_lens": request.max_len,
            "arrival": sample.arrival,
            "priority": request.priority,
            "roots": request.root,
            "fork_source": none if sample.index == 0 else leader.slot,
        }
        for name, value in values.items():
            self._pieces[name][rank, piece] = value
        self._sampling.set(
            (rank, piece),
            request.params,
            seed=request.seed,
            sample_index=sample.number,
            first_sample=request.first_sample,
            eos_token_ids=eos_token_ids,
        )
        if self._constraints:
            self._constraints["guided"][rank, piece] = sample.guide is not None
            if automaton is not None:
                self._constraints["automata"][rank, piece] = automaton
        if request.params.num_beams > 1:
            self._add_beam(rank, piece, sample)
        self.has_pieces[rank] = True
        self._num_pieces[rank] += 1
        self._num_tokens[rank] += length

    def cancel(self, rank: int, slots: Iterable[int]) -> None:
        """End the sequences in these slots of a rank with reason ABORT."""
        if self._cancel is None:
            self._cancel = np.zeros((self._num_ranks, self._shapes.num_slots), bool)
        self._cancel[rank, list(slots)] = True
        self.has_cancellations[rank] = self._cancel[rank].any()

    def arrays(self) -> dict[str, Any]:
        """The arrays by field of `Admission`; "sampling", "beams" and "constraints" are dicts of arrays by field of
        their tables."""
        fields: dict[str, Any] = {
            "max_steps": self.max_steps,
            "min_free_slots": self.min_free_slots,
            "has_pieces": self.has_pieces,
            "has_cancellations": self.has_cancellations,
        }
        if self._cancel is not None:
            fields["cancel"] = self._cancel
        if self._sampling is not None:
            fields |= {**self._pieces, "sampling": self._sampling.columns}
            fields |= {"beams": self._beams} if self._beams else {}
            fields |= {"constraints": self._constraints} if self._constraints else {}
        return fields

    def allocate(self) -> "SamplingColumns":
        """Make all arrays, with entries that hold no sequence."""
        shapes, lead = self._shapes, (self._num_ranks, self._shapes.num_slots)
        none, size = shapes.num_slots, (self._num_ranks, shapes.upload_tokens)
        zeros = ("lens", "starts", "prompt_lens", "max_lens", "arrival", "priority")
        self._pieces = {"tokens": np.zeros(size, np.int32), "complete": np.zeros(lead, bool)}
        self._pieces |= {name: np.zeros(lead, np.int32) for name in zeros}
        self._pieces |= {name: np.full(lead, none, np.int32) for name in ("slot_ids", "fork_source")}
        self._pieces["roots"] = np.full(lead, DEFAULT_ROOT, np.int32)
        if shapes.max_beams:
            self._beams = {name: np.zeros(lead, np.int32) for name in ("places", "widths", "early_stopping")}
            self._beams |= {"leaders": np.full(lead, none, np.int32), "length_penalty": np.zeros(lead, np.float32)}
        if shapes.constraints is not None:
            automata = np.full(lead, shapes.constraints.num_automata, np.int32)
            self._constraints = {"automata": automata, "guided": np.zeros(lead, bool)}
        self._sampling = SamplingColumns(lead, shapes.limits)
        return self._sampling

    def _add_beam(self, rank: int, piece: int, sample: SampleState) -> None:
        params, leader = sample.request.params, sample.request.sequences[0]
        values = {
            "leaders": leader.slot,
            "places": sample.index,
            "widths": params.num_beams,
            "length_penalty": params.length_penalty,
            "early_stopping": _STOPPING[params.early_stopping],
        }
        for name, value in values.items():
            self._beams[name][rank, piece] = value


def nothing_to_admit(shapes: Shapes, num_ranks: int) -> dict[str, Any]:
    """All arrays of an admission that admits and cancels nothing, in a round of no steps."""
    admission = HostAdmission(shapes, num_ranks, max_steps=0)
    admission.allocate()
    for rank in range(num_ranks):
        admission.cancel(rank, ())
    return admission.arrays()


class SamplingColumns:
    """Sampling parameters as columns of `decode.sampling_table.SamplingTable`, in NumPy.

    Entries that are never set hold no sequence.

    Args:
        shape: of the entries: their number, or several axes such as (ranks, entries).
        limits: sizes of the engine's tables; `max_stop_sequences` includes the end-of-sequence ids.
    """

    def __init__(self, shape: int | tuple[int, ...], limits: SamplingLimits):
        lead = (shape,) if isinstance(shape, int) else shape
        none, stops = limits.vocab_size, (*lead, limits.max_stop_sequences)
        self.limits = limits
        self.columns = {
            "temperature": np.zeros(lead, np.float32),
            "top_k": np.zeros(lead, np.int32),
            "top_p": np.ones(lead, np.float32),
            "log_min_p": np.full(lead, MIN_EXPONENT, np.float32),
            "frequency_penalty": np.zeros(lead, np.float32),
            "presence_penalty": np.zeros(lead, np.float32),
            "repetition_penalty": np.ones(lead, np.float32),
            "sample_index": np.zeros(lead, np.int32),
            "first_sample": np.zeros(lead, np.int32),
            "min_tokens": np.zeros(lead, np.int32),
            "num_logprobs": np.zeros(lead, np.int32),
            "seed": np.zeros((*lead, 2), np.uint32),
            "bias_ids": np.full((*lead, limits.max_logit_bias), none, np.int32),
            "bias_values": np.zeros((*lead, limits.max_logit_bias), np.float32),
            "stop_ids": np.full((*lead, limits.max_stop_sequences * limits.max_stop_tokens), none, np.int32),
            "stop_lens": np.zeros(stops, np.int32),
        }

    def set(
        self,
        entry: int | tuple[int, ...],
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        first_sample: int = 0,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Write one sequence. Each end-of-sequence id is a stop sequence of one token unless `ignore_eos`.

        Args:
            entry: index of the entry.
            seed: 0 to 2^64 - 1.
            sample_index: which of the request's samples.
            first_sample: the index of the request's first sample.
        Requires: `validate_sampling(params)` passed with the sizes of this object's limits.
        """
        columns, vocab = self.columns, self.limits.vocab_size
        columns["temperature"][entry] = params.temperature if params.num_beams == 1 else 0
        columns["log_min_p"][entry] = math.log(params.min_p) if params.min_p > 0 else MIN_EXPONENT
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
            columns[name][entry] = getattr(params, name)
        # A value just below 1 may round to 1, which is off; one that rounds to 0 would keep nothing
        columns["top_p"][entry] = max(np.float32(params.top_p), np.finfo(np.float32).tiny)
        columns["top_k"][entry] = min(params.top_k or 0, vocab)
        columns["sample_index"][entry], columns["first_sample"][entry] = sample_index, first_sample
        columns["min_tokens"][entry] = params.min_tokens
        columns["num_logprobs"][entry] = params.logprobs or 0
        columns["seed"][entry] = (seed >> 32, seed & 0xFFFFFFFF)
        bias = params.logit_bias or {}
        columns["bias_ids"][entry][: len(bias)] = list(bias.keys())
        columns["bias_values"][entry][: len(bias)] = list(bias.values())
        stops = list(dict.fromkeys(stop_sequences(params)))
        if not params.ignore_eos:
            stops += [(token,) for token in eos_token_ids if token < vocab and (token,) not in stops]
        stop_ids, stop_lens = columns["stop_ids"][entry], columns["stop_lens"][entry]
        for i, sequence in enumerate(stops):
            end = (i + 1) * self.limits.max_stop_tokens
            stop_ids[end - len(sequence) : end] = sequence
            stop_lens[i] = len(sequence)
