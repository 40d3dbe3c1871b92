"""`OpenShard`: the results of one shard of the input, until they are committed.

A shard is finished when its record is in `_commits`; the record names the file of rows, which was durable before. Until
then finished rows are in a journal, each line with a checksum, so that no finished row is computed again. Records and
journals name their job by the SHA-256 of its `job.json`.

On one mesh over several processes, process 0 alone reads and writes the job's directory, and all compute. All read the
same rows in the same order; process 0 broadcasts each shard that it claims with the rows that were finished before, and
the others follow it with a `RemoteShard`.
"""

import collections
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from levanter_infer.batch import tables
from levanter_infer.batch.input import InputShard, InputShards
from levanter_infer.batch.store import Journal, Store
from levanter_infer.columns import encode_row
from levanter_infer.engine.params import brief
from levanter_infer.runtime.hosts import Hosts

JOB, COMMITS, JOURNALS = "job.json", "_commits", "_journal"
COUNTS = ("rows", "failed_rows", "samples", "prompt_tokens", "generated_tokens")
"""Counts of a shard's record, which the manifest adds up."""


def part_name(index: int) -> str:
    """File name of a shard's rows, without a suffix."""
    return f"part-{index:06d}"


def part_suffix(kind: str) -> str:
    """Suffix of a shard's file name. Args: kind: one of `BatchConfig.format`."""
    return ".parquet" if kind == "parquet" else ".jsonl"


def record_name(index: int) -> str:
    return f"{COMMITS}/{part_name(index)}.json"


def journal_name(index: int) -> str:
    return f"{JOURNALS}/{part_name(index)}"


def dumps(content: Any) -> bytes:
    """Indented JSON; equal content gives equal bytes."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def count(outputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """`COUNTS` of the output rows of one input row, in either format."""
    if "custom_id" in outputs[0]:
        body = outputs[0]["response"]["body"]
        failed, samples = outputs[0]["error"] is not None, len(body.get("choices", ()))
        usage = body.get("usage", {"prompt_tokens": 0, "completion_tokens": 0})
        prompt_tokens, generated = usage["prompt_tokens"], usage["completion_tokens"]
    else:
        failed, samples = any(row.get("error") for row in outputs), sum(row["index"] is not None for row in outputs)
        prompt_tokens, generated = len(outputs[0]["prompt_token_ids"]), sum(len(row["token_ids"]) for row in outputs)
    return dict(zip(COUNTS, (1, int(failed), samples, prompt_tokens, generated), strict=True))


class OpenShard:
    """A shard that this process has claimed.

    Args:
        journal: rows that earlier processes have finished.
        job: SHA-256 of the job's `job.json`.
        check_job: raises ValueError if the output no longer holds that job.
        kind: format of the output, as in `BatchConfig.format`.
        carried: as in `InputShards`.
        unique_names: name the file after its contents too, because two processes may both write this shard, and
            different rows.
    Raises: ValueError if the journal is another job's, or has a line that is no row.
    """

    def __init__(
        self,
        store: Store,
        source: InputShard,
        journal: Journal,
        *,
        job: str,
        check_job: Callable[[], None],
        kind: str,
        carried: str = "",
        unique_names: bool = False,
    ):
        self.source, self._job, self._check_job = source, job, check_job
        self._store, self._journal, self._kind, self._unique_names = store, journal, kind, unique_names
        self._carried = carried
        self._rows: dict[int, list[str]] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._replay()
        self.found = len(self._rows)
        """Number of rows that were finished before."""

    def __contains__(self, row: int) -> bool:
        """Whether a row, counted from the start of the shard, is finished."""
        return row in self._rows

    @property
    def is_complete(self) -> bool:
        return len(self._rows) == self.source.rows

    def finish(self, row: int, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Add the output rows of an input row. Requires: the row is not finished."""
        assert row not in self._rows, f"row {row} of shard {self.source.index} is finished twice"
        encoded = [encode_row(output) for output in outputs]
        self._journal.add(_line(f"{row} [{','.join(encoded)}]"))
        self._take(row, encoded, outputs)

    def _take(self, row: int, encoded: list[str], outputs: Sequence[Mapping[str, Any]]) -> None:
        self._rows[row] = encoded
        self._counts.update(count(outputs))

    def _replay(self) -> None:
        """Add the rows of the journal, up to the first line that is incomplete."""
        content, good = self._journal.content, 0
        name, header = journal_name(self.source.index), f"job {self._job}"
        while (end := content.find(b"\n", good)) >= 0:
            checksum, _, body = content[good:end].partition(b" ")
            if checksum != b"%08x" % zlib.crc32(body):
                break
            if good == 0 and body != header.encode():
                raise ValueError(
                    f"{name} of the output belongs to another job than {JOB}; put back the {JOB} that it was written "
                    f"for, or remove {name} to compute its rows again"
                )
            try:
                if good > 0:
                    self._take_line(body)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
                raise ValueError(
                    f"{name} of the output holds a line that is no row of its shard ({brief(str(e))}); remove {name} "
                    "to compute its rows again"
                ) from e
            good = end + 1
        self._journal.keep(good)
        if good == 0:
            self._journal.add(_line(header))

    def _take_line(self, body: bytes) -> None:
        number, _, outputs = body.partition(b" ")
        row, rows = int(number), json.loads(outputs)
        if not 0 <= row < self.source.rows:
            raise ValueError(f"row {row} of {self.source.rows}")
        if row not in self._rows:
            self._take(row, [encode_row(row) for row in rows], rows)

    def commit(self) -> None:
        """Make the shard's file durable, and then its record. Requires: it is complete.

        Raises: ValueError if the output no longer holds this job, or another record of this shard.
        """
        assert self.is_complete, f"shard {self.source.index} lacks rows"
        rows = (row for i in range(self.source.rows) for row in self._rows[i])
        if self._kind == "parquet":
            data = tables.encode(rows, self._carried)
        else:
            data = "".join(f"{row}\n" for row in rows).encode()
        sha256 = hashlib.sha256(data).hexdigest()
        name = part_name(self.source.index) + (f"-{sha256[:16]}" if self._unique_names else "")
        record = {
            "shard": self.source.index,
            "job": self._job,
            "file": name + part_suffix(self._kind),
            "bytes": len(data),
            "sha256": sha256,
            **{key: self._counts[key] for key in COUNTS},
        }
        self._check_job()
        self._store.put(record["file"], data)
        self._check_job()  # again: putting a large file takes a while
        name = record_name(self.source.index)
        if not self._store.create(name, dumps(record)):  # another worker was first
            if self._unique_names:
                self._store.remove(record["file"])
            elif self._store.read(name) != dumps(record):
                raise ValueError(
                    f"{name} of the output was written by another process meanwhile, and names other rows; remove it "
                    "to compute the shard again, by one process"
                )
        self._journal.close(remove=True)

    def leave(self) -> None:
        """Release the shard; the journal keeps the finished rows for a later run, if the output still holds the job."""
        try:
            self._check_job()
        except ValueError:
            self._journal.release()
        else:
            self._journal.close(remove=False)


def _line(body: str) -> bytes:
    """A line of a journal."""
    data = body.encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


class RemoteShard:
    """A shard that process 0 writes.

    Args:
        finished: rows that were finished when it was claimed.
    """

    def __init__(self, source: InputShard, finished: Iterable[int]):
        self.source, self._finished = source, set(finished)
        self.found = len(self._finished)

    def __contains__(self, row: int) -> bool:
        return row in self._finished

    @property
    def is_complete(self) -> bool:
        return len(self._finished) == self.source.rows

    def finish(self, row: int, outputs: Sequence[Mapping[str, Any]]) -> None:
        self._finished.add(row)

    def commit(self) -> None:
        pass

    def leave(self) -> None:
        pass


def broadcast_claims(hosts: Hosts, shards: Iterator[OpenShard]) -> Iterator[OpenShard]:
    """The shards; publishes each to the other processes as it is claimed."""
    prefix = f"claims/{hosts.next_number('claims')}"
    number = 0
    for shard in shards:
        finished = [row for row in range(shard.source.rows) if row in shard]
        hosts.publish(f"{prefix}/{number}", [shard.source.index, finished])
        number += 1
        yield shard
    hosts.publish(f"{prefix}/{number}", None)


def receive_claims(hosts: Hosts, inputs: InputShards) -> Iterator[RemoteShard]:
    """The shards that process 0 claims. Raises: HostLost."""
    prefix = f"claims/{hosts.next_number('claims')}"
    number = 0
    while (claim := hosts.wait_for(f"{prefix}/{number}", math.inf)) is not None:
        index, finished = claim
        number += 1
        yield RemoteShard(inputs.shards[index], finished)
