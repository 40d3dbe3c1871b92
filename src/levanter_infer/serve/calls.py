"""Bodies of requests, checked and translated into requests of the engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Request
from levanter_infer.io.openai import ROW_POLICIES, body_row
from levanter_infer.io.prompts import RowParser
from levanter_infer.serve.tools import TOOL_KEYS, ToolReader, Tools

_OTHERWISE = ("max_tokens", "logprobs", "return_routed_experts")
"""Sampling parameters that the endpoints have in another form, or not at all."""
OWN = (*(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _OTHERWISE), *ROW_POLICIES)
"""Keys of a body that are ours: sampling parameters and fields of a request, by their names."""
CALL_KEYS = ("stream", "stream_options", "return_token_ids", "echo")
"""Keys of a body that concern the answer alone."""
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
"""Keys of `stream_options`: OpenAI's, and that of vLLM which adds the usage so far to every event."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One HTTP request."""

    requests: list[Request]
    """One for each prompt."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the number of tokens."""
    continuous_usage: bool
    """Whether every event has the number of tokens so far."""
    return_token_ids: bool
    echo: bool
    tools: Tools | None = None
    """Tools that its answer may call; None: its text is not parsed."""


@dataclasses.dataclass(frozen=True)
class CallReader:
    """Reads the bodies of one server's requests."""

    parser: RowParser
    """Has the sampling parameters that a body may override."""
    tools: ToolReader
    model_names: Sequence[str]
    """Names that `model` may have."""
    max_prompts: int
    """Prompts of a call, at most."""

    def read(self, body: Any, kind: str, name: str) -> Call:
        """The call of a body.

        Args:
            kind: "prompt" or "messages", by the endpoint.
            name: id of the call; its requests' ids begin with it.
        Raises: ValueError that names what is wrong.
        """
        if not isinstance(body, dict):
            raise ValueError(f"the body is {brief(body)}; expected a JSON object")
        flags = {key: _flag(body, key) for key in ("stream", "return_token_ids", "echo")}
        is_chat = kind == "messages"
        if flags["echo"] and is_chat:
            raise ValueError("body.echo with a chat; it is for /v1/completions: leave it out")
        apart = (*CALL_KEYS, *(TOOL_KEYS if is_chat else ()))
        rest = {key: value for key, value in body.items() if key not in apart}
        if flags["echo"]:
            rest |= _echoed(rest)
        own = (*OWN, *apart)  # what is read apart is known too
        prompts = [rest.get("messages")] if is_chat else _prompts(rest.get("prompt"), self.max_prompts)
        requests, tools = [], None
        for i, prompt in enumerate(prompts):
            own_name = f"{name}-{i}"
            others = {} if requests else rest  # the first prompt's request has them; they are read once
            content = body_row({**others, kind: prompt}, kind, own_name, self.model_names, taker="this server", own=own)
            row = self.parser.row(content, own_name, "the request" if len(prompts) == 1 else f"body.prompt[{i}]")
            if row.request is None:
                raise ValueError(row.error)
            request = row.request
            if requests:
                ids = request.prompt_token_ids
                request = dataclasses.replace(requests[0], prompt=request.prompt, prompt_token_ids=ids, id=request.id)
            if is_chat:
                request, tools = self.tools.read(body, request)
            requests.append(request)
        call = Call(requests, **_usage(body, flags["stream"]), tools=tools, **flags)
        _check_stream(call)
        return call


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and type(value) is not bool:
        raise ValueError(f"body.{key} is {brief(value)}; expected true or false")
    return bool(value)


def _usage(body: Mapping[str, Any], streams: bool) -> dict[str, bool]:
    """`stream_options` as fields of a `Call`."""
    options = body.get("stream_options")
    if options is not None and not streams:
        raise ValueError("body.stream_options without body.stream; set stream to true, or leave it out")
    if options is None:
        options = {}
    if not isinstance(options, dict) or not set(options) <= set(STREAM_OPTIONS):
        raise ValueError(
            f"body.stream_options is {brief(options)}; expected an object with {' and '.join(STREAM_OPTIONS)} alone"
        )
    at_end, always = (_flag(options, key) for key in STREAM_OPTIONS)
    if always and not at_end:
        raise ValueError("stream_options.continuous_usage_stats without include_usage; set include_usage to true")
    return {"include_usage": at_end, "continuous_usage": always}


def _echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that give log probabilities of the prompt, as `echo` with `logprobs` asks for them."""
    if body.get("logprobs") is None:
        if body.get("max_tokens") == 0:
            raise ValueError("body.echo with max_tokens 0 and no logprobs asks for nothing; ask for logprobs")
        return {}
    return {"prompt_logprobs": body["logprobs"]}


def _prompts(value: Any, most: int) -> list[Any]:
    """The prompts of `prompt`: a text, token ids, or a list of either."""
    if not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return [value]
    if len(value) > most:
        raise ValueError(f"body.prompt has {len(value)} prompts; expected at most {most} (serve.max_prompts)")
    return value


def _check_stream(call: Call) -> None:
    if not call.stream:
        return
    params = call.requests[0].sampling
    assert params is not None
    for key, given in (
        ("echo", call.echo),
        ("best_of", (params.best_of or params.n) != params.n),
        ("num_beams", params.num_beams > 1),
        ("prompt_logprobs", params.prompt_logprobs is not None),
    ):
        if given:
            raise ValueError(f"body.{key} with body.stream: the answer is known at the end only; leave one out")
