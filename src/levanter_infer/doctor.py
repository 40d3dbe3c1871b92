"""`levanter-infer doctor`: where two paths that should agree do not, and what that says.

Exit status: 0 they agree, 1 they do not, 2 wrong usage or configuration.
"""

import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from typing import Any

from levanter_infer.cli import command_help, run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("doctor")

import numpy as np

from levanter_infer.audit import (
    MAX_DELTA,
    default_gate,
    path_of,
    plain_model,
    print_line,
    read_number,
    sample,
    score_again,
    split_options,
    summary,
    table,
)
from levanter_infer.config import RunConfig, load_config
from levanter_infer.diagnosis import Diagnosis, Pair, Path, diagnose, where_stored_differs
from levanter_infer.engine.params import brief
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.frontend import guarded, make_engine, parse_arguments, report_failures, say
from levanter_infer.rows import read_rows

_TOP = 20
"""Likeliest tokens whose log probabilities are compared where two engines choose differently."""

_REMEDY = "sample again with --sampling.logprobs 5"

USAGE = """\
usage: levanter-infer doctor
       levanter-infer doctor --config FILE [--against.KEY VALUE ...] [--max-delta X] [--KEY VALUE ...]
       levanter-infer doctor --diff ONE.jsonl OTHER.jsonl [--page-size N] [--max-delta X]

Without options: name the machine, versions, and the kernels and instruction set that `auto` takes here.

With them: compare two paths that should give the same tokens and log probabilities, and say how they differ:

  agree     nowhere by more than --max-delta
  prompt    from the first token on: chat template, tokenizer, positions
  drift     smoothly, as rounding does; other tokens only where two were nearly as likely
  scramble  from one position on, by far more than before: page table, masks, stale keys

  --config FILE             an engine against the plain forward of its model, without a cache; if they disagree, one
                            sample is run again, alone: which layer is the first to store wrong keys and values?
  --against.KEY VALUE       instead against an engine whose configuration has this key changed, for example
                            --against.engine.attention reference
  --diff ONE OTHER          instead: two files of rows, written with sampling.logprobs (5 or more tell most)
  --page-size N             tokens of a page of ONE, to recognise page boundaries in files
  --max-delta X             log probabilities that differ by at most X are equal; default: as `audit`, and
                            {float32:g} for files
  --help                    this text
"""
"""Read from the source by `cli.command_help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return guarded(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    if not argv:
        return describe_machine()
    files, argv = _files(argv)
    rest, own = split_options(argv, lambda key: key in ("max-delta", "page-size") or key.startswith("against."))
    max_delta, page_size = read_number("max-delta", own), read_number("page-size", own)
    if page_size is not None and (page_size < 1 or page_size % 1):
        raise ValueError(f"--page-size {page_size:g}: expected a whole number of at least 1")
    changes = [(key.removeprefix("against."), value) for key, value in own if key.startswith("against.")]
    if files is not None:
        if rest or changes:
            raise ValueError(f"--diff compares two files and takes no {(rest or ['--against'])[0]}")
        gate = MAX_DELTA["float32"] if max_delta is None else max_delta
        pairs = read_pairs(*files)
        return report("files", {}, pairs, gate, diagnose(pairs, gate, None if page_size is None else int(page_size)))
    arguments = parse_arguments(rest)
    if arguments is None:
        print(command_help("doctor"))
        return 0
    path, overrides = arguments
    config = load_config(path, overrides)
    return run(config, load_config(path, [*overrides, *changes]) if changes else None, max_delta)


def describe_machine() -> int:
    """Say what an engine would run on here, and print it as a line of JSON; returns the exit status."""
    import jax

    from levanter_infer.engine.instructions import choose
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
        say("kernels   those for CPUs are not used on this device; an engine names its own (doctor --config FILE)")
    elif missing is not None:
        say(f"kernels   those for CPUs cannot be used, XLA takes their place: {missing}")
    else:
        say(f"kernels   for CPUs, with {', '.join(cpu.isas())}")
        for dtype in ("bfloat16", "float32"):
            choice = choose("auto", dtype)
            chosen[dtype] = choice.isa
            say(f"          {dtype}: cpu_isa={choice.isa}: {choice.reason}")
    print(json.dumps({"command": "doctor", "device": device, "versions": versions, "cpu_isa": chosen}), flush=True)
    return 0


def _files(argv: Sequence[str]) -> tuple[tuple[str, str] | None, list[str]]:
    argv = list(argv)
    if "--diff" not in argv:
        return None, argv
    place = argv.index("--diff")
    files = argv[place + 1 : place + 3]
    if len(files) < 2 or any(name.startswith("--") for name in files):
        raise ValueError("--diff needs two files of rows: --diff ONE.jsonl OTHER.jsonl")
    return (files[0], files[1]), argv[:place] + argv[place + 3 :]


def run(config: RunConfig, other: RunConfig | None, max_delta: float | None) -> int:
    """An engine against the plain forward of its model, or against another engine; returns the exit status."""
    if other is None:
        sampled = sample(config)
        pairs, against, gate = score_again(config, sampled), "uncached forward", default_gate(sampled.about)
    else:
        sampled, second = sample(config, _with_top(config)), sample(other, _with_top(other))
        pairs = _pairs(_paths(sampled.requests), _paths(second.requests))
        against, gate = "engine", max(default_gate(sampled.about), default_gate(second.about))
    report_failures(sampled.outputs)
    say("kernels   matmul={matmul} attention={attention} cpu_isa={cpu_isa}: {cpu_isa_reason}".format(**sampled.about))
    gate = gate if max_delta is None else max_delta
    diagnosis = diagnose(pairs, gate, sampled.about["page_size"])
    if other is None and diagnosis.suspect is not None:
        diagnosis.findings.append(look_inside(config, diagnosis.suspect, diagnosis.stored))
    return report(against, sampled.about, pairs, gate, diagnosis)


def look_inside(config: RunConfig, suspect: Pair, stored: int) -> str:
    """Run the request of a suspect sample again, alone, and compare what it stores, layer by layer."""
    rows = [row.request for row in read_rows(config) if row.id == suspect.id and row.request is not None]
    engine = make_engine(config, 1)
    found = keys_and_values_of(engine, rows[0], suspect.index, stored)
    page_size, max_seq_len = engine.shapes.page_size, engine.shapes.max_seq_len
    del engine
    gc.collect()
    return compare_stored(plain_model(config), found, page_size, max_seq_len)


def keys_and_values_of(engine, request: Request, index: int, stored: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Sample a request alone until `stored` tokens of sample `index` are stored, and look at these.

    Returns: the tokens i32[stored], and their keys and values f32[layer, stored, kv_pair, head_size]; None if the
        sample ends before.
    """
    import jax.numpy as jnp

    group = engine.submit(request)
    sequence, found = group.sequences[index], None
    while found is None and not group.is_done:
        engine.step_round(max_steps=1)
        table, kv = engine.state.decode.sequences, engine.state.kv
        if sequence.slot is not None and int(table.num_computed[sequence.slot]) >= stored:
            position = np.arange(stored)
            pages = np.asarray(table.page_indices)[sequence.slot, position // engine.shapes.page_size]
            offsets = position % engine.shapes.page_size
            values = kv.values_at(jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32))
            tokens = np.asarray(table.tokens)[sequence.slot, :stored]
            found = tokens, np.asarray(values)
    engine.cancel(group)
    engine.drain()
    return found


def compare_stored(model, found: tuple[np.ndarray, np.ndarray] | None, page_size: int, max_seq_len: int) -> str:
    """What is wrong with keys and values that an engine has stored."""
    import jax.numpy as jnp

    from levanter_infer.decode.programs import compile_program
    from levanter_infer.layers.attention import AttentionSpec
    from levanter_infer.models.uncached import keys_and_values

    if found is None:
        return "run alone, the sample ends earlier: what it gets depends on its company"
    tokens, stored = found
    padded = np.zeros(1 << (len(tokens) - 1).bit_length(), np.int32)
    padded[: len(tokens)] = tokens
    spec = AttentionSpec(max_seq_len=max_seq_len)
    expected = compile_program(lambda model, tokens: keys_and_values(model, tokens, spec))(model, jnp.asarray(padded))
    expected = np.asarray(expected.astype(jnp.float32))[:, : len(tokens)]
    return where_stored_differs(stored, expected, page_size) or (
        f"run alone, all layers store the right keys and values for the first {len(tokens)} tokens: it takes company, "
        "or it is the last layer, the head or the sampler"
    )


def _with_top(config: RunConfig):
    count = min(_TOP, config.engine_config().max_logprobs)

    def change(request: Request) -> Request:
        sampling = request.sampling or config.sampling
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, logprobs=count))

    return change


def report(against: str, about: dict[str, Any], pairs: Sequence[Pair], gate: float, diagnosis: Diagnosis) -> int:
    """Print numbers and verdict; returns the exit status."""
    numbers = summary(pairs, gate)
    for line in table(numbers):
        say(line)
    say(f"verdict   {diagnosis.verdict}")
    for finding in diagnosis.findings:
        say(f"          {finding}")
    print_line("doctor", against, about, numbers, diagnosis)
    return 0 if diagnosis.verdict == "agree" else 1


# What is compared


def _paths(outputs: Sequence[RequestOutput]) -> dict[tuple[str, int], Path]:
    return {(output.id, c.index): path_of(output, c.index) for output in outputs for c in output.completions}


def _pairs(one: dict[tuple[str, int], Path], other: dict[tuple[str, int], Path]) -> list[Pair]:
    """The samples that both have. Raises: ValueError if there is none."""
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
