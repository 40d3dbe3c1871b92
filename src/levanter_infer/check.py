"""`levanter-infer check`: the machine, the numerics of an engine, and where they start to differ.

A table for people goes to standard error, one JSON line to standard output. Exit status: `cli.EXIT_STATUS`.
"""

import contextlib
import dataclasses
import enum
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("check")

import numpy as np

from levanter_infer.cli.common import guarded, parse_arguments
from levanter_infer.cli.session import generate, make_engine, merge_outputs, report_failures
from levanter_infer.config import RunConfig, load_config
from levanter_infer.diagnosis import Diagnosis, Pair, Path, diagnose, where_stored_differs
from levanter_infer.engine.params import brief
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.io.prompts import read_rows
from levanter_infer.io.terminal import say
from levanter_infer.policies import CpuIsa, WeightDtype
from levanter_infer.runtime.progress import stage

MAX_DELTA = {"float32": 1e-3, "bfloat16": 1.0, "float16": 0.1, "int8": 1.2, "float8_e4m3fn": 15.0}
"""Largest |Δ logprob| that passes by default, by the coarser dtype of weights and pages. Measured: docs/numerics.md."""
QUANTIZED_DELTA = 15.0
"""The same with weights of int8, between 16-bit paths or with an engine of floats; in float32 it is float32's."""
_LENGTHS = 8
"""Lengths that the uncached forward is compiled for, at most; a sequence is padded to the next."""
_TOP = 20
"""Likeliest tokens whose log probabilities are compared where two engines choose differently."""
_REMEDY = "sample again with --sampling.logprobs 5"

USAGE = """\
usage: levanter-infer check
       levanter-infer check --config FILE [--level LEVEL] [--max-delta X] [--KEY VALUE ...]
       levanter-infer check --config FILE --against.KEY VALUE [--max-delta X] [--KEY VALUE ...]
       levanter-infer check --diff ONE.jsonl OTHER.jsonl [--page-size N] [--max-delta X]

Three levels, each of which says more:

  machine    the machine, versions, and the kernels and instruction set that `auto` takes here
  numerics   sample as `levanter-infer sample` does, then compute the log probability of every sampled token again, by
             the plain forward of the same model over the whole sequence: no cache, no pages, one sequence at a time
  diagnosis  the same comparison, or that of two engines or two files, and how they differ:
               agree     nowhere by more than --max-delta
               prompt    from the first token on: chat template, tokenizer, positions
               drift     smoothly, as rounding does; other tokens only where two were nearly as likely
               scramble  from one position on, by far more than before: page table, masks, stale keys

  --level LEVEL        default: machine without options, diagnosis with --against or --diff, else numerics
  --config FILE        the configuration, as in `levanter-infer sample`. With --level diagnosis, if they disagree, one
                       sample is run again, alone: which layer is the first to store wrong keys and values?
  --against.KEY VALUE  compare with an engine whose configuration has this key changed, for example
                       --against.engine.attention reference
  --diff ONE OTHER     compare two files of rows, written with sampling.logprobs (5 or more tell most)
  --page-size N        tokens per page of ONE, to recognise page boundaries in files
  --max-delta X        log probabilities that differ by at most X are equal. Default, by dtype: float32 {float32:g},
                       float16 {float16:g}, bfloat16 {bfloat16:g}, int8 {int8:g}, float8_e4m3fn {float8_e4m3fn:g}
  --help               this text
"""
"""Read from the source by `cli.command_help`."""


class Level(enum.StrEnum):
    """Depth of a check."""

    MACHINE = "machine"
    NUMERICS = "numerics"
    DIAGNOSIS = "diagnosis"


def main(argv: Sequence[str] | None = None, command: str = "check") -> int:
    """Run the command under one of its names (check, audit, doctor); returns the exit status."""
    return guarded(lambda: _command(list(sys.argv[1:] if argv is None else argv), command))


def _command(argv: list[str], command: str) -> int:
    files, argv = _files(argv)
    path, given = parse_arguments(command, argv, own=("level", "max-delta", "page-size", "against"))
    changes = [(key.removeprefix("against."), value) for key, value in given if key.startswith("against.")]
    own = {key: value for key, value in given if key in ("level", "max-delta", "page-size")}
    overrides = [(key, value) for key, value in given if key not in own and not key.startswith("against.")]
    level = _level(command, own, bool(path or given), bool(files or changes))
    max_delta, page_size = (_read_number(key, own) for key in ("max-delta", "page-size"))
    if page_size is not None and (page_size < 1 or page_size % 1):
        raise ValueError(f"--page-size {page_size:g}: expected a whole number of at least 1")
    if files is not None:
        if path or overrides or changes:
            raise ValueError(f"--diff compares two files and takes no configuration: got {' '.join(argv)[:80]}")
        pairs, gate = read_pairs(*files), MAX_DELTA["float32"] if max_delta is None else max_delta
        diagnosis = diagnose(pairs, gate, None if page_size is None else int(page_size))
        return 0 if Comparison("files", {}, pairs, gate, diagnosis).report(command, level) else 1
    if page_size is not None:
        raise ValueError("--page-size is for --diff; leave it out, engines use their own")
    if level is Level.MACHINE:
        if path or overrides:
            raise ValueError("--level machine needs no configuration; leave it out, or use --level numerics")
        return describe_machine(command)
    config = load_config(path, overrides)
    other = load_config(path, [*overrides, *changes]) if changes else None
    return compare(command, level, config, other, max_delta)


def _files(argv: list[str]) -> tuple[list[str] | None, list[str]]:
    """The two files of `--diff`, if it is given, and the other arguments."""
    if "--diff" not in argv:
        return None, argv
    at = argv.index("--diff")
    files = argv[at + 1 : at + 3]
    if len(files) < 2 or any(name.startswith("--") for name in files):
        raise ValueError("--diff needs two files of rows: --diff ONE.jsonl OTHER.jsonl")
    return files, argv[:at] + argv[at + 3 :]


def _level(command: str, own: Mapping[str, str], has_options: bool, compares_two: bool) -> Level:
    """Raises: ValueError for a level that does not exist, or does not go with the other options."""
    is_long = compares_two or (command == "doctor" and has_options)
    default = Level.DIAGNOSIS if is_long else Level.NUMERICS if has_options or command == "audit" else Level.MACHINE
    level = own.get("level", default)
    if level not in tuple(Level):
        raise ValueError(f"--level {brief(level)}: expected one of {', '.join(Level)}")
    if compares_two and level != Level.DIAGNOSIS:
        raise ValueError(f"--level {level} compares no two files or engines; use {Level.DIAGNOSIS}, or leave it out")
    return Level(level)


def _read_number(key: str, own: Mapping[str, str]) -> float | None:
    """The value of option `key`, if it is given. Raises: ValueError unless it is a number of at least 0."""
    if key not in own:
        return None
    with contextlib.suppress(ValueError):
        if float(own[key]) >= 0:
            return float(own[key])
    raise ValueError(f"--{key} {own[key]}: expected a number of at least 0")


def describe_machine(command: str) -> int:
    """Say what an engine would run on here, and print it as a line of JSON; returns the exit status."""
    import jax

    from levanter_infer.engine.instructions import choose, usable_isas
    from levanter_infer.fingerprint import device_fingerprint, version_fingerprint
    from levanter_infer.kernels.cpu import bindings as cpu
    from levanter_infer.runtime.processor import processor_name

    device, versions = {**device_fingerprint(), "devices": jax.device_count()}, version_fingerprint()
    kind = processor_name() if device["platform"] == "cpu" else device["kind"]
    say(f"machine   {device['devices']} x {device['platform']} ({kind})")
    say(f"versions  {' '.join(f'{name}={version}' for name, version in versions.items())}")
    chosen: dict[str, str] = {}
    missing = cpu.why_unavailable()
    if device["platform"] != "cpu":
        say(f"kernels   those for CPUs are not used on this device; an engine prints its own ({command} --config FILE)")
    elif missing is not None:
        say(f"kernels   those for CPUs cannot be used, XLA replaces them: {missing}")
    else:
        say(f"kernels   for CPUs, with {', '.join(usable_isas())}")
        for dtype in ("bfloat16", "float32"):
            choice = choose(CpuIsa.AUTO, dtype)
            chosen[dtype] = choice.isa
            say(f"          {dtype}: cpu_isa={choice.isa}: {choice.reason}")
    print(json.dumps({"command": command, "device": device, "versions": versions, "cpu_isa": chosen}), flush=True)
    return 0


def compare(command: str, level: Level, config: RunConfig, other: RunConfig | None, max_delta: float | None) -> int:
    """Compare an engine with the uncached forward of its model, or with another engine; returns the exit status.

    Raises: ValueError for what stops the run.
    """
    if other is None:
        sampled = sample(config)
        pairs, against, gate = score_again(config, sampled), "uncached forward", default_gate(sampled.about)
    else:
        sampled, second = sample(config, _with_top(config)), sample(other, _with_top(other))
        pairs, against = _pairs(_paths(sampled.requests), _paths(second.requests)), "engine"
        gate = max(default_gate(sampled.about), default_gate(second.about))
        if (sampled.about["weights"] == WeightDtype.INT8) != (second.about["weights"] == WeightDtype.INT8):
            gate = max(gate, QUANTIZED_DELTA)
    failed = report_failures(sampled.outputs)
    gate = gate if max_delta is None else max_delta
    diagnosis = diagnose(pairs, gate, sampled.about["page_size"])
    if level is Level.DIAGNOSIS:
        failed = 0  # what was sampled is judged, and a failed request is no difference
        about = "matmul={matmul} attention={attention} cpu_isa={cpu_isa}: {cpu_isa_reason}"
        say("kernels   " + about.format(**sampled.about))
        if other is None and diagnosis.suspect is not None:
            diagnosis.findings.append(look_inside(config, diagnosis.suspect, diagnosis.stored))
    agrees = Comparison(against, sampled.about, pairs, gate, diagnosis).report(command, level)
    return 0 if agrees and not failed else 1


# Sampling and scoring


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The results of an engine that has been freed."""

    outputs: list[RequestOutput]
    about: dict[str, Any]
    """`InferenceEngine.describe`, the dtype of the weights, and why the instruction set was chosen."""

    @property
    def requests(self) -> list[RequestOutput]:
        """The outputs without an error."""
        return [output for output in self.outputs if output.error is None]


def sample(config: RunConfig, change: Callable[[Request], Request] = lambda request: request) -> Sampled:
    """Sample what the configuration asks for; afterwards the engine and its model are out of memory.

    Raises: ValueError for what stops the run, or if no request could be served.
    """
    rows = read_rows(config)
    engine = make_engine(config, len(rows))
    outputs = merge_outputs(rows, generate(engine, [change(row.request) for row in rows if row.request is not None]))
    about = engine.describe()
    about["weights"], about["activations"] = about["weight_dtype"], str(engine.model.dtype)
    about["cpu_isa_reason"] = engine.backend.isa_reason
    sampled = Sampled(outputs, about)
    del engine
    gc.collect()
    if not any(completion.token_ids for output in sampled.requests for completion in output.completions):
        report_failures(outputs)
        raise ValueError("nothing was sampled, so that there is nothing to compare")
    return sampled


def _with_top(config: RunConfig) -> Callable[[Request], Request]:
    """A change of requests that asks for the likeliest tokens too."""
    count = min(_TOP, config.engine_config().max_logprobs)

    def change(request: Request) -> Request:
        sampling = request.sampling or config.sampling
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, logprobs=count))

    return change


@stage("computing the log probabilities again, without a cache")
def score_again(config: RunConfig, sampled: Sampled) -> list[Pair]:
    """Every completion beside the uncached forward over its tokens, by the model as it is stored."""
    return beside_uncached(plain_model(config), sampled.requests, sampled.about["max_seq_len"])


def plain_model(config: RunConfig):
    """The configuration's model, quantized as its engine has it. Raises: ValueError as `load_model`."""
    from levanter_infer.checkpoints.load import load_weights

    quantizes = config.engine_config().weight_dtype is not None
    return load_weights(config.model.resolve(), dtype=config.model.dtype, quantizes=quantizes)


def beside_uncached(model, outputs: Sequence[RequestOutput], max_seq_len: int) -> list[Pair]:
    """Every completion beside what the uncached forward of `model` says of the same tokens.

    Args:
        max_seq_len: the engine's; ropes that depend on the length of sequences look at it.
    """
    import jax
    import jax.numpy as jnp

    from levanter_infer.decode.programs import compile_program
    from levanter_infer.layers.attention import AttentionSpec
    from levanter_infer.models.uncached import BLOCK, token_scores

    spec = AttentionSpec(max_seq_len=max_seq_len)
    program = compile_program(lambda model, tokens: token_scores(model, tokens, spec).logprobs)
    paths = _paths(outputs)
    longest = max(len(path.prompt_token_ids) + len(path.token_ids) for path in paths.values())
    unit = BLOCK * -(-longest // (BLOCK * _LENGTHS))
    pairs = []
    for key, path in paths.items():
        tokens = [*path.prompt_token_ids, *path.token_ids]
        padded = np.zeros(unit * -(-len(tokens) // unit), np.int32)
        padded[: len(tokens)] = tokens
        scores = np.asarray(jax.device_get(program(model, jnp.asarray(padded))))
        generated = scores[len(path.prompt_token_ids) - 1 : len(tokens) - 1].tolist()
        pairs.append(Pair(*key, path, Path(path.prompt_token_ids, path.token_ids, generated)))
    return pairs


def default_gate(about: Mapping[str, Any]) -> float:
    """The largest difference that passes, for an engine that `about` describes."""
    own = MAX_DELTA[about["activations"]]
    if about["weights"] == WeightDtype.INT8 and about["activations"] != "float32":
        own = QUANTIZED_DELTA
    return max(own, MAX_DELTA[about["kv_dtype"]])


# Which layer


def look_inside(config: RunConfig, suspect: Pair, stored: int) -> str:
    """Run the request of a suspect sample again, alone, and compare what it stores, layer by layer."""
    rows = [row.request for row in read_rows(config) if row.id == suspect.id and row.request is not None]
    engine = make_engine(dataclasses.replace(config, engine={**config.engine, "window_cache": False}), 1)
    found = keys_and_values_of(engine, rows[0], suspect.index, stored)
    page_size, max_seq_len = engine.shapes.page_size, engine.shapes.max_seq_len
    del engine
    gc.collect()
    return compare_stored(plain_model(config), found, page_size, max_seq_len)


@dataclasses.dataclass(frozen=True)
class StoredTokens:
    """Tokens of one sequence, and what an engine has stored of them."""

    tokens: np.ndarray
    """i32[n]"""
    values: Mapping[int, np.ndarray]
    """Keys and values f32[n, kv_heads, 2, head_size], or latents f32[n, kv_heads, 1, head_size], by the number of each
    layer that stores some. On a mesh the heads are those of all devices."""


def keys_and_values_of(engine, request: Request, index: int, stored: int) -> StoredTokens | None:
    """Sample a request alone until `stored` tokens of sample `index` are stored, and read these.

    Requires: all layers keep all pages (`engine.window_cache` is false where there are sliding windows).

    Returns: None if the sample ends before.
    """
    import jax.numpy as jnp

    from levanter_infer.cache.cache import by_layer

    state = engine.submit(request)
    sequence, found = state.sequences[index], None
    while found is None and not state.is_done:
        engine.step_round(max_steps=1)
        table, cache, rank = engine.state.decode.sequences, engine.state.cache, state.rank or 0
        columns = table.num_computed, table.page_indices, table.tokens
        ranks = (engine.runner.num_ranks, engine.shapes.num_slots)
        computed, pages, tokens = (np.asarray(c).reshape(*ranks, -1)[rank, sequence.slot or 0] for c in columns)
        if sequence.slot is not None and computed.item() >= stored:
            position = np.arange(stored, dtype=np.int32)
            places = pages[position // engine.shapes.page_size], position % engine.shapes.page_size
            places = tuple(map(jnp.asarray, places))
            pools = zip(engine.model.config.pools, cache.pools, strict=True)
            stored_in = [(spec, pool) for spec, pool in pools if spec.memory.is_paged]
            values = by_layer((spec, pool.by_head(pool.values_at(*places, rank))) for spec, pool in stored_in)
            found = StoredTokens(tokens[:stored], {layer: np.asarray(each) for layer, each in values.items()})
    engine.cancel(state)
    engine.drain()
    return found


def compare_stored(model, found: StoredTokens | None, page_size: int, max_seq_len: int) -> str:
    """Comparison of the keys and values that an engine has stored with the right ones, in words."""
    import jax.numpy as jnp

    from levanter_infer.decode.programs import compile_program
    from levanter_infer.layers.attention import AttentionSpec
    from levanter_infer.models.uncached import keys_and_values

    if found is None:
        return "run alone, the sample ends earlier: its result depends on the batch composition"
    tokens = found.tokens
    padded = np.zeros(1 << (len(tokens) - 1).bit_length(), np.int32)
    padded[: len(tokens)] = tokens
    spec = AttentionSpec(max_seq_len=max_seq_len)
    expected = compile_program(lambda model, tokens: keys_and_values(model, tokens, spec))(model, jnp.asarray(padded))
    expected = {layer: np.asarray(values)[: len(tokens)] for layer, values in expected.items()}
    return where_stored_differs(found.values, expected, page_size) or (
        f"run alone, all layers store the right keys and values for the first {len(tokens)} tokens: the cause is "
        "another request in the batch, the last layer, the head or the sampler"
    )


# The report


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The samples of two sides, and how they differ."""

    against: str
    """The second side: uncached forward, engine or files."""
    about: Mapping[str, Any]
    """Description of the first engine; empty for files."""
    pairs: Sequence[Pair]
    gate: float
    """Largest |Δ logprob| that passes."""
    diagnosis: Diagnosis

    def report(self, command: str, level: Level) -> bool:
        """Print numbers and verdict for people, and a line of JSON; returns whether the two sides agree."""
        numbers = summary(self.pairs, self.gate)
        verdict, findings, passed = self.diagnosis.verdict, self.diagnosis.findings, numbers["passed"]
        if level is Level.DIAGNOSIS:
            lines = [f"verdict   {verdict}", *(f"          {finding}" for finding in findings)]
        else:
            end = f"max |Δ logprob| {numbers['max_delta']:.3g}, gate {self.gate:g}"
            lines = [f"verdict   {self.diagnosis.text}", f"{'passed' if passed else 'FAILED':<10}{end}"]
        for line in (*table(numbers), *lines):
            say(line)
        names = ("weights", "kv_dtype", "attention", "matmul", "cpu_isa", "numerics", "page_size")
        about = {name: self.about[name] for name in names if name in self.about}
        line = {"command": command, "against": self.against, **about, **numbers, "verdict": verdict}
        print(json.dumps(_finite({**line, "findings": findings})))
        return verdict == "agree" if level is Level.DIAGNOSIS else passed


def summary(pairs: Sequence[Pair], gate: float) -> dict[str, Any]:
    """Differences of the log probabilities, over all tokens and by their position among the generated ones."""
    deltas = [pair.deltas() for pair in pairs]
    flat = np.concatenate(deltas)
    position = np.concatenate([np.arange(len(d)) for d in deltas])
    buckets = []
    low, high = 0, 1
    while (position >= low).any():
        inside = flat[(position >= low) & (position < high)]
        buckets.append({"from": low, "to": high - 1, "tokens": len(inside), **_max_and_mean(inside)})
        low, high = high, 2 * high
    where, token = max(
        ((i, int(np.argmax(d))) for i, d in enumerate(deltas) if d.size), key=lambda it: deltas[it[0]][it[1]]
    )
    worst = pairs[where]
    return {
        "samples": len(pairs),
        "tokens": len(flat),
        **_max_and_mean(flat),
        "gate": gate,
        "passed": bool(np.max(flat) <= gate),
        "perplexity": [_perplexity(paths) for paths in zip(*((pair.one, pair.other) for pair in pairs), strict=True)],
        "worst": {
            "id": worst.id,
            "index": worst.index,
            "token": token,
            "position": len(worst.one.prompt_token_ids) + token,
            "logprobs": [
                _short(path.logprobs[token]) for path in (worst.one, worst.other) if token < len(path.logprobs)
            ],
        },
        "by_token": buckets,
    }


def _perplexity(paths: Sequence[Path]) -> float:
    """Perplexity of all generated tokens together."""
    logprobs = np.concatenate([path.logprobs for path in paths])
    with np.errstate(over="ignore"):
        return _short(float(np.exp(-np.mean(logprobs, dtype=np.float64))))


def _max_and_mean(deltas: np.ndarray) -> dict[str, float]:
    return {"max_delta": _short(float(np.max(deltas))), "mean_delta": _short(float(np.mean(deltas)))}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def table(report: Mapping[str, Any]) -> list[str]:
    """The report in lines for people."""
    lines = [f"{'generated':>12}{'tokens':>9}{'max |Δ logprob|':>18}{'mean':>12}"]
    for bucket in report["by_token"]:
        name = str(bucket["from"]) if bucket["from"] == bucket["to"] else f"{bucket['from']}-{bucket['to']}"
        lines.append(f"{name:>12}{bucket['tokens']:>9}{bucket['max_delta']:>18.3g}{bucket['mean_delta']:>12.3g}")
    worst = report["worst"]
    both, values = (" and ".join(f"{v:.6g}" for v in pair) for pair in (report["perplexity"], worst["logprobs"]))
    return [
        *lines,
        f"perplexity  {both}",
        f"worst     request {worst['id']}, sample {worst['index']}, generated token {worst['token']} (position "
        f"{worst['position']}): {values}",
    ]


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become text."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


# What is compared


def _paths(outputs: Sequence[RequestOutput]) -> dict[tuple[str, int], Path]:
    return {
        (output.id, c.index): Path(output.prompt_token_ids, c.token_ids, c.logprobs.tolist(), c.top_logprobs)
        for output in outputs
        for c in output.completions
    }


def _pairs(one: dict[tuple[str, int], Path], other: dict[tuple[str, int], Path]) -> list[Pair]:
    """The samples that both sides have. Raises: ValueError if there is none."""
    shared = [key for key in one if key in other]
    if len(shared) < max(len(one), len(other)):
        alone = len(one) - len(shared), len(other) - len(shared)
        say(f"note      {alone[0]} samples of the one and {alone[1]} of the other stand alone")
    if not any(one[key].token_ids or other[key].token_ids for key in shared):
        raise ValueError("no sample with the same id and index has tokens on both paths: nothing to compare")
    return [Pair(*key, one[key], other[key]) for key in shared]


def read_pairs(one: str, other: str) -> list[Pair]:
    """The samples of two files of output rows. Raises: ValueError saying which file or row is wrong."""
    return _pairs(_read(one), _read(other))


def _read(name: str) -> dict[tuple[str, int], Path]:
    paths = {}
    with open(name, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                if not row.get("error"):
                    paths[row["id"], row["index"]] = _path(row)
            except KeyError as e:
                raise ValueError(f"{name}:{number} has no {e.args[0]}; {_REMEDY}") from e
            except (ValueError, TypeError, AttributeError) as e:
                raise ValueError(f"{name}:{number} is no row to compare: {brief(str(e))}; {_REMEDY}") from e
    return paths


def _path(row: dict[str, Any]) -> Path:
    """Raises: KeyError, ValueError, TypeError or AttributeError for what `sample` does not write."""
    prompt, tokens, logprobs = (row[name] for name in ("prompt_token_ids", "token_ids", "logprobs"))
    if logprobs is None:
        raise KeyError("logprobs")
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(logprobs)} logprobs of {len(tokens)} tokens")
    tops = row.get("top_logprobs")
    tops = [{int(entry["token_id"]): _number(entry["logprob"]) for entry in top} for top in tops] if tops else None
    return Path(list(prompt), list(tokens), [_number(value) for value in logprobs], tops)


def _number(value: float | None) -> float:
    """JSON has no infinities: a row holds null for them."""
    return float("-inf") if value is None else float(value)
