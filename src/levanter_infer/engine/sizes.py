"""The static sizes that follow from an `EngineConfig`, a model and a machine."""

from collections.abc import Callable, Iterable

import jax.numpy as jnp

from levanter_infer.cache.memory import PoolSizes
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.params import MAX_STOP_TOKENS, SamplingParams
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.models.config import DecoderConfig
from levanter_infer.policies import PreemptionPolicy
from levanter_infer.runtime.memory import default_pool_bytes

MIN_UPLOAD_TOKENS = 4096
"""Prompt tokens that one round can upload, at least; longer prompts take several rounds."""


def page_bytes(
    config: DecoderConfig,
    page_size: int,
    dtype: jnp.dtype,
    backend: Backend = XLA,
    local_heads: Callable[[int], int] = int,
) -> int:
    """Bytes of a page of `page_size` tokens in all layers. Args: dtype: of keys and values; the rest as of
    `PoolSizes`."""
    one = PoolSizes(1, page_size, 1, dtype, backend, local_heads)
    return sum(spec.memory.entry_bytes(len(spec.layers), one) for spec in config.pools)


def resolve_shapes(
    config: EngineConfig,
    model,
    num_eos: int,
    unread_bytes: int = 0,
    page_bytes_of: Callable[[DecoderConfig, int, jnp.dtype], int] = page_bytes,
    device_bytes: int | None = None,
) -> Shapes:
    """The static sizes of an engine for `model`.

    Args:
        num_eos: end-of-sequence ids of the model; each counts as a stop token sequence.
        unread_bytes: weights that still have to be loaded into the memory of a device.
        page_bytes_of: bytes of a page in one device's memory, as `page_bytes`; by default those of all heads.
        device_bytes: memory of a device elsewhere; None: the free memory of this process's first device.
    Raises: ValueError if the pool could not hold one page per running sequence, or sizes contradict each other.
    """
    arch = model.config
    page_size = config.page_size or 16
    max_seq_len = config.max_seq_len or min(arch.max_position_embeddings, 32768)
    if arch.position_limit is not None and max_seq_len > arch.position_limit:
        raise ValueError(
            f"engine.max_seq_len={max_seq_len}: the model has learnt {arch.position_limit} positions "
            f"(max_position_embeddings) and no others; set it to at most {arch.position_limit}"
        )
    max_step_tokens = config.max_step_tokens or max(256, 4 * config.max_seqs)
    wanted = config.max_seqs * -(-max_seq_len // page_size)
    dtype = kv_dtype(config, model)
    each = page_bytes_of(arch, page_size, dtype)
    num_pages = config.max_pages or min(wanted, default_pool_bytes(unread_bytes, device_bytes) // each)
    if num_pages < config.max_seqs and config.max_pages is None:
        raise ValueError(
            f"free memory holds {num_pages} pages of {each} bytes, and {config.max_seqs} sequences need "
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
        offload=config.preempt == PreemptionPolicy.OFFLOAD,
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
    """dtype of the KV cache: the configuration's, else that of the weights."""
    return jnp.dtype(config.kv_dtype or model.dtype)


def beams_for(asked: Iterable[SamplingParams], shapes: Shapes) -> int:
    """`Shapes.max_beams` that suits requests with these parameters: a power of two, so that it rarely changes.

    Requires: each search fits (`validate`).
    """
    most = max((params.num_beams for params in asked), default=1)
    if most <= max(1, shapes.max_beams):
        return shapes.max_beams
    return min(1 << (most - 1).bit_length(), shapes.max_seqs)
