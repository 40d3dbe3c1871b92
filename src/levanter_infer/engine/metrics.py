"""Declarations of all metrics, and `Registry`, which holds their values.

Values come from the one download of each round ("round"), from `InferenceEngine.memory`, which reads the tables
("state"), or from a bench ("bench"): no step is slower for them. docs/metrics.md lists them for people.
"""

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Value = int | float | None | dict[str, "int | float"]
_PREFIX = "levanter_infer_"
_ROUND_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    unit: str
    help: str
    source: str = "round"
    """Source of its value: round, state or bench."""
    counter: str | None = None
    """Field of `decode.state.Counters` whose increase it sums."""
    label: str = ""
    """Name of the keys, for a metric whose value is a mapping."""
    contract: str = ""
    """Ids in docs/contract.md."""
    asked_as: str = ""
    """Its name there, if it differs."""


def _round(name: str, unit: str, help: str, counter: str | None = None, kind: str = "counter", **more) -> Metric:
    return Metric(name, kind, unit, help, counter=counter, **more)


def _state(name: str, unit: str, help: str, **more) -> Metric:
    return Metric(name, "gauge", unit, help, source="state", **more)


def _bench(name: str, unit: str, help: str, contract: str) -> Metric:
    return Metric(name, "gauge", unit, help, source="bench", contract=contract)


_DECLARED = (
    # Work
    _round("prompt_tokens", "tokens", "of submitted prompts"),
    _round("generated_tokens", "tokens", "sampled", "generated"),
    _round("draft_tokens", "tokens", "proposed by speculative decoding", "draft_tokens"),
    _round("accepted_tokens", "tokens", "of these drafts that saved a step", "accepted_tokens"),
    _round("scored_tokens", "tokens", "of prompts whose log probability was computed"),
    _round("computed_prompt_tokens", "tokens", "computed in prompt chunks, recomputed ones included", "prompt_tokens"),
    _round("recomputed_tokens", "tokens", "whose stored K/V a preemption or change of weights dropped", "recomputed"),
    _round("recomputed_per_token", "ratio", "recomputed over generated tokens", kind="gauge"),
    _round("steps", "steps", "forward passes", "steps"),
    _round("prompt_steps", "steps", "steps that computed a prompt chunk", "prompt_steps"),
    _round("rounds", "rounds", "launches of the step loop"),
    _round("idle_share", "ratio", "of steps that a data-parallel rank waited for others", kind="gauge", label="shard"),
    _round("preemptions", "", "preemptions of sequences, whose pages were taken", "preemptions"),
    _round("offloaded_pages", "pages", "offloaded to host memory"),
    _round("prefetched_pages", "pages", "prefetched from host memory"),
    _round("offloaded_sequences", "sequences", "whose pages are in host memory", kind="gauge"),
    _round("offloaded_bytes", "bytes", "of host memory in use for offloaded pages", kind="gauge"),
    _round("forks", "", "sequences that started with the pages of another", "forks"),
    _round("copied_pages", "pages", "copied on write because they were shared", "copied_pages"),
    _round(
        "copies_per_token",
        "pages/token",
        "copied pages per generated token",
        kind="gauge",
        contract="M70",
        asked_as="COW_clones_per_token",
    ),
    _round(
        "pages_touched",
        "pages",
        "read by attention: those of the context of every sequence in a step",
        "pages_touched",
        contract="M66",
        asked_as="blocks_touched",
    ),
    _round("paged_kv_bytes_read", "bytes", "of these pages, all layers", contract="M66"),
    _round("prefix_hits", "pages", "found in the prefix cache instead of computed", "prefix_hits"),
    _round("prefix_misses", "pages", "filled by prompt chunks", "prefix_misses"),
    _round("prefix_hit_rate", "ratio", "hits over hits and misses", kind="gauge"),
    _round("prefix_evictions", "pages", "reused while the prefix cache could still find them", "prefix_evictions"),
    _round("snapshots_kept", "states", "of fixed size kept at the ends of prefixes", "snapshots_kept"),
    _round("snapshots_restored", "sequences", "that went on from such a state", "snapshots_restored"),
    _round("snapshot_evictions", "states", "replaced while their prefix could be found", "snapshot_evictions"),
    _round("cached_pages", "pages", "in the prefix cache, in use or not", kind="gauge"),
    # Sequences and pages as the last round left them
    _round("running", "sequences", "running", kind="gauge"),
    _round("waiting", "sequences", "waiting on the device", kind="gauge"),
    _round("stored_tokens", "tokens", "whose K/V are stored, once per holder", kind="gauge", contract="L63"),
    _round("pages_total", "pages", "in the pool", kind="gauge"),
    _round("pages_free", "pages", "free", kind="gauge", contract="L62"),
    _round("pages_in_use", "pages", "held by sequences", kind="gauge", contract="M70", asked_as="blocks_in_use"),
    _round("pages_peak", "pages", "in use at once, peak", kind="gauge"),
    _round("refs_max", "references", "to one page, maximum", kind="gauge", contract="L62", asked_as="max(ref)"),
    _round("refs_sum", "references", "to all pages", kind="gauge", contract="L62", asked_as="sum(ref)"),
    _round("page_bytes", "bytes", "per page, all layers", kind="gauge"),
    _round("pool_bytes", "bytes", "of the pool", kind="gauge"),
    _round("weights_bytes", "bytes", "of the model", kind="gauge"),
    _round("weights_version", "", "version of the weights that the next round uses", kind="gauge"),
    _round("weight_swaps", "", "calls of swap_weights"),
    # Time
    _round("round_s", "s", "from a round's launch, or the end of the previous one, to its end", kind="histogram"),
    _round("launch_s", "s", "host: preparing, uploading and launching rounds", contract="L58"),
    _round("wait_s", "s", "host: blocked until the device had finished a round", contract="L58"),
    _round("download_s", "s", "host: fetching the results of rounds", contract="L58"),
    _round("collect_s", "s", "host: sorting results by sequence, text and stop strings", contract="L58"),
    _round("offload_s", "s", "host: choosing preemption victims and starting to copy their pages out"),
    _round("prefetch_s", "s", "host: choosing sequences to resume and starting to copy their pages in"),
    _round("prefill_tokens_per_s", "tokens/s", "of computed prompts", kind="gauge"),
    _round("decode_tokens_per_s", "tokens/s", "generated in rounds without prompt chunks", kind="gauge"),
    _round("time_to_first_token_s", "s", "from the first submission to an idle engine", kind="gauge", contract="I29"),
    _round("compile_s", "s", "waiting for programs to be compiled or read from the cache", kind="gauge"),
    _round("compilations", "", "of all programs"),
    _round("programs", "", "compilations of each program", label="program"),
    # A look at the state: `InferenceEngine.memory`
    _state("reserved_bytes", "bytes", "of pages in use", contract="I33"),
    _state("live_bytes", "bytes", "of stored K/V; shared pages count once", contract="I33"),
    _state("wasted_bytes", "bytes", "reserved but not live: the unfilled rest of last pages", contract="I33"),
    _state("table_bytes", "bytes", "of all tables: sequences, sampling, pages"),
    _state("memory_overhead", "ratio", "(weights + tables + reserved) / (weights + live) - 1", contract="I27"),
    _state("peak_memory_bytes", "bytes", "peak of the device, on a CPU of the process", contract="I26"),
    _state("refcount_histogram", "pages", "by reference count", label="refs", contract="M70"),
    _state("slot_pages", "pages", "held per slot", label="slot", contract="L63"),
    _state("slot_tokens", "tokens", "known per slot that holds pages", label="slot", contract="L63"),
    # Measured by benches
    _bench("gather_ms", "ms", "gathering K/V in one attention call", "M54 M66 M69"),
    _bench("softmax_ms", "ms", "scores, softmax and weighted sum in one attention call", "M69"),
    _bench("kv_write_ms", "ms", "storing the K/V of a step", "M67"),
    _bench("layer_ms", "ms", "one layer of a step", "I39"),
    _bench("prefill_chunk_ms", "ms", "a step with a prompt chunk", "M67"),
    _bench("decode_tick_ms_p50", "ms", "a step without a prompt chunk, median", "M67 M69"),
    _bench("decode_tick_ms_p95", "ms", "a step without a prompt chunk, 95th percentile", "M67"),
    _bench("inter_token_ms", "ms", "between tokens of a sequence, mean in steady state", "I30"),
    _bench("static_tokens_per_sec", "tokens/s", "all requests at once", "M71"),
    _bench("continuous_tokens_per_sec", "tokens/s", "open loop, ramp and tail included", "M71"),
    _bench("continuous_steady_tokens_per_sec", "tokens/s", "open loop, without ramp and tail", "M71"),
    _bench("final_tokens_per_s", "tokens/s", "over the last 256 tokens", "I28"),
    _bench("perplexity", "", "of the tokens scored", "I31"),
    _bench(
        "compute_utilisation", "ratio", "of attention or steps: arithmetic done over what the device could do", "I32"
    ),
    _bench(
        "bandwidth_utilisation", "ratio", "of attention or steps: bytes needed over what the device could move", "I32"
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}
LINE = (
    *("running", "waiting", "generated_tokens", "decode_tokens_per_s", "pages_in_use", "pages_total", "preemptions"),
    *("rounds", "wait_s", "launch_s"),
)
"""Metrics in the one line for a log."""


class Registry:
    """Values of the declared metrics: as a dict, as a line for a log, and in Prometheus' text format.

    It is a custom collector of `prometheus_client`: `REGISTRY.register(engine.metrics())` adds it to any registry.
    A name that is not declared is an error. docs/decisions/0036 says why the values are not `prometheus_client`'s own.
    """

    def __init__(self):
        self._values: dict[str, Value] = {}
        self._observed: dict[str, _Histogram] = {}
        for metric in METRICS.values():
            if metric.source == "round" and metric.kind == "histogram":
                self._observed[metric.name] = _Histogram()
            elif metric.source == "round":
                self._values[metric.name] = 0 if metric.kind == "counter" and not metric.label else None

    def set(self, name: str, value: Value) -> None:
        assert METRICS[name].kind != "histogram" and isinstance(value, dict) == bool(METRICS[name].label)
        self._values[name] = value

    def add(self, name: str, amount: int | float) -> None:
        """Increase a counter."""
        assert METRICS[name].kind == "counter" and amount >= 0, f"{name} cannot increase by {amount}"
        self._values[name] += amount  # type: ignore[operator]

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._observed[name].observe(value)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def as_dict(self, source: str | None = None) -> dict[str, Any]:
        """Values by name, for JSON; None before the first value. Histograms as count, sum and cumulative buckets.

        Args:
            source: restricts the result to metrics of this source.
        """
        values = {**self._values, **{name: histogram.as_dict() for name, histogram in self._observed.items()}}
        return {name: values[name] for name in METRICS if name in values and source in (None, METRICS[name].source)}

    def line(self) -> str:
        """The metrics of `LINE` in one line."""
        return " ".join(f"{name}={_short(self._values[name])}" for name in LINE)

    def prometheus(self) -> str:
        """Prometheus' text format with its names: counters end in `_total`, times in `_seconds`."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry).decode()

    def collect(self) -> Iterator:
        """The metric families, for `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, metric in METRICS.items():
            place = _PREFIX + (name.removesuffix("_s") + "_seconds" if metric.unit == "s" else name)
            if name in self._observed:
                histogram = self._observed[name]
                yield HistogramMetricFamily(
                    place, metric.help, buckets=histogram.cumulative(), sum_value=histogram.total
                )
            value = self._values.get(name)
            if value is None:
                continue
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            if isinstance(value, Mapping):
                labelled = family(place, metric.help, labels=[metric.label])
                for key, part in value.items():
                    labelled.add_metric([key], part)
                yield labelled
            else:
                yield family(place, metric.help, value=value)


class _Histogram:
    """Counts by upper bound."""

    def __init__(self):
        self.total = 0.0
        self._counts = [0] * (len(_ROUND_SECONDS) + 1)

    def observe(self, value: float) -> None:
        self.total += value
        self._counts[bisect.bisect_left(_ROUND_SECONDS, value)] += 1

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, values up to it)."""
        bounds = [*map(str, _ROUND_SECONDS), "+Inf"]
        return [(bound, sum(self._counts[: i + 1])) for i, bound in enumerate(bounds)]

    def as_dict(self) -> dict[str, object]:
        return {"count": sum(self._counts), "sum": self.total, "buckets": dict(self.cumulative())}


def _short(value: Value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
