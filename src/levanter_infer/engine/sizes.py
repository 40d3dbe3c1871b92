"""The static sizes that follow from an `EngineConfig`, a model and a machine."""

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from levanter_infer.cache.memory import PoolSizes
from levanter_infer.decode.shapes import SamplingLimits, Shapes, SpeculationShapes, WindowShape
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.params import MAX_STOP_TOKENS
from levanter_infer.kernels.backend import Backend, Platform
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.models.config import DecoderConfig
from levanter_infer.policies import AdmissionPolicy, PreemptionPolicy
from levanter_infer.runtime.memory import default_pool_bytes

MIN_UPLOAD_TOKENS = 4096
"""Prompt tokens that one round can upload, at least; longer prompts take several rounds."""


def page_bytes(
    config: DecoderConfig,
    page_size: int,
    dtype: jnp.dtype,
    backend: Backend = XLA,
    local_heads: Callable[[int], int] = int,
) -> dict[int | None, int]:
    """Bytes of a page of `page_size` tokens in the layers of each sliding window; None: in those without one.

    Args: dtype: of keys and values; the rest as in `PoolSizes`.
    """
    one = PoolSizes(1, page_size, 1, dtype, backend, local_heads)
    found: dict[int | None, int] = {}
    for spec in (spec for spec in config.pools if spec.memory.is_paged):
        window, each = spec.memory.window, spec.memory.entry_bytes(len(spec.layers), one)
        found[window] = found.get(window, 0) + each
    return found


def window_shapes(config: EngineConfig, arch: DecoderConfig, shapes: Shapes) -> tuple[WindowShape, ...]:
    """`Shapes.windows` of an engine whose other sizes are `shapes`: of the windows whose layers need fewer pages than
    there are."""
    windows = dict.fromkeys(spec.memory.window for spec in arch.pools)
    found = [
        WindowShape(window, _window_pages(window, config, shapes))
        for window in windows
        if window is not None and window < shapes.max_seq_len and config.window_cache
    ]
    return tuple(each for each in found if each.num_pages < shapes.num_pages)


def _window_pages(window: int, config: EngineConfig, shapes: Shapes) -> int:
    """Window pages that suffice for `max_seqs` sequences and the next one, whatever their lengths; with admission
    `worst_case`, where none is ever preempted, for every slot. With prefix caching a sixteenth of the other pages
    besides, up to as many again: for the last windows of cached prefixes. At most as many as pages."""
    size, num_pages = shapes.page_size, shapes.num_pages
    reach = (window + size - 2) // size + 1  # pages that a window touches, wherever it begins
    # of each sequence one more for the page that a step begins, and one for a copy
    sequences = shapes.num_slots if config.admission == AdmissionPolicy.WORST_CASE else shapes.max_seqs + 1
    needed = sequences * (reach + 2) + -(-shapes.max_step_tokens // size)
    cached = min(needed, max(num_pages - needed, 0) // 16) if shapes.prefix_cache else 0
    return min(num_pages, needed + cached)


def _most_pages(budget: int, wanted: int, bytes_of: Callable[[int], int]) -> int:
    """The most pages, at most `wanted`, whose `bytes_of` (which grows with them) is within the budget."""
    fits, most = 0, wanted
    while fits < most:
        middle = (fits + most + 1) // 2
        fits, most = (middle, most) if bytes_of(middle) <= budget else (fits, middle - 1)
    return fits


def slots_bytes(config: DecoderConfig, num_slots: int) -> int:
    """Bytes of the states of fixed size of `num_slots` sequences, in all layers that remember one."""
    one = PoolSizes(1, 1, 1, jnp.dtype(jnp.float32))
    slots = (spec for spec in config.pools if not spec.memory.is_paged)
    return num_slots * sum(spec.memory.entry_bytes(len(spec.layers), one) for spec in slots)


def _num_snapshots(config: EngineConfig, arch: DecoderConfig, free_bytes: Callable[[], int]) -> int:
    """`Shapes.num_snapshots`: by default one for each slot, within a quarter of the memory that is left for pools.

    Raises: ValueError if they are configured and there is no use for them.
    """
    has_state, asked = not all(spec.memory.is_paged for spec in arch.pools), config.state_snapshots
    if asked is not None and (not has_state or config.prefix_cache is False):
        reason = "prefix_cache is false" if has_state else "no layer of this model remembers a state of fixed size"
        raise ValueError(f"engine.state_snapshots={asked}: {reason}, so that no states are kept; leave it out")
    if not has_state or config.prefix_cache is False:
        return 0
    if asked is not None:
        return asked
    return max(1, min(2 * config.max_seqs, free_bytes() // 4 // slots_bytes(arch, 1)))


def _speculation(config: EngineConfig) -> SpeculationShapes | None:
    if config.num_speculative_tokens == 0:
        return None
    least, most = config.prompt_lookup
    return SpeculationShapes(config.num_speculative_tokens, most, least, Platform.draft_rows)


def max_seq_len_of(config: EngineConfig, arch) -> int:
    """Tokens of the longest sequence of an engine. Args: arch: the model's `DecoderConfig`."""
    return config.max_seq_len or min(arch.max_position_embeddings, 32768)


def resolve_shapes(
    config: EngineConfig,
    model,
    num_eos: int,
    unread_bytes: int = 0,
    page_bytes_of: Callable[[DecoderConfig, int, jnp.dtype], dict[int | None, int]] = page_bytes,
    device_bytes: int | None = None,
    step_tokens: int = Platform.step_tokens,
) -> Shapes:
    """The static sizes of an engine for `model`.

    Args:
        num_eos: end-of-sequence ids of the model; each counts as a stop token sequence.
        unread_bytes: weights that still have to be loaded into the memory of a device.
        page_bytes_of: bytes of a page in one device's memory, as `page_bytes`; by default those of all heads.
        device_bytes: memory of a device elsewhere; None: the free memory of this process's first device.
        step_tokens: as in `Backend`.
    Raises: ValueError if the pool could not hold one page per running sequence, or sizes contradict each other.
    """
    arch = model.config
    page_size = config.page_size or 16
    max_seq_len = max_seq_len_of(config, arch)
    arch.check_length(max_seq_len, f"engine.max_seq_len={max_seq_len}")
    useful = min(step_tokens, config.max_seqs * max_seq_len)
    max_step_tokens = config.max_step_tokens or max(useful, Platform.step_tokens, 4 * config.max_seqs)
    wanted = config.max_seqs * -(-max_seq_len // page_size)
    dtype = kv_dtype(config, model)
    each = page_bytes_of(arch, page_size, dtype)
    num_slots, slot_state = 2 * config.max_seqs, not all(spec.memory.is_paged for spec in arch.pools)
    unread_bytes += slots_bytes(arch, num_slots)
    num_snapshots = _num_snapshots(config, arch, lambda: default_pool_bytes(unread_bytes, device_bytes))
    snapshot_bytes = slots_bytes(arch, num_snapshots)
    if config.num_speculative_tokens and slot_state:
        raise ValueError(
            f"engine.num_speculative_tokens={config.num_speculative_tokens}: this model remembers a state of fixed "
            "size per sequence, which a rejected draft would change; leave it out"
        )
    shapes = Shapes(
        num_slots=num_slots,
        max_seqs=config.max_seqs,
        max_seq_len=max_seq_len,
        num_pages=config.max_pages or wanted,
        page_size=page_size,
        max_step_tokens=max_step_tokens,
        max_round_steps=config.max_round_steps,
        admission=config.admission,
        prefix_cache=config.prefix_cache is not False,
        slot_state=slot_state,
        num_snapshots=num_snapshots,
        speculation=_speculation(config),
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

    def of_pages(num_pages: int) -> Shapes:
        sized = dataclasses.replace(shapes, num_pages=num_pages)
        return dataclasses.replace(sized, windows=window_shapes(config, arch, sized))

    num_pages = config.max_pages or _most_pages(
        default_pool_bytes(unread_bytes, device_bytes) - snapshot_bytes,
        wanted,
        lambda pages: pool_bytes(of_pages(pages), each),
    )
    if num_pages < config.max_seqs and config.max_pages is None:
        raise ValueError(
            f"free memory holds {num_pages} pages of {sum(each.values())} bytes, and {config.max_seqs} sequences need "
            "one each; free some memory, lower engine.max_seqs, or say how many pages with engine.max_pages"
        )
    if num_pages * page_size >= 2**31:
        raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens exceeds 2^31 tokens; lower max_pages")
    return of_pages(num_pages)


def pool_bytes(shapes: Shapes, page_bytes: Mapping[int | None, int]) -> int:
    """Bytes of all pools. Args: page_bytes: of `page_bytes`."""
    pages: dict[int | None, int] = {each.window: each.num_pages for each in shapes.windows}
    return sum(pages.get(window, shapes.num_pages) * each for window, each in page_bytes.items())


def kv_dtype(config: EngineConfig, model) -> jnp.dtype:
    """dtype of the KV cache: the configuration's, else that of the weights."""
    return jnp.dtype(config.kv_dtype or model.dtype)


def beams_for(num_beams: int, shapes: Shapes) -> int:
    """`Shapes.max_beams` that suits searches of up to `num_beams`: a power of two, so that it rarely changes.

    Raises: ValueError for no whole number, and for more beams than run together.
    """
    most = shapes.max_seqs
    if not isinstance(num_beams, int) or not 1 <= num_beams <= most:
        raise ValueError(f"num_beams={num_beams!r}: expected 1 to engine.max_seqs={most}: beams run together")
    if num_beams <= max(1, shapes.max_beams):
        return shapes.max_beams
    return min(1 << (num_beams - 1).bit_length(), most)
