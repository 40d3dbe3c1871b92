"""Bodies of answers, and events of streams."""

import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from levanter_infer.engine.reader import Update
from levanter_infer.engine.request import Completion, RequestOutput
from levanter_infer.io.openai import Answers, counted, prompt_logprobs, usage
from levanter_infer.policies import FinishReason
from levanter_infer.serve.calls import Call
from levanter_infer.serve.tool_calls import CallParser, ToolCall
from levanter_infer.serve.tools import Tools

_json = json.JSONEncoder(allow_nan=False).encode


def answer(answers: Answers, call: Call, outputs: Sequence[RequestOutput], name: str, created: int):
    """(HTTP status, body) for all outputs of a call; that of the first one that failed, if one did."""
    bodies = []
    for request, output in zip(call.requests, outputs, strict=True):
        status, body = answers.answer(request, output, name)
        if status != 200:
            return status, body
        for choice, completion in zip(body["choices"], output.completions, strict=True):
            choice |= _own(call, completion, output)
            if call.tools is not None:
                _move_calls(call.tools, choice)
            if call.echo:
                _prepend_prompt(answers, choice, output, completion)
        bodies.append(body)
    choices = [choice for body in bodies for choice in body["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    return 200, {**bodies[0], "created": created, "choices": choices, "usage": usage(outputs)}


def _own(call: Call, completion: Completion, output: RequestOutput) -> dict[str, Any]:
    """Fields of a choice that OpenAI's answers do not have."""
    fields: dict[str, Any] = {"weights_version": _last_version(completion), "seed": completion.seed}
    if call.return_token_ids:
        fields |= {
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": completion.token_ids,
            "token_versions": [int(version) for version in completion.token_versions],
        }
    if output.prompt_logprobs is not None and not call.echo:
        fields["prompt_logprobs"] = prompt_logprobs(output)
    return fields


def _last_version(part: "Completion | Update") -> int | None:
    """Version of the weights that sampled the last token; None without tokens."""
    return part.version_range[1] if part.version_range else None


def _prepend_prompt(answers: Answers, choice: dict[str, Any], output: RequestOutput, completion: Completion) -> None:
    prompt = answers.prompt_text(output)
    choice["text"] = prompt + choice["text"]
    if choice["logprobs"] is not None and output.prompt_logprobs is not None:
        choice["logprobs"] = answers.echoed_logprobs(output, completion)


def _move_calls(tools: Tools, choice: dict[str, Any]) -> None:
    """Move the calls of a message from its text to `tool_calls`."""
    message, parser = choice["message"], tools.parser()
    parts = parser.push(message["content"]) + parser.finish()
    if parser.num_calls:
        message["content"] = "".join(part for part in parts if isinstance(part, str)) or None
        message["tool_calls"] = [
            {"id": tools.form.new_id(), "type": "function", "function": dataclasses.asdict(part)}
            for part in parts
            if isinstance(part, ToolCall)
        ]
        choice["finish_reason"] = _reason(choice["finish_reason"], parser)


def _reason(reason: str | None, parser: CallParser) -> str | None:
    return "tool_calls" if reason == FinishReason.STOP and parser.num_calls else reason


class Events:
    """The events of a stream.

    Args:
        name, created, model: of the answer.
    """

    def __init__(self, answers: Answers, call: Call, name: str, created: int, model: str):
        self._answers, self._call = answers, call
        self._is_chat = call.requests[0].messages is not None
        same = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{name}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._begin = f"data: {_json(same)[:-1]}, "
        sampling = call.requests[0].sampling
        assert sampling is not None
        self._n, self._asked = sampling.n, sampling.logprobs is not None
        self._parsers: dict[int, CallParser] = {}
        self._counts: collections.Counter[int] = collections.Counter()
        """Tokens of each choice."""
        self._chars: collections.Counter[int] = collections.Counter()
        """Characters of the tokens of each choice whose log probabilities are asked for."""

    def first(self, num_prompt_tokens: int) -> str:
        """The events before any token."""
        if not self._is_chat:
            return ""
        delta = {"role": "assistant", "content": ""}
        return "".join(
            self._event(
                [{"index": index, "delta": delta, "finish_reason": None}], self._so_far(index, num_prompt_tokens)
            )
            for index in range(self._n * len(self._call.requests))
        )

    def update(self, prompt: int, update: Update) -> str:
        """The events for an update of request `prompt` of the call."""
        index = prompt * self._n + update.index
        is_first = index not in self._counts
        self._counts[index] += len(update.token_ids)
        so_far = self._so_far(index, update.num_prompt_tokens)
        parts, reason = self._parts(index, update)
        choice: dict[str, Any] = {"index": index, **parts[0]}
        choice["logprobs"] = self._logprobs(index, update) if self._asked else None
        choice |= {"finish_reason": reason, "weights_version": _last_version(update)}
        if reason is not None:
            stop = update.stop_reason
            choice["stop_reason"] = list(stop) if isinstance(stop, tuple) else stop
            choice["seed"] = update.seed
        if self._call.return_token_ids:
            if is_first:
                choice["prompt_token_ids"] = update.prompt_token_ids
            choice["token_ids"] = update.token_ids
            choice["token_versions"] = [int(version) for version in update.token_versions]
        others = [self._event([{"index": index, **part, "finish_reason": None}], so_far) for part in parts[1:]]
        return "".join([*others, self._event([choice], so_far)])

    def _logprobs(self, index: int, update: Update) -> dict[str, Any]:
        if self._is_chat:
            return self._answers.chat_logprobs(update)
        found = self._answers.logprobs(update, self._chars[index])
        self._chars[index] += sum(map(len, found["tokens"]))
        return found

    def _so_far(self, index: int, num_prompt_tokens: int) -> dict[str, int] | None:
        return counted(num_prompt_tokens, self._counts[index]) if self._call.continuous_usage else None

    def _parts(self, index: int, update: Update) -> tuple[list[dict[str, Any]], str | None]:
        """Additions of each event of an update to choice `index`, that of the last event first; and the reason of its
        end."""
        text, reason = update.text or "", update.finish_reason
        if not self._is_chat:
            return [{"text": text}], reason
        if self._call.tools is None:
            return [{"delta": {"content": text} if text else {}}], reason
        parser = self._parsers.setdefault(index, self._call.tools.parser())
        deltas: list[dict[str, Any]] = []
        number = parser.num_calls
        for part in parser.push(text) + (parser.finish() if reason is not None else []):
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            of_call = {"id": self._call.tools.form.new_id(), "type": "function"}
            deltas += [
                {"tool_calls": [{"index": number, **of_call, "function": {"name": part.name, "arguments": ""}}]},
                {"tool_calls": [{"index": number, "function": {"arguments": part.arguments}}]},
            ]
            number += 1
        *before, last = deltas or [{}]
        return [{"delta": delta} for delta in (last, *before)], _reason(reason, parser)

    def last(self, outputs: Sequence[RequestOutput]) -> str:
        """The events after all tokens."""
        end = self._event([], usage(outputs)) if self._call.include_usage else ""
        return f"{end}data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], tokens: dict[str, int] | None) -> str:
        rest = {"choices": choices} if tokens is None else {"choices": choices, "usage": tokens}
        return f"{self._begin}{_json(rest)[1:]}\n\n"


def event(content: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {_json(content)}\n\n"
