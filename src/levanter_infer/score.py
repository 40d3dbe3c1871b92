"""`levanter-infer score --config FILE`: log probabilities of texts, and perplexity.

Results go to standard output, everything else to standard error. Exit status: `cli.EXIT_STATUS`.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("score")

import numpy as np

from levanter_infer.cli.common import run_config
from levanter_infer.cli.session import make_engine, report_failures, serve
from levanter_infer.columns import numbers, tops
from levanter_infer.config import RunConfig
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.io.output import output_files, write_files
from levanter_infer.io.prompts import Row, read_rows
from levanter_infer.io.terminal import one_line, say

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer

_SHOWN = 8
"""Rows that are printed when all of them go to a file."""

USAGE = """\
usage: levanter-infer score --config FILE [--KEY VALUE ...]

Log probabilities of texts under a model, and their perplexity. FILE is YAML, as in `levanter-infer sample`:

  model: models/tiny            # a directory in Hugging Face's layout, or a hub id
  prompts_file: texts.jsonl

A text file holds one text a line. JSONL rows have one of prompt, prompt_token_ids and messages, and may have an id. All
tokens but the first are scored; with a completion (behind token ids: completion_token_ids), those of the completion.
With engine.prefix_cache, shared prefixes are computed once.

  --config FILE       the configuration
  --output FILE       write one JSON row per text; never replaces a file
  --output.metrics FILE.json   write what the engine counted, and the perplexity; FILE.prom for Prometheus
  --overwrite         let these replace files
  --sampling.prompt_logprobs K   also write the K likeliest tokens at each position; K up to engine.max_prompt_logprobs
  --help              this text
"""
"""Read from the source by `cli.command_help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_config("score", argv, run)


@dataclasses.dataclass(frozen=True)
class Score:
    """Result of a row."""

    row: dict[str, Any]
    """The output row."""
    logprobs: np.ndarray
    """f32, of the tokens that count; empty for a row that failed."""

    @property
    def logprob(self) -> float:
        return float(np.sum(self.logprobs, dtype=np.float64))


def run(config: RunConfig) -> int:
    """Score what the configuration names; returns the exit status. Raises: ValueError for what stops the run."""
    asked = config.sampling.prompt_logprobs
    config = dataclasses.replace(config, sampling=_sampling(config))
    rows = read_rows(config, completions=True)
    output = config.output.path if config.output else None
    with output_files(config) as (writer, metrics):
        engine = make_engine(config, len(rows))
        targets = [_target(row, engine.tokenizer) for row in rows]
        results, seconds = serve(engine, [request for request, _ in targets if isinstance(request, Request)])
        rest = iter(results)
        outputs = [next(rest) if isinstance(request, Request) else request for request, _ in targets]
        scores = [
            _score(row, output, first, bool(asked))
            for row, output, (_, first) in zip(rows, outputs, targets, strict=True)
        ]
        engine.metrics().set("perplexity", perplexity(scores))
        write_files(writer, metrics, (score.row for score in scores), engine)
    for score in scores if output is None else scores[:_SHOWN]:
        if not score.row["error"]:
            print(score_line(score.row))
    sys.stdout.flush()
    failed = report_failures(outputs)
    say(summary(scores, engine.stats(), seconds))
    return 1 if failed else 0


def _sampling(config: RunConfig) -> SamplingParams:
    """Sampling parameters for the engine. Raises: ValueError for one that scores do not depend on."""
    for field in dataclasses.fields(SamplingParams):
        if field.name != "prompt_logprobs" and getattr(config.sampling, field.name) != getattr(
            SamplingParams(), field.name
        ):
            raise ValueError(f"sampling.{field.name} has no effect on scores; leave it out")
    if config.output is not None and config.output.include:
        raise ValueError("output.include has no effect on scores; sampling.prompt_logprobs adds top_logprobs")
    if config.output is not None and config.output.carry:
        raise ValueError("output.carry is for sample and batch; the rows of scores name theirs by id: leave it out")
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name} has no effect on scores: a completion follows the generation prompt")
    likeliest = 0 if config.engine.get("max_prompt_logprobs") == 0 else 1  # for `is_greedy`
    asked = config.sampling.prompt_logprobs
    return SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=likeliest if asked is None else asked)


def _target(row: Row, tokenizer: "Tokenizer | None") -> tuple[Request | RequestOutput, int]:
    """The request that scores a row, or its error; and the number of leading tokens that do not count."""
    if row.request is None:
        return RequestOutput(row.id, None, [], [], error=row.error), 0
    try:
        return _joined(row.request, row.completion, tokenizer)
    except ValueError as e:
        return RequestOutput(row.id, row.request.prompt, [], [], error=str(e)), 0


def _joined(request: Request, completion: Any, tokenizer: "Tokenizer | None") -> tuple[Request, int]:
    if request.prompt_token_ids is not None:
        ids = list(request.prompt_token_ids)
        context, whole = ids, [*ids, *(completion or ())]
    elif tokenizer is None:
        raise ValueError("text needs a tokenizer and this model has none; give prompt_token_ids")
    else:
        text = request.prompt or ""
        if request.messages is not None:
            text = tokenizer.apply_chat_template(
                list(request.messages),
                add_generation_prompt=completion is not None,
                **_template_settings(request),
            )
        special = request.messages is None  # a template has written them
        context = tokenizer.encode(text, add_special_tokens=special)
        whole = tokenizer.encode(text + (completion or ""), add_special_tokens=special)
    request = dataclasses.replace(
        request, prompt=None, messages=None, prompt_token_ids=whole, tools=None, chat_template_kwargs=None
    )
    if completion is None:
        return request, 1
    # A token that spans prompt and completion counts
    first = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(context, whole, strict=False)))
    if first == 0:
        raise ValueError(
            "there is no token before the completion, so its first one has no log probability; give a prompt"
        )
    return request, first


def _template_settings(request: Request) -> dict[str, Any]:
    """Variables of the chat template beside the messages."""
    return {**({"tools": request.tools} if request.tools is not None else {}), **(request.chat_template_kwargs or {})}


def _score(row: Row, output: RequestOutput, first: int, with_tops: bool) -> Score:
    """
    Args:
        first: position of the first token that counts.
    """
    ids, error = output.prompt_token_ids, output.error
    if error is None:
        error = output.completions[0].error
    prompt = None if row.request is None else row.request.prompt
    # One schema, as in `columns.Columns`: keys and their types do not depend on the row
    values: dict[str, Any] = {
        "id": row.id,
        "prompt": prompt or "",
        "completion": row.completion if isinstance(row.completion, str) else "",
        "prompt_token_ids": list(ids[:first]),
        "token_ids": list(ids[first:]),
        "logprobs": [],
        "logprob": None,
        "num_tokens": 0,
        "perplexity": None,
        "is_greedy": None,
        **({"top_logprobs": []} if with_tops else {}),
        "error": error or "",
    }
    if error is not None or output.prompt_logprobs is None:
        return Score(values | {"error": error or "failed"}, np.zeros(0, np.float32))
    logprobs, top = output.prompt_logprobs[first - 1 :], output.prompt_top_logprobs
    score = Score(values, logprobs)
    best = None if top is None or not len(logprobs) else [next(iter(likeliest)) for likeliest in top[first - 1 :]]
    values |= {
        "logprobs": numbers(logprobs),
        "logprob": _finite(score.logprob),
        "num_tokens": len(logprobs),
        "perplexity": perplexity([score]),
        "is_greedy": None if best is None else best == values["token_ids"],
    }
    if with_tops and top is not None:
        values["top_logprobs"] = tops(top[first - 1 :])
    return score


def perplexity(scores: Iterable[Score]) -> float | None:
    """e^-(mean log probability of a token), over all of them; None without tokens, or if one is impossible."""
    scores = list(scores)
    count = sum(len(score.logprobs) for score in scores)
    with np.errstate(over="ignore"):
        return _finite(float(np.exp(-sum(score.logprob for score in scores) / count))) if count else None


def _finite(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


def score_line(row: Mapping[str, Any]) -> str:
    """A row's result, safe to print."""
    count = row["num_tokens"]
    text = f"[{one_line(row['id'])}] logprob {_short(row['logprob'])}, {count} token{'s' if count != 1 else ''}"
    return text + f", perplexity {_short(row['perplexity'])}" + (", greedy" if row["is_greedy"] else "")


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def summary(scores: Sequence[Score], stats: Mapping[str, Any], seconds: float) -> str:
    """The closing lines; `stats` are those of `InferenceEngine.stats`."""
    failed = sum(bool(score.row["error"]) for score in scores)
    greedy = sum(bool(score.row["is_greedy"]) for score in scores)
    count = sum(score.row["num_tokens"] for score in scores)
    return (
        f"done      {len(scores)} texts ({failed} failed), {count} tokens scored in {seconds:.1f} s\n"
        f"result    perplexity {_short(perplexity(scores))}, {greedy} texts are greedy\n"
        f"work      {stats['computed_prompt_tokens']} tokens computed in {stats['steps']} steps, "
        f"{stats['prefix_hits']} pages found, {stats['preemptions']} preemptions, "
        f"{stats['compilations']} programs compiled in {stats['compile_s']:.1f} s"
    )
