"""`EngineSpec`: the engine that is planned, as plain values that another process can read."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levanter_infer.checkpoints.quantized.config import without_quantization
from levanter_infer.checkpoints.remote import is_url
from levanter_infer.checkpoints.source import CONFIG, Source, parse_json, resolve_source
from levanter_infer.config import RunConfig, decode_engine, decode_section
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.mesh import MeshConfig, make_mesh
from levanter_infer.plan.targets import Target, parse_target

if TYPE_CHECKING:
    from levanter_infer.decode.programs import Programs
    from levanter_infer.decode.shapes import Shapes
    from levanter_infer.engine.backend_choice import BackendChoice

_MAX_BYTES = 2**20
_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Types, shapes and programs of an engine, without weights."""

    types: Any
    """The model as loaded from a checkpoint, with a `jax.ShapeDtypeStruct` for every array."""
    backend: "BackendChoice"
    shapes: "Shapes"
    programs: "Programs"

    @property
    def round_types(self) -> tuple:
        """The result of `engine.runner.round_types`."""
        from levanter_infer.engine.runner import round_types

        return round_types(self.types, self.backend, self.shapes, self.programs)


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """An engine on a target."""

    target: str
    hf_config: dict[str, Any]
    """Content of the model's config.json."""
    dtype: str
    """Dtype of the weights."""
    engine: dict[str, Any]
    """Keys of `EngineConfig`."""
    mesh: dict[str, int]
    num_eos: int = 1
    """End-of-sequence ids of the tokenizer."""
    scoring: bool = False
    routing: bool = False
    constraints: bool = False
    num_beams: int = 1

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "EngineSpec":
        return EngineSpec(**json.loads(text))

    @property
    def machine(self) -> Target:
        return parse_target(self.target)

    @property
    def mesh_config(self) -> MeshConfig:
        return decode_section(MeshConfig, self.mesh, "mesh")

    @property
    def engine_config(self) -> EngineConfig:
        return decode_engine(self.engine)

    def check_chips(self) -> None:
        """Raises: ValueError if the target has fewer devices than the mesh needs."""
        wanted, there = self.mesh_config.num_devices, self.machine.num_chips
        if wanted > there:
            raise ValueError(f"mesh: {self.mesh_config} is {wanted} devices, and {self.target} has {there}")

    def blueprint(self, devices: Sequence | None = None) -> "Blueprint":
        """The engine on the target.

        Args:
            devices: devices of the target or its topology, to compile for; None: for shapes alone.
        Raises: ValueError if the engine would refuse the configuration on the target before it loads weights.
        """
        from jax.sharding import AbstractMesh

        from levanter_infer.engine.backend_choice import BackendChoice
        from levanter_infer.engine.runner import programs_for, shapes_for

        self.check_chips()
        mesh, config, types = self.mesh_config, self.engine_config, self.model_types()
        if devices is not None:
            made = make_mesh(mesh, devices)
        else:
            sizes = mesh.sizes
            made = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        chip = self.machine.chip
        device = chip if devices is None else devices[0]
        backend = BackendChoice.choose(config, types, has_mods=False, mesh=made, device=device)  # type: ignore[arg-type]
        shapes = shapes_for(
            config,
            types,
            backend,
            num_eos=self.num_eos,
            is_loaded=False,
            device_bytes=None if chip.platform == "cpu" else chip.memory_bytes,
            scoring=self.scoring,
            routing=self.routing,
            constraints=self.constraints,
            num_beams=min(self.num_beams, config.max_seqs),
        )
        attention = backend.attention_spec(shapes, None, None)
        return Blueprint(types, backend, shapes, programs_for(config, types, backend, shapes, attention))

    def model_types(self):
        """The model with a `jax.ShapeDtypeStruct` for every array. Raises: ValueError as `family_for`."""
        import jax.numpy as jnp

        from levanter_infer.models.decoder import DecoderModel
        from levanter_infer.models.registry import family_for

        config = family_for(self.hf_config).config_from_hf(self.hf_config)
        return DecoderModel.types(config, jnp.dtype(self.dtype))


def spec_of(config: RunConfig, target: str, shape: str | None) -> EngineSpec:
    """The spec of a configuration's engine, without the weights and without a network.

    Args:
        shape: path of a config.json that replaces the model's own.
    Raises: ValueError if the model is not on this machine, or of an unknown family.
    """
    hf_config, directory = _hf_config(config, shape)
    hf_config, _ = without_quantization(hf_config)  # its weights are held as `_dtype` says
    mesh = {"data": config.mesh.data, "model": config.mesh.model, "expert": config.mesh.expert}
    return EngineSpec(
        target=target,
        hf_config=hf_config,
        dtype=_dtype(config, hf_config),
        engine=dict(config.engine),
        mesh=mesh,
        num_eos=_num_eos(config, hf_config, directory),
        scoring=config.sampling.prompt_logprobs is not None,
        routing=config.sampling.return_routed_experts,
        constraints=config.sampling.is_constrained,
        num_beams=config.sampling.num_beams,
    )


def _hf_config(config: RunConfig, shape: str | None) -> tuple[dict[str, Any], Path | None]:
    """Content of config.json, and the directory of the model if it is on this machine."""
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
    """Directory of a hub model in the local cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG, revision=revision)
    except HFValidationError as error:
        raise ValueError(f"model {name!r} is no directory, no config.json and no hub id: {error}") from error
    return Path(found).parent if isinstance(found, str) else None


def _dtype(config: RunConfig, hf_config: Mapping[str, Any]) -> str:
    """Dtype of the weights: as configured, else the stored one of config.json."""
    text_config = hf_config.get("text_config")
    sources = [hf_config, text_config if isinstance(text_config, Mapping) else {}]
    stored = (source.get(key) for source in sources for key in ("torch_dtype", "dtype"))
    dtype = config.model.dtype or next(filter(None, stored), None)
    if dtype not in _DTYPES:
        raise ValueError(
            f"model.dtype is {config.model.dtype or 'not given'} and config.json says {dtype or 'nothing'}; expected "
            f"{', '.join(_DTYPES)}: give model.dtype"
        )
    return str(dtype)


def _num_eos(config: RunConfig, hf_config: Mapping[str, Any], directory: Path | None) -> int:
    """Number of end-of-sequence ids, which have a column in the tables."""
    tokenizer = Path(config.tokenizer) if config.tokenizer is not None else directory
    if tokenizer is not None and (tokenizer / "tokenizer.json").is_file():
        from levanter_infer.checkpoints.tokenizer import Tokenizer

        return len(Tokenizer.from_directory(tokenizer).eos_token_ids)
    ids = hf_config.get("eos_token_id")
    return len(ids) if isinstance(ids, list) else int(ids is not None)
