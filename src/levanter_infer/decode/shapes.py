"""`Shapes`: the static sizes of everything that a generation program contains. Imports no JAX."""

import dataclasses

from levanter_infer.kernels import MIN_ROWS
from levanter_infer.policies import AdmissionPolicy

_DRAFT_ROWS = 16
"""Rows that engines of fewer sequences have for drafts, at most."""


@dataclasses.dataclass(frozen=True)
class SamplingLimits:
    """Static sizes of what one sequence may ask for."""

    vocab_size: int
    max_logprobs: int
    """Likeliest tokens reported per generated token."""
    max_logit_bias: int
    max_stop_sequences: int
    """Stop token sequences, end-of-sequence ids included."""
    max_stop_tokens: int
    """Tokens of one stop sequence."""


@dataclasses.dataclass(frozen=True)
class ScoreShapes:
    """Sizes of what prompt scoring keeps."""

    num_top: int
    """Likeliest tokens kept of each position."""
    hidden_size: int
    """Width of the model's hidden states."""


@dataclasses.dataclass(frozen=True)
class WindowShape:
    """Sizes of the pages of layers with one sliding window (`cache.window_pages`)."""

    window: int
    """Tokens that a query sees, its own included."""
    num_pages: int
    """Window pages."""


@dataclasses.dataclass(frozen=True)
class RoutingShapes:
    """Sizes of the table of routed experts."""

    num_layers: int
    """Layers with experts."""
    num_chosen: int
    """Experts of each token."""
    num_experts: int


@dataclasses.dataclass(frozen=True)
class SpeculationShapes:
    """Sizes of speculative decoding by prompt lookup (`decode.speculation`)."""

    num_tokens: int
    """Draft tokens of a sequence in one step, at most."""
    lookup_max: int
    """Last tokens of a sequence that are looked up in it, at most."""
    lookup_min: int
    """Last tokens that have to occur in it."""
    rows: int
    """Rows of a step with drafts, at most."""


@dataclasses.dataclass(frozen=True)
class ConstraintShapes:
    """Sizes of the tables of constraints on the tokens of sequences (`decode.constraints`)."""

    num_automata: int
    """Distinct constraints that sequences may have at the same time."""
    num_entries: int
    """Entries of all their states: each takes one more than its automaton has classes of tokens."""
    num_masks: int
    """Distinct sets of tokens of all their states."""
    mask_words: int
    """Words of 32 bits of one set."""
    load_entries: int = 2**15
    """Entries that one upload carries."""
    load_masks: int = 64
    """Sets that one upload carries."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes that a program is compiled for; they do not depend on what the requests look like."""

    num_slots: int
    """Slots of the tables: running and waiting sequences."""
    max_seqs: int
    """Sequences that run at once."""
    max_seq_len: int
    """Prompt and generated tokens of one sequence."""
    num_pages: int
    """Pages that the tables know: of the layers that see everything, and at most as many for those with a window."""
    page_size: int
    max_step_tokens: int
    """Token budget of one step; at least `max_seqs`."""
    max_round_steps: int
    """Most steps of one round; sets the size of the output ring."""
    upload_tokens: int
    """Prompt tokens that one `Admission` can carry."""
    limits: SamplingLimits
    admission: str = AdmissionPolicy.OPTIMISTIC
    """Policy of the pages that must be free for a sequence to start (`admission_policy`): optimistic, expected or
    worst_case."""
    prefix_cache: bool = False
    """Whether automatic prefix caching is on."""
    slot_state: bool = False
    """Whether a layer remembers a state of fixed size per sequence (`cache.slot_state`): after all tokens that are
    computed, and after no fewer. Forks start exactly there."""
    num_snapshots: int = 0
    """States of fixed size that prefix caching keeps (`cache.state_snapshots`); 0 unless both are there."""
    scoring: ScoreShapes | None = None
    """None: prompts are not scored."""
    routing: RoutingShapes | None = None
    """None: the experts of tokens are not recorded."""
    constraints: ConstraintShapes | None = None
    """None: no sequence is constrained."""
    speculation: SpeculationShapes | None = None
    """None: there is no speculative decoding."""
    offload: bool = False
    """Whether a round ends for KV offload, instead of preempting and recomputing at once."""
    max_beams: int = 0
    """Most beams of one search; 0: there is no beam search."""
    windows: tuple[WindowShape, ...] = ()
    """One for each sliding window whose layers have pages of their own. The other layers have all `num_pages`."""
    sampled_rows: int | None = MIN_ROWS
    """Rows that XLA samples together; None: all. Few suit a CPU: sampling is compiled once, for a shape that suits one
    sequence and, a few rows after another, any number; it is batch-invariant because the shape is fixed. Where a loop
    costs more than its rows (a GPU asks its host whether to continue), all are better. With kernels that choose the
    tokens of all rows at once (`sampling.samples_whole_rows`), only the rest is computed of so many rows: log
    probabilities and, where the step changes logits or offers beams by XLA, everything."""
    mixed_tokens: int | None = None
    """Capacity of one more bucket, where it is between that of decoding and the largest (`Platform.mixed_tokens`)."""
    block_tokens: int | None = None
    """Tokens that the forward computes at a time, and rows that the head does (`decode.blocks`): always as many, and by
    the same code. None: all of a step, in the smallest bucket that holds them."""

    def __post_init__(self):
        if self.max_step_tokens < self.max_seqs:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens} is less than max_seqs={self.max_seqs}, so that a step could "
                "not hold one token of every running sequence; raise max_step_tokens or lower max_seqs"
            )
        if self.num_slots < self.max_seqs:
            raise ValueError(f"num_slots={self.num_slots} is less than max_seqs={self.max_seqs}")

    @property
    def max_rows(self) -> int:
        """Rows of the largest bucket: of all sequences, or of few and their drafts."""
        sizes = self.speculation
        drafts = 0 if sizes is None else min(-(-(1 + sizes.num_tokens) // 8) * 8, _DRAFT_ROWS)
        return max(self.max_seqs, MIN_ROWS, drafts)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token capacities of a step: a lone decode, all sequences decode, a short prompt beside them
        (`mixed_tokens`), a full prompt chunk; ascending, 1 to 4. One where the forward computes blocks, a multiple of
        theirs."""
        if self.block_tokens is not None:
            return (-(-max(self.max_rows, self.max_step_tokens) // self.block_tokens) * self.block_tokens,)
        lone = MIN_ROWS if self.max_seqs <= 4 * MIN_ROWS else 2 * MIN_ROWS
        decode = max(lone, self.max_rows)
        largest = max(decode, self.max_step_tokens)
        mixed = decode if self.mixed_tokens is None else min(max(decode, self.mixed_tokens), largest)
        return tuple(sorted({lone, decode, mixed, largest}))

    @property
    def forward_tokens(self) -> tuple[int, ...]:
        """Token capacities that the forward is compiled for, ascending: the buckets, or the size of a block."""
        return self.buckets if self.block_tokens is None else (self.block_tokens,)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Row capacities of the head: few sequences, and all that run."""
        return tuple(sorted({self.rows(self.buckets[0]), self.max_rows}))

    def rows(self, bucket: int) -> int:
        """Rows of a bucket: every token may belong to another sequence."""
        return min(bucket, self.max_rows)

    @property
    def max_new_pages(self) -> int:
        """Most pages that one step allocates: for its tokens, one partial page a row, and one copy a row."""
        return -(-self.max_step_tokens // self.page_size) + 2 * self.max_seqs

    @property
    def transfer_pages(self) -> int:
        """Pages that one program moves between pool and host: those of 256 tokens, or of the longest sequence."""
        return max(1, min(256, self.max_seq_len) // self.page_size)

    @property
    def ring_size(self) -> int:
        """Sampled tokens that one round can hold: those of its steps, and as many as there are rows behind the last."""
        per_step = self.max_seqs if self.speculation is None else self.max_rows
        return self.max_round_steps * per_step + self.max_rows - per_step
