"""What a client gets: the bodies of answers, and the events of streams."""

import json
from collections.abc import Sequence
from typing import Any

from levanter_infer.engine.async_engine import Update
from levanter_infer.engine.request import Completion, RequestOutput
from levanter_infer.io.openai import Answers, prompt_logprobs, usage
from levanter_infer.serve.calls import Call


def answer(answers: Answers, call: Call, outputs: Sequence[RequestOutput], name: str, created: int):
    """(HTTP status, body) for all outputs of a call; that of the first one that failed, if one did."""
    bodies = []
    for request, output in zip(call.requests, outputs, strict=True):
        status, body = answers.answer(request, output, name)
        if status != 200:
            return status, body
        for choice, completion in zip(body["choices"], output.completions, strict=True):
            choice |= _own(call, completion, output)
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


class Events:
    """The events of a stream.

    Args:
        name, created, model: of the answer.
    """

    def __init__(self, answers: Answers, call: Call, name: str, created: int, model: str):
        self._answers, self._call = answers, call
        self._is_chat = call.requests[0].messages is not None
        self._same = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{name}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        sampling = call.requests[0].sampling
        assert sampling is not None
        self._n, self._asked = sampling.n, sampling.logprobs is not None

    def first(self) -> str:
        """The events before any token."""
        if not self._is_chat:
            return ""
        delta = {"role": "assistant", "content": ""}
        return "".join(
            self._event([{"index": index, "delta": delta, "finish_reason": None}])
            for index in range(self._n * len(self._call.requests))
        )

    def update(self, prompt: int, update: Update) -> str:
        """The event for an update of request `prompt` of the call."""
        text = update.text or ""
        choice: dict[str, Any] = {"index": prompt * self._n + update.index}
        choice |= {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        if self._asked:
            render = self._answers.chat_logprobs if self._is_chat else self._answers.logprobs
            choice["logprobs"] = render(update)
        else:
            choice["logprobs"] = None
        choice |= {"finish_reason": update.finish_reason, "weights_version": _last_version(update)}
        if update.finish_reason is not None:
            stop = update.stop_reason
            choice["stop_reason"] = list(stop) if isinstance(stop, tuple) else stop
        if self._call.return_token_ids:
            choice["token_ids"] = update.token_ids
            choice["token_versions"] = [int(version) for version in update.token_versions]
        return self._event([choice])

    def last(self, outputs: Sequence[RequestOutput]) -> str:
        """The events after all tokens."""
        end = self._event([], usage=usage(outputs)) if self._call.include_usage else ""
        return f"{end}data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._same, "choices": choices, **more})


def event(content: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"
