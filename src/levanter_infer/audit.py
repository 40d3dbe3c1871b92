"""`levanter-infer audit --config FILE`: sample prompts, and score every token again without a cache.

A table for people goes to standard error, one JSON line to standard output. Exit status: 0 all log probabilities agree,
1 some do not or a request failed, 2 wrong usage or configuration.
"""

import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from levanter_infer.cli import command_help, run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("audit")

import numpy as np

from levanter_infer.config import RunConfig, load_config
from levanter_infer.diagnosis import Diagnosis, Pair, Path, diagnose
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.frontend import (
    generate,
    guarded,
    make_engine,
    merge_outputs,
    parse_arguments,
    report_failures,
    say,
)
from levanter_infer.rows import read_rows
from levanter_infer.runtime.progress import stage

MAX_DELTA = {"float32": 1e-3, "bfloat16": 1.0, "float16": 0.1, "int8": 1.2, "float8_e4m3fn": 15.0}
"""Largest |Δ logprob| that passes by default, by the coarser dtype of weights and pages. docs/numerics.md says what was
measured."""
_LENGTHS = 8
"""The uncached forward is compiled for this many lengths at most; a sequence is padded to the next."""

USAGE = """\
usage: levanter-infer audit --config FILE [--max-delta X] [--KEY VALUE ...]

Sample as `levanter-infer sample` does, then compute the log probability of every sampled token again, by the plain
forward of the same model over the whole sequence: no cache, no pages, no company. Prints by how much they differ.

  --config FILE       the configuration, as of `levanter-infer sample`
  --max-delta X       fail if a log probability differs by more; default by dtype: float32 {float32:g},
                      float16 {float16:g}, bfloat16 {bfloat16:g}, int8 {int8:g}, float8_e4m3fn {float8_e4m3fn:g}
  --help              this text
"""
"""Read from the source by `cli.command_help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return guarded(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    rest, own = split_options(argv, lambda key: key == "max-delta")
    arguments = parse_arguments(rest)
    if arguments is None:
        print(command_help("audit"))
        return 0
    return run(load_config(*arguments), read_number("max-delta", own))


def split_options(argv: Sequence[str], is_own: Callable[[str], bool]) -> tuple[list[str], list[tuple[str, str]]]:
    """The arguments without a command's own options, and these, as (key, value).

    Raises: ValueError for an own option without a value.
    """
    rest, own, left = [], [], list(argv)
    while left:
        option = left.pop(0)
        key, has_value, value = option.removeprefix("--").partition("=")
        if not (option.startswith("--") and is_own(key)):
            rest.append(option)
            continue
        if not has_value and not left:
            raise ValueError(f"--{key} needs a value")
        own.append((key, value if has_value else left.pop(0)))
    return rest, own


def read_number(key: str, own: Sequence[tuple[str, str]]) -> float | None:
    """The value of the last option `key`, if it is given. Raises: ValueError unless it is a number of at least 0."""
    texts = [value for name, value in own if name == key]
    if not texts:
        return None
    try:
        number = float(texts[-1])
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise ValueError(f"--{key} {texts[-1]}: expected a number of at least 0")
    return number


def run(config: RunConfig, max_delta: float | None) -> int:
    """Sample, score again and report; returns the exit status. Raises: ValueError for what stops the run."""
    sampled = sample(config)
    pairs = score_again(config, sampled)
    gate = default_gate(sampled.about) if max_delta is None else max_delta
    diagnosis = diagnose(pairs, gate, sampled.about["page_size"])
    failed = report_failures(sampled.outputs)
    report = summary(pairs, gate)
    for line in table(report):
        say(line)
    say(f"verdict   {diagnosis.text}")
    say(f"{'passed' if report['passed'] else 'FAILED':<10}max |Δ logprob| {report['max_delta']:.3g}, gate {gate:g}")
    print_line("audit", "uncached forward", sampled.about, report, diagnosis)
    return 0 if report["passed"] and not failed else 1


# Sampling and scoring


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What an engine gave, once it is gone."""

    outputs: list[RequestOutput]
    about: dict[str, Any]
    """Of `InferenceEngine.describe`, the dtype of the weights, and why the instruction set was chosen."""

    @property
    def requests(self) -> list[RequestOutput]:
        """Those that were served."""
        return [output for output in self.outputs if output.error is None]


def sample(config: RunConfig, change: Callable[[Request], Request] = lambda request: request) -> Sampled:
    """Sample what the configuration asks for; afterwards the engine and its model are out of memory.

    Raises: ValueError for what stops the run, or if no request could be served.
    """
    rows = read_rows(config)
    engine = make_engine(config, len(rows))
    outputs = merge_outputs(rows, generate(engine, [change(row.request) for row in rows if row.request is not None]))
    about = {**engine.describe(), "weights": str(engine.model.dtype), "cpu_isa_reason": engine.backend.isa_reason}
    sampled = Sampled(outputs, about)
    del engine
    gc.collect()
    if not any(completion.token_ids for output in sampled.requests for completion in output.completions):
        report_failures(outputs)
        raise ValueError("nothing was sampled, so that there is nothing to compare")
    return sampled


@stage("computing the log probabilities again, without a cache")
def score_again(config: RunConfig, sampled: Sampled) -> list[Pair]:
    """Every completion beside the plain forward over its tokens, by the model as it is stored."""
    return beside_uncached(plain_model(config), sampled.requests, sampled.about["max_seq_len"])


def plain_model(config: RunConfig):
    """The configuration's model as it is stored. Raises: ValueError as `load_model`."""
    from levanter_infer.checkpoints.load import load_weights
    from levanter_infer.checkpoints.source import resolve_source

    return load_weights(resolve_source(config.model.path, config.model.revision), dtype=config.model.dtype)


def beside_uncached(model, outputs: Sequence[RequestOutput], max_seq_len: int) -> list[Pair]:
    """Every completion, and what the plain forward of `model` says of the same tokens.

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
    longest = max(len(o.prompt_token_ids) + len(c.token_ids) for o in outputs for c in o.completions)
    unit = BLOCK * -(-longest // (BLOCK * _LENGTHS))
    pairs = []
    for output in outputs:
        prompt = output.prompt_token_ids
        for c in output.completions:
            tokens = [*prompt, *c.token_ids]
            padded = np.zeros(unit * -(-len(tokens) // unit), np.int32)
            padded[: len(tokens)] = tokens
            scores = np.asarray(jax.device_get(program(model, jnp.asarray(padded))))
            again = Path(prompt, c.token_ids, scores[len(prompt) - 1 : len(tokens) - 1].tolist())
            pairs.append(Pair(output.id, c.index, path_of(output, c.index), again))
    return pairs


def path_of(output: RequestOutput, index: int) -> Path:
    c = output.completions[index]
    return Path(output.prompt_token_ids, c.token_ids, c.logprobs.tolist(), c.top_logprobs)


def default_gate(about: Mapping[str, Any]) -> float:
    """The largest difference that passes, for an engine that `about` describes."""
    return max(MAX_DELTA[about["weights"]], MAX_DELTA[about["kv_dtype"]])


# The report


def summary(pairs: Sequence[Pair], gate: float) -> dict[str, Any]:
    """How much the log probabilities differ, over all tokens and by their place among the generated ones."""
    deltas = [pair.deltas() for pair in pairs]
    flat = np.concatenate(deltas)
    place = np.concatenate([np.arange(len(d)) for d in deltas])
    buckets = []
    low, high = 0, 1
    while low < len(place) and (place >= low).any():
        inside = flat[(place >= low) & (place < high)]
        buckets.append({"from": low, "to": high - 1, "tokens": len(inside), **_max_and_mean(inside)})
        low, high = high, 2 * high
    sample_, token = max(
        ((i, int(np.argmax(d))) for i, d in enumerate(deltas) if d.size), key=lambda it: deltas[it[0]][it[1]]
    )
    worst = pairs[sample_]
    at = {
        "id": worst.id,
        "index": worst.index,
        "token": token,
        "position": len(worst.one.prompt_token_ids) + token,
        "logprobs": [_number(path.logprobs[token]) for path in (worst.one, worst.other) if token < len(path.logprobs)],
    }
    return {
        "samples": len(pairs),
        "tokens": len(flat),
        **_max_and_mean(flat),
        "gate": gate,
        "passed": bool(np.max(flat) <= gate),
        "perplexity": [_perplexity([pair.one for pair in pairs]), _perplexity([pair.other for pair in pairs])],
        "worst": at,
        "by_token": buckets,
    }


def _perplexity(paths: Sequence[Path]) -> float:
    """Of all generated tokens together."""
    logprobs = np.concatenate([path.logprobs for path in paths])
    with np.errstate(over="ignore"):
        return _number(float(np.exp(-np.mean(logprobs, dtype=np.float64))))


def _max_and_mean(deltas: np.ndarray) -> dict[str, float | str]:
    return {"max_delta": _number(float(np.max(deltas))), "mean_delta": _number(float(np.mean(deltas)))}


def _number(value: float) -> float:
    return float(f"{value:.6g}")


def table(report: Mapping[str, Any]) -> list[str]:
    """The report in lines for people."""
    lines = [f"{'generated':>12}{'tokens':>9}{'max |Δ logprob|':>18}{'mean':>12}"]
    for bucket in report["by_token"]:
        name = str(bucket["from"]) if bucket["from"] == bucket["to"] else f"{bucket['from']}-{bucket['to']}"
        lines.append(f"{name:>12}{bucket['tokens']:>9}{bucket['max_delta']:>18.3g}{bucket['mean_delta']:>12.3g}")
    lines.append("perplexity  " + " and ".join(f"{value:.6g}" for value in report["perplexity"]))
    worst = report["worst"]
    values = " and ".join(f"{value:.6g}" for value in worst["logprobs"])
    lines.append(
        f"worst     request {worst['id']}, sample {worst['index']}, generated token {worst['token']} (position "
        f"{worst['position']}): {values}"
    )
    return lines


def print_line(
    command: str, against: str, about: Mapping[str, Any], report: Mapping[str, Any], diagnosis: Diagnosis
) -> None:
    """One JSON line on standard output."""
    names = ("weights", "kv_dtype", "attention", "matmul", "cpu_isa", "numerics", "page_size")
    line = {"command": command, "against": against, **{name: about[name] for name in names if name in about}, **report}
    print(json.dumps(_finite({**line, "verdict": diagnosis.verdict, "findings": diagnosis.findings})))


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become text."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
