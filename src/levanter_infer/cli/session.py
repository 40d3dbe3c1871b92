"""An engine of a command from start to end: processes, model and engine, progress, failures."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from levanter_infer.config import RunConfig
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.fingerprint import flag_fingerprint, version_fingerprint
from levanter_infer.io.prompts import Row
from levanter_infer.io.terminal import one_line, say
from levanter_infer.runtime.compile_cache import enable_compile_cache
from levanter_infer.runtime.garbage_collection import gc_disabled
from levanter_infer.runtime.hosts import Hosts, agree
from levanter_infer.runtime.multihost import PER_HOST, joined
from levanter_infer.runtime.progress import Lines, choose_display, stage

if TYPE_CHECKING:
    from levanter_infer.checkpoints.generation import SuggestedSampling
    from levanter_infer.engine.engine import InferenceEngine

_MAX_SHOWN_ERRORS = 20
_LOG_SECONDS = 10
"""Seconds between progress lines where no progress bar is drawn."""


@contextlib.contextmanager
def join(config: RunConfig, orderly: tuple[type[BaseException], ...] = ()) -> Iterator[Hosts | None]:
    """The processes of the job, checked for equal versions and flags; None for a single process.

    Args:
        orderly: as in `joined`.
    Raises: ValueError and HostLost as `joined`; HostsDiffer naming the process that differs.
    """
    with contextlib.ExitStack() as stack:
        with stage("waiting for the other processes"):
            hosts = stack.enter_context(joined(config.multihost, orderly))
        if hosts is not None:
            hosts.set_status("comparing versions")
            say(f"hosts     {hosts.count}, {config.multihost.layout}; this is {hosts.names[hosts.index]}")
            with stage("waiting for the other processes to compare versions"):
                agree(hosts, "versions and flags", {**version_fingerprint(), **flag_fingerprint()})
                # Backends of several processes start together. Begun later, it would wait for a process that still
                # reads its weights, and no signal ends that wait.
                import jax

                jax.devices()
        yield hosts


@gc_disabled()
def make_engine(
    config: RunConfig, num_rows: int, hosts: Hosts | None = None, ahead: Mapping[str, int] = MappingProxyType({})
) -> "InferenceEngine":
    """Load model and tokenizer, make an engine, and print its choices.

    Args:
        hosts: processes that each make one; with `multihost.layout: per_host` on their own devices.
        ahead: least values of `scoring`, `constraints`, `routing` and `num_beams`, arguments of `InferenceEngine`.
    Raises: ValueError for a wrong configuration, model or tokenizer; HostsDiffer.
    """
    from levanter_infer.checkpoints.generation import suggested_sampling
    from levanter_infer.checkpoints.source import resolve_source
    from levanter_infer.checkpoints.tokenizer import Tokenizer

    if config.multihost.is_on and hosts is None:
        raise ValueError("multihost: this command runs in one process; use levanter_infer.batch or sample for several")
    engine_config = config.engine_config()
    source = config.model.resolve()
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
        hosts.set_status("loading the model")
    enable_compile_cache()
    begin = time.perf_counter()
    model = open_model(source, dtype=config.model.dtype)
    say(
        f"model     {source.name}"
        + (f" at revision {source.revision}" if source.revision else "")
        + (f" with {source.adapter.name}" if source.adapter is not None else "")
        + f": {model.types.config.num_parameters / 1e6:.4g}M parameters, {model.types.dtype}"
    )
    if tokenizer is not None:
        say(f"tokenizer {tokenizer.vocab_size} tokens, sha256 {tokenizer.fingerprint[:16]}")
    try:
        seed = config.sampling.seed or 0
        asked: dict[str, Any] = {
            "scoring": config.sampling.prompt_logprobs is not None,
            "constraints": config.sampling.is_constrained,
            "routing": config.sampling.return_routed_experts and model.types.config.experts is not None,
            "num_beams": min(config.sampling.num_beams, engine_config.max_seqs),
        }
        asked = {name: max(value, ahead.get(name, value)) for name, value in asked.items()}
        per_host = hosts is not None and config.multihost.layout == PER_HOST
        mesh = make_mesh(config.mesh, local=True) if per_host else config.mesh
        engine = InferenceEngine(model, tokenizer, engine_config, seed=seed, mesh=mesh, hosts=hosts, **asked)
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
    """Notes about suggestions of generation_config.json that are not applied: not asked for, or not supported."""
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
    """The parameters that differ from their defaults, and always max_tokens and temperature."""
    default = SamplingParams()
    names = [f.name for f in dataclasses.fields(params)]
    shown = [
        name
        for name in names
        if name in ("max_tokens", "temperature") or getattr(params, name) != getattr(default, name)
    ]
    return " ".join(f"{name}={getattr(params, name)!r}" for name in shown)


def generate(engine: "InferenceEngine", requests: list[Request], on_update=None) -> list[RequestOutput]:
    """Sample all requests. Raises: RuntimeError for a fault of the engine."""
    try:
        return engine.generate(requests, on_update=on_update)
    except ValueError as e:  # errors of requests are in their outputs, so this is an internal fault: show its traceback
        raise RuntimeError("sampling failed; please report this with the traceback") from e


def serve(engine: "InferenceEngine", requests: list[Request]) -> tuple[list[RequestOutput], float]:
    """`generate` with a progress bar or progress lines. Returns: the outputs, and the seconds it took."""
    begin = time.perf_counter()
    draws = not isinstance(choose_display(), Lines)  # the engine draws a bar on a terminal
    outputs = generate(engine, requests, None if draws else log_lines(engine))
    return outputs, time.perf_counter() - begin


def log_lines(engine: "InferenceEngine") -> Callable[[int, int, int], None]:
    """A callback that prints a progress line every few seconds."""
    last = time.monotonic()

    def update(finished: int, total: int, _: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            say(f"progress  {finished}/{total} samples, {engine.metrics().line()}")

    return update


def merge_outputs(rows: Sequence[Row], sampled: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Outputs in the order of the rows, with an error for each row without a request."""
    rest = iter(sampled)
    return [
        next(rest) if row.request is not None else RequestOutput(row.id, None, [], [], error=row.error) for row in rows
    ]


def failure(output: RequestOutput) -> str | None:
    """The error of a request, or else of its first sample that has one; None if it did not fail."""
    broken = (f"sample {c.index}: {c.error}" for c in output.completions if c.error is not None)
    return output.error if output.error is not None else next(broken, None)


def report_failures(outputs: Sequence[RequestOutput]) -> int:
    """Print which requests failed; returns their number."""
    errors = [f"request {output.id}: {error}" for output in outputs if (error := failure(output)) is not None]
    for error in errors[:_MAX_SHOWN_ERRORS]:
        say(one_line(f"error: {error}"))
    if len(errors) > _MAX_SHOWN_ERRORS:
        say(f"error: and {len(errors) - _MAX_SHOWN_ERRORS} more requests")
    return len(errors)
