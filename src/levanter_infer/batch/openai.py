"""OpenAI's batch format: input lines as rows, and results as lines that the types of `openai` read.

Source: https://platform.openai.com/docs/guides/batch. A line of the input has `custom_id`, `method`, `url` and `body`,
the request to that endpoint; a line of the output has `id`, `custom_id`, `response` with the body of the endpoint's
answer (`io/openai.py`), and `error`.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from levanter_infer.config import check_keys
from levanter_infer.engine.params import brief
from levanter_infer.engine.request import MAX_ID_CHARS, RequestOutput
from levanter_infer.io.openai import PROMPTS, Answers, body_row
from levanter_infer.io.prompts import RefusedRow, Row, given_id

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer

_KEYS = ("custom_id", "method", "url", "body")


def is_batch_line(content: Any) -> bool:
    """Whether a row is a line of OpenAI's batch format."""
    return isinstance(content, dict) and not {"custom_id", "body"}.isdisjoint(content)


def line_id(line: dict[str, Any]) -> str | None:
    """The id of a batch line, which is its `custom_id`; None if that is not a string of a valid length."""
    name = line.get("custom_id")
    return given_id({"id": name}) if isinstance(name, str) and name else None


def as_row(content: Any, model_names: Sequence[str]) -> Any:
    """A batch line as a row of this package's own format; other content is returned unchanged.

    Args:
        model_names: names that `model` may have.
    Raises: RefusedRow, with the line's `custom_id`, for a line that requests something unsupported.
    """
    if not is_batch_line(content):
        return content
    given = line_id(content)
    try:
        if given is None:
            raise ValueError(
                f"custom_id is {brief(content.get('custom_id'))}; expected a string of 1 to {MAX_ID_CHARS} characters"
            )
        return _row(content, given, model_names)
    except ValueError as e:
        raise RefusedRow(str(e), given) from None


def _row(content: dict[str, Any], name: str, model_names: Sequence[str]) -> dict[str, Any]:
    check_keys(content, _KEYS, "")
    body = content.get("body")
    if content.get("method", "POST") != "POST":
        raise ValueError(f"method is {brief(content['method'])}; expected POST")
    kind = PROMPTS.get(str(content.get("url")))
    if kind is None:
        raise ValueError(f"url is {brief(content.get('url'))}; expected {' or '.join(PROMPTS)}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {brief(body)}; expected an object")
    return body_row(body, kind, name, model_names)


class ResultLines:
    """Results as lines of OpenAI's batch output.

    Equal results give equal lines: ids are derived from `custom_id`, and `created` is 0.

    Args:
        model, tokenizer: as in `Answers`.
    """

    columns = None

    def __init__(self, model: str, tokenizer: "Tokenizer | None"):
        self._answers = Answers(model, tokenizer)

    def rows(self, source: Row, output: RequestOutput) -> list[dict[str, Any]]:
        """The one line of a result."""
        name = hashlib.sha256(output.id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        status, body = self._answers.answer(source.request, output, name)
        failed = body.get("error")
        return [
            {
                "id": f"batch_req_{name}",
                "custom_id": output.id,
                "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
                "error": {"code": failed["type"], "message": failed["message"]} if failed else None,
            }
        ]
