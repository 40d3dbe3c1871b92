"""Where a checkpoint comes from: a directory, or a repository of the Hugging Face hub."""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION = "generation_config.json"
_TEXT_FILES = (
    *(CONFIG, INDEX, GENERATION, "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates/tool_use.jinja",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SHARD = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")
_MAX_JSON_BYTES = {CONFIG: 2**20, GENERATION: 2**20, INDEX: 2**26}


@dataclass(frozen=True)
class Source:
    """A checkpoint's directory on this machine, and what it is a copy of."""

    directory: Path
    name: str
    """What the user wrote."""
    revision: str | None
    """Commit of the hub repository; None for a directory."""

    def file(self, name: str) -> Path:
        """A file of the checkpoint, which must lie in its directory.

        Links that lead out of it are refused, but for those from a hub cache's snapshot to its own blobs.

        Raises: ValueError if it is absent or leads outside.
        """
        path = self.directory / name
        if not path.is_file():
            raise ValueError(f"{self.name}: no file {name} in {self.directory}; the checkpoint is incomplete")
        check_inside(path, self.directory)
        return path

    def has(self, name: str) -> bool:
        return (self.directory / name).is_file()

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises: ValueError if it is absent, too long, or no JSON object; names must not repeat."""
        path = self.file(name)
        limit = _MAX_JSON_BYTES[name]
        if path.stat().st_size > limit:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, expected at most {limit}; it is no {name}")
        try:
            return parse_json(path.read_bytes(), str(path))
        except OSError as e:
            raise ValueError(f"cannot read {path}: {e.strerror}") from e

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
            raise ValueError(f"{self.directory / INDEX}: weight_map is {type(weight_map).__name__}, expected an object")
        shards: dict[str, set[str] | None] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
                raise ValueError(
                    f"{self.directory / INDEX}: tensor {tensor!r} is in {shard!r}, expected the plain name of a "
                    ".safetensors file beside the index"
                )
            held = shards.setdefault(shard, set())
            assert held is not None
            held.add(tensor)
        return shards


def check_inside(path: Path, directory: Path) -> None:
    """Raises: ValueError if a file of a model directory is a link that leads out of it."""
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


def resolve_source(path_or_id: str | Path, revision: str | None = None, *, weights: bool = True) -> Source:
    """Find a checkpoint, and fetch it if it is on the hub: configuration, tokenizer and safetensors, nothing else.

    Args:
        path_or_id: a directory, or a hub id such as `org/name`.
        revision: branch, tag or commit of the hub repository; pin a commit for results that can be repeated.
        weights: fetch the safetensors too.
    Raises: ValueError if there is no such directory or repository.
    """
    try:
        directory = Path(path_or_id).expanduser()
        is_directory, exists = directory.is_dir(), directory.exists()
    except (RuntimeError, OSError) as e:  # no such user's home; a name too long; a folder that may not be entered
        why = e.strerror if isinstance(e, OSError) else e
        raise ValueError(f"cannot look for model {str(path_or_id)[:200]!r}: {why}; give a directory or a hub id") from e
    if is_directory:
        if revision is not None:
            raise ValueError(f"revision={revision!r} with the directory {directory}: revisions are for hub ids")
        return Source(directory, str(path_or_id), None)
    name = str(path_or_id)
    if exists or not _HUB_ID.fullmatch(name):
        kind = "a file" if exists else "no such directory, and no hub id of the form org/name"
        raise ValueError(f"model {name!r} is {kind}; give the directory that holds {CONFIG}, or a hub id")
    text = Source(_download(name, revision, _TEXT_FILES), name, None)
    commit = text.directory.name
    logger.info("model %s: revision %s", name, commit)
    if not weights:
        return Source(text.directory, name, commit)
    shards = [SINGLE] if not text.has(INDEX) else list(text.shards())
    return Source(_download(name, commit, (*_TEXT_FILES, *shards)), name, commit)


def _download(name: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise ValueError(
            f"model {name!r}{at}: no such directory, and the hub gave {type(error).__name__}: {error}; check the "
            "name, the network and (for gated models) HF_TOKEN, or give a directory"
        ) from error


def _no_safetensors(source: Source) -> str:
    others = sorted(
        path.name for path in source.directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5")
    )
    if others:
        return (
            f"{source.name}: found {', '.join(others[:3])} but no {SINGLE} or {INDEX}; only safetensors are read, "
            "because the other formats can run code: convert to safetensors "
            "(`model.save_pretrained(directory, safe_serialization=True)` in HF transformers)"
        )
    return (
        f"{source.name}: no {SINGLE} and no {INDEX} in {source.directory}; only safetensors are read: "
        "give a directory that has them, or convert the checkpoint to safetensors"
    )
