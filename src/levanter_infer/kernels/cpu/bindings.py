"""The `cpu` implementations: C++ kernels that XLA calls (`native/`), for matmuls, paged attention and sampling.

They are optional: if the package was installed without a compiler, or they were built for a newer jaxlib, `available`
is false and the `xla` implementations are used. A CPU is bound by memory when few tokens are computed, and XLA's own
matmuls read 16-bit weights several times.

**Panels.** The matmuls read weights [outputs, inputs] in panels: a panel holds `panel_width` outputs, one pair of
inputs after the other, so that it is read from front to back and a vector register holds outputs. Within a pair,
float32 and int8 hold all outputs of the first input and then those of the second; bfloat16 holds the two inputs of each
output side by side, in one 32-bit word. Missing outputs of the last panel, and the second input of the last pair if the
number of inputs is odd, are zeros. The attention kernel copies keys and values into panels as well, and uses the same
matmuls.
"""

import ctypes
import functools
import importlib.metadata
import importlib.resources
import importlib.util
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax import Array
from jax.core import Tracer

from levanter_infer.kernels import MIN_EXPONENT
from levanter_infer.kernels.backend import DrawKey, DrawRules, LogitChanges
from levanter_infer.kernels.call import AttentionCall, GroupedCall, KvWrite, LinearCall
from levanter_infer.kernels.cpu import huge_pages, sources
from levanter_infer.kernels.rules import LOG2_E

_LIBRARY = "levanter_infer.kernels.cpu._native"
_CALLS = (
    "linear",
    "grouped_linear",
    "combine",
    "place_tokens",
    "attention",
    "logit_stats",
    "changed_logits",
    "masked_best",
    "likeliest",
    "thresholds",
    "draw",
)
_DTYPES = (jnp.float32, jnp.bfloat16)
READ_STEP = 512
"""Bytes that `read` reads at once."""
_SOURCES = importlib.resources.files("levanter_infer.kernels.cpu") / "native"
"""Sources of the kernels, which only a checkout has."""
_REMEDY = "install a C++17 compiler (g++ or clang++) and then levanter_infer again, beside the jaxlib that is used"


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The kernels, registered with XLA; or the reason why they cannot be used."""
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or spec.origin is None:
        return "they were not built"
    try:
        library = ctypes.CDLL(spec.origin)
        library.levanter_infer_isa.restype = ctypes.c_char_p
        library.levanter_infer_sources.restype = ctypes.c_char_p
        library.levanter_infer_panel.argtypes = [ctypes.c_char_p]
        targets = {name: jax.ffi.pycapsule(getattr(library, name)) for name in (f"levanter_infer_{c}" for c in _CALLS)}
        built, here = library.levanter_infer_ffi_api(), _ffi_api()
        built_from = library.levanter_infer_sources().decode()
    except (OSError, AttributeError) as error:  # of another system, or of an earlier version
        return f"they were built for another system or version ({error})"
    if built > here:  # to register them would make JAX fail when it starts
        version = importlib.metadata.version("jaxlib")
        return (
            f"they were built for version {_dotted(built)} of XLA's FFI, and jaxlib {version} has {_dotted(here)}, "
            "which runs its own and older ones"
        )
    if _SOURCES.is_dir() and built_from != sources.digest(_SOURCES):  # a checkout; they compute something else
        return "they were built from other sources than this checkout has"
    for name, target in targets.items():
        jax.ffi.register_ffi_target(name, target, platform="cpu")
    return library


def _ffi_api() -> int:
    """Version of XLA's FFI in this jaxlib, major · 1000 + minor, read from its headers."""
    header = importlib.resources.files(jaxlib) / "include" / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text(encoding="utf-8") if header.is_file() else ""
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return int(found["MAJOR"]) * 1000 + int(found["MINOR"]) if len(found) == 2 else 2**31


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000}"


def why_unavailable() -> str | None:
    """Why the kernels cannot be used, and what to do about it; None if they can."""
    library = _load()
    return f"{library}; {_REMEDY}" if isinstance(library, str) else None


def available() -> bool:
    """Whether the kernels were built for this Python and jaxlib, and can be loaded."""
    return why_unavailable() is None


def _library() -> ctypes.CDLL:
    """Raises: ValueError if the kernels cannot be used."""
    library = _load()
    if isinstance(library, str):
        raise ValueError(f'the "cpu" kernels cannot be used: {library}; {_REMEDY}, or use xla')
    return library


def path() -> str:
    """Path of the compiled kernels. Raises: ValueError if they are not available."""
    return _library()._name


def isa() -> str:
    """The widest instruction set that this processor and this build have. Raises: ValueError if the kernels are not
    available."""
    return _library().levanter_infer_isa().decode()


def supports_dtype(dtype) -> bool:
    """Whether weights or pages of this dtype can be read, and int8 in the stead of such weights."""
    return jnp.dtype(dtype) in _DTYPES


def panel_width(isa_name: str | None = None) -> int:
    """Outputs per panel; `isa_name`: an instruction set that the processor has; by default the widest."""
    name = isa_name or isa()
    return _library().levanter_infer_panel(name.encode())


def to_panels(weight: Array | np.ndarray, *, isa_name: str | None = None) -> Array:
    """Weights in panels (see the module's docstring), as `stacked_matmul` reads them.

    Args:
        weight: [layers, outputs, inputs] or [outputs, inputs], f32, bf16 or i8. May be traced.
    Returns: f32, u16 (the bits of bf16) or i8 [layers, panels, inputs rounded up to even · panel_width], or without
        layers. In huge pages if the weight is not traced.
    """
    paired, xp = weight.dtype == jnp.bfloat16, jnp if isinstance(weight, Tracer) else np
    *layers, outputs, inputs = weight.shape
    if xp is np:
        bits = np.asarray(weight).view(np.uint16) if paired else np.asarray(weight)
    else:
        bits = jax.lax.bitcast_convert_type(weight, jnp.uint16) if paired else weight
    width = panel_width(isa_name)
    num_panels, pairs = -(-outputs // width), -(-inputs // 2)
    missing = num_panels * width - outputs, 2 * pairs - inputs
    if any(missing):
        bits = xp.pad(bits, [*[(0, 0)] * len(layers), (0, missing[0]), (0, missing[1])])
    apart = bits.reshape(*layers, num_panels, width, pairs, 2)
    last = (-2, -3, -1) if paired else (-2, -1, -3)
    panels = apart.transpose(*range(apart.ndim - 3), *(apart.ndim + axis for axis in last))
    shape = *layers, num_panels, 2 * pairs * width
    if isinstance(panels, Array):
        return panels.reshape(shape)
    kept = huge_pages.empty(shape, panels.dtype)
    np.copyto(kept.reshape(panels.shape), panels)
    return jax.device_put(kept)  # which shares it


def panel_rows(panels: Array, rows: Array, inputs: int, *, isa_name: str | None = None) -> Array:
    """Rows (outputs) of a matrix in panels, as an embedding reads them; an index past the last panel gives zeros.

    Args:
        panels: [panels, size] of `to_panels`.
        rows: i32[n]
        inputs: inputs of the matrix.
        isa_name: the one that `to_panels` was given.
    Returns: [n, inputs], f32, u16 (the bits of bf16) or i8.
    """
    width = panel_width(isa_name)
    num_panels, size = panels.shape
    panel, lane = rows // width, rows % width
    if panels.dtype != jnp.uint16:
        apart = panels.reshape(num_panels, size // width, width)
        found = apart.at[panel, :, lane].get(mode="fill", fill_value=0)
    else:
        apart = panels.reshape(num_panels, size // width // 2, width, 2)
        found = apart.at[panel, :, lane, :].get(mode="fill", fill_value=0)
    return found.reshape(rows.shape[0], size // width)[:, :inputs]


def stacked_matmul(call: LinearCall, *, isa_name: str | None = None) -> list[Array]:
    """The matmuls of `call`, accumulated in float32; x, gate and residual are converted to float32.

    The stacks of panels are read in place. A row of the result has the same bits for any number of rows. A norm, a
    gate, a residual, and the gate of a pair of results and its matmul are fused into the call: on a CPU every call has
    its overhead, and results of many rows do not stay in the caches.

    Args:
        call: its weights are in panels (`to_panels`); rows beyond `num_rows` give zeros and cost nothing.
        isa_name: an instruction set that the processor has; by default the widest.
    Returns: f32[rows, outputs] each, of a gated pair one.
    Raises: ValueError if the kernels were not built.
    """
    assert call.norm is None or call.gate is None, "a matmul has a norm or a gate, not both"
    rows = call.x.shape[0]
    results = [jax.ShapeDtypeStruct((rows, count), jnp.float32) for count in call.result_outs]
    kernel = jax.ffi.ffi_call("levanter_infer_linear", results, vmap_method="sequential")
    used = jnp.int32(rows) if call.num_rows is None else call.num_rows
    layer = jnp.int32(0) if call.layer is None else call.layer
    norm, eps = (None, 0.0) if call.norm is None else call.norm
    wide = [None if extra is None else extra.astype(jnp.float32) for extra in (call.gate, call.residual)]
    extras = [extra for extra in (None if norm is None else _stack(norm, 2), *wide) if extra is not None]
    return list(
        kernel(
            call.x.astype(jnp.float32),
            used.astype(jnp.int32),
            layer.astype(jnp.int32),
            *extras,
            *(_stack(panels, 3) for panels in call.weights),
            *(_stack(scale, 2) for scale in call.scales),
            isa=isa_name or isa(),
            has_norm=norm is not None,
            has_gate=call.gate is not None,
            has_residual=call.residual is not None,
            is_gated_pair=call.is_gated_pair,
            gated=np.int64(call.num_outs[0] if call.is_gated_pair and len(call.weights) == 3 else 0),
            eps=np.float32(eps),
        )
    )


def grouped_matmul(call: GroupedCall, *, isa_name: str | None = None) -> list[Array]:
    """The grouped matmuls of `call`, accumulated in float32; x and the gate are converted to float32.

    Of the stacks of panels only those of groups with results are read, each once. A result has the same bits whatever
    the others are, and those of `stacked_matmul`.

    Args:
        call: its weights are in panels (`to_panels`).
        isa_name: an instruction set that the processor has; by default the widest.
    Returns: f32[results, outputs] each.
    Raises: ValueError if the kernels were not built.
    """
    assert call.norm is None or call.gate is None, "a matmul has a norm or a gate, not both"
    results = [jax.ShapeDtypeStruct((call.num_results, count), jnp.float32) for count in call.num_outs]
    kernel = jax.ffi.ffi_call("levanter_infer_grouped_linear", results, vmap_method="sequential")
    norm, eps = (None, 0.0) if call.norm is None else call.norm
    gate = None if call.gate is None else call.gate.astype(jnp.float32)
    extras = [extra for extra in (None if norm is None else _stack(norm, 2), gate) if extra is not None]
    return list(
        kernel(
            call.x.astype(jnp.float32),
            jnp.zeros(0, jnp.int32) if call.rows is None else call.rows,
            call.counts,
            jnp.int32(0) if call.layer is None else call.layer.astype(jnp.int32),
            *extras,
            *(_stack(panels, 4) for panels in call.weights),
            *(_stack(scale, 3) for scale in call.scales),
            isa=isa_name or isa(),
            has_norm=norm is not None,
            has_gate=gate is not None,
            eps=np.float32(eps),
        )
    )


def weighted_sum(
    values: Array, places: Array, weights: Array, num_rows: Array, *, isa_name: str | None = None
) -> Array:
    """`Backend.combine` in C++, f32[row, size]; rows beyond `num_rows` are zeros."""
    sums = jax.ShapeDtypeStruct((places.shape[0], values.shape[1]), jnp.float32)
    kernel = jax.ffi.ffi_call("levanter_infer_combine", sums, vmap_method="sequential")
    return kernel(values, places, weights, num_rows.astype(jnp.int32), isa=isa_name or isa())


def _stack(array: Array, ndim: int) -> Array:
    """An array with an axis of layers; one without becomes a stack of one."""
    return array if array.ndim == ndim else array[None]


def place_tokens(pool: Array, write: KvWrite, *, isa_name: str | None = None) -> tuple[Array, Array]:
    """Apply norms and the rotary embedding to queries and keys, and write keys and values to the KV cache, in one call
    and in place where the pool is donated.

    Tokens are independent, so that their bits do not depend on batch composition. XLA would run half a dozen small
    operations for each token of such a write.

    Args:
        pool: [layers, P, page_size, 2 * Hkv, D] of f32, bf16, or u16 that holds the bits of bf16.
        write: has queries and their rotation; queries, keys and values are converted to float32.
        isa_name: an instruction set that the processor has; by default the widest.
    Returns: the rotated q, f32, and the pool.
    Raises: ValueError if the kernels were not built.
    """
    rotation = write.rotation
    assert write.q is not None and rotation is not None, "queries and their rotation are stored with the keys"
    assert write.v is not None, "latents are not rotated with the write"
    q, k, v = (side.astype(jnp.float32) for side in (write.q, write.k, write.v))
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, pool)]
    kernel = jax.ffi.ffi_call(
        "levanter_infer_place_tokens", results, vmap_method="sequential", input_output_aliases={1: 1}
    )
    norms, (q_eps, k_eps) = (), (0.0, 0.0)
    if rotation.norms is not None:
        assert rotation.norm_layer is not None, "norms are stacks of layers"
        weights, (q_eps, k_eps) = zip(*rotation.norms, strict=True)
        norms = (*weights, rotation.norm_layer.astype(jnp.int32))
    eps = {"q_eps": np.float32(q_eps), "k_eps": np.float32(k_eps)}
    layer = write.layer.astype(jnp.int32)
    rotated, stored = kernel(
        q, pool, k, v, rotation.cos, rotation.sin, write.dests, layer, *norms, isa=isa_name or isa(), **eps
    )
    return rotated, stored


def cpu_attention(call: AttentionCall, *, isa_name: str | None = None) -> Array:
    """`Backend.attend` in C++. Returns: `call.out_shape`, 0 for padding tokens.

    Raises: ValueError for what only other implementations support: `score_mod`, `mask_mod`, pages of other dtypes,
            latents of several heads.
    """
    rules, sinks = call.rules, call.sinks
    if rules.score_mod is not None or rules.mask_mod is not None:
        raise ValueError('impl="cpu" cannot call score_mod or mask_mod; use "xla"')
    if not supports_dtype(call.kv_dtype):
        raise ValueError(f'impl="cpu" reads pages of float32 or bfloat16, not {call.kv_dtype}; use "xla"')
    if call.value_dim is not None and call.kv_heads != 1:
        raise ValueError(f'impl="cpu" reads latents of one head, not of {call.kv_heads}; use "xla"')
    f32, num_heads = jnp.float32, call.q.shape[1]
    far, log2_e = jnp.int32(2**31 - 1), np.float32(LOG2_E)  # the kernel takes powers of 2
    slopes = jnp.zeros(num_heads, f32) if rules.alibi_slopes is None else rules.alibi_slopes * log2_e
    out = jax.ShapeDtypeStruct(call.out_shape, f32)
    result = jax.ffi.ffi_call("levanter_infer_attention", out, vmap_method="sequential")(
        call.q.astype(f32),
        call.kv_pages,
        call.layer,
        call.page_indices,
        call.seq_lens,
        call.cu_q_lens,
        call.num_seqs,
        far if rules.sliding_window is None else rules.sliding_window,
        slopes,
        jnp.full(num_heads, -jnp.inf, f32) if sinks is None else sinks * log2_e,
        scale=np.float32(rules.scale * LOG2_E),
        soft_cap=np.float32((rules.soft_cap or 0) * LOG2_E),
        attention_chunk=np.int64(rules.attention_chunk or 0),
        isa=isa_name or isa(),
    )
    return result.astype(call.q.dtype)


def logit_stats(logits: Array, num_rows: Array, *, isa_name: str | None = None) -> tuple[Array, Array, Array]:
    """The statistics of logits that sampling needs. A row's bits do not depend on batch composition.

    Args:
        logits: f32[row, vocab]
        num_rows: i32[], rows in use; the others get 0, 1 and 0.
    Returns: the largest logit f32[row]; the sum of e^(logit - largest) f32[row], NaN where a logit is NaN or +inf and
        0 where all are -inf; and the first index of the largest i32[row].
    """
    rows = logits.shape[0]
    results = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)]
    call = jax.ffi.ffi_call("levanter_infer_logit_stats", results, vmap_method="sequential")
    peak, total, best = call(logits, num_rows.astype(jnp.int32), isa=isa_name or isa())
    return peak, total, best


def changed_logits(logits: Array, changes: LogitChanges, num_rows: Array, *, isa_name: str | None = None) -> Array:
    """`Backend.changed_logits`. A row's bits do not depend on the others; rows without changes are not written."""
    call = jax.ffi.ffi_call(
        "levanter_infer_changed_logits", jax.ShapeDtypeStruct(logits.shape, jnp.float32), vmap_method="sequential"
    )
    masked, changed = changes.masked.astype(jnp.int32), changes.changed.astype(jnp.int32)
    changes = changes._replace(masked=masked, changed=changed)
    return call(logits, num_rows.astype(jnp.int32), *changes, isa=isa_name or isa())


def masked_best(
    logits: Array, masks: Array, masked: Array, num_rows: Array, *, isa_name: str | None = None
) -> tuple[Array, Array]:
    """The largest logit that each row's mask allows, and the first token that has it.

    Args:
        masks: u32[row, word]; bit b of word w is of token b * words + w, and words are a multiple of 128.
        masked: bool[row], the rows that have a mask; the others are looked at as a whole.
        num_rows: i32[]
    Returns: f32[row], -inf where the mask allows no other; i32[row]. NaN is passed over. Rows from `num_rows` on get 0
        and 0.
    """
    rows = logits.shape[0]
    results = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.int32)]
    call = jax.ffi.ffi_call("levanter_infer_masked_best", results, vmap_method="sequential")
    peak, best = call(logits, num_rows.astype(jnp.int32), masks, masked.astype(jnp.int32), isa=isa_name or isa())
    return peak, best


def likeliest(logits: Array, counts: Array, most: int, *, isa_name: str | None = None) -> tuple[Array, Array]:
    """`Backend.likeliest`. NaN is passed over; columns beyond a row's count hold 0."""
    results = [jax.ShapeDtypeStruct((logits.shape[0], most), dtype) for dtype in (jnp.float32, jnp.int32)]
    call = jax.ffi.ffi_call("levanter_infer_likeliest", results, vmap_method="sequential")
    values, tokens = call(logits, counts.astype(jnp.int32), isa=isa_name or isa())
    return values, tokens


def thresholds(logits: Array, rules: DrawRules, *, isa_name: str | None = None) -> Array:
    """`RowKernels.thresholds`: bisection, bit by bit, among the logits from the k-th largest of all groups' largest up.

    For top_p alone these are the logits from the 256th up, and all of the row where they weigh less than `top_p`. A
    mass is a sum in another order than XLA's code has, so that a token at which it reaches `top_p` to within rounding
    may pass one way and not the other.
    """
    call = jax.ffi.ffi_call(
        "levanter_infer_thresholds", jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32), vmap_method="sequential"
    )
    of_rows = rules.peak, rules.inverse, rules.top_k, rules.top_p
    return call(logits, *of_rows, floor=np.float32(MIN_EXPONENT), isa=isa_name or isa())


def draw(
    logits: Array,
    rules: DrawRules,
    threshold: Array,
    key: DrawKey,
    sizes: Sequence[int],
    *,
    isa_name: str | None = None,
) -> tuple[Array, Array]:
    """`RowKernels.draw`."""
    rows = logits.shape[0]
    results = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32)]
    call = jax.ffi.ffi_call("levanter_infer_draw", results, vmap_method="sequential")
    of_rows = rules.peak, rules.inverse, rules.floor, threshold, rules.draws
    token, logprob = call(logits, *of_rows, *key, sizes=np.asarray(sizes, np.int64), isa=isa_name or isa())
    return token, logprob


def read(memory: np.ndarray, times: int, threads: int, *, isa_name: str | None = None) -> None:
    """Read an array `times` times with so many threads, as fast as they can: for measurements of memory.

    Args:
        memory: contiguous; its size is a multiple of `READ_STEP` bytes.
        isa_name: an instruction set that the processor has; by default the widest.
    Raises: ValueError if the kernels were not built.
    """
    assert memory.flags.c_contiguous and memory.nbytes % READ_STEP == 0, "it is read in whole steps"
    call = _library().levanter_infer_read
    call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
    call((isa_name or isa()).encode(), memory.ctypes.data, memory.nbytes, times, threads)


def multiply_adds(times: int, threads: int, *, isa_name: str | None = None) -> int:
    """Multiply and add numbers in registers with so many threads: for measurements of an instruction set's peak rate,
    with the instructions that the matmuls use for the narrowest weights.

    Returns: the number of floating-point operations.
    Raises: ValueError if the kernels were not built.
    """
    call, seen = _library().levanter_infer_multiply_adds, ctypes.c_float()
    call.argtypes, call.restype = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p], ctypes.c_int64
    return call((isa_name or isa()).encode(), times, threads, ctypes.byref(seen))
