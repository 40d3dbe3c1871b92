"""Open-loop load: latencies, phases, and continuous against static batching, with requests of mixed lengths.

Three cases per engine, a line each. `closed`: `--closed-requests` arrive at the start; continuous batching against
static batches of `max_seqs`, and the cost of rounds of `--max-round-steps`. `saturated`: requests whose outputs add up
to `--tokens-target` arrive at the start; the rate of the whole run against its steady phase. `open`: the same requests
arrive at `--load` times the capacity that the closed loop has shown.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from levanter_infer.bench.clients import run_continuous, run_static
from levanter_infer.bench.machine import jitter
from levanter_infer.bench.report import add_plot_argument, digest, draw, emit, percentiles, provenance, summarize
from levanter_infer.bench.timeline import Round, Timeline, in_steady, phases, spikes
from levanter_infer.bench.workload import (
    ARRIVALS,
    add_model_arguments,
    amount,
    arrival_times,
    count,
    mixed_lens,
    model_sizes,
    names,
    numbers,
    random_model,
    random_prompts,
    round_up,
    span,
)
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request

CASES = ("closed", "saturated", "open")
_NAMED_SPIKES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--cases",
        type=names(CASES),
        default=",".join(CASES),
        help=f"of {', '.join(CASES)}; default all; closed always runs",
    )
    load.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="default poisson")
    load.add_argument(
        "--load", type=amount, default=0.8, help="rate of arrival as a share of the capacity; default 0.8"
    )
    load.add_argument("--rate", type=amount, help="requests a second, instead of --load")
    load.add_argument("--tokens-target", type=count, default=10000, help="generated tokens, saturated and open")
    load.add_argument("--closed-requests", type=count, help="requests of the closed loop; default 8 * max_seqs")
    load.add_argument("--prompt", type=span, default=(16, 128), help="shortest,longest prompt; default 16,128")
    load.add_argument("--output", type=span, default=(8, 256), help="shortest,longest output; default 8,256")
    load.add_argument("--seed", type=int, default=0, help="of lengths, prompts and arrivals")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-seqs", type=count, default=16, help="default 16")
    engine.add_argument(
        "--max-step-tokens", "--prefill-chunk", type=numbers, default=(64,), help="comma-separated; default 64"
    )
    engine.add_argument("--page-size", "--kv-block-size", type=numbers, default=(16,), help="comma-separated; 16")
    engine.add_argument(
        "--max-round-steps", type=count, default=1, help="steps of a round; 1, the default, shows and times every step"
    )
    engine.add_argument("--early-launch", action="store_true", help="do not wait for late requests before a launch")
    parser.add_argument("--no-static", action="store_true", help="leave out the static batches")
    parser.add_argument("--spike-threshold", type=amount, help="seconds a step; default twice the median")
    parser.add_argument("--repeats", type=count, default=3)
    add_plot_argument(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print a line per case, page size and token budget of a step; phases of each run go to the log."""
    about = provenance()
    sizes = model_sizes(args)
    model = random_model(sizes, args.dtype)
    closed_requests, open_requests = mixed_requests(args, sizes["vocab"])
    longest = round_up(args.prompt[-1] + args.output[-1] + 1, 16)
    budgets, curve = [], []
    for page_size, budget in itertools.product(args.page_size, args.max_step_tokens):
        config = EngineConfig(
            max_seqs=args.max_seqs, max_seq_len=longest, max_step_tokens=budget, page_size=page_size, prefix_cache=False
        )
        engine = InferenceEngine(model, config=config)
        closed, capacity = measure_closed(engine, closed_requests, args)
        cases = {"closed": closed}
        if "saturated" in args.cases:
            cases["saturated"] = measure_saturated(engine, open_requests, args)
        if "open" in args.cases:
            cases["open"] = measure_open(engine, open_requests, capacity, args)
            budgets.append(budget)
            curve.append(cases["open"]["inter_token_ms"])
        shared = {
            "config": {
                "model": sizes,
                "dtype": args.dtype,
                "prompt": args.prompt,
                "output": args.output,
                "max_round_steps": args.max_round_steps,
                "late_launch": not args.early_launch,
                "engine": {k: v for k, v in engine.describe().items() if k != "device"},
            },
            "compilations": engine.stats()["compilations"],
            **about,
        }
        for name, case in cases.items():
            emit({"bench": "open-loop", "case": name, **case, **shared})
    draw(
        args.plot,
        {name: (budgets, [gaps[name]["median"] for gaps in curve]) for name in ("p50", "p95", "p99")},
        title=f"time between tokens, {args.arrivals} arrivals, {args.max_seqs} sequences, {args.shape} {args.dtype}",
        x="max_step_tokens",
        y="ms",
    )


def mixed_requests(args: argparse.Namespace, vocab: int) -> tuple[list[Request], list[Request]]:
    """Requests of mixed lengths: those of the closed loop, and as many as generate the target's number of tokens."""
    closed = args.closed_requests or 8 * args.max_seqs
    lens = mixed_lens(*args.output, count=max(args.tokens_target, closed), seed=args.seed)
    opened = 1 + int(np.searchsorted(np.cumsum(lens), args.tokens_target))
    prompt_lens = mixed_lens(*args.prompt, count=max(opened, closed), seed=args.seed + 1)
    prompts = random_prompts(vocab, prompt_lens, seed=args.seed)
    requests = [
        Request(prompt_token_ids=ids, sampling=SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0))
        for ids, length in zip(prompts, lens, strict=False)
    ]
    return requests[:closed], requests[:opened]


def measure_closed(
    engine: InferenceEngine, requests: Sequence[Request], args: argparse.Namespace
) -> tuple[dict[str, object], float]:
    """All requests arrive at the start. Returns the case, and the capacity in generated tokens per second."""
    at_once = [0.0] * len(requests)
    runs = {
        "static": lambda: run_static(engine, requests, at_once, batch=args.max_seqs),
        "continuous": lambda: run_continuous(engine, requests, at_once),
        "short_rounds": lambda: run_continuous(engine, requests, at_once, max_steps=args.max_round_steps),
    }
    if args.no_static:
        del runs["static"]
    run_continuous(
        engine, requests[: args.max_seqs], at_once[: args.max_seqs]
    )  # so that nothing runs for the first time
    seen: dict[str, list[Timeline]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, measure in runs.items():
            seen[name].append(measure())
    continuous, short = ([t.tokens_per_s for t in seen[name]] for name in ("continuous", "short_rounds"))
    steady = [steady_rate(t) for t in seen["short_rounds"]]
    case: dict[str, object] = {
        **_workload(requests, seen["continuous"][0]),
        "continuous_tokens_per_sec": summarize(continuous, 1),
        "continuous_steady_tokens_per_sec": summarize([steady_rate(t) for t in seen["continuous"]], 1),
        "short_rounds_tokens_per_sec": summarize(short, 1),
        "short_rounds_steady_tokens_per_sec": summarize(steady, 1),
        "wall_over_steady": _ratios(short, steady),
        "short_rounds_over_continuous": _ratios(short, continuous)
        if _equal(seen, "continuous", "short_rounds")
        else None,
    }
    if "static" in seen:
        case |= compare_static(seen)
    return case, statistics.median(steady)


def _equal(seen: Mapping[str, Sequence[Timeline]], *names: str) -> bool:
    """Whether all runs of these kinds gave the same tokens."""
    expected = seen[names[0]][0].token_ids
    return all(timeline.token_ids == expected for name in names for timeline in seen[name])


def compare_static(seen: Mapping[str, Sequence[Timeline]]) -> dict[str, object]:
    """Static batches beside the others, and the ratio if all of them gave the same tokens."""
    static, continuous = ([t.tokens_per_s for t in seen[name]] for name in ("static", "continuous"))
    equal = _equal(seen, *seen)
    if not equal:
        print("static and continuous batches gave different tokens: no ratio; try --dtype float32", file=sys.stderr)
    return {
        "static_tokens_per_sec": summarize(static, 1),
        "outputs_are_equal": equal,
        "continuous_over_static": _ratios(continuous, static) if equal else None,
    }


def measure_saturated(
    engine: InferenceEngine, requests: Sequence[Request], args: argparse.Namespace
) -> dict[str, object]:
    """More requests than slots, until nearly the end: the whole run against its steady phase.

    Below the capacity both would equal the arrival rate, whatever the engine does.
    """
    at_once = [0.0] * len(requests)
    timelines = []
    for _ in range(args.repeats):
        timelines.append(run_continuous(engine, requests, at_once, max_steps=args.max_round_steps))
        print(*phase_lines(timelines[-1], args.spike_threshold), sep="\n", file=sys.stderr)
    whole, steady = [t.tokens_per_s for t in timelines], [steady_rate(t) for t in timelines]
    return {
        **_workload(requests, timelines[0]),
        "continuous_tokens_per_sec": summarize(whole, 1),
        "continuous_steady_tokens_per_sec": summarize(steady, 1),
        "wall_over_steady": _ratios(whole, steady),
        **_steps_of(timelines, args),
    }


def _steps_of(timelines: Sequence[Timeline], args: argparse.Namespace) -> dict[str, object]:
    """Times of steps in the steady phase, and the phases."""
    return {
        # Of longer rounds only the mean step is known.
        "one_step_a_round": args.max_round_steps == 1,
        "step_ms": percentiles([_ms(r.step_s for r in in_steady(t)) for t in timelines]),
        "decode_only_step_ms": percentiles([_ms(r.step_s for r in _decode_only(t)) for t in timelines]),
        "decode_only_spikes": [_spike_report(_decode_only(t)) for t in timelines],
        "phases": [_phase_report(t, args.spike_threshold) for t in timelines],
    }


def _max_tokens(request: Request) -> int:
    assert request.sampling is not None, "the requests of this bench have their own"
    return request.sampling.max_tokens


def measure_open(
    engine: InferenceEngine, requests: Sequence[Request], capacity: float, args: argparse.Namespace
) -> dict[str, object]:
    """Requests arrive at a rate. `capacity`: tokens per second that the engine generates of such requests."""
    tokens_each = sum(map(_max_tokens, requests)) / len(requests)
    rate = args.rate or args.load * capacity / tokens_each
    arrivals = arrival_times(args.arrivals, len(requests), rate, seed=args.seed)
    probes, timelines = [], []
    for _ in range(args.repeats):
        probes.append(jitter())
        timelines.append(
            run_continuous(
                engine, requests, arrivals, max_steps=args.max_round_steps, late_launch=not args.early_launch
            )
        )
        print(*phase_lines(timelines[-1], args.spike_threshold), sep="\n", file=sys.stderr)
    whole, steady = [t.tokens_per_s for t in timelines], [steady_rate(t) for t in timelines]
    gaps = percentiles([_ms(t.inter_token_s()) for t in timelines])
    return {
        **_workload(requests, timelines[0]),
        "arrivals": args.arrivals,
        "requests_per_s": round(rate, 3),
        "load": round(rate * tokens_each / capacity, 3),
        "continuous_tokens_per_sec": summarize(whole, 1),
        "continuous_steady_tokens_per_sec": summarize(steady, 1),
        "ttft_ms": percentiles([_ms(t.first_token_s()) for t in timelines]),
        "inter_token_ms": gaps,
        "decoding": percentiles([[r.decoding for r in in_steady(t)] for t in timelines], 1),
        "inter_token_p99_over_p50": round(gaps["p99"]["median"] / max(gaps["p50"]["median"], 1e-9), 2),
        **_steps_of(timelines, args),
        "jitter": probes,
    }


def steady_rate(timeline: Timeline) -> float:
    """Tokens a second in the steady phase. Raises: SystemExit if the run is too short to have one."""
    rate = phases(timeline)["steady"].tokens_per_s
    if not rate:
        raise SystemExit(
            "the run has no steady phase; raise --tokens-target and --closed-requests, or lower --max-seqs"
        )
    return rate


def phase_lines(timeline: Timeline, threshold_s: float | None) -> list[str]:
    """The log lines `[phase ramp]`, `[phase steady]`, `[phase tail]` and `[phase spikes]`."""
    lines = [
        f"[phase {name}] count={phase.rounds} time={phase.seconds:.2f}s tokens={phase.tokens}"
        for name, phase in phases(timeline).items()
    ]
    found, threshold_s = spikes(timeline.rounds, threshold_s)
    seconds = sum(r.seconds for r in found)
    return [*lines, f"[phase spikes] count={len(found)} time={seconds:.2f}s threshold={threshold_s:.3f}s"]


def _phase_report(timeline: Timeline, threshold_s: float | None) -> dict[str, object]:
    found, threshold_s = spikes(timeline.rounds, threshold_s)
    report: dict[str, object] = {
        name: {"count": phase.rounds, "time_s": round(phase.seconds, 2), "tokens": phase.tokens}
        for name, phase in phases(timeline).items()
    }
    report["spikes"] = {
        "count": len(found),
        "time_s": round(sum(r.seconds for r in found), 2),
        "threshold_s": round(threshold_s, 4),
    }
    return report


def _decode_only(timeline: Timeline) -> list[Round]:
    return [r for r in in_steady(timeline) if r.prompt_steps == 0]


def _spike_report(rounds: Sequence[Round]) -> dict[str, object]:
    """Steps of more than twice their median, with the processor time of other processes during the worst of them."""
    found, threshold_s = spikes(rounds)
    worst = sorted(found, key=lambda r: -r.step_s)[:_NAMED_SPIKES]
    return {
        "count": len(found),
        "of": len(rounds),
        "threshold_ms": round(threshold_s * 1e3, 2),
        "worst": [
            {
                "ms": round(r.step_s * 1e3, 1),
                "decoding": r.decoding,
                "others_ms": None if r.others_s is None else round(r.others_s * 1e3),
            }
            for r in worst
        ],
    }


def _workload(requests: Sequence[Request], timeline: Timeline) -> dict[str, object]:
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_token_ids or ()) for request in requests),
        "tokens": timeline.tokens,
        "workload_hash": digest([[r.prompt_token_ids, _max_tokens(r)] for r in requests]),
        "output_hash": digest(timeline.token_ids),
    }


def _ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float | int]:
    return summarize([a / b for a, b in zip(above, below, strict=True)], 3)


def _ms(seconds: Iterable[float]) -> list[float]:
    return [value * 1e3 for value in seconds]
