"""A `Job` from a configuration: what the model is like, without its weights and without a network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from levanter_infer.checkpoints.remote import is_url
from levanter_infer.checkpoints.source import CONFIG, Source, parse_json, resolve_source
from levanter_infer.config import RunConfig
from levanter_infer.plan.job import Job

_MAX_BYTES = 2**20
_DTYPES = ("bfloat16", "float32")


def job_of(config: RunConfig, target: str, shape: str | None) -> Job:
    """
    Args:
        shape: a config.json, in place of the model's own.
    Raises: ValueError if the model is not here, or is none that the engine knows.
    """
    hf_config, directory = _hf_config(config, shape)
    mesh = {"data": config.mesh.data, "model": config.mesh.model, "expert": config.mesh.expert}
    return Job(
        target=target,
        hf_config=hf_config,
        dtype=_dtype(config, hf_config),
        engine=dict(config.engine),
        mesh=mesh,
        num_eos=_num_eos(config, hf_config, directory),
        scoring=config.sampling.prompt_logprobs is not None,
    )


def _hf_config(config: RunConfig, shape: str | None) -> tuple[dict[str, Any], Path | None]:
    """What config.json says, and the directory of the model if that is here."""
    if shape is not None:
        return _read(Path(shape)), None
    if is_url(config.model.path):
        return resolve_source(config.model.path, config.model.revision).read_json(CONFIG), None
    path = Path(config.model.path).expanduser()
    if path.is_file():
        return _read(path), None
    if path.is_dir():
        return resolve_source(config.model.path, config.model.revision).read_json(CONFIG), path
    directory = _cached(config.model.path, config.model.revision)
    if directory is None:
        raise ValueError(
            f"model {config.model.path!r} is not on this machine, and a plan downloads nothing; give its config.json "
            "with --shape FILE (configs/shapes has some), or a directory that holds one with --model"
        )
    return Source(directory, config.model.path, None).read_json(CONFIG), directory


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} has more than {_MAX_BYTES} bytes; expected a config.json")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; expected a model's config.json") from error


def _cached(name: str, revision: str | None) -> Path | None:
    """The directory of a hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG, revision=revision)
    except HFValidationError as error:
        raise ValueError(f"model {name!r} is no directory, no config.json and no hub id: {error}") from error
    return Path(found).parent if isinstance(found, str) else None


def _dtype(config: RunConfig, hf_config: Mapping[str, Any]) -> str:
    """Of the weights: as wanted, else as config.json says that they are stored."""
    dtype = config.model.dtype or hf_config.get("torch_dtype") or hf_config.get("dtype")
    if dtype not in _DTYPES:
        raise ValueError(
            f"model.dtype is {config.model.dtype or 'not given'} and config.json says {dtype or 'nothing'}; expected "
            f"{' or '.join(_DTYPES)}: give model.dtype"
        )
    return str(dtype)


def _num_eos(config: RunConfig, hf_config: Mapping[str, Any], directory: Path | None) -> int:
    """End-of-sequence ids, which have a place in the tables."""
    tokenizer = Path(config.tokenizer) if config.tokenizer is not None else directory
    if tokenizer is not None and (tokenizer / "tokenizer.json").is_file():
        from levanter_infer.checkpoints.tokenizer import Tokenizer

        return len(Tokenizer.from_directory(tokenizer).eos_token_ids)
    ids = hf_config.get("eos_token_id")
    return len(ids) if isinstance(ids, list) else int(ids is not None)
