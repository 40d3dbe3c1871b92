"""`RowAudit`: what XLA computes of a step's tokens together, so that the bits of one may depend on the others.

`numerics: batch_invariant` promises bits that do not. Kernels keep that promise, and so does what is computed row by
row (`kernels.loops.one_by_one`). The rest XLA rounds by the shapes of the step: it chooses the order of sums, computes
vectors by one formula and the numbers at their ends by another, and may multiply and add with one rounding. A model is
served in that mode if its program has nothing of the kind, which is read from the program and not from a list.

What is computed row by row has the same text in every program, and LLVM still compiles every copy by itself, with
vectors of other sizes. Where a row has arithmetic that vectors may round otherwise, the program is compiled without.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn

from levanter_infer.axes import ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.cache import Cache
from levanter_infer.cache.memory import PoolSizes
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.scopes import BY_ROWS
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel

_MOVED = {
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice",
    "dynamic_update_slice", "expand_dims", "gather", "neg", "optimization_barrier", "pad", "reshape", "rev", "select_n",
    "slice", "split", "squeeze", "stack", "transpose",
}  # fmt: skip
"""Operations that only move, convert or negate numbers: XLA sees through them when it merges operations."""
_EXACT = {"abs", "clamp", "div", "ffi_call", "floor", "iota", "max", "min", "round", "scatter", "sign", "top_k"}
"""Operations with one right result for every number, or of a kernel."""
_SUMS = {"add", "sub", "add_any"}
"""Operations that are exact too, unless a number was multiplied before: XLA may round both operations together."""
_ROTATIONS = {"sin", "cos"}
"""Functions for which LLVM calls the C library, number by number, in a vector too."""
_TOKENS, _ROWS, _PAGE = 16, 4, 4


@dataclasses.dataclass(frozen=True)
class RowAudit:
    """Operations of the paged forward of a model whose rounding is XLA's."""

    joint: str | None
    """The first operation that it computes for all tokens together, with its place in the source; None: there is
    none."""
    by_row: str | None
    """The first one that it computes row by row; None: kernels compute all of them."""


@functools.lru_cache(maxsize=16)
def audit_rows(
    config: DecoderConfig, dtype, matmul: Backend, attention: Backend, *, quantizes: bool = False
) -> RowAudit:
    """Trace the paged forward and look for operations whose rounding may depend on how they are compiled.

    Args:
        dtype: of weights and pages.
        matmul, attention: the backends, with `rows_apart`.
        quantizes: whether weights are stored as int8.
    """
    found: dict[bool, JaxprEqn] = {}
    for by_row, equation in _rounded(_traced(config, dtype, matmul, attention, quantizes), set()):
        found.setdefault(by_row, equation)
    joint, by_row = (described(found[each]) if each in found else None for each in (False, True))
    return RowAudit(joint, by_row)


def library_matmul(
    config: DecoderConfig, dtype, matmul: Backend, attention: Backend, *, quantizes: bool = False
) -> str | None:
    """The first matmul of the paged forward that XLA leaves to a library or its own code, with its place in the source;
    None: kernels compute all. Args: as in `audit_rows`."""
    return next(map(described, _matmuls(_traced(config, dtype, matmul, attention, quantizes))), None)


def _matmuls(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            yield equation
        elif name != "pallas_call":
            for program in _programs(equation.params.values()):
                yield from _matmuls(program)


def _traced(config: DecoderConfig, dtype, matmul: Backend, attention: Backend, quantizes: bool) -> Jaxpr:
    given = DecoderModel.types(config, dtype)
    types = jax.eval_shape(lambda model: model.prepare(matmul, quantizes=quantizes), given)
    sizes = PoolSizes(_TOKENS, _PAGE, num_slots=_ROWS, dtype=jnp.dtype(dtype), backend=attention)
    cache = jax.eval_shape(lambda: Cache.init(config.pools, sizes))
    return jax.make_jaxpr(_forward)(types, cache, jax.ShapeDtypeStruct((_TOKENS,), jnp.int32)).jaxpr


def _forward(model: DecoderModel, cache: Cache, some: Array):
    """Logits of a step, whose tokens and tables do not matter."""

    def of_rows(axis: str, count: int) -> NamedArray:
        return hax.named(some[:count], (axis,))

    batch = PageBatchInfo(
        tokens=of_rows(TOKEN, _TOKENS),
        positions=of_rows(TOKEN, _TOKENS),
        slot_ids=of_rows(ROW, _ROWS),
        cu_q_lens=of_rows(ROW_BOUND, _ROWS + 1),
        seq_lens=of_rows(ROW, _ROWS),
        page_indices=hax.named(some.reshape(_ROWS, -1), (ROW, SEQ_PAGE)),
        num_seqs=hax.named(some[0], ()),
        new_token_dests=of_rows(TOKEN, _TOKENS),
        page_size=_PAGE,
    )
    # Sequences that need no choice of keys: with one, no engine is batch invariant (`Backend.why_not_invariant`)
    spec = AttentionSpec(max_seq_len=min(_TOKENS, model.config.num_chosen or _TOKENS))
    hidden, cache = model.hidden(batch, cache, spec)
    return model.logits(hidden.rename({TOKEN: ROW}), batch.num_seqs.array).array, cache


def _rounded(jaxpr: Jaxpr, multiplied: set, in_row: bool = False) -> Iterator[tuple[bool, JaxprEqn]]:
    """Such operations of a program, and whether each is computed row by row.

    Args:
        multiplied: variables of the program that were multiplied last, which are added to.
        in_row: whether the program is computed row by row itself.
    """
    for equation in jaxpr.eqns:
        name, results = equation.primitive.name, equation.outvars
        found = [each for each in equation.invars if not hasattr(each, "val") and each in multiplied]
        by_row = in_row or BY_ROWS in str(equation.source_info.name_stack)
        inner = list(_programs(equation.params.values()))
        if inner:
            is_call = len(inner) == 1 and len(inner[0].invars) == len(equation.invars) and name not in ("while", "scan")
            own = {a for a, b in zip(inner[0].invars, equation.invars, strict=True) if b in found} if is_call else set()
            for program in inner:
                yield from _rounded(program, own, by_row)
            if is_call:
                multiplied.update(b for a, b in zip(inner[0].outvars, results, strict=True) if a in own)
        elif not any(jnp.issubdtype(_dtype(each), jnp.floating) for each in results):
            continue
        elif name == "mul" or (name in _MOVED and found):
            multiplied.update(results)
        elif name in _MOVED | _EXACT or (name in _SUMS and not found) or (by_row and name in _ROTATIONS):
            continue
        else:
            yield by_row, equation


def described(equation: JaxprEqn) -> str:
    """An operation that `_rounded` found, with its place in the source."""
    name = equation.primitive.name
    return f"{name}{' of what was multiplied' if name in _SUMS else ''} ({_place(equation)})"


def _programs(values) -> Iterator[Jaxpr]:
    """The programs among the parameters of an operation."""
    for value in values:
        program = getattr(value, "jaxpr", value)  # of a closed one, whose class has no public name in jax 0.12
        if isinstance(program, Jaxpr):
            yield program
        elif isinstance(value, tuple | list):
            yield from _programs(value)


def _dtype(variable):
    return getattr(variable.aval, "dtype", jnp.dtype(bool))


def _place(equation) -> str:
    """The line of this package that an operation comes from."""
    home = Path(__file__).parents[1]
    for frame in equation.source_info.traceback.frames if equation.source_info.traceback else ():
        if Path(frame.file_name).is_relative_to(home):
            return f"{Path(frame.file_name).relative_to(home)}:{frame.line_num}"
    return "in no line of this package"
