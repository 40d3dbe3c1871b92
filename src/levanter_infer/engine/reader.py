"""`Update` and `Reader`: what requests of an `AsyncEngine` have brought, on its way to the coroutines that read it."""

import asyncio
import dataclasses
from typing import Any

import numpy as np

from levanter_infer.engine.request import RequestOutput, equal_fields, first_and_last


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """Output of one sample of a request since its last update. Deltas that have not been read yet are merged."""

    request_id: str
    index: int
    """Sample index."""
    token_ids: list[int]
    """The new tokens."""
    text: str | None
    """The new text; what may yet become part of a stop string is held back. None without a tokenizer."""
    logprobs: np.ndarray
    """f32, one per new token, as in `Completion`; so are the next three."""
    processed_logprobs: np.ndarray
    top_logprobs: list[dict[int, float]] | None
    token_versions: np.ndarray
    num_prompt_tokens: int = 0
    """Tokens of the request's prompt."""
    finish_reason: str | None = None
    """Set with the last tokens of the sample."""
    stop_reason: str | int | tuple[int, ...] | None = None
    output: RequestOutput | None = None
    """Set in the last update of the whole request; a refused request has this one only, with `output.error`."""
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    seed: int | None = None
    """As in `Completion`; None for a refused request."""

    __eq__ = equal_fields

    @property
    def version_range(self) -> tuple[int, int] | None:
        """The versions of its first and its last token; None without tokens."""
        return first_and_last(self.token_versions)

    def merged(self, later: "Update") -> "Update":
        """This update and the next one of the same sample as one."""
        return dataclasses.replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=None if later.text is None else (self.text or "") + later.text,
            logprobs=np.concatenate([self.logprobs, later.logprobs]),
            processed_logprobs=np.concatenate([self.processed_logprobs, later.processed_logprobs]),
            top_logprobs=None if later.top_logprobs is None else (self.top_logprobs or []) + later.top_logprobs,
            token_versions=np.concatenate([self.token_versions, later.token_versions]),
        )


class Reader:
    """The end of a request in its event loop: updates that wait to be read, one per sample at most."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.pending: dict[int, Update] = {}
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.ready = asyncio.Event()
        self.leaves = asyncio.Event()
        """Set where the request ends, or is to end, so that nothing more is to be compiled for it."""

    def deliver(self, update: "Update | RequestOutput | BaseException") -> None:
        if isinstance(update, BaseException):
            self.error = update
        elif isinstance(update, RequestOutput):
            self.output = update
        else:
            before = self.pending.get(update.index)
            self.pending[update.index] = update if before is None else before.merged(update)
        self.ready.set()
        self.leaves.set()

    def result(self) -> RequestOutput:
        """The output. Raises: the error of the request. Requires: it has ended."""
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


def deliver(letters: list[tuple[Reader, Any]]) -> None:
    """On the event loop of these readers: give each its update."""
    for reader, update in letters:
        reader.deliver(update)


def last_update(output: RequestOutput) -> Update:
    """The update of a request whose samples have all been delivered, or that was refused."""
    none = np.zeros(0, np.float32)
    last = output.completions[-1] if output.completions else None
    index, reason = (0, "error") if last is None else (last.index, last.finish_reason)
    text = None if last is None or last.text is None else ""
    ids, seed = output.prompt_token_ids, None if last is None else last.seed
    version = np.zeros(0, np.int32)
    return Update(
        output.id, index, [], text, none, none, None, version, len(ids), reason, prompt_token_ids=ids, seed=seed
    )
