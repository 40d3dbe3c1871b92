"""`Driver`: submits the rows of many shards to an engine, and collects their results.

Memory holds a window of rows and the results of unfinished shards, whatever the size of the input.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from levanter_infer.batch.input import ROW_FAULTS, InputShard
from levanter_infer.batch.job import count
from levanter_infer.columns import Columns
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Request, RequestOutput
from levanter_infer.io.prompts import Row, RowParser, row_id

logger = logging.getLogger(__name__)

_WINDOW = 4
"""Submitted sequences per sequence that can run: as many wait on the device, twice as many in the engine's queue."""
_CLOCK = (
    "timeout_s depends on the clock, and this job promises equal bytes; leave it out or set engine.numerics: default"
)


class Shard(Protocol):
    """A claimed shard (`OpenShard`, `RemoteShard`)."""

    source: InputShard
    found: int

    @property
    def is_complete(self) -> bool: ...
    def __contains__(self, row: int) -> bool: ...
    def finish(self, row: int, outputs: Sequence[Mapping[str, Any]]) -> None: ...
    def commit(self) -> None: ...
    def leave(self) -> None: ...


class SubmittedRequest(Protocol):
    """A request in an engine."""

    @property
    def is_done(self) -> bool: ...
    def output(self) -> RequestOutput: ...


class Engine(Protocol):
    """The methods of an `InferenceEngine` that a driver calls."""

    def submit(self, request: Request, /) -> Any: ...
    def step_round(self) -> Any: ...
    def flush(self) -> Any: ...


class OutputFormat(Protocol):
    """Format of the output rows."""

    @property
    def columns(self) -> Columns | None:
        """Columns of the output; None where each row has its own."""
        ...

    def rows(self, source: Row, output: RequestOutput) -> list[dict[str, Any]]:
        """Output rows of one input row."""
        ...


class RowFormat:
    """Rows as `sample` writes them."""

    def __init__(self, columns: Columns):
        self.columns: Columns | None = columns

    def rows(self, source: Row, output: RequestOutput) -> list[dict[str, Any]]:
        assert self.columns is not None
        return list(self.columns.rows(output, source.carried))


@dataclasses.dataclass
class _Pending:
    shard: Shard
    row: int
    source: Row
    submitted: SubmittedRequest

    @property
    def num_sequences(self) -> int:
        assert self.source.request is not None and self.source.request.sampling is not None
        return self.source.request.sampling.num_sequences


@dataclasses.dataclass
class Totals:
    """Counts of a run; `found` are the rows that were finished before it began."""

    rows: int = 0
    found: int = 0
    failed: int = 0
    tokens: int = 0
    shards: int = 0


class Driver:
    """Runs the rows of shards through an engine.

    Args:
        engine: an idle engine.
        read: (position in the file, content) of the rows of an input shard.
        base: default sampling parameters of a row.
        max_seqs: sequences that the engine runs at once.
        equal_bytes: refuse rows whose result depends on anything but the row.
        chat: settings of chats, as in `rows.chat_settings`.
        named: whether rows of the job give themselves ids.
        output_format: default: the columns that `base` requests.
    """

    def __init__(
        self,
        engine: Engine,
        read: Callable[[InputShard], Iterable[tuple[str, Any]]],
        base: SamplingParams,
        *,
        max_seqs: int,
        equal_bytes: bool,
        chat: Mapping[str, Any] = MappingProxyType({}),
        named: bool = False,
        output_format: OutputFormat | None = None,
    ):
        self._engine, self._read, self._equal_bytes, self._named = engine, read, equal_bytes, named
        self._format = output_format or RowFormat(Columns(base))
        base = dataclasses.replace(base, seed=None)  # the engine derives one for each row
        self._parser = RowParser(base, chat, self._format.columns)
        self._window = _WINDOW * max_seqs
        self._pending: list[_Pending] = []
        self._open: dict[int, Shard] = {}
        self._has_logged_fault = False
        self.totals = Totals()

    def run(
        self,
        shards: Iterator[Shard],
        should_stop: Callable[[], bool] = lambda: False,
        on_round: Callable[[Totals], None] = lambda _: None,
    ) -> bool:
        """Process shards, and commit each as soon as its rows are finished.

        Once `should_stop()` is true, the round in flight is read, finished rows are kept, and the rest is left to a
        run that resumes the job.

        Returns: whether all shards were processed.
        Raises: ValueError if the input cannot be read or has changed; OSError if results cannot be written.
        """
        rows = self._rows(shards)
        try:
            while True:
                self._feed(rows)
                self._commit()
                if not self._pending:
                    assert not self._open, "shards without all of their rows"
                    return True
                if should_stop():
                    self._engine.flush()
                    self._collect()
                    self._commit()
                    return False
                self._engine.step_round()
                self._collect()
                on_round(self.totals)
        finally:
            for shard in self._open.values():
                shard.leave()
            self._open.clear()

    def _rows(self, shards: Iterator[Shard]) -> Iterator[tuple[Shard, int, Row]]:
        """Unfinished rows, shard by shard; a shard is open from its first row on."""
        for shard in shards:
            self._open[shard.source.index] = shard
            self.totals.found += shard.found
            if shard.is_complete:
                continue  # it was not committed yet
            for i, (where, content) in enumerate(self._read(shard.source)):
                if i not in shard:
                    name = row_id(content, shard.source.first_row + i, named=self._named)
                    yield shard, i, self._row(content, name, where)

    def _row(self, content: Any, name: str, where: str) -> Row:
        try:
            return self._parser.row(content, name, where)
        except ROW_FAULTS as e:
            return Row(name, None, f"{where}: {_fault(e)}")

    def _feed(self, rows: Iterator[tuple[Shard, int, Row]]) -> None:
        """Submit rows until the window is full."""
        sequences = sum(pending.num_sequences for pending in self._pending)
        while sequences < self._window and (item := next(rows, None)) is not None:
            shard, i, row = item
            submitted = self._submit(row)
            if isinstance(submitted, RequestOutput):
                self._finish(shard, i, row, submitted)
                continue
            self._pending.append(_Pending(shard, i, row, submitted))
            sequences += self._pending[-1].num_sequences

    def _submit(self, row: Row) -> SubmittedRequest | RequestOutput:
        """The submitted request, or the output of a row that is refused."""
        request = row.request
        if request is None:
            return RequestOutput(row.id, None, [], [], error=row.error)
        if self._equal_bytes and request.timeout_s is not None:
            return RequestOutput(row.id, request.prompt, [], [], error=_CLOCK)
        try:
            return self._engine.submit(request)
        except ValueError as error:
            given = request.prompt_token_ids
            ids = [token for token in given if _is_token(token)] if isinstance(given, list) else []
            return RequestOutput(row.id, request.prompt, ids, [], error=str(error))
        except ROW_FAULTS as error:
            self._log_first_fault(row.id)
            return RequestOutput(row.id, request.prompt, [], [], error=_fault(error))

    def _collect(self) -> None:
        """Write the results of requests that are done."""
        done = [pending for pending in self._pending if pending.submitted.is_done]
        self._pending = [pending for pending in self._pending if not pending.submitted.is_done]
        for pending in done:
            self._finish(pending.shard, pending.row, pending.source, pending.submitted.output())

    def _finish(self, shard: Shard, row: int, source: Row, output: RequestOutput) -> None:
        try:
            rows = self._format.rows(source, output)
            shard.finish(row, rows)
        except ROW_FAULTS as e:  # from the encoder, before anything is written
            self._log_first_fault(output.id)
            failed = RequestOutput(output.id, None, [], [], error=f"the result cannot be written: {_fault(e)}")
            rows = self._format.rows(source, failed)
            shard.finish(row, rows)
        counts = count(rows)
        self.totals.rows += 1
        self.totals.failed += counts["failed_rows"]
        self.totals.tokens += counts["generated_tokens"]

    def _log_first_fault(self, row_id: str) -> None:
        """Log the traceback of the exception being handled, for the first such row: the fault may be the engine's."""
        if not self._has_logged_fault:
            self._has_logged_fault = True
            logger.warning("row %s failed unexpectedly; further rows like it are not logged", row_id, exc_info=True)

    def _commit(self) -> None:
        """Commit the shards whose rows are all finished."""
        for index in [index for index, shard in self._open.items() if shard.is_complete]:
            self._open[index].commit()
            del self._open[index]
            self.totals.shards += 1


def _fault(error: BaseException) -> str:
    """Message for an exception that no check of a row has foreseen."""
    return f"the row cannot be served ({type(error).__name__}: {brief(str(error))}); see its values"


def _is_token(value: Any) -> bool:
    """Whether a refused prompt's entry can stand in a row of the output, whose token ids are 32-bit integers."""
    return type(value) is int and 0 <= value < 2**31
