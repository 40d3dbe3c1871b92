"""`EngineConfig`: what a user may choose about the engine. Imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING

from levanter_infer.engine.params import brief, check_names, field_names
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
    WeightDtype,
)

if TYPE_CHECKING:
    from levanter_infer.kernels.tpu.tiling import Tiles

_MAX_ROUND_SECONDS = 3600
MAX_DRAFT_TOKENS = 32
"""Draft tokens of a sequence in one step, and tokens that prompt lookup looks for, at most."""
_POLICIES: dict[str, type[Option]] = {
    "kv_dtype": KvDtype,
    "weight_dtype": WeightDtype,
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
_OPTIONAL = ("kv_dtype", "weight_dtype")
"""Policies that may be None."""
NAMES_ELSEWHERE = {
    **dict.fromkeys(("max_model_len", "context_length", "ctx_size", "n_ctx"), "max_seq_len"),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), "max_seqs"),
    **dict.fromkeys(("max_num_batched_tokens", "chunked_prefill_size"), "max_step_tokens"),
    **dict.fromkeys(("num_gpu_blocks_override", "max_total_tokens"), "max_pages"),
    "block_size": "page_size",
    "kv_cache_dtype": "kv_dtype",
    "quantization": "weight_dtype",
    "enable_prefix_caching": "prefix_cache",
    "attention_backend": "attention",
    "preemption_mode": "preempt",
    "swap_space": "host_bytes",
    **dict.fromkeys(("speculative_num_draft_tokens", "prompt_lookup_num_tokens"), "num_speculative_tokens"),
    "max_matching_ngram_size": "prompt_lookup_max",
}
"""Names of other engines (vLLM, SGLang, llama.cpp, transformers) for these keys."""
_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
_LEAST_MATCH = 3
"""Default of `prompt_lookup_min`."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of an engine. None means: chosen from model and machine, and printed by the commands."""

    page_size: int | None = None
    """Tokens per page, a power of two. Default 16."""
    max_pages: int | None = None
    """Pages in the pool. Default: enough for `max_seqs` sequences of `max_seq_len`, within free memory. Layers with a
    sliding window have fewer pages, if the windows of all sequences need fewer (`window_cache`)."""
    max_seqs: int = 64
    """Sequences that run at once; the same number may wait on the device."""
    max_seq_len: int | None = None
    """Prompt and generated tokens of one sequence. Default: the model's context length, at most 32768."""
    max_step_tokens: int | None = None
    """Tokens computed in one step, at most; bounds the prompt chunks of chunked prefill. Default 256, or 4 *
    max_seqs if that is more; if `max_seqs` * `max_seq_len` is more than both, as many, up to 2048 on a GPU and 512 with
    the CPU kernels for AMX."""
    kv_dtype: str | None = None
    """dtype of the KV cache: float32, bfloat16, float16, int8 (with a scale per head and token) or float8_e4m3fn.
    Default: that of the model's weights. The precision of the narrow ones: docs/numerics.md."""
    weight_dtype: str | None = None
    """dtype of the weights of layers and of the head in memory: int8, with a scale for each output, takes half the
    bytes of bfloat16 (weight-only quantization; docs/numerics.md). Weights are quantized while they are loaded or
    swapped. Default: that of the model. Untied embeddings and other tables, norms, routers and gates of shared experts,
    and the per-head maps of latent attention keep theirs."""
    attention: str = "auto"
    """Attention implementation: auto, xla, reference; on a CPU also cpu, on an NVIDIA GPU gpu, on a TPU tpu."""
    tiles: "Tiles | None" = None
    """Tiles of the attention for TPUs: pages, slots and parts of `decode` and `prefill`, and queries of `prefill`.
    Default: those known for the shape, or proposed. `levanter_infer.plan` finds others where these do not fit."""
    matmul: str = "auto"
    """Matmul implementation: auto, xla; on a CPU also cpu, on an NVIDIA GPU gpu, on a TPU tpu."""
    cpu_isa: str = "auto"
    """Instruction set of the kernels for CPUs: auto, amx_bf16, avx512_bf16, avx512, avx2 or generic. `auto` is the
    fastest that the processor has, by a measurement of half a second whose record stays beside the compile cache."""
    prefix_cache: bool | None = None
    """Automatic prefix caching: the pages of a shared prefix are computed once, for requests in the same batch and for
    later ones until the pages are reused. Default: on."""
    state_snapshots: int | None = None
    """States that prefix caching keeps at the ends of prefixes, where layers remember a state of fixed size per
    sequence (docs/architecture.md). Default: 2 * max_seqs, within a quarter of the memory left for pools."""
    window_cache: bool = True
    """Whether layers with a sliding window keep only the pages that the window reaches into, and release those behind
    it (docs/architecture.md). false: they keep all pages, like layers without."""
    admission: str = "optimistic"
    """Free pages that a sequence needs to start. `optimistic`: pages for its known tokens; preemption frees more later.
    `expected`: also pages for a share of the tokens that it may generate, which is the mean share that recent sequences
    have generated. `worst_case`: pages for all tokens that it may generate; no sequence is preempted."""
    preempt: str = "recompute"
    """Preemption of the youngest sequences when pages run out: `recompute` frees their pages and computes them again
    later; `offload` (KV offload) moves the pages to host memory and back."""
    host_bytes: int | None = None
    """Host memory for offloaded pages, at most, in bytes; pages beyond it are computed again. Default: a quarter of the
    available memory."""
    numerics: str = "default"
    """`default`: random numbers depend on the request alone; rounding may depend on the batch composition.
    `batch_invariant`: tokens and logprobs are bit-identical for any batch composition; refused where the backends do
    not provide that (docs/numerics.md). It is the default of batch jobs (docs/batch.md)."""
    num_speculative_tokens: int = 0
    """Speculative decoding by prompt lookup: draft tokens of a sequence in one step, at most. 0: off. Where the last
    n-gram of a sequence has occurred in it before, the tokens that followed it there are verified as a draft in the
    same step, and those that equal the sampled tokens are accepted. It helps small batches that copy from their
    prompts. Drafts take rows that running sequences leave free of max(`max_seqs`, 16), and end with their page."""
    prompt_lookup_max: int | None = None
    """Size of the largest n-gram that prompt lookup looks for; a draft is no longer than what it finds. Default
    `num_speculative_tokens`, or `prompt_lookup_min` if that is more."""
    prompt_lookup_min: int | None = None
    """Size of the smallest n-gram that prompt lookup looks for. Default 3."""
    max_round_steps: int = 64
    """Steps of one launch, at most."""
    max_round_seconds: float = 0.5
    """Longest round: cancellation takes effect between rounds; the steps per round adapt to stay under this time. An
    `AsyncEngine` and a server have shorter ones (`serve.max_round_seconds`)."""
    recompilation: str = "error"
    """Reaction to a recompilation after `warmup`, which no request can cause: error or warn. The first request with a
    feature that has tables of its own (constraints, `prompt_logprobs`, `return_routed_experts`) compiles the round with
    it, which is no recompilation."""
    max_logprobs: int = 20
    """Largest `logprobs` that a request may ask for."""
    max_prompt_logprobs: int = 1
    """Largest `prompt_logprobs` that a request may ask for. With 2 or more, scoring any prompt takes longer."""
    max_logit_bias: int = 384
    """Entries of a request's `logit_bias`, at most. Unless it is a multiple of 128, a TPU copies the table of them in
    each round."""
    max_stop_sequences: int = 8
    """Entries of a request's `stop_token_ids` (of up to 16 tokens each) and of its `stop`, at most."""
    max_constraints: int = 64
    """Distinct constraints (`regex`, `json_schema`, `choice`, token lists) that run at once; further ones wait."""
    constraint_bytes: int = 67108864
    """Device memory of the tables of all constraints, in bytes; the first constrained request allocates it."""

    def __new__(cls, *args, **kwargs):
        check_names("EngineConfig", kwargs, field_names(cls), NAMES_ELSEWHERE)
        return super().__new__(cls)

    def __post_init__(self):
        for name in ("page_size", "max_pages", "max_seq_len", "max_step_tokens", "state_snapshots"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        for name in ("max_seqs", "max_round_steps", "max_constraints", "constraint_bytes"):
            _check_whole(name, getattr(self, name), 1)
        for name in ("max_logprobs", "max_prompt_logprobs", "max_logit_bias", "max_stop_sequences"):
            _check_whole(name, getattr(self, name), 0)
        self._check_speculation()
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
        for name, kind in (("prefix_cache", bool | None), ("window_cache", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"engine.{name}={brief(getattr(self, name))}: expected true or false")
        for name, kind in _POLICIES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _policy(name, kind, getattr(self, name)))

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """The least and the most last tokens that prompt lookup looks for."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if most is None:
            most = max(self.num_speculative_tokens, _LEAST_MATCH if least is None else least)
        return min(_LEAST_MATCH, most) if least is None else least, most

    def _check_speculation(self) -> None:
        _check_whole("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)
        for name in _LOOKUP:
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1, MAX_DRAFT_TOKENS)
        least, most = self.prompt_lookup
        if least > most:
            raise ValueError(
                f"engine.prompt_lookup_min={least} exceeds engine.prompt_lookup_max={most}; raise the second or lower "
                "the first"
            )
        if self.num_speculative_tokens and self.page_size == 1:
            raise ValueError(
                f"engine.num_speculative_tokens={self.num_speculative_tokens} and engine.page_size=1: a draft ends "
                "with its page; raise engine.page_size, or leave one of them out"
            )
        for name in _LOOKUP:
            if getattr(self, name) is not None and self.num_speculative_tokens == 0:
                raise ValueError(
                    f"engine.{name}={getattr(self, name)}: there is no prompt lookup without "
                    "engine.num_speculative_tokens; set that to 1 or more, or leave this out"
                )


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
