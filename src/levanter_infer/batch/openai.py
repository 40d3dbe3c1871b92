"""Lines of OpenAI's batch format, as rows.

Source: https://platform.openai.com/docs/guides/batch: `custom_id`, `method`, `url` and `body`, the request that would
be sent to that endpoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from levanter_infer.config import check_keys
from levanter_infer.engine.params import brief

_KEYS = ("custom_id", "method", "url", "body")
_PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_SAME = (
    *("temperature", "top_p", "n", "stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
)
"""Parameters that mean here what they mean there; the second line is what other servers have added to the format."""
_OWN = {
    "messages": ("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
    "prompt": ("max_tokens", "logprobs", "best_of"),
}


def as_row(content: Any, model_names: Sequence[str]) -> Any:
    """A row of this package's own format; what is no line of a batch is returned as it is.

    Args:
        model_names: that `model` may have.
    Raises: ValueError for a line that asks for something else.
    """
    if not isinstance(content, dict) or not {"custom_id", "body"} & set(content):
        return content
    check_keys(content, _KEYS, "")
    name, body = content.get("custom_id"), content.get("body")
    if not isinstance(name, str) or not name:
        raise ValueError(f"custom_id is {brief(name)}; expected a string")
    if content.get("method", "POST") != "POST":
        raise ValueError(f"method is {brief(content['method'])}; expected POST")
    kind = _PROMPTS.get(str(content.get("url")))
    if kind is None:
        raise ValueError(f"url is {brief(content.get('url'))}; expected {' or '.join(_PROMPTS)}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {brief(body)}; expected an object")
    given = {key: value for key, value in body.items() if value is not None}
    check_keys(given, (kind, "model", "stream", *_SAME, *_OWN[kind]), "body")
    model = given.get("model")
    if model is not None and model not in model_names:
        raise ValueError(
            f"body.model is {brief(model)}; expected one of {', '.join(model_names)}; see batch.model_names"
        )
    if given.get("stream", False) is not False:
        raise ValueError("body.stream is not false; a batch job does not stream")
    sampling = {key: given[key] for key in _SAME if key in given}
    row: dict[str, Any] = {"id": name, kind: given.get(kind), "sampling": sampling | _own_parameters(given, kind)}
    if kind == "prompt" and isinstance(row[kind], list):
        row["prompt_token_ids"] = row.pop(kind)
    return row


def _own_parameters(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    values = {key: body[key] for key in ("max_tokens", "best_of") if key in body}
    if "max_completion_tokens" in body:
        if "max_tokens" in values:
            raise ValueError("body.max_tokens and body.max_completion_tokens are both given; expected one of them")
        values["max_tokens"] = body["max_completion_tokens"]
    if kind == "prompt":
        return values | {key: body[key] for key in ("logprobs",) if key in body}
    wanted = body.get("logprobs", False)
    if type(wanted) is not bool:
        raise ValueError(f"body.logprobs is {brief(wanted)}; expected true or false")
    if "top_logprobs" in body and not wanted:
        raise ValueError("body.top_logprobs without body.logprobs; set logprobs to true")
    return values | ({"logprobs": body.get("top_logprobs", 0)} if wanted else {})
