"""Every metric, declared once, and `Registry`, which holds their values.

Values come from what a round brings to the host anyway ("round"), from a look at the state that somebody asked for
("state"), or from a bench ("bench"): nothing here makes a step slower. docs/metrics.md lists them for people.
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
    """What one number means."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    unit: str
    help: str
    source: str = "round"
    """round, state or bench, as above."""
    counter: str | None = None
    """The field of `decode.state.Counters` whose increase it adds up."""
    label: str = ""
    """Its value is a mapping; what the keys are."""
    contract: str = ""
    """Ids of docs/contract.md."""
    asked_as: str = ""
    """Its name there, where that is another one."""


def _round(name: str, unit: str, help: str, counter: str | None = None, kind: str = "counter", **more) -> Metric:
    return Metric(name, kind, unit, help, counter=counter, **more)


def _state(name: str, unit: str, help: str, **more) -> Metric:
    return Metric(name, "gauge", unit, help, source="state", **more)


def _bench(name: str, unit: str, help: str, contract: str) -> Metric:
    return Metric(name, "gauge", unit, help, source="bench", contract=contract)


_DECLARED = (
    # Work
    _round("prompt_tokens", "tokens", "of the prompts that were submitted"),
    _round("generated_tokens", "tokens", "sampled", "generated"),
    _round("scored_tokens", "tokens", "of prompts, with a log probability"),
    _round("computed_prompt_tokens", "tokens", "computed in chunks, recomputed ones included", "prompt_tokens"),
    _round("recomputed_tokens", "tokens", "whose stored K/V preemption, or a change of weights, gave up", "recomputed"),
    _round("recomputed_per_token", "ratio", "of recomputed to generated tokens", kind="gauge"),
    _round("steps", "steps", "forward passes", "steps"),
    _round("prompt_steps", "steps", "those that computed a chunk of a prompt", "prompt_steps"),
    _round("rounds", "rounds", "launches of the loop"),
    _round("idle_share", "ratio", "of steps in which a data shard waited for others", kind="gauge", label="shard"),
    _round("preemptions", "", "times that a sequence lost its pages", "preemptions"),
    _round("offloaded_pages", "pages", "moved to the host's memory"),
    _round("prefetched_pages", "pages", "moved back from there"),
    _round("offloaded_sequences", "sequences", "whose pages are in the host's memory", kind="gauge"),
    _round("offloaded_bytes", "bytes", "of the host's memory in use for pages", kind="gauge"),
    _round("forks", "", "sequences that began with the pages of another", "forks"),
    _round("copied_pages", "pages", "copied because a shared one was to be written", "copied_pages"),
    _round(
        "copies_per_token",
        "pages/token",
        "copied pages for each generated token",
        kind="gauge",
        contract="M70",
        asked_as="COW_clones_per_token",
    ),
    _round(
        "pages_touched",
        "pages",
        "that attention reads: those of every row's context, once a step",
        "pages_touched",
        contract="M66",
        asked_as="blocks_touched",
    ),
    _round("paged_kv_bytes_read", "bytes", "of these pages, in all layers", contract="M66"),
    _round("prefix_hits", "pages", "found instead of computed", "prefix_hits"),
    _round("prefix_misses", "pages", "filled by chunks of prompts", "prefix_misses"),
    _round("prefix_hit_rate", "ratio", "of hits to hits and misses", kind="gauge"),
    _round("prefix_evictions", "pages", "reused while they could still be found", "prefix_evictions"),
    _round("cached_pages", "pages", "whose contents can be shared, in use or not", kind="gauge"),
    # Sequences and pages as the last round left them
    _round("running", "sequences", "that take part in every step", kind="gauge"),
    _round("waiting", "sequences", "on the device without a place", kind="gauge"),
    _round("stored_tokens", "tokens", "whose K/V are stored, once for each holder", kind="gauge", contract="L63"),
    _round("pages_total", "pages", "of the pool", kind="gauge"),
    _round("pages_free", "pages", "that nobody holds", kind="gauge", contract="L62"),
    _round("pages_in_use", "pages", "that somebody holds", kind="gauge", contract="M70", asked_as="blocks_in_use"),
    _round("pages_peak", "pages", "in use at once, at most", kind="gauge"),
    _round("refs_max", "references", "to one page, at most", kind="gauge", contract="L62", asked_as="max(ref)"),
    _round("refs_sum", "references", "to all pages", kind="gauge", contract="L62", asked_as="sum(ref)"),
    _round("page_bytes", "bytes", "of a page, all layers", kind="gauge"),
    _round("pool_bytes", "bytes", "of the pool", kind="gauge"),
    _round("weights_bytes", "bytes", "of the model", kind="gauge"),
    _round("weights_version", "", "of the weights that the next round uses", kind="gauge"),
    _round("weight_swaps", "", "times that the engine was given other weights"),
    # Time
    _round("round_s", "s", "of rounds, from launch or the end of the one before to the end", kind="histogram"),
    _round("launch_s", "s", "host: preparing, uploading and launching rounds", contract="L58"),
    _round("wait_s", "s", "host: blocked until the device had finished a round", contract="L58"),
    _round("download_s", "s", "host: fetching the results of rounds", contract="L58"),
    _round("collect_s", "s", "host: sorting results by sequence, text and stop strings", contract="L58"),
    _round("offload_s", "s", "host: choosing who gives way, and starting to move pages away"),
    _round("prefetch_s", "s", "host: choosing who comes back, and starting to move pages back"),
    _round("prefill_tokens_per_s", "tokens/s", "of computed prompts", kind="gauge"),
    _round("decode_tokens_per_s", "tokens/s", "generated in rounds without prompts", kind="gauge"),
    _round("time_to_first_token_s", "s", "from the first submission to an idle engine", kind="gauge", contract="I29"),
    _round("compile_s", "s", "spent waiting for the programs to be compiled, or fetched from the cache", kind="gauge"),
    _round("compilations", "", "of all programs"),
    _round("programs", "", "compilations of each", label="program"),
    # A look at the state: `InferenceEngine.memory`
    _state("reserved_bytes", "bytes", "of pages in use", contract="I33"),
    _state("live_bytes", "bytes", "of stored K/V; what is shared counts once", contract="I33"),
    _state("wasted_bytes", "bytes", "reserved but not live: the rest of last pages", contract="I33"),
    _state("table_bytes", "bytes", "of all tables: sequences, sampling, pages"),
    _state("memory_overhead", "ratio", "(weights + tables + reserved) / (weights + live) - 1", contract="I27"),
    _state("peak_memory_bytes", "bytes", "of the device so far, on a CPU of the process", contract="I26"),
    _state("refcount_histogram", "pages", "by the number of their references", label="refs", contract="M70"),
    _state("slot_pages", "pages", "held by each slot", label="slot", contract="L63"),
    _state("slot_tokens", "tokens", "known of each slot that holds pages", label="slot", contract="L63"),
    # Measured by benches
    _bench("gather_ms", "ms", "fetching scattered K/V, of one attention call", "M54 M66 M69"),
    _bench("softmax_ms", "ms", "scores, softmax and sum of one attention call", "M69"),
    _bench("kv_write_ms", "ms", "storing a step's K/V", "M67"),
    _bench("layer_ms", "ms", "one layer of a step", "I39"),
    _bench("prefill_chunk_ms", "ms", "a step with a chunk of a prompt", "M67"),
    _bench("decode_tick_ms_p50", "ms", "a step without one, median", "M67 M69"),
    _bench("decode_tick_ms_p95", "ms", "a step without one, 95th percentile", "M67"),
    _bench("inter_token_ms", "ms", "between tokens of a sequence, mean in steady state", "I30"),
    _bench("static_tokens_per_sec", "tokens/s", "all requests at once", "M71"),
    _bench("continuous_tokens_per_sec", "tokens/s", "open loop, ramp and tail included", "M71"),
    _bench("continuous_steady_tokens_per_sec", "tokens/s", "open loop, without ramp and tail", "M71"),
    _bench("final_tokens_per_s", "tokens/s", "over the last 256 tokens", "I28"),
    _bench("perplexity", "", "with cached K/V", "I31"),
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
"""What one line for a log says."""


class Registry:
    """Values of the declared metrics: as a dict, as a line for a log, and in Prometheus' text format.

    It is a collector of `prometheus_client`, so it can also be registered with a registry of somebody else's.
    A name that is not declared is an error.
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
        """Enter a value into a histogram."""
        self._observed[name].observe(value)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def as_dict(self, source: str | None = None) -> dict[str, Any]:
        """Values by name, for JSON; None where nothing is known yet. Histograms as count, sum and cumulative buckets.

        Args:
            source: only metrics that come from there.
        """
        values = {**self._values, **{name: histogram.as_dict() for name, histogram in self._observed.items()}}
        return {name: values[name] for name in METRICS if name in values and source in (None, METRICS[name].source)}

    def line(self) -> str:
        """The most telling values in one line."""
        return " ".join(f"{name}={_short(self._values[name])}" for name in LINE)

    def prometheus(self) -> str:
        """Prometheus' text format, units as it wants them: counters end in `_total`, times in `_seconds`."""
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
