"""OpenAI's batch format: input lines as rows, and results as lines that the types of `openai` read.

Source: https://platform.openai.com/docs/guides/batch, and the types of the `openai` package 3.54. A line of the input
has `custom_id`, `method`, `url` and `body`, the request to that endpoint; a line of the output has `id`, `custom_id`,
`response` with the body of the endpoint's answer, and `error`.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from levanter_infer.checkpoints.chat import CHAT_KEYS
from levanter_infer.columns import NOT_FINITE
from levanter_infer.config import check_keys
from levanter_infer.engine.params import brief
from levanter_infer.engine.request import MAX_ID_CHARS, Completion, RequestOutput
from levanter_infer.io.prompts import RefusedRow, Row, given_id
from levanter_infer.policies import FinishReason

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer

_KEYS = ("custom_id", "method", "url", "body")
_PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_SAME = (
    *("temperature", "top_p", "n", "stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
)
"""Parameters with the same name and meaning here; the second line has those that other servers have added."""
_OWN = {
    "messages": ("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", *CHAT_KEYS),
    "prompt": ("max_tokens", "logprobs", "best_of"),
}
_NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
)
"""Parameters without effect on the tokens and log probabilities of an answer."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
}
"""Parameters of which only these values, and null, are supported."""
_LEAST_LOGPROB = -9999.0
"""The log probability that OpenAI's answers have for minus infinity."""


def as_row(content: Any, model_names: Sequence[str]) -> Any:
    """A batch line as a row of this package's own format; other content is returned unchanged.

    Args:
        model_names: names that `model` may have.
    Raises: RefusedRow, with the line's `custom_id`, for a line that requests something unsupported.
    """
    if not isinstance(content, dict) or not {"custom_id", "body"} & set(content):
        return content
    name = content.get("custom_id")
    given = given_id({"id": name}) if isinstance(name, str) and name else None
    try:
        if given is None:
            raise ValueError(f"custom_id is {brief(name)}; expected a string of 1 to {MAX_ID_CHARS} characters")
        return _row(content, given, model_names)
    except ValueError as e:
        raise RefusedRow(str(e), given) from None


def _row(content: dict[str, Any], name: str, model_names: Sequence[str]) -> dict[str, Any]:
    check_keys(content, _KEYS, "")
    body = content.get("body")
    if content.get("method", "POST") != "POST":
        raise ValueError(f"method is {brief(content['method'])}; expected POST")
    kind = _PROMPTS.get(str(content.get("url")))
    if kind is None:
        raise ValueError(f"url is {brief(content.get('url'))}; expected {' or '.join(_PROMPTS)}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {brief(body)}; expected an object")
    check_keys(body, (kind, "model", *_SAME, *_OWN[kind], *_NO_EFFECT, *_ONLY), "body")
    given = {key: value for key, value in body.items() if value is not None}
    model = given.get("model")
    if model is not None and model not in model_names:
        raise ValueError(
            f"body.model is {brief(model)}; expected one of {', '.join(model_names)}; see batch.model_names"
        )
    for key, values in _ONLY.items():
        if key in given and not any(type(given[key]) is type(value) and given[key] == value for value in values):
            possible = " or ".join([*(json.dumps(value) for value in values), "null"])
            raise ValueError(f"body.{key} is {brief(given[key])}, which a batch job cannot do; expected {possible}")
    sampling = {key: given[key] for key in _SAME if key in given} | _own_parameters(given, kind)
    if kind == "prompt":
        return {"id": name, "sampling": sampling} | _prompt(given.get(kind))
    return {"id": name, kind: _messages(given.get(kind)), "sampling": sampling} | _chat_keys(given)


def _prompt(value: Any) -> dict[str, Any]:
    """The key and value of a prompt: a string, or token ids. A list of one prompt is that prompt."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise ValueError(f"body.prompt is a list of {len(value)} prompts; expected one prompt a line: split it")
        value = value[0]
    return {"prompt_token_ids" if isinstance(value, list) else "prompt": value}


def _messages(value: Any) -> Any:
    """Messages with the arguments of tool calls as objects: OpenAI's format has JSON texts, and templates read objects.

    What is not of that form is returned unchanged; the chat's own checks name it.
    """
    if not isinstance(value, list):
        return value
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        else message
        for message in value
    ]


def _call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    text = function.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _chat_keys(body: Mapping[str, Any]) -> dict[str, Any]:
    choice = body.get("tool_choice", "auto")
    if choice != "auto" and not (choice == "none" and not body.get("tools")):
        raise ValueError(
            f"body.tool_choice is {brief(choice)}, which the chat template does not get; expected auto, or null"
        )
    return {key: body[key] for key in CHAT_KEYS if key in body and (key != "tools" or body[key])}


def _own_parameters(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    values = {key: body[key] for key in ("max_tokens", "best_of") if key in body}
    if "max_completion_tokens" in body:
        if values.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise ValueError("body.max_tokens and body.max_completion_tokens are both given and differ; leave one out")
        values["max_tokens"] = body["max_completion_tokens"]
    if kind == "prompt":
        return values | {key: body[key] for key in ("logprobs",) if key in body}
    wanted = body.get("logprobs", False)
    if type(wanted) is not bool:
        raise ValueError(f"body.logprobs is {brief(wanted)}; expected true or false")
    if body.get("top_logprobs") and not wanted:
        raise ValueError("body.top_logprobs without body.logprobs; set logprobs to true")
    return values | ({"logprobs": body.get("top_logprobs", 0)} if wanted else {})


# Results


class ResultLines:
    """Results as lines of OpenAI's batch output.

    Equal results give equal lines: ids are derived from `custom_id`, and `created` is 0.

    Args:
        model: name of the model in the answers.
        tokenizer: decodes single tokens, whose texts come with their log probabilities.
    """

    columns = None

    def __init__(self, model: str, tokenizer: "Tokenizer | None"):
        self._model, self._tokenizer = model, tokenizer
        self._texts: dict[int, tuple[str, list[int] | None]] = {}

    def rows(self, source: Row, output: RequestOutput) -> list[dict[str, Any]]:
        """The one line of a result."""
        name = hashlib.sha256(output.id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        reasons = {c.finish_reason for c in output.completions}
        if output.error is not None or source.request is None:
            status, body = 400, _error(output.error or "failed", "invalid_request_error")
        elif FinishReason.ERROR in reasons:
            status, body = 500, _error(NOT_FINITE, "server_error")
        elif FinishReason.ABORT in reasons:
            status, body = 408, _error("the request was ended before its answer was complete", "timeout")
        else:
            status, body = 200, self._answer(source, output, name)
        failed = body.get("error")
        return [
            {
                "id": f"batch_req_{name}",
                "custom_id": output.id,
                "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
                "error": {"code": failed["type"], "message": failed["message"]} if failed else None,
            }
        ]

    def _answer(self, source: Row, output: RequestOutput, name: str) -> dict[str, Any]:
        assert source.request is not None and source.request.sampling is not None
        is_chat, asked = source.request.messages is not None, source.request.sampling.logprobs
        generated = sum(len(c.token_ids) for c in output.completions)
        choices = [
            {
                "index": index,
                **({"message": _message(c)} if is_chat else {"text": c.text or ""}),
                "logprobs": None if asked is None else (self._chat_logprobs if is_chat else self._logprobs)(c),
                "finish_reason": c.finish_reason,
                "stop_reason": list(c.stop_reason) if isinstance(c.stop_reason, tuple) else c.stop_reason,
            }
            for index, c in enumerate(output.completions)
        ]
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": self._model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": generated,
                "total_tokens": len(output.prompt_token_ids) + generated,
            },
        }

    def _chat_logprobs(self, c: Completion) -> dict[str, Any]:
        entries = [self._entry(*pair) for pair in zip(c.token_ids, c.logprobs, strict=True)]
        for entry, top in zip(entries, c.top_logprobs or ({},) * len(entries), strict=True):
            entry["top_logprobs"] = [self._entry(*pair) for pair in top.items()]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._text(token)
        return {"token": text, "bytes": data, "logprob": _logprob(logprob)}

    def _logprobs(self, c: Completion) -> dict[str, Any]:
        texts = [self._text(token)[0] for token in c.token_ids]
        offsets = [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        tops = None
        if c.top_logprobs:
            tops = [{self._text(t)[0]: _logprob(v) for t, v in reversed(top.items())} for top in c.top_logprobs]
            tops = [dict(reversed(top.items())) for top in tops]  # of tokens with equal texts the likelier one stays
        return {
            "tokens": texts,
            "token_logprobs": [_logprob(value) for value in c.logprobs],
            "top_logprobs": tops,
            "text_offset": offsets[:-1],
        }

    def _text(self, token: int) -> tuple[str, list[int] | None]:
        """(text, bytes) of a token; the text of a token without one is its id."""
        if token not in self._texts:
            self._texts[token] = _text_of(token, self._tokenizer)
        return self._texts[token]


def _text_of(token: int, tokenizer: "Tokenizer | None") -> tuple[str, list[int] | None]:
    if tokenizer is not None and tokenizer.is_byte_level:
        data = tokenizer.token_bytes(token)
        if data:
            return data.decode("utf-8", "replace"), list(data)
    elif tokenizer is not None and token < tokenizer.vocab_size:
        once, twice = (tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
        text = twice[len(once) :] if twice.startswith(once) else once  # the first token of a text may lose its space
        if text:
            return text, None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return f"token_id:{token}", None


def _message(c: Completion) -> dict[str, Any]:
    return {"role": "assistant", "content": c.text, "refusal": None}


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _logprob(value: float) -> float:
    return float(value) if math.isfinite(value) and value > _LEAST_LOGPROB else _LEAST_LOGPROB
