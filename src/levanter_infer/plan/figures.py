"""`Figures`: memory of each device and numbers of pages and sequences, from shapes alone."""

import dataclasses
from typing import TYPE_CHECKING, Any

from levanter_infer.plan.spec import Blueprint, EngineSpec

if TYPE_CHECKING:
    from levanter_infer.cache.cache import Cache
    from levanter_infer.kernels.tpu.tiling import TileShape


@dataclasses.dataclass(frozen=True)
class WindowFigures:
    """Sizes of the pages of layers with one sliding window, per device."""

    window: int
    """Tokens that a query sees."""
    num_pages: int
    """Window pages of a data-parallel rank."""
    page_bytes: int


@dataclasses.dataclass(frozen=True)
class StateFigures:
    """Sizes of the states of fixed size per sequence, per device."""

    num_slots: int
    """States of sequences, running or waiting, of a data-parallel rank."""
    num_snapshots: int
    """States that prefix caching keeps."""
    state_bytes: int
    """Bytes of one of them, in all layers that remember one."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Sizes per device, unless noted. The devices of a CPU share their memory: there, sizes of all devices together."""

    memory_bytes: int
    """Memory of the device."""
    weights_bytes: int
    pool_bytes: int
    tables_bytes: int
    """Tables of sequences, sampling, pages and prefixes."""
    upload_bytes: int
    """Uploads of two admissions: of the running round and of the next."""
    page_bytes: int
    """Bytes of a page in the layers that store every page: all but those of `windows`."""
    page_size: int
    num_pages: int
    """Pages of a data-parallel rank; `max_seqs` and `max_step_tokens` are per rank, too."""
    seq_pages: int
    """Pages of the longest sequence."""
    max_seqs: int
    max_step_tokens: int
    max_seq_len: int
    num_ranks: int
    """Data-parallel ranks."""
    buckets: tuple[int, ...]
    """Token capacities of a step."""
    sampled_rows: int
    """Sequences sampled together."""
    attention: str
    matmul: str
    tiles: dict[str, Any]
    """Tiles of the TPU attention, for decode and prompt chunks; empty for other attention."""
    model: dict[str, Any]
    """Sizes of a device's part of the model, for `roofline`."""
    block_tokens: int | None = None
    """Tokens of the blocks that a step is computed in (`Shapes.block_tokens`)."""
    windows: tuple[WindowFigures, ...] = ()
    """One for each sliding window whose layers have pages of their own."""
    states: StateFigures | None = None
    """None: no layer remembers a state of fixed size."""

    @property
    def forward_tokens(self) -> tuple[int, ...]:
        """Token capacities that the forward is compiled for: the buckets, or the size of a block."""
        return self.buckets if self.block_tokens is None else (self.block_tokens,)

    @property
    def known_bytes(self) -> int:
        """Memory known from shapes, without workspace and code of the programs."""
        return self.weights_bytes + self.pool_bytes + self.tables_bytes + self.upload_bytes

    @property
    def full_seqs(self) -> int:
        """Sequences of the maximal length that fit into the pool of a data-parallel rank."""
        return self.num_pages // self.seq_pages


def figures_of(spec: EngineSpec) -> Figures:
    """The figures of an engine. Raises: ValueError if the engine would refuse it before it loads weights."""
    blueprint = spec.blueprint()
    shapes, backend = blueprint.shapes, blueprint.backend
    model, state, admission = blueprint.round_types
    pool = backend.device_bytes(state.cache)
    page_bytes = [
        sum(backend.device_bytes(pool) // pool.num_entries for pool in state.cache.paged(group))
        for group in range(1 + len(shapes.windows))
    ]
    return Figures(
        memory_bytes=spec.machine.chip.memory_bytes,
        weights_bytes=backend.device_bytes(model),
        pool_bytes=pool,
        tables_bytes=backend.device_bytes(state) - pool,
        upload_bytes=2 * backend.device_bytes(admission),
        page_bytes=page_bytes[0],
        page_size=shapes.page_size,
        num_pages=shapes.num_pages,
        seq_pages=-(-shapes.max_seq_len // shapes.page_size),
        max_seqs=shapes.max_seqs,
        max_step_tokens=shapes.max_step_tokens,
        max_seq_len=shapes.max_seq_len,
        num_ranks=backend.num_ranks,
        buckets=shapes.buckets,
        block_tokens=shapes.block_tokens,
        sampled_rows=shapes.sampled_rows or shapes.max_rows,
        attention=backend.attention,
        matmul=backend.matmul,
        tiles=_tiles(spec, blueprint) if "tiles" in backend.attention_backend.options else {},
        model=_model_sizes(spec, blueprint),
        windows=tuple(
            WindowFigures(each.window, each.num_pages, own)
            for each, own in zip(shapes.windows, page_bytes[1:], strict=True)
        ),
        states=_state_figures(blueprint, state.cache),
    )


def _state_figures(blueprint: Blueprint, cache: "Cache") -> StateFigures | None:
    shapes, pools = blueprint.shapes, [pool for pool in cache.pools if not pool.is_paged]
    if not pools:
        return None
    state_bytes = sum(blueprint.backend.device_bytes(pool) // pool.num_entries for pool in pools)
    return StateFigures(shapes.num_slots, shapes.num_snapshots, state_bytes)


def _model_sizes(spec: EngineSpec, blueprint: Blueprint) -> dict[str, Any]:
    config, layout = blueprint.types.config, blueprint.backend.layout
    parts, expert_parts = layout.model.parts, layout.experts.parts
    itemsize = blueprint.types.dtype.itemsize
    weight_itemsize = 1 if blueprint.backend.quantizes else itemsize
    table_size = config.vocab_size * config.hidden_size
    untied_bytes = 0 if config.tie_word_embeddings else table_size * itemsize // parts
    layer_input_bytes = config.vocab_size * config.num_layers * config.layer_input_width * itemsize // parts
    loops = [group for group in config.groups if group.trips > 1]
    return {
        "parameters": config.num_parameters,
        "layers": config.num_layers,
        "looped_layers": sum(group.num_layers for group in loops),
        "layer_bodies": sum(len(group.bodies) for group in loops),
        "hidden": config.hidden_size,
        "q_heads": -(-config.num_heads // parts),
        "head_dim": config.head_dim,
        "value_dim": config.head_dim if config.value_dim is None else config.value_dim,
        "experts": config.num_experts,
        "experts_per_token": config.experts.num_chosen if config.experts else 0,
        "expert_bytes": config.num_expert_parameters * weight_itemsize // (parts * expert_parts),
        "embedding_bytes": untied_bytes + layer_input_bytes,
        "head_bytes": table_size * weight_itemsize // parts,
        "itemsize": itemsize,
        "weight_itemsize": weight_itemsize,
        "parts": parts,
    }


def _tiles(spec: EngineSpec, blueprint: Blueprint) -> dict[str, Any]:
    """Tiles that the kernel will choose, for the largest step."""
    from levanter_infer.kernels.tpu.tiling import choose

    return dataclasses.asdict(spec.engine_config.tiles or choose(tile_shape_of(spec, blueprint)))


def tile_shape_of(spec: EngineSpec, blueprint: Blueprint) -> "TileShape":
    """Parameters on which the tiles of the TPU attention depend."""
    from levanter_infer.engine.sizes import kv_dtype
    from levanter_infer.engine.tile_search import tile_shape

    return tile_shape(
        blueprint.types.config,
        blueprint.backend.layout,
        blueprint.shapes,
        kv_dtype(spec.engine_config, blueprint.types),
        generation=spec.machine.generation,
    )
