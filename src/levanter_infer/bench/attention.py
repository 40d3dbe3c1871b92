"""The attention kernels alone: gathering pages, writing keys and values, copying pages, attending; per layer.

Every time is that of one layer. The pages of each sequence are scattered over the pool, which holds nothing else.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from levanter_infer.axes import HEAD_SIZE, KV_HEADS, ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.bench.machine import Peaks, device_peaks
from levanter_infer.bench.report import (
    add_plot_argument,
    digest,
    draw,
    emit,
    measured,
    provenance,
    summarize,
    utilisation,
)
from levanter_infer.bench.workload import amount, count, names, numbers
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.decode.programs import compile_program
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import AttentionCall, PoolShape
from levanter_infer.kernels.registry import BACKENDS, IMPLEMENTATIONS, make_backend, platform_of
from levanter_infer.kernels.rules import ScoreRules

LAYERS = 2
"""Layers of the pool, which a measurement visits in turn: none is in the processor's cache because it was just read."""
PHASES = ("decode", "prefill")


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` sequences of `context` stored tokens, of which the last `queries` attend."""

    phase: str
    batch: int
    context: int
    queries: int
    page_size: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def pages_each(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def pages_touched(self) -> int:
        """Pages that are read."""
        return self.batch * self.pages_each

    @property
    def paged_kv_bytes_read(self) -> int:
        """Bytes of live keys and values: the least that a kernel has to read."""
        return self.batch * self.context * 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Operations of both matmuls, over the keys that each query attends to."""
        seen = sum(range(self.context - self.queries + 1, self.context + 1))
        return 4 * self.batch * seen * self.heads * self.head_dim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--phases", type=names(PHASES), default=",".join(PHASES), help="of decode, prefill; default both"
    )
    parser.add_argument("--batch", type=numbers, default=(1, 8, 32), help="sequences; default 1,8,32")
    parser.add_argument("--context", type=numbers, default=(128, 1024, 8192), help="tokens; default 128,1024,8192")
    parser.add_argument("--page-size", type=numbers, default=(16,), help="default 16")
    parser.add_argument("--chunk", type=count, default=256, help="prompt tokens of a step, in all; default 256")
    suited = ",".join(["xla", *(name for name in BACKENDS if _suits(name))])
    parser.add_argument("--impl", default=suited, help=f"of {', '.join(IMPLEMENTATIONS)}; default here {suited}")
    for name, size in (("heads", 9), ("kv-heads", 3), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=count, default=size, help=f"default {size}")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--milliseconds", type=amount, default=50, help="of one measurement, about; default 50")
    add_plot_argument(parser)


def _suits(implementation: str) -> bool:
    """Whether an implementation is for this device and available."""
    backend = BACKENDS[implementation]
    return backend.home == platform_of(jax.default_backend()) and backend.why_unavailable() is None


def run(args: argparse.Namespace) -> None:
    """Print one line per phase, batch, context, page size and implementation."""
    about, peaks = provenance(), device_peaks(args.dtype)
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for phase, batch, page_size, context in itertools.product(args.phases, args.batch, args.page_size, args.context):
        queries = 1 if phase == "decode" else min(args.chunk // batch, context)
        if phase == "prefill" and queries < 2:
            continue  # more sequences than tokens: each would decode
        case = Case(phase, batch, context, queries, page_size, args.heads, args.kv_heads, args.head_dim, args.dtype)
        clock = Clock(args.repeats, args.milliseconds)
        for line in measure(case, args.impl.split(","), clock, peaks):
            emit({"bench": "attention", **line, **about})
            x, y = curves.setdefault(f"{phase} {line['impl']} batch {batch} page {page_size}", ([], []))
            x.append(context)
            y.append(line["total_ms"]["median"])  # pyright: ignore[reportIndexIssue]
    draw(args.plot, curves, title="Attention of one layer", x="stored tokens per sequence", y="ms", log=True)


@dataclasses.dataclass(frozen=True)
class Clock:
    """Length and number of measurements."""

    repeats: int
    milliseconds: float

    def per_trip(self, function, first, *rest, donate: bool = False) -> tuple[dict[str, float | int], Any]:
        """Time one trip of `function(trips, first, *rest)`, which is compiled once for any number of trips.

        Args:
            donate: donate `first` to the result.
        Returns: milliseconds, and the result: of one trip, or with `donate` of all.
        """
        program = compile_program(function, donate=(1,) if donate else ())
        once = jax.block_until_ready(program(jnp.int32(1), first, *rest))
        given = once if donate else first

        def run(trips: int) -> None:
            nonlocal given
            result = jax.block_until_ready(program(jnp.int32(trips), given, *rest))
            given = result if donate else given

        one_turn = self.turns(run)
        return summarize([one_turn() for _ in range(self.repeats)], 5), given if donate else once

    def turns(self, run: Callable[[int], None]) -> Callable[[], float]:
        """A function that measures one turn of `run(trips)`, in milliseconds per trip."""

        def seconds(trips: int) -> float:
            start = time.perf_counter()
            run(trips)
            return time.perf_counter() - start

        trips = LAYERS
        for _ in range(2):  # the first estimate contains the launch
            trips = max(LAYERS, math.ceil(trips * self.milliseconds / 1e3 / max(seconds(trips), 1e-6)))
        return lambda: seconds(trips) / trips * 1e3


def measure(
    case: Case, implementations: list[str], clock: Clock, peaks: Peaks | None = None
) -> list[dict[str, object]]:
    """A line for each implementation; measurements that do not depend on it are made once and repeated in every line.

    Args:
        peaks: peak rates of the device; None leaves out the utilisations.
    """
    kv, batch, q, k, v = inputs(case)
    backends = {name: make_backend(name, jax.default_backend()) for name in implementations}
    attended = {
        name: clock.per_trip(functools.partial(attend, backend=backend), q, kv, batch)
        for name, backend in backends.items()
    }
    shared = {
        "gather_ms": clock.per_trip(gather, kv, batch)[0],
        "softmax_ms": clock.per_trip(attend_to_gathered, q, kv, batch)[0],
    }
    shared["kv_write_ms"], written = clock.per_trip(write, kv, batch, k, v, donate=True)
    copied, _ = clock.per_trip(copy, written, donate=True)
    lines = []
    for name, (total, output) in attended.items():
        seconds = total["median"] / 1e3
        bits = np.asarray(output.astype(jnp.float32)).view(np.uint32)
        lines.append(
            {
                "impl": name,
                **dataclasses.asdict(case),
                "config": {**dataclasses.asdict(case), "impl": name, "layers": LAYERS},
                **measured(**shared, pages_touched=case.pages_touched, paged_kv_bytes_read=case.paged_kv_bytes_read),
                "copy_page_ms": copied,
                "total_ms": total,
                "gb_per_s": round(case.paged_kv_bytes_read / seconds / 1e9, 3),
                "gflop_per_s": round(case.flops / seconds / 1e9, 3),
                **utilisation(case.paged_kv_bytes_read / seconds, case.flops / seconds, peaks),
                "workload_hash": digest(dataclasses.asdict(case)),
                "output_hash": digest(bits.tolist()),
            }
        )
    return lines


def inputs(
    case: Case, backend: Backend | None = None, layers: int = LAYERS
) -> tuple[KvPages, PageBatchInfo, jax.Array, NamedArray, NamedArray]:
    """A pool of random numbers, the batch, queries, and new keys and values of the batch's tokens."""
    rng = np.random.default_rng(0)
    num_pages, tokens = case.pages_touched, case.batch * case.queries
    dtype = jnp.dtype(case.dtype)
    backend = make_backend("xla", jax.default_backend()) if backend is None else backend
    kv = KvPages.init(PoolShape(layers, num_pages, case.page_size, case.kv_heads, case.head_dim, dtype), backend)
    values = rng.standard_normal(kv.pages.array.shape, dtype=np.float32).astype(dtype)
    stored = values.view(kv.pages.array.dtype)
    kv = dataclasses.replace(kv, pages=NamedArray(jax.device_put(stored), kv.pages.axes))

    def numbers_of(*shape: int) -> jax.Array:
        return jax.device_put(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    pages = rng.permutation(num_pages).astype(np.int32).reshape(case.batch, case.pages_each)
    row = np.repeat(np.arange(case.batch), case.queries)
    position = np.tile(np.arange(case.context - case.queries, case.context), case.batch)
    dests = pages[row, position // case.page_size] * case.page_size + position % case.page_size

    def i32(values, *axes: str) -> NamedArray:
        return hax.named(jax.device_put(np.asarray(values, np.int32)), axes)

    batch = PageBatchInfo(
        tokens=i32(np.zeros(tokens), TOKEN),
        positions=i32(position, TOKEN),
        slot_ids=i32(np.arange(case.batch), ROW),
        cu_q_lens=i32(np.arange(case.batch + 1) * case.queries, ROW_BOUND),
        seq_lens=i32(np.full(case.batch, case.context), ROW),
        page_indices=i32(pages, ROW, SEQ_PAGE),
        num_seqs=i32(case.batch),
        new_token_dests=i32(dests, TOKEN),
        page_size=case.page_size,
    )
    new = (tokens, case.kv_heads, case.head_dim)
    axes = (TOKEN, KV_HEADS, HEAD_SIZE)
    q = numbers_of(tokens, case.heads, case.head_dim)
    return kv, batch, q, hax.named(numbers_of(*new), axes), hax.named(numbers_of(*new), axes)


# The measured functions. Each takes the number of trips first, and each trip depends on the one before.


def attend(trips, q: jax.Array, kv: KvPages, batch: PageBatchInfo, *, backend: Backend) -> jax.Array:
    def body(trip, q):
        call = AttentionCall(
            q=q,
            kv_pages=kv.pages.array,
            layer=trip % LAYERS,
            page_indices=batch.page_indices.array,
            seq_lens=batch.seq_lens.array,
            cu_q_lens=batch.cu_q_lens.array,
            num_seqs=batch.num_seqs.array,
            rules=ScoreRules(scale=q.shape[2] ** -0.5),
            kv_dtype=kv.dtype,
            kv_heads=kv.num_kv_heads,
            page_size=kv.page_size,
        )
        return backend.attend(call)

    return jax.lax.fori_loop(0, trips, body, q)


def gathered_pages(kv: KvPages, batch: PageBatchInfo, layer) -> jax.Array:
    """[row, tokens, kv_pair, head_size]: the pages of each row, concatenated."""
    pages = kv.pages.array.at[layer, batch.page_indices.array].get(mode="clip")
    return pages.reshape(pages.shape[0], -1, *pages.shape[3:])


def gather(trips, kv: KvPages, batch: PageBatchInfo) -> jax.Array:
    """The gathered pages of the last trip. Page ids are rotated by one if the first number of the trip before was odd:
    the same work, which cannot start before that trip has ended."""
    indices = batch.page_indices

    def body(trip, last):
        turned = jnp.roll(indices.array, first_bit(last), axis=1)
        again = dataclasses.replace(batch, page_indices=NamedArray(turned, indices.axes))
        return gathered_pages(kv, again, trip % LAYERS)

    return jax.lax.fori_loop(0, trips, body, jnp.zeros_like(gathered_pages(kv, batch, 0)))


def first_bit(values: jax.Array) -> jax.Array:
    """i32[]: the last bit of the first of these numbers."""
    first = values.reshape(-1)[0]
    width = 8 * first.dtype.itemsize
    if not jnp.issubdtype(first.dtype, jnp.integer):
        first = jax.lax.bitcast_convert_type(first, jnp.dtype(f"uint{width}"))
    return (first & jnp.ones((), first.dtype)).astype(jnp.int32)


def attend_to_gathered(trips, q: jax.Array, kv: KvPages, batch: PageBatchInfo) -> jax.Array:
    """Dense attention to contiguous keys and values: the work that is left after gathering."""
    bits = gathered_pages(kv, batch, 0)
    stored = bits if bits.dtype == kv.dtype else jax.lax.bitcast_convert_type(bits, kv.dtype)
    rows, tokens, pairs, head_dim = stored.shape
    queries = q.shape[0] // rows
    seen = jnp.arange(tokens)[None, :] <= batch.positions.array[:queries, None]
    shape = (rows, queries, pairs // 2, -1, head_dim)

    def body(_, q):
        scores = jnp.einsum(
            "rqhgd,rkhd->rhgqk", q.reshape(shape), stored[:, :, 0::2], preferred_element_type=jnp.float32
        )
        weights = jax.nn.softmax(jnp.where(seen, scores * head_dim**-0.5, -1e30), axis=-1).astype(q.dtype)
        out = jnp.einsum("rhgqk,rkhd->rqhgd", weights, stored[:, :, 1::2], preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype)

    return jax.lax.fori_loop(0, trips, body, q)


def write(trips, kv: KvPages, batch: PageBatchInfo, k: NamedArray, v: NamedArray) -> KvPages:
    return jax.lax.fori_loop(0, trips, lambda trip, kv: kv.write(trip % LAYERS, batch, k, v), kv)


def copy(trips, kv: KvPages) -> KvPages:
    """Copy one page of every layer, as a fork does; a trip counts as all layers."""

    def body(trip, kv):
        source = jnp.reshape(trip % kv.num_pages, (1,)).astype(jnp.int32)
        return kv.copy(source, (source + 1) % kv.num_pages)

    return jax.lax.fori_loop(0, trips, body, kv)
