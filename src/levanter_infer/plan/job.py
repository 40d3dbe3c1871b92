"""`Job`: all that a plan depends on, as plain values that another process can read."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from levanter_infer.config import decode_engine, decode_section
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.mesh import MeshConfig, make_mesh
from levanter_infer.plan.targets import Target, parse_target

if TYPE_CHECKING:
    from levanter_infer.decode.programs import Programs
    from levanter_infer.decode.shapes import Shapes
    from levanter_infer.engine.backend import Backend


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """An engine that is not there."""

    types: Any
    """Of the model, as it comes from a checkpoint."""
    backend: "Backend"
    shapes: "Shapes"
    programs: "Programs"

    @property
    def round_types(self) -> tuple:
        """As `engine.runner.round_types`."""
        from levanter_infer.engine.runner import round_types

        return round_types(self.types, self.backend, self.shapes, self.programs)


@dataclasses.dataclass(frozen=True)
class Job:
    """An engine that is to run on a target."""

    target: str
    hf_config: dict[str, Any]
    """Of the model, as in its config.json."""
    dtype: str
    """Of the weights."""
    engine: dict[str, Any]
    """Keys of `EngineConfig`."""
    mesh: dict[str, int]
    num_eos: int = 1
    """End-of-sequence ids of the tokenizer."""
    scoring: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        return Job(**json.loads(text))

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
        """Raises: ValueError if the target has fewer devices than the mesh wants."""
        wanted, there = self.mesh_config.num_devices, self.machine.num_chips
        if wanted > there:
            raise ValueError(f"mesh: {self.mesh_config} is {wanted} devices, and {self.target} has {there}")

    def blueprint(self, devices: Sequence | None = None) -> "Blueprint":
        """The engine on the target.

        Args:
            devices: of the target, or a topology of it, to compile for; None: none are at hand, which suffices for
                shapes.
        Raises: ValueError for what the engine would refuse, on the target, before it has loaded anything.
        """
        from jax.sharding import AbstractMesh

        from levanter_infer.engine.backend import Backend
        from levanter_infer.engine.runner import programs_for, shapes_for

        self.check_chips()
        mesh, config, types = self.mesh_config, self.engine_config, self.model_types()
        if devices is not None:
            made = make_mesh(mesh, devices)
        else:
            sizes = mesh.sizes
            made = AbstractMesh(tuple(sizes.values()), tuple(sizes)) if mesh.num_devices > 1 else None
        chip = self.machine.chip
        device = chip if devices is None else devices[0]
        backend = Backend.choose(config, types, has_mods=False, mesh=made, device=device)  # type: ignore[arg-type]
        shapes = shapes_for(
            config,
            types,
            backend,
            num_eos=self.num_eos,
            is_loaded=False,
            device_bytes=None if chip.platform == "cpu" else chip.memory_bytes,
            scoring=self.scoring,
        )
        return Blueprint(types, backend, shapes, programs_for(config, types, backend, shapes))

    def model_types(self):
        """The model with a `jax.ShapeDtypeStruct` in place of every array. Raises: ValueError as `family_for`."""
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        from levanter_infer.models.decoder import DecoderModel
        from levanter_infer.models.registry import family_for

        config = family_for(self.hf_config).config_from_hf(self.hf_config)
        key = jax.eval_shape(jax.random.key, 0)
        return eqx.filter_eval_shape(DecoderModel.init, config, key=key, dtype=jnp.dtype(self.dtype))
