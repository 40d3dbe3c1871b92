"""`OpenShard`: the results of one shard of the input, until they are committed.

A shard is done when its record lies in `_commits`; the record names the file of rows, which was durable before. Until
then finished rows stand in a journal, each line with a checksum, so that what was finished is not computed again.
"""

import collections
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from levanter_infer.batch import tables
from levanter_infer.batch.layout import COUNTS, count
from levanter_infer.batch.plan import InputShard
from levanter_infer.batch.store import Journal, Store
from levanter_infer.columns import encode_row

COMMITS, JOURNALS = "_commits", "_journal"


def part_name(index: int) -> str:
    """Of a shard, without a suffix."""
    return f"part-{index:06d}"


def record_name(index: int) -> str:
    return f"{COMMITS}/{part_name(index)}.json"


def dumps(content: Any) -> bytes:
    """JSON for people and programs; equal content gives equal bytes."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class OpenShard:
    """A shard that this process works on.

    Args:
        journal: holds what earlier processes had finished.
        kind: of the output: as of `BatchConfig.format`.
        unique_names: name the file after its contents too, because two processes may both write this shard, and
            different rows.
    """

    def __init__(self, store: Store, source: InputShard, journal: Journal, *, kind: str, unique_names: bool = False):
        self.source = source
        self._store, self._journal, self._kind, self._unique_names = store, journal, kind, unique_names
        self._rows: dict[int, list[str]] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._replay()
        self.found = len(self._rows)
        """Rows that were finished already."""

    def __contains__(self, row: int) -> bool:
        """Whether a row, counted from the beginning of the shard, is finished."""
        return row in self._rows

    @property
    def num_finished(self) -> int:
        return len(self._rows)

    @property
    def is_complete(self) -> bool:
        return len(self._rows) == self.source.rows

    def finish(self, row: int, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Take what became of a row, as output rows. Requires: it is not finished yet."""
        assert row not in self._rows, f"row {row} of shard {self.source.index} is finished twice"
        encoded = [encode_row(output) for output in outputs]
        body = f"{row} [{','.join(encoded)}]".encode()
        self._journal.add(b"%08x %s\n" % (zlib.crc32(body), body))
        self._take(row, encoded, outputs)

    def _take(self, row: int, encoded: list[str], outputs: Sequence[Mapping[str, Any]]) -> None:
        self._rows[row] = encoded
        self._counts.update(count(outputs))

    def _replay(self) -> None:
        """Take what the journal holds up to the first line that is not whole."""
        content, good = self._journal.content, 0
        while (end := content.find(b"\n", good)) >= 0:
            checksum, _, body = content[good:end].partition(b" ")
            if checksum != b"%08x" % zlib.crc32(body):
                break
            number, _, outputs = body.partition(b" ")
            rows = json.loads(outputs)
            if int(number) not in self._rows:
                self._take(int(number), [encode_row(row) for row in rows], rows)
            good = end + 1
        self._journal.keep(good)

    def commit(self) -> None:
        """Make the shard's file durable, and then its record. Requires: it is complete."""
        assert self.is_complete, f"shard {self.source.index} lacks rows"
        rows = (row for i in range(self.source.rows) for row in self._rows[i])
        data = tables.encode(rows) if self._kind == "parquet" else "".join(f"{row}\n" for row in rows).encode()
        sha256 = hashlib.sha256(data).hexdigest()
        name = part_name(self.source.index) + (f"-{sha256[:16]}" if self._unique_names else "")
        record = {
            "shard": self.source.index,
            "file": f"{name}.{'parquet' if self._kind == 'parquet' else 'jsonl'}",
            "bytes": len(data),
            "sha256": sha256,
            **{key: self._counts[key] for key in COUNTS},
        }
        self._store.put(record["file"], data)
        if not self._store.create(record_name(self.source.index), dumps(record)) and self._unique_names:
            self._store.remove(record["file"])  # another worker was first
        self._journal.close(remove=True)

    def leave(self) -> None:
        """Stop working on the shard; what is finished stays for whoever goes on."""
        self._journal.close(remove=False)
