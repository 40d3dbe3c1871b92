"""Peak memory of a process that runs a model, and the waste of pages on mixes of lengths.

The peak is measured in a process of its own, which loads a checkpoint and samples: once with an empty compile cache,
once with a filled one. The mixes read the tables after every step. Allocation does not depend on the model, so there a
model of one narrow layer replaces it; bytes are those of the requested shape.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.bench.report import add_plot_argument, digest, draw, emit, measured, provenance
from levanter_infer.bench.workload import (
    add_model_arguments,
    count,
    model_config,
    model_sizes,
    names,
    random_model,
    random_prompts,
    round_up,
    token_ids,
)
from levanter_infer.cache.page_math import pages_for
from levanter_infer.checkpoints.load import open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.memory_audit import MemoryAudit, audit
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.runtime.memory import peak_bytes, process_bytes

STAND_IN = dict(hidden=16, layers=1, heads=1, kv_heads=1, mlp=16, vocab=64)
_PEAK_ALLOWANCE = 400 * 10**6
"""Allowed bytes of a process beyond weights and pool."""
_MAX_OVERHEAD = 0.05


@dataclasses.dataclass(frozen=True)
class Mix:
    """A mix of requests, given by the lengths of their prompts."""

    prompt_lens: tuple[int, ...]
    max_seqs: int
    n: int = 1
    in_turn: bool = False
    """Each request starts when the one before has ended."""


def mixes(output: int) -> dict[str, Mix]:
    """The mixes by name."""
    rng = np.random.default_rng(0)
    growing = tuple(1024 * 2**i - output for i in range(6))
    return {
        "lengths": Mix(tuple(range(500, 8001, 500)), max_seqs=16),
        "chat": Mix(growing, max_seqs=1, in_turn=True),
        "random": Mix(tuple(rng.choice(np.arange(256, 4097, 256), 32).tolist()), max_seqs=16),
        "short": Mix(tuple(rng.integers(32, 129, 64).tolist()), max_seqs=32),
        "samples": Mix((1000, 1111, 1222, 1333), max_seqs=32, n=8),
    }


CASES = ("peak", *mixes(1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=names(CASES), default=",".join(CASES), help=f"of {', '.join(CASES)}; default all"
    )
    parser.add_argument("--page-size", type=count, default=16)
    parser.add_argument("--batch", type=count, default=8, help="sequences of the peak case; default 8")
    parser.add_argument("--prompt", type=count, default=128, help="prompt tokens of the peak case; default 128")
    parser.add_argument("--output", type=count, default=32, help="generated tokens; default 32")
    add_plot_argument(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per case; the figure shows live and reserved bytes of the mixes, step by step."""
    # The peak comes first: its processes can use the device only while this one has not initialised it.
    peaks = list(peak_cases(args)) if "peak" in args.cases else []
    about = provenance()
    for case in peaks:
        emit({"bench": "memory", **case, **about})
    curves = {}
    for name, mix in mixes(args.output).items():
        if name in args.cases:
            case, curve = mix_case(mix, args)
            emit({"bench": "memory", "case": name, **case, **about})
            curves |= {f"{name}, {what}": (range(len(values)), values) for what, values in curve.items()}
    draw(args.plot, curves, title=f"K/V in use, pages of {args.page_size}", x="step", y="MB")


# The peak


def peak_cases(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One case with an empty compile cache, one with the cache that the first has filled."""
    with tempfile.TemporaryDirectory() as directory:
        _in_new_process(_save_random_model, model_sizes(args), args.dtype, directory)
        for start in ("cold", "cached"):
            yield {"case": "peak", "start": start, **_in_new_process(_run_checkpoint, directory, args)}


def _in_new_process(function: Callable, *arguments):
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _save_random_model(sizes: dict[str, int], dtype: str, directory: str) -> None:
    save_model(random_model(sizes, dtype), directory)


def _run_checkpoint(directory: str, args: argparse.Namespace) -> dict[str, object]:
    jax.config.update("jax_compilation_cache_dir", str(Path(directory) / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.block_until_ready(jnp.zeros(1))
    before, _ = process_bytes()
    on_device = jax.local_devices()[0].memory_stats() is not None
    so_far = {}

    def note(phase: str) -> None:
        so_far[phase] = peak_bytes() - (0 if on_device else before)

    model = open_model(resolve_source(directory))
    longest = round_up(args.prompt + args.output, args.page_size)
    config = EngineConfig(max_seqs=args.batch, max_seq_len=longest, page_size=args.page_size)
    engine = InferenceEngine(model, config=config)
    note("load")
    engine.warmup()
    note("compile")
    prompts = random_prompts(engine.model.config.vocab_size, [args.prompt] * args.batch, seed=0)
    outputs = engine.generate([_request(prompt, args.output) for prompt in prompts])
    note("run")
    stats = engine.stats()
    limit = stats["weights_bytes"] + stats["pool_bytes"] + _PEAK_ALLOWANCE
    return {
        **measured(peak_memory_bytes=so_far["run"]),
        "counted": "on the device" if on_device else "beyond the process before it loads the model",
        "limit_bytes": limit,
        "within_limit": so_far["run"] <= limit,
        "weights_bytes": stats["weights_bytes"],
        "pool_bytes": stats["pool_bytes"],
        "table_bytes": engine.memory()["table_bytes"],
        "peak_after_bytes": so_far,
        "resident_at_the_end_bytes": process_bytes()[0] - before,
        "compile_s": round(stats["compile_s"], 1),
        "batch": args.batch,
        "prompt": args.prompt,
        "output": args.output,
        "config": {"model": model_sizes(args), "dtype": args.dtype, "engine": engine.describe()},
        "workload_hash": digest([prompts, args.output]),
        "output_hash": digest(token_ids(outputs)),
    }


# The mixes


def mix_case(mix: Mix, args: argparse.Namespace) -> tuple[dict[str, object], dict[str, list[float]]]:
    """Run a mix one step a round.

    Returns: the case, and megabytes live and reserved after every step.
    """
    config, itemsize = model_config(model_sizes(args)), jnp.dtype(args.dtype).itemsize
    page_bytes = args.page_size * config.num_layers * 2 * config.num_kv_heads * config.head_dim * itemsize
    engine = mix_engine(mix, args)
    audits = list(audits_of(engine, mix, args.output))
    case = {
        "stand_in": "the tables are those of a model of one narrow layer, the bytes those of the shape",
        "prompts": len(mix.prompt_lens),
        "samples": mix.n,
        "prompt_tokens": sum(mix.prompt_lens),
        "output": args.output,
        "config": {
            "model": model_sizes(args),
            "dtype": args.dtype,
            "engine": {name: engine.describe()[name] for name in ("page_size", "max_pages", "max_seqs", "max_seq_len")},
        },
        **summary(audits, engine, page_bytes, config.num_parameters * itemsize),
        "workload_hash": digest([dataclasses.asdict(mix), args.output]),
        "output_hash": digest([each.pages_in_use for each in audits]),
    }
    token_mb = page_bytes / args.page_size / 2**20
    live = [each.live_tokens * token_mb for each in audits]
    reserved = [(each.live_tokens + each.wasted_tokens) * token_mb for each in audits]
    return case, {"live": live, "reserved": reserved}


def mix_engine(mix: Mix, args: argparse.Namespace) -> InferenceEngine:
    """An engine whose pool holds exactly the sequences that may run at once."""
    final = sorted((length + args.output for length in mix.prompt_lens), reverse=True)
    at_once = [*itertools.chain(*([length] * mix.n for length in final))][: mix.max_seqs]
    longest = round_up(final[0], args.page_size)
    return InferenceEngine(
        random_model(STAND_IN, args.dtype, max_positions=longest),
        config=EngineConfig(
            max_seqs=mix.max_seqs,
            max_seq_len=longest,
            page_size=args.page_size,
            # One more each: a sequence starts only if its next page is free too.
            max_pages=sum(pages_for(length, args.page_size) + 1 for length in at_once),
            max_step_tokens=4096,  # prompts of all sequences are computed before the first of them has ended
            max_round_steps=1,
            prefix_cache=False,
        ),
    )


def audits_of(engine: InferenceEngine, mix: Mix, output: int) -> Iterator[MemoryAudit]:
    """Memory after every step of the mix."""
    prompts = random_prompts(STAND_IN["vocab"], list(mix.prompt_lens), seed=0)
    requests = [_request(prompt, output, mix.n) for prompt in prompts]
    for together in [[request] for request in requests] if mix.in_turn else [requests]:
        states = [engine.submit(request) for request in together]
        while not all(state.is_done for state in states):
            engine.step_round()
            yield audit(engine.state.decode)
        engine.drain()


def summary(
    audits: list[MemoryAudit], engine: InferenceEngine, page_bytes: int, weights_bytes: int
) -> dict[str, object]:
    """Figures at the moment when most pages were in use, and over the whole run."""
    size = engine.shapes.page_size
    top = max(audits, key=lambda each: each.pages_in_use)
    slack = engine.shapes.num_pages * size / 100

    def allowed(each: MemoryAudit) -> float:
        """Half a page for each sequence that holds pages, and 1 % of the pool."""
        return len(each.slot_pages) * size / 2 + slack

    held = [each for each in audits if each.pages_in_use]
    at_top = top.metrics(page_bytes=[page_bytes], weights_bytes=weights_bytes)
    one_by_one = sum(top.slot_pages.values())
    return {
        **measured(
            **{name: at_top[name] for name in ("reserved_bytes", "live_bytes", "wasted_bytes", "table_bytes")},
            memory_overhead=round(top.overhead(page_bytes=[page_bytes], weights_bytes=weights_bytes), 4),
        ),
        "weights_bytes": weights_bytes,
        "pool_bytes": engine.shapes.num_pages * page_bytes,
        "sequences": len(top.slot_pages),
        "overhead_limit": _MAX_OVERHEAD,
        "wasted_limit_bytes": int(allowed(top) * page_bytes / size),
        "within_limits": bool(
            top.overhead(page_bytes=[page_bytes], weights_bytes=weights_bytes) < _MAX_OVERHEAD
            and top.wasted_tokens <= allowed(top)
        ),
        "audits": len(audits),
        "audits_within_wasted_limit": sum(each.wasted_tokens <= allowed(each) for each in audits),
        "largest_overhead": round(
            max(each.overhead(page_bytes=[page_bytes], weights_bytes=weights_bytes) for each in audits), 4
        ),
        "wasted_percent": round(
            100 * sum(each.wasted_tokens for each in held) / sum(each.pages_in_use * size for each in held), 2
        ),
        "unshared_bytes": one_by_one * page_bytes,
        "contiguous_bytes": len(top.slot_pages) * engine.shapes.max_seq_len // size * page_bytes,
        "preemptions": engine.stats()["preemptions"],
    }


def _request(prompt: list[int], output: int, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, n=n, seed=0)
    return Request(prompt_token_ids=prompt, sampling=sampling)
