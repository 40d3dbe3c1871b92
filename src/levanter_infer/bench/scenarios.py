"""The scenarios of the PagedAttention / FlexAttention study: long contexts, mixed lengths, growing chats, with and
without a cache.

Every size has a flag; the defaults are the study's, and take long on a CPU.
"""

import argparse
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.bench.attention import Case, Clock, inputs
from levanter_infer.bench.machine import device_peaks
from levanter_infer.bench.progress import Progress, record
from levanter_infer.bench.report import (
    add_plot_argument,
    digest,
    draw,
    emit,
    exponent,
    growing_part,
    measured,
    provenance,
    summarize,
    utilisation,
)
from levanter_infer.bench.workload import (
    add_model_arguments,
    count,
    model_sizes,
    names,
    numbers,
    random_model,
    random_prompts,
    round_up,
)
from levanter_infer.cache.cache import Cache
from levanter_infer.decode.programs import compile_program
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.uncached import next_token
from levanter_infer.runtime.memory import peak_bytes

_PAGE = 16
_UNCACHED_SHAPES = 8
"""The forward without a cache is compiled for this many lengths; a sequence is padded to the next."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ",".join(CASES)
    parser.add_argument("--cases", type=names(CASES), default=known, help=f"of {known}; default all")
    add = parser.add_argument
    add("--tokens", type=count, default=100_000, help="single: prompt and generated tokens; default 100000")
    add("--generate", type=count, default=256, help="single, mixed, random, chat: tokens each generates; default 256")
    add("--mixed", type=numbers, default=tuple(range(500, 8001, 500)), help="prompt tokens; default 500,1000 … 8000")
    add("--random", type=numbers, default=tuple(range(256, 4097, 256)), help="lengths to draw from; default 256 … 4096")
    add("--chat", type=numbers, default=tuple(2**i for i in range(10, 16)), help="tokens of the history at each turn")
    add("--lengths", type=numbers, default=tuple(2**i for i in range(7, 14)), help="contexts; default 128 … 8192")
    add("--uncached", type=numbers, default=tuple(2**i for i in range(7, 12)), help="the same without a cache; … 2048")
    add("--cache-tokens", type=count, default=128, help="cache: tokens generated both ways; default 128")
    add("--long", type=count, default=4096, help="long: tokens that each of --batch sequences generates; default 4096")
    add("--batch", type=count, default=8, help="long, layer: sequences; default 8")
    add("--layer-context", type=numbers, default=(128, 1024, 4096), help="layer: stored tokens; default 128,1024,4096")
    add("--window", type=count, default=256, help="the first and the last tokens that rates are taken of; default 256")
    add("--chunk", type=count, default=256, help="tokens computed in one step; default 256")
    add("--repeats", type=count, default=3)
    add_model_arguments(parser)
    add_plot_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per measurement of each case."""
    about = provenance()
    for name in args.cases:
        for line in CASES[name](args):
            config = {"model": model_sizes(args), "dtype": line.pop("dtype", args.dtype), "chunk": args.chunk}
            emit({"bench": "scenarios", "case": name, **line, "config": config, **about})


# Shared by the cases


def make_model(args: argparse.Namespace, max_positions: int, dtype: str | None = None) -> DecoderModel:
    return random_model(model_sizes(args), dtype or args.dtype, max_positions=max_positions)


def make_engine(
    args: argparse.Namespace, model: DecoderModel, max_seqs: int, longest: int, *, prefix_cache: bool = False
) -> InferenceEngine:
    """`prefix_cache`: off where prompts are computed again and again, and timed."""
    config = EngineConfig(
        max_seqs=max_seqs,
        max_seq_len=round_up(longest, _PAGE),
        page_size=_PAGE,
        max_pages=max_seqs * round_up(longest, _PAGE) // _PAGE,
        max_step_tokens=max(args.chunk, max_seqs),
        prefix_cache=prefix_cache,
    )
    return InferenceEngine(model, config=config)


def kv_bytes_per_token(engine: InferenceEngine) -> float:
    return engine.stats()["page_bytes"] / engine.shapes.page_size


def memory(engine: InferenceEngine, live_tokens: int) -> dict[str, object]:
    """Bytes in use at the peak, against the bytes of live tokens."""
    stats, each = engine.stats(), kv_bytes_per_token(engine)
    held = stats["pages_peak"] * engine.shapes.page_size
    return {
        "live_kv_bytes": int(live_tokens * each),
        "held_kv_bytes": int(held * each),
        "kv_overhead": round(held / live_tokens - 1, 5),
        "pool_bytes": stats["pool_bytes"],
        "weights_bytes": stats["weights_bytes"],
        **measured(peak_memory_bytes=peak_bytes()),
    }


def hashes(prompts: Sequence[Sequence[int]], progress: Progress) -> dict[str, str]:
    return {
        "workload_hash": digest([list(ids) for ids in prompts]),
        "output_hash": digest(progress.token_ids),
    }


# The cases


def single(args) -> Iterator[dict]:
    """One sequence of many tokens: its prompt in chunks, then generation at the end of the context."""
    prompt_len, window = args.tokens - args.generate, min(args.window, args.generate - 1)
    model = make_model(args, args.tokens + 1)
    engine = make_engine(args, model, 1, args.tokens + 1)
    prompts = random_prompts(model.config.vocab_size, [prompt_len], seed=0)
    progress = record(engine, prompts, args.generate)
    part, last = prompt_len // 8, progress.seconds_of(args.generate - window, args.generate)
    yield {
        "tokens": args.tokens,
        "generated": args.generate,
        **measured(
            time_to_first_token_s=round(progress.first_token_s, 3),
            prefill_tokens_per_s=round(prompt_len / progress.first_token_s, 1),
            inter_token_ms=round(last / window * 1e3, 4),
            final_tokens_per_s=round(window / last, 1),
        ),
        "prefill_tokens_per_s_first_eighth": round(part / progress.prefill_seconds_of(0, part), 1),
        "prefill_tokens_per_s_last_eighth": round(
            part / progress.prefill_seconds_of(prompt_len - part, progress.prompt_tokens[-1]), 1
        ),
        **memory(engine, args.tokens - 1),
        **hashes(prompts, progress),
    }


def mixed(args) -> Iterator[dict]:
    """All prompts at once, each of another length."""
    yield from _together(args, list(args.mixed))


def random_lengths(args) -> Iterator[dict]:
    """16 prompts of random lengths."""
    yield from _together(args, np.random.default_rng(0).choice(args.random, 16).tolist())


def _together(args, lens: list[int]) -> Iterator[dict]:
    longest = max(lens) + args.generate + 1
    model = make_model(args, longest)
    engine = make_engine(args, model, len(lens), longest)
    prompts = random_prompts(model.config.vocab_size, lens, seed=1)
    progress = record(engine, prompts, args.generate)
    total = len(lens) * args.generate
    window = min(args.window * len(lens), total // 2)
    live = sum(lens) + len(lens) * (args.generate - 1)
    yield {
        "prompts": lens,
        "generated": args.generate,
        "total_s": round(progress.total_s, 3),
        "tokens_per_s": round((sum(lens) + total) / progress.total_s, 1),
        **measured(
            time_to_first_token_s=round(progress.first_token_s, 3),
            final_tokens_per_s=round(window / progress.seconds_of(total - window, total), 1),
        ),
        "unpaged_kv_overhead": round(len(lens) * longest / live - 1, 5),
        **memory(engine, live),
        **hashes(prompts, progress),
    }


def chat(args) -> Iterator[dict]:
    """A conversation whose history grows: each turn's prompt begins with the last one's prompt and answer."""
    longest = max(args.chat) + args.generate + 1
    model = make_model(args, longest)
    engine = make_engine(args, model, 1, longest, prefix_cache=True)
    words = random_prompts(model.config.vocab_size, [longest], seed=2)[0]
    history: list[int] = []
    for turn, target in enumerate(args.chat):
        history += words[len(history) : target]
        before = engine.stats()["computed_prompt_tokens"]
        progress = record(engine, [history], args.generate)
        computed = engine.stats()["computed_prompt_tokens"] - before
        window = min(args.window, args.generate - 1)
        last = progress.seconds_of(args.generate - window, args.generate)
        yield {
            "turn": turn,
            "history": len(history),
            "prefix_cache": engine.shapes.prefix_cache,
            "prompt_tokens_computed": computed,
            "note": "the whole history was computed again" if computed >= len(history) - 1 else "pages were reused",
            **measured(
                time_to_first_token_s=round(progress.first_token_s, 3),
                inter_token_ms=round(last / window * 1e3, 4),
                final_tokens_per_s=round(window / last, 1),
            ),
            **hashes([history], progress),
        }
        history = history + progress.token_ids[0]


def lengths(args) -> Iterator[dict]:
    """Time per token over the stored tokens, with a cache and without, and its growth."""
    longest = max(*args.lengths, *args.uncached) + args.window + 1
    model = make_model(args, longest)
    engine = make_engine(args, model, 1, longest)
    outputs: dict[str, dict] = {"cached": {}, "uncached": {}}

    def cached_ms(context: int) -> float:
        # Around the context: half of the window before it, half behind.
        prompt = random_prompts(model.config.vocab_size, [max(context - args.window // 2, 1)], seed=context)
        progress = record(engine, prompt, args.window + 1)
        outputs["cached"][str(context)] = progress.token_ids
        return progress.seconds_of(1, args.window + 1) / args.window * 1e3

    forward = compile_program(next_token)

    def uncached_ms(context: int) -> float:
        tokens = jax.device_put(np.zeros(context, np.int32))
        start = time.perf_counter()
        token = jax.block_until_ready(forward(model, tokens, jnp.int32(context)))
        seconds = time.perf_counter() - start
        outputs["uncached"][str(context)] = int(token)
        return seconds * 1e3

    curves = {}
    for name, contexts, measure in (("cached", args.lengths, cached_ms), ("uncached", args.uncached, uncached_ms)):
        times = []
        for context in contexts:
            measure(context)  # compiles
            times.append(summarize([measure(context) for _ in range(args.repeats)]))
        medians = [entry["median"] for entry in times]
        curves[name] = (contexts, medians)
        growth: dict[str, object] = {"exponent": exponent(contexts, medians)}
        if len(contexts) >= 4:
            p, at_zero = growing_part(contexts, medians)
            growth |= {"exponent_of_growing_part": p, "fitted_ms_at_zero": round(at_zero, 4)}
        ratio = [round(b / a, 3) for a, b in zip(medians, medians[1:], strict=False)]
        yield {
            "form": name,
            "contexts": contexts,
            "ms_per_token": times,
            "next_to_last": ratio,
            **growth,
            "workload_hash": digest([contexts, args.window]),
            "output_hash": digest(outputs[name]),
        }
    draw(args.plot, curves, title="Time of one token", x="stored tokens", y="ms", log=True)


def cache(args) -> Iterator[dict]:
    """The same tokens with the cache and by the plain forward; only equal outputs are compared in time."""
    prompt_len, count = 32, args.cache_tokens
    model = make_model(args, prompt_len + count + 1, dtype="float32")
    engine = make_engine(args, model, 1, prompt_len + count + 1)
    prompts = random_prompts(model.config.vocab_size, [prompt_len], seed=3)
    program = compile_program(next_token)
    step = -(-(prompt_len + count) // _UNCACHED_SHAPES)

    def uncached() -> tuple[float, list[int]]:
        tokens = list(prompts[0])
        start = time.perf_counter()
        for _ in range(count):
            padded = np.zeros(round_up(len(tokens), step), np.int32)
            padded[: len(tokens)] = tokens
            tokens.append(int(program(model, jax.device_put(padded), jnp.int32(len(tokens)))))
        return time.perf_counter() - start, tokens[prompt_len:]

    record(engine, prompts, count)
    uncached()  # compiles
    progress = record(engine, prompts, count)
    seconds, token_ids = uncached()
    yield {
        "dtype": "float32",
        "prompt": prompt_len,
        "generated": count,
        "cached_s": round(progress.total_s, 4),
        "uncached_s": round(seconds, 4),
        **ratio_if_equal(progress.token_ids[0], token_ids, progress.total_s, seconds),
        **hashes(prompts, progress),
    }


def ratio_if_equal(cached: list[int], uncached: list[int], cached_s: float, uncached_s: float) -> dict[str, object]:
    """Speed-up of the cache; a refusal if the outputs differ."""
    if cached == uncached:
        return {"equal": True, "ratio": round(uncached_s / cached_s, 3)}
    first = next((i for i, (a, b) in enumerate(zip(cached, uncached, strict=False)) if a != b), -1)
    return {"equal": False, "refused": f"the outputs differ from token {first} on, so their times are not compared"}


def long(args) -> Iterator[dict]:
    """Long generations: tokens/s and bytes/s of the first tokens against the last ones."""
    prompt_len = 16
    longest = prompt_len + args.long + 1
    model = make_model(args, longest)
    engine = make_engine(args, model, args.batch, longest)
    prompts = random_prompts(model.config.vocab_size, [prompt_len] * args.batch, seed=4)
    record(engine, prompts, 2)
    progress = record(engine, prompts, args.long)
    window = min(args.window, args.long // 2)
    rates, bytes_per_s, peaks = {}, {}, device_peaks(args.dtype)
    # The first round has the prompts in it.
    for name, begin in (("first", min(window, args.long - window) // 4), ("last", args.long - window)):
        seconds = progress.seconds_of(begin * args.batch, (begin + window) * args.batch)
        live = args.batch * (prompt_len + begin + window / 2)
        # The embeddings are the head too, so that a step reads all weights.
        needed = engine.stats()["weights_bytes"] + live * kv_bytes_per_token(engine)
        bytes_per_s[name] = needed * window / seconds
        rates[name] = {
            "tokens_per_s": round(window * args.batch / seconds, 1),
            "ms_per_step": round(seconds / window * 1e3, 4),
            "bytes_per_step": int(needed),
            "gb_per_s": round(bytes_per_s[name] / 1e9, 3),
            **utilisation(bytes_per_s[name], step_flops(model, args.batch, live) * window / seconds, peaks),
        }
    yield {
        "batch": args.batch,
        "prompt": prompt_len,
        "generated": args.long,
        "window": window,
        **rates,
        "last_to_first_gb_per_s": round(bytes_per_s["last"] / bytes_per_s["first"], 3),
        "total_s": round(progress.total_s, 2),
        **memory(engine, args.batch * (prompt_len + args.long - 1)),
        **hashes(prompts, progress),
    }


def layer(args) -> Iterator[dict]:
    """Latency of a decode step per layer: each sequence on one page as long as itself, and on pages of 16 tokens."""
    clock = Clock(args.repeats, 100)
    for context in args.layer_context:
        model = make_model(args, context)
        config, layers = model.config, model.config.num_layers
        backend = BackendChoice.choose(EngineConfig(), model, has_mods=False)
        spec = AttentionSpec(max_seq_len=context)
        model = backend.prepare(model, donate=True)
        for target, page_size in (("bench-llama", 1 << (context - 1).bit_length()), ("bench-llama-paged", _PAGE)):
            sizes = dict(heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
            case = Case("decode", args.batch, context, 1, page_size, **sizes, dtype=args.dtype)
            kv, batch, *_ = inputs(case, backend.attention_backend, layers=layers)
            step = functools.partial(_model_steps, batch=batch, spec=spec)
            start = jnp.zeros((args.batch, config.hidden_size), model.activation_dtype)
            times, (states, _) = clock.per_trip(step, (start, Cache((kv,), (0,))), model, donate=True)
            yield {
                "target": target,
                "batch": args.batch,
                "context": context,
                "page_size": page_size,
                **measured(layer_ms={k: v if k == "runs" else round(v / layers, 5) for k, v in times.items()}),
                "tokens_per_s_without_head": round(args.batch / times["median"] * 1e3, 1),
                "workload_hash": digest([args.batch, context, page_size]),
                "output_hash": digest(np.asarray(states[:, 0].astype(jnp.float32)).tolist()),
            }


def step_flops(model: DecoderModel, batch: int, live_tokens: float) -> float:
    """Operations of a decode step of `batch` sequences with `live_tokens` stored tokens in all: attention, and matmuls
    with all weights (the embeddings are the head too)."""
    c = model.config
    return 2.0 * batch * c.num_parameters + 4.0 * live_tokens * c.num_heads * c.head_dim * c.num_layers


def _model_steps(trips, carry, model: DecoderModel, *, batch, spec: AttentionSpec):
    """Decode the same tokens `trips` times. Carry: their hidden states, and the cache."""

    def body(_, carry):
        states, cache = model.hidden(batch, carry[1], spec)
        return states.array, cache

    return jax.lax.fori_loop(0, trips, body, carry)


CASES = {
    "lengths": lengths,
    "cache": cache,
    "layer": layer,
    "mixed": mixed,
    "random": random_lengths,
    "chat": chat,
    "long": long,
    "single": single,
}
