"""`MeshConfig`: how many devices a run takes, and for what.

Nothing here imports JAX before a mesh is made: a configuration is read without it.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from levanter_infer.axes import DATA, EXPERT, MODEL, check_model_axis

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh."""

    data: int = 1
    """Data parallelism: engines side by side (data-parallel ranks), each with its own requests, tables and pool."""
    model: int = 1
    """Tensor parallelism: devices that one copy of the model is sharded over: 1, 2, 4, 8 or 16."""
    expert: int = 1
    """Expert parallelism: devices that the experts of a model with experts are sharded over."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"mesh.{field.name}={value!r}: expected a whole number of at least 1")
        check_model_axis(self.model)

    @property
    def num_devices(self) -> int:
        return self.data * self.model * self.expert

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by axis of the mesh; `expert` only where it has some."""
        return {DATA: self.data, MODEL: self.model} | ({EXPERT: self.expert} if self.expert > 1 else {})

    def __str__(self) -> str:
        return " times ".join(f"{name}={size}" for name, size in self.sizes.items())


def make_mesh(config: "MeshConfig | Mesh | None", devices: Sequence | None = None, *, local: bool = False) -> "Mesh":
    """The mesh over the first of some devices.

    Args:
        config: sizes, or a mesh with some of the axes `data`, `model` and `expert`; others have size 1. None for one
            device of this process.
        devices: to choose from, such as those of a topology that programs are compiled for; None: those that are here.
        local: of those that are here, this process's only; else of all that do the job together, each of which must
            have some in the mesh.
    Raises: ValueError if there are fewer devices, they form no grid, or the mesh has other axes.
    """
    import jax
    from jax.experimental import mesh_utils
    from jax.sharding import Mesh

    from levanter_infer.layers.layout import one_device_mesh

    if config is None:
        return one_device_mesh()
    if isinstance(config, Mesh):
        others = [name for name, size in config.shape.items() if name not in (DATA, MODEL, EXPERT) and size > 1]
        if others:
            raise ValueError(
                f"mesh: got the axis {others[0]!r}; expected {DATA!r}, {MODEL!r} and {EXPERT!r}, or others of size 1"
            )
        return config
    is_elsewhere = devices is not None
    if devices is None:
        devices = jax.local_devices() if local else jax.devices()
    processes = set() if is_elsewhere else {device.process_index for device in devices}
    if config.num_devices == 1 and len(processes) <= 1:
        return one_device_mesh(devices[0] if is_elsewhere else None)
    if config.num_devices > len(devices):
        raise ValueError(
            f"mesh: {config} is {config.num_devices} devices, and there are {len(devices)} ({devices[0].platform}); "
            "lower one of them"
        )
    left_out = processes - {device.process_index for device in devices[: config.num_devices]}
    if left_out:
        raise ValueError(
            f"mesh: {config} leaves the devices of process {min(left_out)} out; there are {len(devices)}, and a mesh "
            "over several processes has devices of each"
        )
    try:
        grid = mesh_utils.create_device_mesh(
            tuple(config.sizes.values()),
            devices=devices[: config.num_devices],
            # An axis may take a part of an axis of a TPU's torus, as 8 of 4 by 4 chips do.
            allow_split_physical_axes=True,
        )
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"mesh: {config} is {config.num_devices} of {len(devices)} chips, which form no grid; use a row of the "
            "slice, half of the slice, or all of it"
        ) from error
    return Mesh(in_rings(grid), tuple(config.sizes))


def in_rings(grid: "np.ndarray") -> "np.ndarray":
    """Devices [data, model, ...] with the four of each group along `model` in the order of a ring, as far as they are
    neighbours: a transfer between neighbours of the group is one hop then (`layers.collective_matmul`)."""
    if grid.shape[1] != 4 or not all(hasattr(device, "coords") for device in grid.flat):
        return grid

    def hops(order: Sequence[int]) -> int:
        groups = ([each.coords for each in group] for group in grid.swapaxes(1, -1).reshape(-1, 4))
        pairs = ((group[order[i - 1]], group[order[i]]) for group in groups for i in range(4))
        return sum(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True))

    return grid[:, min([(0, 1, 2, 3), (0, 1, 3, 2), (0, 2, 1, 3)], key=hops)]
