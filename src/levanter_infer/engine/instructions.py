"""Choice of the instruction set of the C++ kernels for CPUs: the fastest on this processor, found by measuring it.

What a processor has and what is fast on it are two things: the 16-bit dot products of AVX512-BF16 have twice the rate
of float32 on some cores and half of it on others (docs/decisions/0028). A row's bits must not depend on how many rows
there are, so one instruction set computes everything that an engine does.
"""

import dataclasses
import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.decode.programs import compile_program
from levanter_infer.kernels.call import LinearCall
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu import huge_pages
from levanter_infer.policies import CpuIsa
from levanter_infer.runtime.processor import processor_name
from levanter_infer.runtime.records import keep_record, read_record

logger = logging.getLogger(__name__)

ROWS = (1, 8, 32, 256)
"""Rows of the matmuls that are measured: decoding of one, a few and many sequences, and a prompt chunk."""
TIE = 1.03
"""Times whose quotient is less than this are equal."""
_IN_TIES = ("avx512", "avx2", "amx_bf16", "avx512_bf16", "generic")
"""Preference among equally fast ones: no rounding of inputs first, then wider vectors."""
_INPUTS, _BYTES = 2048, 64 * 2**20
"""Inputs of the measured matmuls, and bytes of their weights; a prompt chunk takes an eighth of them."""
_TURNS, _MIN_TURNS, _SECONDS = 11, 3, 0.5
"""Measurements of each, in turn; fewer where that takes longer than so many seconds."""

Times = Mapping[str, Sequence[float]]
"""Milliseconds of the matmuls of each of `ROWS`, by instruction set."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The instruction set of an engine, and why."""

    isa: str
    times: Times | None = None
    """Measured times; None: it was asked for, or there is no other."""

    @property
    def reason(self) -> str:
        """The reason of the choice, in words."""
        if self.times is None:
            return "as configured, or the only one"
        shown = "; ".join(f"{isa} {', '.join(f'{t:.3g}' for t in times)}" for isa, times in self.times.items())
        return f"measured: ms of matmuls of {', '.join(map(str, ROWS))} rows: {shown}"


def usable_isas(dtype=None) -> tuple[str, ...]:
    """The instruction sets that this processor and the built kernels have, the widest first.

    Args:
        dtype: dtype of the weights; instruction sets without matmuls of their own for it are left out, because they use
            those of the next one.
    Raises: ValueError if the kernels are not available.
    """
    _, *names = CpuIsa
    usable = names[names.index(CpuIsa(cpu.isa())) :]
    in_pairs = dtype is None or jnp.dtype(dtype) == jnp.bfloat16
    return tuple(name.value for name in usable if in_pairs or name not in (CpuIsa.AMX_BF16, CpuIsa.AVX512_BF16))


def choose(wanted: str, dtype) -> Choice:
    """The instruction set for matmuls with weights of `dtype`.

    Args:
        wanted: an instruction set, or auto: the fastest, as it was measured once for this processor and build.
    Raises: ValueError if the processor does not have it, or it has no matmuls for `dtype`.
    """
    usable = usable_isas(dtype)
    if wanted != CpuIsa.AUTO:
        if wanted not in usable:
            raise ValueError(
                f'engine.cpu_isa="{wanted}" is not possible for weights of {jnp.dtype(dtype)}: the kernels have '
                f"{', '.join(usable)} on this processor; use one of them, or auto"
            )
        return Choice(wanted)
    candidates = usable[:-1] or usable  # generic is for processors without the others
    if len(candidates) == 1:
        return Choice(candidates[0])
    return _measured(jnp.dtype(dtype).name, candidates)


@functools.cache
def _measured(dtype: str, candidates: tuple[str, ...]) -> Choice:
    return from_record(dtype, candidates, measure)


def from_record(dtype: str, candidates: Sequence[str], measure: Callable[[str, Sequence[str]], Times]) -> Choice:
    """The fastest of `candidates` by what was measured on this processor before, or by `measure`, whose times are
    kept."""
    about = {"processor": processor_name(), "kernels": _kernels_sha256(), "dtype": dtype, "rows": list(ROWS)}
    name = f"cpu_isa-{dtype}-{hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:16]}.json"
    times = _valid(read_record(name), about, candidates)
    if times is None:
        measured = {**about, "ms": measure(dtype, candidates)}
        # Of processes that measure at the same time, all go by the first that has kept its times.
        kept = keep_record(name, measured, lambda record: _valid(record, about, candidates) is not None)
        times = _valid(kept, about, candidates) or measured["ms"]
    choice = Choice(fastest(times), times)
    logger.info("engine.cpu_isa=auto is %s for %s: %s", choice.isa, dtype, choice.reason)
    return choice


def fastest(times: Times) -> str:
    """The instruction set that takes the least time, as the geometric mean over all numbers of rows."""
    means = {isa: math.exp(sum(map(math.log, each)) / len(each)) for isa, each in times.items()}
    least = min(means.values())
    return min((isa for isa in means if means[isa] < least * TIE), key=_IN_TIES.index)


def measure(dtype: str, candidates: Sequence[str]) -> dict[str, list[float]]:
    """Milliseconds of matmuls of each of `ROWS`: the least of several, all candidates in turn."""
    with ThreadPoolExecutor(1) as pool:  # whatever the caller is tracing, another thread traces nothing
        return pool.submit(_measure, dtype, candidates).result()


def _measure(dtype: str, candidates: Sequence[str]) -> dict[str, list[float]]:
    weights = huge_pages.empty((_BYTES // jnp.dtype(dtype).itemsize,), np.float32 if dtype == "float32" else np.uint16)
    weights[:] = 0.01 if dtype == "float32" else 0x3C24
    cells = [_cell(isa, weights, rows) for rows in ROWS for isa in candidates]
    best = [math.inf] * len(cells)
    begin = time.perf_counter()
    for turn in range(_TURNS):
        if turn >= _MIN_TURNS and time.perf_counter() - begin > _SECONDS:
            break
        for i, cell in enumerate(cells):
            start = time.perf_counter()
            jax.block_until_ready(cell())
            best[i] = min(best[i], time.perf_counter() - start)
    ms = [round(1e3 * seconds, 4) for seconds in best]
    return {isa: ms[i :: len(candidates)] for i, isa in enumerate(candidates)}


def _cell(isa: str, weights: np.ndarray, rows: int) -> Callable[[], Any]:
    """A call that multiplies `rows` rows with the weights, by the kernels of one instruction set."""
    decodes = rows <= 32
    part, width = weights if decodes else weights[: weights.size // 8], cpu.panel_width(isa)
    panels = jax.device_put(part.reshape(1, -1, _INPUTS * width))
    x = jax.device_put(np.full((rows, _INPUTS), 0.01, np.float32))
    outputs = [part.size // _INPUTS]

    def matmul(x, panels):
        return cpu.stacked_matmul(LinearCall(x, [panels], outputs, jnp.int32(0)), isa_name=isa)

    program = compile_program(matmul).lower(x, panels).compile()
    return functools.partial(program, x, panels)


def _valid(record: Any, about: Mapping[str, Any], candidates: Sequence[str]) -> Times | None:
    """The times in a record of this machine; None if it is none."""
    if not isinstance(record, dict) or any(record.get(key) != value for key, value in about.items()):
        return None
    times = record.get("ms")
    if not isinstance(times, dict) or set(times) != set(candidates):
        return None
    for each in times.values():
        if not isinstance(each, list) or len(each) != len(ROWS):
            return None
        if not all(type(ms) in (int, float) and 0 < ms < math.inf for ms in each):
            return None
    return {isa: times[isa] for isa in candidates}


@functools.cache
def _kernels_sha256() -> str:
    with open(cpu.path(), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
