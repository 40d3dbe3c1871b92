"""What the commands share: arguments, streams and exit status, an engine, output files, progress, errors.

Exit status of all of them: 0 all is well, 1 some requests failed, 2 wrong usage or configuration, 3 another process of
the job was lost or has failed, 130 interrupted, 141 nobody reads the output any more.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from levanter_infer.columns import NOT_FINITE
from levanter_infer.config import AnyRunConfig, RunConfig, load_config
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.fingerprint import flag_fingerprint, package_version, version_fingerprint
from levanter_infer.keys import hint_for
from levanter_infer.policies import FinishReason
from levanter_infer.rows import Row, RowWriter, escape_for_terminal
from levanter_infer.runtime.aborts import LOST
from levanter_infer.runtime.agreement import agree
from levanter_infer.runtime.compile_cache import enable_compile_cache
from levanter_infer.runtime.garbage_collection import gc_disabled
from levanter_infer.runtime.hosts import HostLost, Hosts
from levanter_infer.runtime.multihost import PER_HOST, joined
from levanter_infer.runtime.progress import Lines, choose_display, lines_written_with, stage

if TYPE_CHECKING:
    from levanter_infer.checkpoints.generation import SuggestedSampling
    from levanter_infer.engine.engine import InferenceEngine

_MAX_SHOWN_ERRORS = 20
_MAX_MESSAGE = 800
"""Characters of one error on the terminal."""
_LOG_SECONDS = 10
"""Between lines about the run where no progress bar is drawn."""


def guarded(command: Callable[[], int]) -> int:
    """Run a command; returns its exit status, or that of what stopped it, which is said on standard error."""
    try:
        with _standard_streams(), lines_written_with(say):
            return _status(command)
    except BrokenPipeError:
        return 141


def run_config(
    argv: Sequence[str],
    usage: Callable[[], str],
    run: Callable[[AnyRunConfig], int],
    kind: type[AnyRunConfig] = RunConfig,
    options: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run what a command line asks for, or explain; returns the exit status.

    Args:
        usage: the text for --help.
        kind: what it configures.
        options: short names of keys.
    """
    arguments = parse_arguments(argv, kind, options)
    if arguments is None:
        print(usage())
        return 0
    return run(load_config(*arguments, kind))


class Answered(Exception):
    """What was asked is answered by a text; there is nothing to run."""


def _status(command: Callable[[], int]) -> int:
    try:
        return command()
    except Answered as e:
        print(e)
        return 0
    except ValueError as e:
        say(one_line(f"error: {e}"))
        return 2
    except HostLost as e:
        say(one_line(f"error: {e}"))
        return LOST
    except BrokenPipeError:
        raise
    except OSError as e:
        say(one_line(f"error: {e.strerror or e}" + (f": {e.filename}" if e.filename else "")))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Take any text on standard output, which may be closed; leave nothing that fails to be flushed at exit."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by whoever started us
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                setattr(sys, name, nowhere)
                stack.callback(setattr, sys, name, None)
        with contextlib.suppress(AttributeError):
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    with contextlib.suppress(OSError, ValueError):
                        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parse_arguments(
    argv: Sequence[str],
    kind: type[RunConfig] = RunConfig,
    options: Mapping[str, str] = MappingProxyType({}),
    own: Sequence[str] = (),
) -> tuple[str | None, list[tuple[str, str]]] | None:
    """(configuration file, overrides), or None for help; a command's own options stand among the overrides.

    Raises: ValueError for a malformed option; Answered.
    """
    path, overrides, rest = None, [], list(argv)
    while rest:
        option = rest.pop(0)
        if option in ("--help", "-h"):
            return None
        if option == "--version":
            raise Answered(f"levanter-infer {package_version()}")
        if not option.startswith("--") or option == "--":
            raise ValueError(f"unexpected {option!r}: expected --config FILE and --key value; see --help")
        key, has_value, value = option[2:].partition("=")
        key = options.get(key, key)
        _check_option(
            key, [*(f.name for f in dataclasses.fields(kind)), "config", "overwrite", "help", "version", *own]
        )
        if key == "overwrite" and not has_value:
            value = "true"
        elif not has_value:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{key} needs a value; one that begins with -- is written --{key}=VALUE")
            value = rest.pop(0)
        if key == "config":
            if path is not None:
                raise ValueError("--config is given twice; expected one configuration")
            path = value
        else:
            overrides.append(("output.overwrite" if key == "overwrite" else key, value))
    return path, overrides


def _check_option(key: str, known: Sequence[str]) -> None:
    """Raises: ValueError for an option whose outermost name is not known, with the one that was probably meant."""
    name = key.split(".")[0]
    if name not in known:
        name = name if len(name) <= 80 else f"{name[:80]}..."
        raise ValueError(f"unknown option --{name}; {hint_for(name, known, prefix='--')}")


@contextlib.contextmanager
def output_files(config: RunConfig) -> Iterator[tuple[RowWriter | None, RowWriter | None]]:
    """Writers of the rows and of the metrics, None for what is not asked for. Raises: ValueError."""
    output = config.output
    with contextlib.ExitStack() as stack:

        def writer(path: str | None) -> RowWriter | None:
            if output is None or path is None:
                return None
            if config.prompts_file is not None:
                _check_apart(path, config.prompts_file)
            return stack.enter_context(RowWriter(path, overwrite=output.overwrite))

        yield (writer(output.path), writer(output.metrics)) if output else (None, None)


def _check_apart(output: str, prompts_file: str) -> None:
    """Raises: ValueError if writing the output would destroy the prompts."""
    for name in (output, f"{output}.partial"):
        if os.path.exists(name) and os.path.samefile(name, prompts_file):
            raise ValueError(f"output {output} would replace the prompts_file {prompts_file}; give another name")


def generate(engine: "InferenceEngine", requests: list[Request], on_update=None) -> list[RequestOutput]:
    """Sample all requests. Raises: RuntimeError for a fault of the engine."""
    try:
        return engine.generate(requests, on_update=on_update)
    except ValueError as e:  # what requests do wrong is in their outputs, so this is a fault of ours: show all of it
        raise RuntimeError("sampling failed; please report this with the traceback") from e


def serve(engine: "InferenceEngine", requests: list[Request]) -> tuple[list[RequestOutput], float]:
    """`generate` with a bar or lines about how it goes. Returns: the outputs, and the seconds that it took."""
    begin = time.perf_counter()
    draws = not isinstance(choose_display(), Lines)  # the engine draws a bar where somebody watches
    outputs = generate(engine, requests, None if draws else log_lines(engine))
    return outputs, time.perf_counter() - begin


def write_files(
    rows: RowWriter | None, metrics: RowWriter | None, content: Iterable[Mapping[str, Any]], engine: "InferenceEngine"
) -> None:
    """Write and commit what `output_files` opened: the rows, and all that the engine has counted."""
    if rows is not None:
        rows.write(content)
        rows.commit()
    if metrics is not None:
        metrics.write_text(metrics_text(engine, as_prometheus=metrics.path.suffix == ".prom"))
        metrics.commit()


@contextlib.contextmanager
def join(config: RunConfig, orderly: tuple[type[BaseException], ...] = ()) -> Iterator[Hosts | None]:
    """The processes that do the job together, with the same versions and flags; None if this one is alone.

    Args:
        orderly: as of `joined`.
    Raises: ValueError, and HostLost, as `joined`; HostsDiffer naming the odd one.
    """
    with contextlib.ExitStack() as stack:
        with stage("waiting for the other processes"):
            hosts = stack.enter_context(joined(config.multihost, orderly))
        if hosts is not None:
            hosts.note("comparing versions")
            say(f"hosts     {hosts.count}, {config.multihost.layout}; this is {hosts.names[hosts.index]}")
            with stage("waiting for the other processes to compare versions"):
                agree(hosts, "versions and flags", {**version_fingerprint(), **flag_fingerprint()})
        yield hosts


@gc_disabled()
def make_engine(config: RunConfig, num_rows: int, hosts: Hosts | None = None) -> "InferenceEngine":
    """Load model and tokenizer, and say what was chosen.

    Args:
        hosts: processes that each make one. With `multihost.layout: per_host` on their own devices.
    Raises: ValueError saying what is wrong with them; HostsDiffer.
    """
    from levanter_infer.checkpoints.generation import suggested_sampling
    from levanter_infer.checkpoints.source import resolve_source
    from levanter_infer.checkpoints.tokenizer import Tokenizer

    if config.multihost.is_on and hosts is None:
        raise ValueError("multihost: this command runs in one process; use levanter_infer.batch or sample for several")
    source = resolve_source(config.model.path, config.model.revision)
    if config.tokenizer is not None:
        tokenizer = Tokenizer.from_source(resolve_source(config.tokenizer, weights=False))
    else:
        tokenizer = Tokenizer.from_source(source) if source.has("tokenizer.json") else None

    suggested = suggested_sampling(source)

    # Everything above answers before JAX is imported.
    with stage("importing JAX"):
        from jax.errors import JaxRuntimeError

        from levanter_infer.checkpoints.load import open_model
        from levanter_infer.engine.engine import InferenceEngine
        from levanter_infer.engine.mesh import make_mesh

    if hosts is not None:
        hosts.note("loading the model")
    enable_compile_cache()
    engine_config = config.engine_config()
    begin = time.perf_counter()
    model = open_model(source, dtype=config.model.dtype)
    say(
        f"model     {source.name}"
        + (f" at revision {source.revision}" if source.revision else "")
        + f": {model.types.config.num_parameters / 1e6:.4g}M parameters, {model.types.dtype}"
    )
    if tokenizer is not None:
        say(f"tokenizer {tokenizer.vocab_size} tokens, sha256 {tokenizer.fingerprint[:16]}")
    try:
        seed = config.sampling.seed or 0
        scoring = config.sampling.prompt_logprobs is not None
        per_host = hosts is not None and config.multihost.layout == PER_HOST
        mesh = make_mesh(config.mesh, local=True) if per_host else config.mesh
        engine = InferenceEngine(model, tokenizer, engine_config, seed=seed, scoring=scoring, mesh=mesh, hosts=hosts)
    except JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise ValueError(
            f"the engine does not fit into memory ({' '.join(str(e).split())[:120]}); lower engine.max_pages, "
            "engine.page_size, engine.max_seqs or engine.max_logit_bias"
        ) from e
    say("engine    " + " ".join(f"{key}={value}" for key, value in engine.describe().items()))
    say(f"loaded    in {time.perf_counter() - begin:.1f} s")
    say(f"sampling  {sampling_text(config.sampling)}")
    for line in suggestion_lines(suggested, config.sampling):
        say(line)
    say(f"requests  {num_rows}")
    return engine


def suggestion_lines(suggested: "SuggestedSampling | None", params: SamplingParams) -> list[str]:
    """What generation_config.json suggests and is not done: because nobody asked for it, or because we cannot."""
    if suggested is None:
        return []
    lines = []
    other = {name: value for name, value in suggested.params.items() if not _has(params, name, value)}
    if other:
        text = " ".join(f"{name}={brief(value)}" for name, value in other.items())
        lines.append(
            f"note      generation_config.json suggests {text}; not applied; `sampling: from_model` applies it"
        )
    if suggested.unsupported:
        text = " ".join(f"{name}={brief(value)}" for name, value in suggested.unsupported.items())
        lines.append(f"note      generation_config.json has {text}, which is not supported")
    return lines


def _has(params: SamplingParams, name: str, value: object) -> bool:
    try:
        return getattr(dataclasses.replace(params, **{name: value}), name) == getattr(params, name)  # as it is kept
    except ValueError:
        return False


def sampling_text(params: SamplingParams) -> str:
    """The parameters that differ from their defaults, and the two that everybody asks about."""
    default = SamplingParams()
    names = [f.name for f in dataclasses.fields(params)]
    shown = [
        name
        for name in names
        if name in ("max_tokens", "temperature") or getattr(params, name) != getattr(default, name)
    ]
    return " ".join(f"{name}={getattr(params, name)!r}" for name in shown)


def merge_outputs(rows: Sequence[Row], sampled: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Outputs in the order of the rows, with an error for each row that has no request."""
    rest = iter(sampled)
    return [
        next(rest) if row.request is not None else RequestOutput(row.id, None, [], [], error=row.error) for row in rows
    ]


def log_lines(engine: "InferenceEngine") -> Callable[[int, int, int], None]:
    """A callback that says every few seconds how the run goes."""
    last = time.monotonic()

    def update(finished: int, total: int, _: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            say(f"progress  {finished}/{total} samples, {engine.metrics().line()}")

    return update


def metrics_text(engine: "InferenceEngine", *, as_prometheus: bool) -> str:
    """All that the engine has counted, as Prometheus' text or as JSON."""
    if not engine.backend.spans_hosts:
        engine.memory()
    registry = engine.metrics()
    return registry.prometheus() if as_prometheus else json.dumps(registry.as_dict(), indent=1) + "\n"


def report_failures(outputs: Sequence[RequestOutput]) -> int:
    """Say which requests failed; returns how many."""
    errors: list[str] = []
    for output in outputs:
        broken = [c.index for c in output.completions if c.finish_reason == FinishReason.ERROR]
        if output.error is not None:
            errors.append(f"request {output.id}: {output.error}")
        elif broken:
            errors.append(f"request {output.id}: sample {broken[0]}: {NOT_FINITE}")
    for error in errors[:_MAX_SHOWN_ERRORS]:
        say(one_line(f"error: {error}"))
    if len(errors) > _MAX_SHOWN_ERRORS:
        say(f"error: and {len(errors) - _MAX_SHOWN_ERRORS} more requests")
    return len(errors)


def one_line(text: str) -> str:
    """`text` in one line of bounded length, so that nothing in it looks like a line of ours."""
    text = " ".join(text.split())
    if len(text) > _MAX_MESSAGE:
        text = f"{text[: _MAX_MESSAGE - 100]} ... {text[-80:]}"
    return escape_for_terminal(text)


def say(text: str) -> None:
    """Print for people, on standard error."""
    print(escape_for_terminal(text), file=sys.stderr, flush=True)
