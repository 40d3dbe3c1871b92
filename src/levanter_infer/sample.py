"""`levanter-infer sample --config FILE`: sample prompts from a model.

Completions go to standard output, everything else to standard error; exit status: `cli.EXIT_STATUS`.
"""

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("sample")

from levanter_infer.cli.common import run_config
from levanter_infer.cli.session import failure, join, make_engine, merge_outputs, report_failures, serve
from levanter_infer.config import RunConfig
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.fingerprint import device_fingerprint, flat, model_fingerprint, tokenizer_fingerprint
from levanter_infer.io.output import output_files, write_files
from levanter_infer.io.prompts import Row, columns_of, read_rows
from levanter_infer.io.terminal import escape_for_terminal, one_line, say
from levanter_infer.runtime.hosts import Hosts, agree
from levanter_infer.runtime.multihost import ONE_MESH

_MAX_SHOWN_PROMPT = 400
_SHOWN_WITH_OUTPUT = 8
"""Requests whose completions are printed when all of them go to a file."""

USAGE = """\
usage: levanter-infer sample --config FILE [--KEY VALUE ...]

Sample completions of prompts from a model. FILE is YAML; two lines are enough:

  model: models/tiny          # a directory in Hugging Face's layout, or a hub id
  prompts: ["17+25="]

Every key can be given, or overridden, on the command line: --sampling.temperature 0 --output rows.jsonl

  --config FILE       the configuration; may be left out if --model and a prompt are given
  --output FILE       write one JSON row per sample; never replaces a file
  --output.metrics FILE.json   write what the engine counted; FILE.prom for Prometheus
  --overwrite         let these replace files
  --prompts TEXT      a prompt, instead of the configuration's; may be repeated
  --version           the version
  --help              this text
"""
"""Read from the source by `cli.command_help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_config("sample", argv, run)


def run(config: RunConfig) -> int:
    """Sample what the configuration asks for; returns the exit status. Raises: ValueError for what stops the run."""
    if config.multihost.is_on and config.multihost.layout != ONE_MESH:
        raise ValueError("multihost.layout: sample has one output; use one_mesh, or levanter_infer.batch for per_host")
    with join(config) as hosts:
        return _run(config, hosts)


def _run(config: RunConfig, hosts: Hosts | None) -> int:
    columns = columns_of(config)
    output = config.output.path if config.output else None
    rows = read_rows(config, columns=None if output is None else columns)
    writes = hosts is None or hosts.is_lead
    if hosts is not None:
        agree(hosts, "run", run_fingerprint(config, rows))
    with output_files(config if writes else dataclasses.replace(config, output=None)) as (writer, metrics):
        engine = make_engine(config, len(rows)) if hosts is None else make_engine(config, len(rows), hosts)
        requests = [row.request for row in rows if row.request is not None]
        sampled, seconds = serve(engine, requests)
        outputs = merge_outputs(rows, sampled)
        results = (columns.rows(output, row.carried) for row, output in zip(rows, outputs, strict=True))
        write_files(writer, metrics, itertools.chain.from_iterable(results), engine)
    if not writes:
        return 1 if any(failure(output) is not None for output in outputs) else 0
    shown = outputs if output is None else outputs[:_SHOWN_WITH_OUTPUT]
    for row, result in zip(rows, shown, strict=False):
        if result.error is None:
            print(completion_text(row.request, result, color=sys.stdout.isatty()))
    sys.stdout.flush()
    if output is not None:
        say(f"{'the others' if len(shown) < len(outputs) else 'rows'} are in {output}")
    failed = report_failures(outputs)
    say(summary(outputs, engine.stats(), seconds))
    return 1 if failed else 0


def run_fingerprint(config: RunConfig, rows: Sequence[Row]) -> dict[str, str]:
    """Facts that processes sampling together must have in common. Paths may differ; contents may not."""
    facts = {
        "sampling": dataclasses.asdict(config.sampling),
        "engine": dataclasses.asdict(config.engine_config()),
        "mesh": dataclasses.asdict(config.mesh),
        "model": {
            "dtype": config.model.dtype,
            **model_fingerprint(config.model.resolve()),
        },
        "tokenizer": tokenizer_fingerprint(
            config.tokenizer or config.model.path, None if config.tokenizer else config.model.revision
        ),
        "prompts": hashlib.sha256(repr(rows).encode()).hexdigest(),
        "device": device_fingerprint(config.engine_config().cpu_isa),
    }
    named = ("model.name", "model.revision", "model.adapter_name", "model.adapter_revision", "tokenizer.name")
    return {key: str(value) for key, value in flat(facts).items() if key not in named}


def completion_text(request: Request | None, output: RequestOutput, *, color: bool) -> str:
    """A request and its samples, safe to print."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if color else ("", "")
    lines = [f"{dim}[{one_line(output.id)}]{plain} " + _indented(_shown_prompt(request), "    ")]
    for c in output.completions:
        mark = f"  {c.index}> " if len(output.completions) > 1 else "  -> "
        text = c.text if c.text is not None else " ".join(map(str, c.token_ids))
        lines.append(mark + _indented(text.rstrip("\n"), " " * len(mark)))
        count = f"{len(c.token_ids)} token{'s' if len(c.token_ids) != 1 else ''}"
        lines.append(f"{dim}{' ' * len(mark)}({c.finish_reason}, {count}){plain}")
    return "\n".join(lines)


def _shown_prompt(request: Request | None) -> str:
    if request is None or request.prompt_token_ids is not None:
        ids = [] if request is None else list(request.prompt_token_ids or ())
        text = " ".join(map(str, ids))
    elif request.messages is not None:
        text = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in request.messages)
    else:
        text = request.prompt or ""
    return text if len(text) <= _MAX_SHOWN_PROMPT else "… " + text[-_MAX_SHOWN_PROMPT:]


def _indented(text: str, indent: str) -> str:
    return escape_for_terminal(text).replace("\n", "\n" + indent)


def summary(outputs: Sequence[RequestOutput], stats: Mapping[str, Any], seconds: float) -> str:
    """The closing lines; `stats` are those of `InferenceEngine.stats`."""
    failed = sum(failure(output) is not None for output in outputs)
    samples = sum(len(output.completions) for output in outputs)

    def rate(key: str) -> str:
        value = stats[key]
        return "-" if value is None else f"{value:.0f} tok/s"

    first = stats["time_to_first_token_s"]
    return (
        f"done      {len(outputs)} requests ({failed} failed), {samples} samples, {stats['prompt_tokens']} prompt and "
        f"{stats['generated_tokens']} generated tokens in {seconds:.1f} s\n"
        f"speed     prefill {rate('prefill_tokens_per_s')}, decode {rate('decode_tokens_per_s')}, first token after "
        f"{'-' if first is None else f'{first:.2f} s'}\n"
        f"work      {stats['steps']} steps in {stats['rounds']} rounds, {stats['pages_peak']} of "
        f"{stats['pages_total']} pages at the peak, {stats['preemptions']} preemptions, "
        f"{stats['compilations']} programs compiled in {stats['compile_s']:.1f} s"
    )
