"""`Source`: the files of a checkpoint, in a directory, at a URL that fsspec reads, or on the Hugging Face hub."""

import dataclasses
import json
import logging
import os
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter_infer.checkpoints.remote import RemoteDirectory, RemoteFile, is_url, open_directory
from levanter_infer.runtime.progress import stage

logger = logging.getLogger(__name__)

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION = "generation_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODELOPT_CONFIG = "hf_quant_config.json"
"""How ModelOpt quantized the weights; of older checkpoints config.json does not say it."""
_TEXT_FILES = (
    *(CONFIG, INDEX, GENERATION, "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *(ADAPTER_CONFIG, MODELOPT_CONFIG),
    "additional_chat_templates/*.jinja",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SHARD = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")
_MAX_JSON_BYTES = {CONFIG: 2**20, GENERATION: 2**20, INDEX: 2**26, ADAPTER_CONFIG: 2**22, MODELOPT_CONFIG: 2**22}


@dataclass(frozen=True)
class Source:
    """A checkpoint in a local directory, which may be a copy of a hub repository."""

    directory: Path
    name: str
    """The directory or id as the user gave it."""
    revision: str | None
    """Commit of the hub repository; None for a directory."""
    adapter: "Source | None" = None
    """The adapter that is merged into the weights."""

    def file(self, name: str) -> Path | RemoteFile:
        """A file of the checkpoint, inside its directory.

        Links out of the directory are refused, except from a snapshot of a hub cache to its own blobs.

        Raises: ValueError if it is absent or outside.
        """
        path = self.directory / name
        if not path.is_file():
            raise ValueError(f"{self.name}: no file {name} in {self.directory}; the checkpoint is incomplete")
        check_inside(path, self.directory)
        return path

    def has(self, name: str) -> bool:
        return (self.directory / name).is_file()

    def where(self, name: str = "") -> str:
        """A file of the checkpoint, or its directory, for messages."""
        return str(self.directory / name)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files in the directory, or in a folder of it; none if there is no such folder."""
        path = self.directory / folder
        return sorted(path.name for path in path.iterdir()) if path.is_dir() else []

    def read_bytes(self, name: str, limit: int) -> bytes:
        """A small file. Raises: ValueError if it is absent, longer than `limit` bytes, or cannot be read."""
        file = self.file(name)
        size = file.stat().st_size if isinstance(file, Path) else file.size
        if size > limit:
            raise ValueError(f"{file} has {size} bytes, expected at most {limit}; it is no {name}")
        if not isinstance(file, Path):
            return file.read(0, size)
        try:
            return file.read_bytes()
        except OSError as e:
            raise ValueError(f"cannot read {file}: {e.strerror}") from e

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises: ValueError if it is absent, too long, or no JSON object; names must not repeat."""
        return parse_json(self.read_bytes(name, _MAX_JSON_BYTES[name]), self.where(name))

    def shards(self) -> dict[str, set[str] | None]:
        """File name -> the tensors that the index says it holds; None where there is no index.

        Raises: ValueError if there are no safetensors, or the index is malformed or names a file outside.
        """
        if self.has(SINGLE):
            return {SINGLE: None}
        if not self.has(INDEX):
            raise ValueError(_no_safetensors(self))
        weight_map = self.read_json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            got = "empty" if weight_map == {} else type(weight_map).__name__
            raise ValueError(f"{self.where(INDEX)}: weight_map is {got}, expected an object of tensors and files")
        shards: dict[str, set[str] | None] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
                raise ValueError(
                    f"{self.where(INDEX)}: tensor {tensor!r} is in {shard!r}, expected the plain name of a "
                    ".safetensors file beside the index"
                )
            held = shards.setdefault(shard, set())
            assert held is not None
            held.add(tensor)
        return shards


@dataclass(frozen=True)
class RemoteSource(Source):
    """A checkpoint at a URL. `directory` is a name only, no local path."""

    remote: RemoteDirectory = dataclasses.field(kw_only=True)

    def file(self, name: str) -> RemoteFile:
        file = self.remote.file(name)
        if file is None:
            raise ValueError(f"{self.name}: no file {name} there; the checkpoint is incomplete, or the URL is another")
        return file

    def has(self, name: str) -> bool:
        return self.remote.info(name) is not None

    def where(self, name: str = "") -> str:
        return self.remote.where(name)

    def names(self, folder: str = "") -> list[str]:
        return self.remote.names(folder)


def check_inside(path: Path, directory: Path) -> None:
    """Raises: ValueError if a file of a model directory is a link to the outside."""
    root, target = directory.resolve(), path.resolve()
    inside = target.is_relative_to(root)
    if not inside and root.parent.name == "snapshots":
        inside = target.is_relative_to(root.parent.parent / "blobs")
    if not inside:
        raise ValueError(f"{path} links to {target}, outside the model directory; copy the file into {root}")


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object without repeated names. Raises: ValueError naming `what`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            raise ValueError("a name is repeated within an object")
        return keys

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}; download it again or mend it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} holds a {type(value).__name__}, expected a JSON object")
    return value


def resolve_source(
    path_or_id: str | Path,
    revision: str | None = None,
    *,
    weights: bool = True,
    adapter: str | Path | None = None,
) -> Source:
    """Find a checkpoint, and download it if it is on the hub: configuration, tokenizer and safetensors, nothing else.

    Args:
        path_or_id: a directory, a URL that fsspec reads such as `gs://bucket/model`, or a hub id such as `org/name`. A
            `Path`, and a string that begins with `/`, `.` or `~`, is never a hub id.
        revision: branch, tag or commit of the hub repository; pin a commit for results that can be repeated.
        weights: download the safetensors too.
        adapter: a LoRA adapter that is merged into the weights, likewise; None: none.
    Raises: ValueError if there is no such directory, URL or repository.
    """
    found = _resolve_source(path_or_id, revision, weights=weights)
    return found if adapter is None else dataclasses.replace(found, adapter=_resolve_adapter(adapter))


def _resolve_adapter(path_or_id: str | Path) -> Source:
    found = _local_source(path_or_id, None, "adapter", ADAPTER_CONFIG)
    if found is None:
        name = str(path_or_id)
        found = Source(_download(name, None, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), "adapter"), name, None)
        found = dataclasses.replace(found, revision=found.directory.name)
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not found.has(file):
            within = [name for name in found.names() if found.has(f"{name}/{file}")]
            hint = f"; there is one in {', '.join(within[:3])}" if within else ""
            raise ValueError(
                f"adapter {found.name!r}: no {file} in {found.where()}; expected the directory that PEFT's "
                f"save_pretrained wrote, with safetensors{hint}"
            )
    return found


def _resolve_source(path_or_id: str | Path, revision: str | None, *, weights: bool) -> Source:
    found = _local_source(path_or_id, revision, "model", CONFIG)
    if found is not None:
        return found
    name = str(path_or_id)
    text = Source(_download(name, revision, _TEXT_FILES), name, None)
    commit = text.directory.name
    logger.info("model %s: revision %s", name, commit)
    if not weights:
        return Source(text.directory, name, commit)
    shards = [SINGLE] if not text.has(INDEX) else list(text.shards())
    return Source(_download(name, commit, (*_TEXT_FILES, *shards)), name, commit)


def _local_source(path_or_id: str | Path, revision: str | None, what: str, file: str) -> Source | None:
    """A source that is not on the hub; None if it is to be looked for there.

    Args:
        what: for messages, the thing that it is.
        file: for messages, the file that it has.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise ValueError(f"{what} is {reprlib.repr(path_or_id)}; expected a directory, a URL or a hub id")
    if isinstance(path_or_id, str) and is_url(path_or_id):
        opened = open_directory(path_or_id)
        if revision is not None:
            raise ValueError(f"revision={revision!r} with the URL {path_or_id}: revisions are for hub ids")
        if isinstance(opened, RemoteDirectory):
            return RemoteSource(Path(opened.root), path_or_id, None, remote=opened)
        if not opened.is_dir():
            raise ValueError(f"{what} {path_or_id!r}: {opened} is no directory; give the directory that holds {file}")
        return Source(opened, path_or_id, None)
    try:
        directory = Path(path_or_id).expanduser()
        is_directory, exists = directory.is_dir(), directory.exists()
    except (RuntimeError, OSError) as e:  # no such user's home; a name too long; a folder that may not be entered
        why = e.strerror if isinstance(e, OSError) else e
        raise ValueError(
            f"cannot look for {what} {str(path_or_id)[:200]!r}: {why}; give a directory or a hub id"
        ) from e
    if is_directory:
        if revision is not None:
            raise ValueError(f"revision={revision!r} with the directory {directory}: revisions are for hub ids")
        return Source(directory, str(path_or_id), None)
    name = str(path_or_id)
    if exists:
        raise ValueError(f"{what} {name!r} is a file; give the directory that holds {file}, or a hub id")
    if isinstance(path_or_id, Path):
        raise ValueError(f"{what} {name!r}: there is no directory {directory.absolute()}; give hub ids as strings")
    if not _HUB_ID.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} is no such directory, and no hub id of the form org/name (looked for "
            f"{directory.absolute()}); give the directory that holds {file}, or a hub id"
        )
    return None


def _download(name: str, revision: str | None, files: tuple[str, ...], what: str = "model") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with stage(f"fetching {name} from the Hugging Face hub", draws_itself=True):
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise ValueError(
            f"{what} {name!r}{at}: there is no directory {Path(name).absolute()}, and as a hub id it was not found: "
            f"the hub gave {type(error).__name__}: {error}; check the name, the network and (for gated models) HF_TOKEN"
        ) from error


def _no_safetensors(source: Source) -> str:
    others = [name for name in source.names() if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5"))]
    if others:
        return (
            f"{source.name}: found {', '.join(others[:3])} but no {SINGLE} or {INDEX}; only safetensors are read, "
            "because the other formats can run code: convert to safetensors "
            "(`model.save_pretrained(directory, safe_serialization=True)` in HF transformers)"
        )
    return (
        f"{source.name}: no {SINGLE} and no {INDEX} in {source.where()}; only safetensors are read: "
        "give a directory that has them, or convert the checkpoint to safetensors"
    )
