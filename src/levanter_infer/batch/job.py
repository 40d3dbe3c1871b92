"""`Job`: the directory of a job: its spec, whether a run may resume it, and its finished shards.

job.json          the job spec: configuration, fingerprints, versions, sizes, shards of the input
part-000000.jsonl rows
_commits/         one record per finished shard; a shard without a record is not finished
_journal/         finished rows of unfinished shards
manifest.json     the job spec and the sums of all records, once all shards are finished

A shard is finished when its record is in `_commits`; the record names the file of rows, which was durable before. Until
then finished rows are in a journal, each line with a checksum, so that no finished row is computed again. Records and
journals name their job by the SHA-256 of its `job.json`.

On one mesh over several processes, process 0 alone reads and writes the job's directory, and all compute. All read the
same rows in the same order; process 0 broadcasts each shard that it claims with the rows that were finished before, and
the others follow it with a `RemoteShard`.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from levanter_infer.batch import tables
from levanter_infer.batch.config import FORMATS
from levanter_infer.batch.input import InputShard, InputShards
from levanter_infer.batch.store import Journal, Store
from levanter_infer.columns import encode_row
from levanter_infer.engine.params import brief
from levanter_infer.fingerprint import flat
from levanter_infer.policies import Numerics
from levanter_infer.runtime.hosts import Hosts

JOB, COMMITS, JOURNALS = "job.json", "_commits", "_journal"
MANIFEST = "manifest.json"
_WRITTEN = re.compile(rf"part-\d{{6,}}(-[0-9a-f]{{16}})?\.(jsonl|parquet|json)|{re.escape(JOB)}|{re.escape(MANIFEST)}")
"""Names of the files that a job writes, without their folders."""
_FORMAT = 3
"""Version of the directory's format. 1: records and journals did not name their job, and `job.json` no file sizes.
2: shards of Parquet files had no SHA-256."""
_MAX_SHOWN, _MAX_DAMAGED, _READERS = 12, 3, 16
GUARANTEES = {
    Numerics.BATCH_INVARIANT: "a job that was interrupted and resumed has the same bytes as one that was not",
    Numerics.DEFAULT: "every row once, with the same id and seed; rounding may change tokens in another batch",
}
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


class Job:
    """A job's directory.

    Args:
        spec: the content of `job.json`.
    """

    def __init__(self, store: Store, spec: Mapping[str, Any]):
        self.store, self.spec = store, spec
        self.input = InputShards.from_dict(spec["input"])
        self.sha256 = hashlib.sha256(dumps(spec)).hexdigest()
        """SHA-256 of `job.json`, which names the job in its records and journals."""
        self._checked: str | None = None
        """The version of `job.json` that was last compared with this job's."""
        self.kind: str = spec["config"]["batch"]["format"]
        """Format of the output, as in `BatchConfig.format`."""
        self.unique_names = not store.has_claims and spec["guarantee"]["numerics"] == Numerics.DEFAULT
        """Whether files are named after their contents too: without claims two processes may write a shard, and with
        these numerics different rows."""

    def check_current(self) -> None:
        """Raises: ValueError if the output no longer holds this job.

        Reads `job.json`, whose size grows with the number of shards, only if it was written after the last call.
        """
        version = self.store.version(JOB)
        if version is not None and version == self._checked:
            return
        content = self.store.read(JOB)
        if content is None or hashlib.sha256(content).hexdigest() != self.sha256:
            what = "is gone" if content is None else "is another one than this job began with"
            raise ValueError(
                f"{JOB} of the output {what}, so nothing more of this job is written there; put its {JOB} back, or "
                "begin again in another output"
            )
        self._checked = version  # the version before the read

    def committed(self) -> set[int]:
        """Numbers of the finished shards."""
        numbers = {part_name(shard.index): shard.index for shard in self.input.shards}
        return {
            numbers[n.removesuffix(".json")] for n in self.store.names(COMMITS) if n.removesuffix(".json") in numbers
        }

    def counts(self, indices: Iterable[int]) -> dict[str, int]:
        """The sums of `COUNTS` over finished shards, by their records alone."""
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(lambda i: json.loads(self.store.read(record_name(i)) or b"{}"), indices))
        return {key: sum(record.get(key, 0) for record in found) for key in COUNTS}

    def records(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Records of finished shards, in order; compares the SHA-256 of each whole file.

        Raises: ValueError if a record is another job's, or does not match its file.
        """
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:  # an object store takes a while for each
            found = list(pool.map(self._record_or_error, sorted(indices)))
        errors = [str(each) for each in found if isinstance(each, ValueError)]
        if errors:
            more = f"; and {len(errors) - _MAX_DAMAGED} more" if len(errors) > _MAX_DAMAGED else ""
            raise ValueError("; ".join(errors[:_MAX_DAMAGED]) + more)
        return [each for each in found if not isinstance(each, ValueError)]

    def _record_or_error(self, index: int) -> dict[str, Any] | ValueError:
        name = record_name(index)
        again = f"remove {name} to compute the shard again"
        record: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(self.store.read(name) or b"")
        if not _is_record(record, index, self.kind):
            return ValueError(f"{name} of the output is no record of its shard; {again}")
        if record["job"] != self.sha256:
            return ValueError(
                f"{name} of the output belongs to another job than {JOB}; put back the {JOB} that it was written for, "
                f"or {again}"
            )
        file, size = record["file"], self.store.size(record["file"])
        if size != record["bytes"]:
            return ValueError(f"{name} says that {file} has {record['bytes']} bytes, and it has {size}; {again}")
        sha256 = self.store.sha256(file)
        if sha256 != record["sha256"]:
            return ValueError(
                f"{file} of the output has changed since it was written: its SHA-256 is {sha256}, and {name} says "
                f"{record['sha256']}; put it back, or {again}"
            )
        return record

    def shards_of(self, worker: int, workers: int) -> list[InputShard]:
        """Shards for a worker, in the order in which it tries to claim them.

        First its own; then, where claims keep processes apart, the shards of the other workers from the last to the
        first, because those come last for their own workers.
        """
        own = [shard for shard in self.input.shards if shard.index % workers == worker]
        others = [shard for shard in reversed(self.input.shards) if shard.index % workers != worker]
        return own + (others if self.store.has_claims else [])

    def claim(self, shards: Iterable[InputShard]) -> Iterator["OpenShard"]:
        """The shards that are neither finished nor claimed elsewhere, each claimed when the iterator reaches it."""
        known = self.committed()
        for shard in shards:
            if shard.index in known:
                continue
            self.check_current()
            journal = self.store.claim(journal_name(shard.index))
            if journal is None:
                continue  # claimed by another process
            if self.store.read(record_name(shard.index)) is not None:  # finished meanwhile
                journal.close(remove=True)
                continue
            yield self._open(shard, journal)

    def _open(self, shard: InputShard, journal: Journal) -> "OpenShard":
        try:
            if self.store.has_claims:
                self.check_current()  # again: the next write is to the journal; an object store's is kept in memory
            return OpenShard(self, shard, journal)
        except BaseException:
            journal.release()
            raise

    def finish(self) -> dict[str, Any] | None:
        """Write the manifest if all shards are finished; returns it, or None if some are not.

        Raises: ValueError if the output no longer holds this job, or a finished shard does not match its record.
        """
        self.check_current()
        done = self.committed()
        if len(done) < len(self.input.shards):
            return None
        records = self.records(done)
        counts = {key: sum(record[key] for record in records) for key in COUNTS}
        if counts["rows"] != self.input.rows:
            raise ValueError(f"the records count {counts['rows']} rows and the input has {self.input.rows}")
        for folder in ("", COMMITS):
            self.store.remove_leftovers(folder, _WRITTEN)
        self.store.remove_leftovers(JOURNALS)
        spec = {key: value for key, value in self.spec.items() if key != "input"}
        files = self.spec["input"]["files"]
        manifest = {**spec, "input": {"rows": self.input.rows, "files": files}, "counts": counts, "shards": records}
        self.store.put(MANIFEST, dumps(manifest))
        return manifest


def read_job_spec(store: Store) -> dict[str, Any] | None:
    """The job spec in a directory; None if there is no job.

    Raises: ValueError if it cannot be read, or if there are results of a job and no `job.json`.
    """
    content = store.read(JOB)
    if content is None:
        left = [folder for folder in (COMMITS, JOURNALS) if store.names(folder)]
        left += [MANIFEST] * (store.size(MANIFEST) is not None)
        content = store.read(JOB) if left else None  # again: another worker may have begun meanwhile
        if content is None and left:
            raise ValueError(
                f"the output holds {' and '.join(left)} of a job, and no {JOB} that says which; put {JOB} back, or "
                "give another output"
            )
    if content is None:
        return None
    try:
        spec = json.loads(content)
        version = spec["format"]
        if version == _FORMAT:
            _check_job_spec(spec)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(
            f"{JOB} of the output is no job of this command ({brief(str(e))}); put it back as it was, or give another "
            "output"
        ) from e
    if version != _FORMAT:
        versions = spec.get("versions")
        by = versions.get("levanter_infer") if isinstance(versions, dict) else None
        raise ValueError(
            f"{JOB} of the output has format {brief(version)}, written by levanter_infer "
            f"{by or 'of an unknown version'}; expected format {_FORMAT}. Finish the job with "
            "that version, or give another output"
        )
    return spec


def _check_job_spec(spec: Mapping[str, Any]) -> None:
    """Raises: ValueError, LookupError, TypeError or AttributeError for an invalid job spec."""
    InputShards.from_dict(spec["input"])
    numerics, kind = spec["guarantee"]["numerics"], spec["config"]["batch"]["format"]
    if numerics not in GUARANTEES or kind not in FORMATS:
        raise ValueError(f"numerics {brief(numerics)} and format {brief(kind)}")
    for part in (spec, spec["sizes"], spec["config"]["engine"]):
        part.items()


def _is_record(record: Any, index: int, kind: str) -> bool:
    """Whether this has the form of the record that `OpenShard.commit` writes."""
    return (
        isinstance(record, dict)
        and record.get("shard") == index
        and all(isinstance(record.get(key), str) for key in ("job", "file", "sha256"))
        and all(type(record.get(key)) is int and record[key] >= 0 for key in ("bytes", *COUNTS))
        and "/" not in record["file"]
        and record["file"].startswith(part_name(index))
        and record["file"].endswith(part_suffix(kind))
    )


def make_job_spec(
    config: Mapping[str, Any], fingerprints: Mapping[str, Any], sizes: Mapping[str, Any], inputs: InputShards
) -> dict[str, Any]:
    """The job spec, as `job.json` holds it.

    Args:
        config: the configuration of the run.
        fingerprints: of model, tokenizer and device, and versions.
        sizes: sizes that the engine chose where the configuration gives none.
    """
    numerics = config["engine"]["numerics"]
    spec = {
        "format": _FORMAT,
        "guarantee": {"numerics": numerics, "promise": GUARANTEES[numerics]},
        "config": config,
        **fingerprints,
        "sizes": sizes,
        "input": inputs.as_dict(),
    }
    return json.loads(json.dumps(spec))  # equal to what is read from the file


def job_fingerprint(spec: Mapping[str, Any], there: Mapping[str, Any] | None) -> dict[str, str]:
    """Settings that must be equal in all processes of a job: their own spec, and the one in the output. Paths may
    differ."""

    def digest(content: Any) -> str:
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    facts = {key: value for key, value in flat(spec).items() if key not in _PATHS and not key.startswith("input.")}
    facts |= {"input": digest(spec["input"]), JOB: digest(there)}
    return {key: str(value) for key, value in facts.items()}


def check_same(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that a run with the spec `here` may resume the job with the spec `there`. Paths may differ: contents are
    compared by their fingerprints.

    Raises: ValueError naming the keys that differ.
    """
    sizes, before, now = there["sizes"], flat(there), flat(here)
    differences: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if old == new or key.startswith(("sizes.", "input.shard")) or key in (*_PATHS, _GUARANTEE_TEXT):
            continue
        if key == "device.instructions" and "cpu_isa" in sizes:
            continue  # the engine computes as the job began, or refuses
        if key.startswith("device.") and there["guarantee"]["numerics"] == Numerics.DEFAULT:
            continue
        if key.startswith("config.engine."):
            chosen = sizes.get(key.removeprefix("config.engine."), _ABSENT)
            if {_known(old, chosen), _known(new, chosen)} == {chosen}:
                continue
        differences.append(f"{key.removeprefix('config.')} is {_shown(new)} and was {_shown(old)}")
    if differences:
        more = f"; and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
        raise ValueError(
            f"the output holds a job that was started with other settings: "
            f"{'; '.join(differences[:_MAX_SHOWN])}{more}. Resume it with those, or give another output"
        )


_PATHS = (
    *("config.prompts_file", "config.model.path", "config.model.revision", "config.model.adapter", "config.tokenizer"),
    *("model.name", "model.names", "model.revision", "model.adapter_name", "model.adapter_revision", "tokenizer.name"),
)
_GUARANTEE_TEXT = "guarantee.promise"
"""Text for readers of `job.json`, which follows from `guarantee.numerics`."""
_ABSENT = "nothing"


def _known(value: Any, chosen: Any) -> Any:
    return chosen if value in (None, "auto") else value


def _shown(value: Any) -> str:
    return value if value is _ABSENT else brief(value)


# Shards


class OpenShard:
    """A shard that this process has claimed.

    Args:
        journal: rows that earlier processes have finished.
    Raises: ValueError if the journal is another job's, or has a line that is no row.
    """

    def __init__(self, job: Job, source: InputShard, journal: Journal):
        self._job, self.source, self._journal = job, source, journal
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
        name, header = journal_name(self.source.index), f"job {self._job.sha256}"
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
        job, store = self._job, self._job.store
        if job.kind == "parquet":
            data = tables.encode(rows, job.input.carried)
        else:
            data = "".join(f"{row}\n" for row in rows).encode()
        sha256 = hashlib.sha256(data).hexdigest()
        name = part_name(self.source.index) + (f"-{sha256[:16]}" if job.unique_names else "")
        record = {
            "shard": self.source.index,
            "job": job.sha256,
            "file": name + part_suffix(job.kind),
            "bytes": len(data),
            "sha256": sha256,
            **{key: self._counts[key] for key in COUNTS},
        }
        job.check_current()
        store.put(record["file"], data)
        job.check_current()  # again: putting a large file takes a while
        name = record_name(self.source.index)
        if not store.create(name, dumps(record)):  # another worker was first
            if job.unique_names:
                store.remove(record["file"])
            elif store.read(name) != dumps(record):
                raise ValueError(
                    f"{name} of the output was written by another process meanwhile, and names other rows; remove it "
                    "to compute the shard again, by one process"
                )
        self._journal.close(remove=True)

    def leave(self) -> None:
        """Release the shard; the journal keeps the finished rows for a later run, if the output still holds the job."""
        try:
            self._job.check_current()
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
