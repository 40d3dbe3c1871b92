"""`EngineConfig`: what a user may choose about the engine. Imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING

from levanter_infer.engine.params import brief
from levanter_infer.policies import (
    AdmissionPolicy,
    AttentionImpl,
    CpuIsa,
    KvDtype,
    MatmulImpl,
    Numerics,
    Option,
    PreemptionPolicy,
    Recompilation,
)

if TYPE_CHECKING:
    from levanter_infer.kernels.tiling import Tiles

_MAX_ROUND_SECONDS = 3600
_POLICIES: dict[str, type[Option]] = {
    "kv_dtype": KvDtype,
    "admission": AdmissionPolicy,
    "preempt": PreemptionPolicy,
    "recompilation": Recompilation,
    "numerics": Numerics,
    "attention": AttentionImpl,
    "matmul": MatmulImpl,
    "cpu_isa": CpuIsa,
}
_BY_MACHINE = ("attention", "matmul", "cpu_isa")
"""Policies whose values also depend on the machine."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of an engine. None means: chosen from model and machine, and printed by the frontends."""

    page_size: int | None = None
    """Tokens per page, a power of two. Default 16."""
    max_pages: int | None = None
    """Pages in the pool. Default: enough for `max_seqs` sequences of `max_seq_len`, within free memory."""
    max_seqs: int = 64
    """Sequences that run at once; as many again may wait on the device."""
    max_seq_len: int | None = None
    """Prompt and generated tokens of one sequence. Default: what the model was made for, at most 32768."""
    max_step_tokens: int | None = None
    """Tokens computed in one step; bounds the chunks in which prompts are computed. Default 256, or 4 * max_seqs."""
    kv_dtype: str | None = None
    """float32, bfloat16, float16, int8 (each head of each token with a scale) or float8_e4m3fn. Default: that of the
    model's weights. What the narrow ones cost in precision: docs/numerics.md."""
    attention: str = "auto"
    """Attention implementation: auto, xla, reference or, on a CPU, cpu, on an NVIDIA GPU, gpu."""
    tiles: "Tiles | None" = None
    """Of the attention for TPUs: pages, slots and parts of `decode`, and of `chunk` also queries. Default: those that
    are known for the shape, or proposed. `levanter_infer.plan` finds others where these do not fit."""
    matmul: str = "auto"
    """What computes matmuls: auto, xla or, on a CPU, cpu, on an NVIDIA GPU, gpu."""
    cpu_isa: str = "auto"
    """Instruction set of the kernels for CPUs: auto, avx512_bf16, avx512, avx2 or generic. `auto` is the fastest that
    the processor has, by a measurement of half a second that is kept beside the compile cache."""
    prefix_cache: bool = True
    """Pages of equal beginnings are computed once: for requests that are there together, and for later ones for as long
    as no other use was found for the pages."""
    admission: str = "optimistic"
    """How much room in the pool a sequence needs to start: `optimistic`, for the tokens that are known; preemption
    makes room later. `expected`: for as many more as recent sequences have generated of what they might.
    `worst_case`: for all that it may generate; nobody is preempted."""
    preempt: str = "recompute"
    """What happens to the youngest when pages run out: `recompute` (their pages are taken back, and computed again
    later) or `offload` (the pages move to the host's memory and back)."""
    host_bytes: int | None = None
    """The host's memory for such pages, at most; what finds no room there is computed again. Default: a quarter of what
    is available."""
    numerics: str = "default"
    """`default`: random numbers depend on the request alone; rounding may depend on its company. `batch_invariant`:
    tokens and logprobs are the same to the bit in any company; refused where the kernels do not give that."""
    max_round_steps: int = 64
    """Steps of one launch, at most."""
    max_round_seconds: float = 0.5
    """Cancellation takes effect between rounds; steps per round adapt so that a round stays under this time."""
    recompilation: str = "error"
    """What happens if the program of a warm engine is compiled again, which no request can cause: error or warn."""
    max_logprobs: int = 20
    """Largest `logprobs` that a request may ask for."""
    max_prompt_logprobs: int = 1
    """Largest `prompt_logprobs` that a request may ask for. With 2 or more, scoring any prompt takes longer."""
    max_logit_bias: int = 300
    """Entries of a request's `logit_bias`, at most."""
    max_stop_sequences: int = 8
    """Entries of a request's `stop_token_ids` (16 tokens each) and of its `stop`, at most."""

    def __post_init__(self):
        for name in ("page_size", "max_pages", "max_seq_len", "max_step_tokens"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        for name in ("max_seqs", "max_round_steps"):
            _check_whole(name, getattr(self, name), 1)
        for name in ("max_logprobs", "max_prompt_logprobs", "max_logit_bias", "max_stop_sequences"):
            _check_whole(name, getattr(self, name), 0)
        if self.host_bytes is not None:
            _check_whole("host_bytes", self.host_bytes, 0, 2**62)
        seconds = self.max_round_seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not (is_number and 0 < seconds <= _MAX_ROUND_SECONDS):  # also false for NaN
            raise ValueError(
                f"engine.max_round_seconds={brief(seconds)}: expected seconds above 0 and up to {_MAX_ROUND_SECONDS}"
            )
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ValueError(f"engine.page_size={self.page_size} is not a power of two; use one of 8, 16, 32, 64, 128")
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"engine.prefix_cache={brief(self.prefix_cache)}: expected true or false")
        for name, kind in _POLICIES.items():
            if getattr(self, name) is not None or name != "kv_dtype":
                object.__setattr__(self, name, _policy(name, kind, getattr(self, name)))


def _check_whole(name: str, value, least: int, most: int = 2**31 - 1) -> None:
    if type(value) is not int or not least <= value <= most:
        bound = f"of at least {least}" if type(value) is not int or value < least else f"of at most {most}"
        kind = "an integer" if least == 0 else "a whole number"
        raise ValueError(f"engine.{name}={brief(value)}: expected {kind} {bound}")


def _policy(name: str, kind: type[Option], value) -> Option:
    if isinstance(value, str) and value in tuple(kind):
        return kind(value)
    if name in _BY_MACHINE:
        raise ValueError(f"engine.{name}={brief(value)} is not available; use {kind.listed()}")
    expected = kind.listed() if len(kind) < 4 else f"one of {', '.join(kind)}"
    raise ValueError(f"engine.{name}={brief(value)}: expected {expected}")
