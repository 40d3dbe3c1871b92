"""`Layout`: what stands in an output for one row of the input, and what is counted of it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.openai import ResultLines
from levanter_infer.columns import Columns
from levanter_infer.engine.request import RequestOutput
from levanter_infer.io.prompts import Row, columns_of

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer

COUNTS = ("rows", "failed_rows", "samples", "prompt_tokens", "generated_tokens")
"""What a record counts, and a manifest adds up."""


class Layout(Protocol):
    """How results are written."""

    @property
    def columns(self) -> Columns | None:
        """Columns of the output; None where every row has what it asks for."""
        ...

    def rows(self, source: Row, output: RequestOutput) -> list[dict[str, Any]]:
        """What is written for a row of the input."""
        ...


class RowLayout:
    """Rows as `sample` writes them."""

    def __init__(self, columns: Columns):
        self.columns: Columns | None = columns

    def rows(self, source: Row, output: RequestOutput) -> list[dict[str, Any]]:
        assert self.columns is not None
        return list(self.columns.rows(output, source.carried))


def layout_of(config: BatchRunConfig, tokenizer: "Tokenizer | None") -> Layout:
    """The layout of a job's output."""
    if config.batch.format != "openai":
        return RowLayout(columns_of(config))
    names = config.batch.model_names or [config.model.path.rstrip("/").rsplit("/", 1)[-1]]
    return ResultLines(names[0], tokenizer)


def count(outputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """`COUNTS` of what was written for one row of the input, in either layout."""
    if "custom_id" in outputs[0]:
        body = outputs[0]["response"]["body"]
        failed, samples = outputs[0]["error"] is not None, len(body.get("choices", ()))
        usage = body.get("usage", {"prompt_tokens": 0, "completion_tokens": 0})
        prompt_tokens, generated = usage["prompt_tokens"], usage["completion_tokens"]
    else:
        failed, samples = any(row.get("error") for row in outputs), sum(row["index"] is not None for row in outputs)
        prompt_tokens, generated = len(outputs[0]["prompt_token_ids"]), sum(len(row["token_ids"]) for row in outputs)
    return dict(zip(COUNTS, (1, int(failed), samples, prompt_tokens, generated), strict=True))
