"""`OpenShard`: the results of one shard of the input, until they are committed.

A shard is done when its record lies in `_commits`; the record names the file of rows, which was durable before. Until
then finished rows stand in a journal, each line with a checksum, so that what was finished is not computed again.
Records and journals name the job that they belong to by the SHA-256 of its `job.json`.
"""

import collections
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from levanter_infer.batch import tables
from levanter_infer.batch.layout import COUNTS, count
from levanter_infer.batch.plan import InputShard
from levanter_infer.batch.store import Journal, Store
from levanter_infer.columns import encode_row
from levanter_infer.engine.params import brief

JOB, COMMITS, JOURNALS = "job.json", "_commits", "_journal"


def part_name(index: int) -> str:
    """Of a shard, without a suffix."""
    return f"part-{index:06d}"


def part_suffix(kind: str) -> str:
    """The end of a part's name. Args: kind: one of `BatchConfig.format`."""
    return ".parquet" if kind == "parquet" else ".jsonl"


def record_name(index: int) -> str:
    return f"{COMMITS}/{part_name(index)}.json"


def journal_name(index: int) -> str:
    return f"{JOURNALS}/{part_name(index)}"


def dumps(content: Any) -> bytes:
    """JSON for people and programs; equal content gives equal bytes."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class OpenShard:
    """A shard that this process works on.

    Args:
        journal: holds what earlier processes had finished.
        job: SHA-256 of the job's `job.json`.
        check_job: raises ValueError if the output no longer holds that job.
        kind: of the output: as of `BatchConfig.format`.
        carried: as of `Plan`.
        unique_names: name the file after its contents too, because two processes may both write this shard, and
            different rows.
    Raises: ValueError if the journal is another job's, or holds what is no row.
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
        """Rows that were finished already."""

    def __contains__(self, row: int) -> bool:
        """Whether a row, counted from the beginning of the shard, is finished."""
        return row in self._rows

    @property
    def is_complete(self) -> bool:
        return len(self._rows) == self.source.rows

    def finish(self, row: int, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Take what became of a row, as output rows. Requires: it is not finished yet."""
        assert row not in self._rows, f"row {row} of shard {self.source.index} is finished twice"
        encoded = [encode_row(output) for output in outputs]
        self._journal.add(_line(f"{row} [{','.join(encoded)}]"))
        self._take(row, encoded, outputs)

    def _take(self, row: int, encoded: list[str], outputs: Sequence[Mapping[str, Any]]) -> None:
        self._rows[row] = encoded
        self._counts.update(count(outputs))

    def _replay(self) -> None:
        """Take what the journal holds up to the first line that is not whole."""
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
        """Stop working on the shard; what is finished stays for whoever goes on, if the job is still there."""
        try:
            self._check_job()
        except ValueError:
            self._journal.release()
        else:
            self._journal.close(remove=False)


def _line(body: str) -> bytes:
    """Of a journal."""
    data = body.encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)
