"""An engine before anything of it is in memory, on devices that may be elsewhere: its sizes and its programs."""

import dataclasses

import jax

from levanter_infer.decode.programs import Programs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.config import EngineConfig, kv_dtype, resolve_shapes
from levanter_infer.engine.scoring import score_shapes
from levanter_infer.engine.sharded import make_nothing
from levanter_infer.engine.tile_search import check_given_tiles


def shapes_for(
    config: EngineConfig,
    types,
    backend: Backend,
    *,
    num_eos: int,
    is_loaded: bool,
    device_bytes: int | None = None,
    scoring: bool = False,
) -> Shapes:
    """The static sizes of an engine.

    Args:
        types: the model as it comes from a checkpoint or a training program, arrays or their types.
        num_eos: end-of-sequence ids of the model.
        is_loaded: whether the model is in memory already.
        device_bytes: memory of a device that is not here; None: what is free in this process's first.
        scoring: whether the round scores prompts from the beginning.
    Raises: ValueError as `resolve_shapes`.
    """
    unread = 0 if is_loaded else backend.device_bytes(backend.prepared_types(types))
    values = backend.token_values(types.config, kv_dtype(config, types))
    shapes = backend.adapt(resolve_shapes(config, types, num_eos, unread, values, device_bytes))
    if scoring:
        shapes = dataclasses.replace(shapes, scoring=score_shapes(config, types))
    return shapes


def programs_for(
    config: EngineConfig,
    types,
    backend: Backend,
    shapes: Shapes,
    *,
    score_mod=None,
    mask_mod=None,
    on_recompile=None,
    fingerprints: bool = False,
) -> Programs:
    """The programs of an engine. Args: types: as of `shapes_for`; on_recompile, fingerprints: as of `Programs`.
    Raises: ValueError for `tiles` that no kernel can have."""
    dtype = kv_dtype(config, types)
    check_given_tiles(config.tiles, types.config, backend.layout, page_size=shapes.page_size, kv_dtype=dtype)
    return Programs(
        types,
        shapes,
        backend.attention_spec(shapes, score_mod, mask_mod, config.tiles),
        kv_dtype=dtype,
        as_bits=backend.on_cpu,
        on_recompile=on_recompile,
        options=backend.compiler_options,
        layout=backend.layout,
        fingerprints=fingerprints,
    )


def round_types(types, backend: Backend, shapes: Shapes, programs: Programs) -> tuple:
    """The types of the round's arguments, model, state and admission, with their places on a mesh."""
    admission = jax.eval_shape(lambda: make_nothing(shapes, backend.num_shards))
    admission = admission if backend.layout is None else backend.layout.types(admission, stacked=True)
    return backend.prepared_types(types), programs.state_types, admission
