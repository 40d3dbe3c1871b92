"""Bodies of OpenAI's completion endpoints: requests as rows of this package's own format, and results as answers.

Source: the types of the `openai` package 3.54.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from levanter_infer.checkpoints.chat import CHAT_KEYS
from levanter_infer.config import check_keys
from levanter_infer.engine.params import brief
from levanter_infer.engine.request import NOT_FINITE, Completion, Request, RequestOutput
from levanter_infer.io.prompts import ROW_POLICIES
from levanter_infer.policies import FinishReason

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer
    from levanter_infer.engine.reader import Update

PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""Key of the prompt, by path of the endpoint."""
_SAME = (
    *("temperature", "top_p", "n", "stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
)
"""Parameters with the same name and meaning here; the second line has those that other servers have added."""
_OWN = {
    "messages": (
        *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", "response_format"),
        *CHAT_KEYS,
    ),
    "prompt": ("max_tokens", "logprobs", "best_of", "response_format"),
}
NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
)
"""Parameters without effect on the tokens and log probabilities of an answer."""
ONLY: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
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


def parameters(kind: str) -> tuple[str, ...]:
    """OpenAI's parameters that an endpoint applies; kind: "prompt" or "messages"."""
    return (kind, "model", *_SAME, *_OWN[kind])


def body_row(
    body: Mapping[str, Any],
    kind: str,
    name: str,
    model_names: Sequence[str],
    *,
    taker: str = "a batch job",
    own: Sequence[str] = (),
) -> dict[str, Any]:
    """The body of a request as a row of this package's own format.

    Args:
        kind: "prompt" or "messages", by the endpoint (`PROMPTS`).
        name: id of the row.
        model_names: names that `model` may have.
        taker: what refuses parameters, for errors.
        own: sampling parameters by our names, and keys of rows, that the body may have besides OpenAI's.
    Raises: ValueError for what is unknown or not supported.
    """
    check_keys(body, _known(kind, tuple(own)), "body")
    given = {key: value for key, value in body.items() if value is not None}
    check_model(given.get("model"), model_names)
    for key, values in ONLY.items():
        if key in given and not any(type(given[key]) is type(value) and given[key] == value for value in values):
            possible = " or ".join([*(json.dumps(value) for value in values), "null"])
            raise ValueError(f"body.{key} is {brief(given[key])}, which {taker} cannot do; expected {possible}")
    row = {key: given[key] for key in own if key in ROW_POLICIES and key in given}
    same = [*_SAME, *(key for key in own if key not in ROW_POLICIES)]
    sampling = {key: given[key] for key in same if key in given} | _own_parameters(given, kind)
    sampling |= _schema_of(given)
    if kind == "prompt":
        return {"id": name, "sampling": sampling} | row | _prompt(given.get(kind))
    return {"id": name, kind: _messages(given.get(kind)), "sampling": sampling} | row | _chat_keys(given)


def check_model(model: Any, names: Sequence[str]) -> None:
    """Raises: ValueError for a body's `model` that is none of `names`. None: the body has none, which is right too."""
    if model is not None and model not in names:
        raise ValueError(f"body.model is {brief(model)}; expected one of {', '.join(names)}")


@functools.cache
def _known(kind: str, own: tuple[str, ...]) -> tuple[str, ...]:
    """The keys that a body may have."""
    return tuple(dict.fromkeys((*parameters(kind), *own, *NO_EFFECT, *ONLY)))


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
    if "logprobs" not in body:
        return values
    return values | {"logprobs": body.get("top_logprobs", 0) if wanted else None}


def _schema_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The constraint that `response_format` stands for, as a sampling parameter."""
    asked = body.get("response_format")
    if asked is None:
        return {}
    expected = (
        'expected {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": …, '
        '"schema": {…}}}'
    )
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind in ("text", "json_object") and set(asked) == {"type"}:
        found = {} if kind == "text" else {"json_schema": {"type": "object"}}
    elif kind == "json_schema" and set(asked) == {"type", "json_schema"} and _is_named_schema(asked["json_schema"]):
        found = {"json_schema": asked["json_schema"]["schema"]}
    else:
        raise ValueError(f"body.response_format is {brief(asked)}; {expected}")
    if found and body.get("json_schema") is not None:
        raise ValueError("body.response_format and body.json_schema are both given; leave one out")
    return found


def _is_named_schema(value: Any) -> bool:
    """Whether a value is what OpenAI calls a JSON schema: one with a name. `strict` makes no difference: it holds."""
    known = {"name", "schema", "strict", "description"}
    return isinstance(value, Mapping) and set(value) <= known and isinstance(value.get("schema"), Mapping | bool)


# Results


class Answers:
    """Results as bodies of answers.

    Args:
        model: name of the model in the answers.
        tokenizer: decodes single tokens, whose texts come with their log probabilities.
    """

    def __init__(self, model: str, tokenizer: "Tokenizer | None"):
        self._model, self._tokenizer = model, tokenizer
        self._texts: dict[int, tuple[str, list[int] | None]] = {}

    def answer(self, request: Request | None, output: RequestOutput, name: str) -> tuple[int, dict[str, Any]]:
        """HTTP status and body for the output of a request; `request` is None for one that was malformed."""
        failed = failure(output)
        if failed is not None:
            return failed
        if request is None:
            return 400, error_body("failed", "invalid_request_error")
        return 200, self._answer(request, output, name)

    def _answer(self, request: Request, output: RequestOutput, name: str) -> dict[str, Any]:
        assert request.sampling is not None
        is_chat, asked = request.messages is not None, request.sampling.logprobs
        choices = [
            {
                "index": index,
                **({"message": _message(c)} if is_chat else {"text": c.text or ""}),
                "logprobs": None if asked is None else (self.chat_logprobs if is_chat else self.logprobs)(c),
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
            "usage": usage([output]),
        }

    def chat_logprobs(self, c: "Completion | Update") -> dict[str, Any]:
        """`logprobs` of a choice of a chat."""
        entries = [self._entry(*pair) for pair in zip(c.token_ids, c.logprobs, strict=True)]
        for entry, top in zip(entries, c.top_logprobs or ({},) * len(entries), strict=True):
            entry["top_logprobs"] = [self._entry(*pair) for pair in top.items()]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._text(token)
        return {"token": text, "bytes": data, "logprob": _logprob(logprob)}

    def logprobs(self, c: "Completion | Update", begin: int = 0) -> dict[str, Any]:
        """`logprobs` of a choice that is no chat; begin: where its tokens begin in the choice, in characters."""
        columns = self._columns(c.token_ids, c.logprobs, c.top_logprobs)
        return {**columns, "text_offset": _offsets(columns["tokens"], begin)}

    def _columns(self, tokens, logprobs, top_logprobs) -> dict[str, Any]:
        tops = None
        if top_logprobs:
            tops = [{self._text(t)[0]: _logprob(v) for t, v in reversed(top.items())} for top in top_logprobs]
            tops = [dict(reversed(top.items())) for top in tops]  # of tokens with equal texts the likelier one stays
        texts = [self._text(token)[0] for token in tokens]
        return {"tokens": texts, "token_logprobs": [_logprob(value) for value in logprobs], "top_logprobs": tops}

    def prompt_text(self, output: RequestOutput) -> str:
        """The prompt of an output as text."""
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def echoed_logprobs(self, output: RequestOutput, c: Completion) -> dict[str, Any]:
        """Log probabilities of prompt and completion, the first token's None. Requires: `prompt_logprobs`."""
        assert output.prompt_logprobs is not None
        tops = output.prompt_top_logprobs
        prompt = self._columns(output.prompt_token_ids[1:], output.prompt_logprobs, tops)
        own = self._columns(c.token_ids, c.logprobs, c.top_logprobs)
        first = self._text(output.prompt_token_ids[0])[0]
        tokens = [first, *prompt["tokens"], *own["tokens"]]
        return {
            "tokens": tokens,
            "token_logprobs": [None, *prompt["token_logprobs"], *own["token_logprobs"]],
            "top_logprobs": [None, *prompt["top_logprobs"], *(own["top_logprobs"] or ())] if tops else None,
            "text_offset": _offsets(tokens),
        }

    def _text(self, token: int) -> tuple[str, list[int] | None]:
        """(text, bytes) of a token; the text of a token without one is its id."""
        if token not in self._texts:
            self._texts[token] = _text_of(token, self._tokenizer)
        return self._texts[token]


def failure(output: RequestOutput) -> tuple[int, dict[str, Any]] | None:
    """HTTP status and body for an output that is no answer; None for one that is."""
    reasons = {c.finish_reason for c in output.completions}
    if output.error is not None:
        return 400, error_body(output.error, "invalid_request_error")
    errors = [c.error for c in output.completions if c.error is not None]
    if NOT_FINITE in errors:
        return 500, error_body(NOT_FINITE, "server_error")
    if errors:
        return 400, error_body(errors[0], "invalid_request_error")
    if FinishReason.ABORT in reasons:
        return 408, error_body("the request was ended before its answer was complete", "timeout")
    return None


def prompt_logprobs(output: RequestOutput) -> list[dict[str, float] | None]:
    """For each prompt token log probabilities by token id: its own and those of the likeliest. Requires: they were
    asked for."""
    assert output.prompt_logprobs is not None
    tops = output.prompt_top_logprobs or [{} for _ in output.prompt_logprobs]
    own = zip(output.prompt_token_ids[1:], output.prompt_logprobs, tops, strict=True)
    return [None, *({str(t): _logprob(v) for t, v in {token: value, **top}.items()} for token, value, top in own)]


def _offsets(texts: Sequence[str], begin: int = 0) -> list[int]:
    """Where each text begins in all of them together, in characters, if the first begins at `begin`."""
    return list(itertools.accumulate((len(text) for text in texts[:-1]), initial=begin)) if texts else []


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """The tokens of some requests, as an answer counts them."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return counted(prompt, sum(len(c.token_ids) for output in outputs for c in output.completions))


def counted(prompt: int, generated: int) -> dict[str, int]:
    """`usage` of so many tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


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


def error_body(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _logprob(value: float) -> float:
    return float(value) if math.isfinite(value) and value > _LEAST_LOGPROB else _LEAST_LOGPROB
