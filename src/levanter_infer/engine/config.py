"""`EngineConfig`: what a user may choose about the engine, and the sizes that follow."""

import dataclasses

import jax.numpy as jnp

from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.engine.params import MAX_STOP_TOKENS, brief
from levanter_infer.kernels.tiling import Tiles
from levanter_infer.runtime.memory import default_pool_bytes

_KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
CPU_ISAS = ("auto", "avx512_bf16", "avx512", "avx2", "generic")
"""What `cpu_isa` may be: auto, or one of `kernels.cpu.ISAS`."""
_MAX_ROUND_SECONDS = 3600
MIN_UPLOAD_TOKENS = 4096
"""Prompt tokens that one round can bring to the device, at least; longer prompts take several rounds."""


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
    tiles: Tiles | None = None
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
        if self.kv_dtype is not None:
            _check_choice("kv_dtype", self.kv_dtype, _KV_DTYPES)
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"engine.prefix_cache={brief(self.prefix_cache)}: expected true or false")
        _check_choice("admission", self.admission, ("optimistic", "expected", "worst_case"))
        _check_choice("preempt", self.preempt, ("recompute", "offload"))
        _check_choice("recompilation", self.recompilation, ("error", "warn"))
        _check_choice("numerics", self.numerics, ("default", "batch_invariant"))
        for name, choices in (
            ("attention", ("auto", "xla", "reference", "cpu", "gpu", "tpu")),
            ("matmul", ("auto", "xla", "cpu", "gpu")),
            ("cpu_isa", CPU_ISAS),
        ):
            value = getattr(self, name)
            if not (isinstance(value, str) and value in choices):
                raise ValueError(f"engine.{name}={brief(value)} is not available; use {_listed(choices)}")


def _check_whole(name: str, value, least: int, most: int = 2**31 - 1) -> None:
    if type(value) is not int or not least <= value <= most:
        bound = f"of at least {least}" if type(value) is not int or value < least else f"of at most {most}"
        kind = "an integer" if least == 0 else "a whole number"
        raise ValueError(f"engine.{name}={brief(value)}: expected {kind} {bound}")


def _check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in choices):
        expected = _listed(choices) if len(choices) < 4 else f"one of {', '.join(choices)}"
        raise ValueError(f"engine.{name}={brief(value)}: expected {expected}")


def _listed(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def resolve_shapes(
    config: EngineConfig,
    model,
    num_eos: int,
    unread_bytes: int = 0,
    token_values: int | None = None,
    device_bytes: int | None = None,
) -> Shapes:
    """The static sizes of an engine for `model`.

    Args:
        num_eos: end-of-sequence ids of the model; each takes a place among the stop token sequences.
        unread_bytes: of weights that will yet come into the memory of a device.
        token_values: numbers that a layer stores for a token in one device's memory; None: keys and values of all
            heads, as they are.
        device_bytes: memory of a device that is not here; None: what is free in this process's first.
    Raises: ValueError if the pool could not hold one page per running sequence, or sizes contradict each other.
    """
    arch = model.config
    page_size = config.page_size or 16
    max_seq_len = config.max_seq_len or min(arch.max_position_embeddings, 32768)
    max_step_tokens = config.max_step_tokens or max(256, 4 * config.max_seqs)
    wanted = config.max_seqs * -(-max_seq_len // page_size)
    dtype = kv_dtype(config, model)
    values = token_values or KvPages.token_values(arch.num_kv_heads, arch.head_dim, dtype)
    page_bytes = arch.num_layers * page_size * values * dtype.itemsize
    num_pages = config.max_pages or min(wanted, default_pool_bytes(unread_bytes, device_bytes) // page_bytes)
    if num_pages < config.max_seqs and config.max_pages is None:
        raise ValueError(
            f"free memory has room for {num_pages} pages of {page_bytes} bytes, and {config.max_seqs} sequences need "
            "one each; free some memory, lower engine.max_seqs, or say how many pages with engine.max_pages"
        )
    if num_pages * page_size >= 2**31:
        raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens exceeds 2^31 tokens; lower max_pages")
    return Shapes(
        num_slots=2 * config.max_seqs,
        max_seqs=config.max_seqs,
        max_seq_len=max_seq_len,
        num_pages=num_pages,
        page_size=page_size,
        max_step_tokens=max_step_tokens,
        max_round_steps=config.max_round_steps,
        admission=config.admission,
        prefix_cache=config.prefix_cache,
        offload=config.preempt == "offload",
        upload_tokens=max(MIN_UPLOAD_TOKENS, max_step_tokens),
        limits=SamplingLimits(
            vocab_size=arch.vocab_size,
            max_logprobs=min(config.max_logprobs, arch.vocab_size),
            max_logit_bias=config.max_logit_bias,
            max_stop_sequences=config.max_stop_sequences + num_eos,
            max_stop_tokens=MAX_STOP_TOKENS,
        ),
    )


def kv_dtype(config: EngineConfig, model) -> jnp.dtype:
    return jnp.dtype(config.kv_dtype or model.dtype)
