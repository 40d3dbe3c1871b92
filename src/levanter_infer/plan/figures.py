"""What a job takes on each device, and how many sequences that allows, from shapes alone."""

import dataclasses
from typing import TYPE_CHECKING, Any

from levanter_infer.plan.job import Blueprint, Job

if TYPE_CHECKING:
    from levanter_infer.kernels.tiling import TileShape


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one device where nothing else is said. The devices of a CPU share their memory; there, of all."""

    memory_bytes: int
    """Memory of the device."""
    weights_bytes: int
    pool_bytes: int
    tables_bytes: int
    """Tables of sequences, sampling, pages and prefix cache entries."""
    upload_bytes: int
    """Of the admissions of the round that runs and of the next."""
    page_bytes: int
    page_size: int
    num_pages: int
    """Of a data-parallel rank, as the next three."""
    seq_pages: int
    """Of the longest sequence."""
    max_seqs: int
    max_step_tokens: int
    max_seq_len: int
    num_shards: int
    buckets: tuple[int, ...]
    """Token capacities that the step is compiled for."""
    sampled_rows: int
    """Sequences that are sampled together."""
    attention: str
    matmul: str
    tiles: dict[str, Any]
    """Of the attention for TPUs, for decode and chunks; empty for other attention."""
    model: dict[str, Any]
    """Sizes of the part of the model that a device has, for `roofline`."""

    @property
    def known_bytes(self) -> int:
        """All that shapes tell: the workspace of the programs and their code come on top."""
        return self.weights_bytes + self.pool_bytes + self.tables_bytes + self.upload_bytes

    @property
    def full_seqs(self) -> int:
        """Sequences of the greatest length that the pool of a data-parallel rank holds together."""
        return self.num_pages // self.seq_pages


def figures_of(job: Job) -> Figures:
    """Raises: ValueError for what the engine would refuse before it loads anything."""
    blueprint = job.blueprint()
    shapes, backend = blueprint.shapes, blueprint.backend
    model, state, admission = blueprint.round_types
    pool = backend.device_bytes(state.kv)
    return Figures(
        memory_bytes=job.machine.chip.memory_bytes,
        weights_bytes=backend.device_bytes(model),
        pool_bytes=pool,
        tables_bytes=backend.device_bytes(state) - pool,
        upload_bytes=2 * backend.device_bytes(admission),
        page_bytes=pool // shapes.num_pages,
        page_size=shapes.page_size,
        num_pages=shapes.num_pages,
        seq_pages=-(-shapes.max_seq_len // shapes.page_size),
        max_seqs=shapes.max_seqs,
        max_step_tokens=shapes.max_step_tokens,
        max_seq_len=shapes.max_seq_len,
        num_shards=backend.num_shards,
        buckets=shapes.buckets,
        sampled_rows=shapes.sampled_rows or shapes.max_rows,
        attention=backend.attention,
        matmul=backend.matmul,
        tiles=_tiles(job, blueprint) if "tiles" in backend.attention_backend.options else {},
        model=_model_sizes(job, blueprint),
    )


def _model_sizes(job: Job, blueprint: Blueprint) -> dict[str, Any]:
    config, layout = blueprint.types.config, blueprint.backend.layout
    parts = 1 if layout is None else layout.model.parts
    expert_parts = 1 if layout is None else layout.experts.parts
    itemsize = blueprint.types.dtype.itemsize
    table_bytes = config.vocab_size * config.hidden_size * itemsize // parts
    return {
        "parameters": config.num_parameters,
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "q_heads": -(-config.num_heads // parts),
        "head_dim": config.head_dim,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_token,
        "expert_bytes": (config.num_experts or 0)
        * 3
        * config.num_layers
        * config.hidden_size
        * config.intermediate_size
        * itemsize
        // (parts * expert_parts),
        "embedding_bytes": 0 if config.tie_word_embeddings else table_bytes,
        "head_bytes": table_bytes,
        "itemsize": itemsize,
        "parts": parts,
    }


def _tiles(job: Job, blueprint: Blueprint) -> dict[str, Any]:
    """What the kernel will choose, for the largest step."""
    from levanter_infer.kernels.tpu.tile_table import choose

    return dataclasses.asdict(job.engine_config.tiles or choose(tile_shape_of(job, blueprint)))


def tile_shape_of(job: Job, blueprint: Blueprint) -> "TileShape":
    """What the tiles of the attention for TPUs depend on."""
    from levanter_infer.engine.sizes import kv_dtype
    from levanter_infer.engine.tile_search import tile_shape

    return tile_shape(
        blueprint.types.config,
        blueprint.backend.layout,
        page_size=blueprint.shapes.page_size,
        kv_dtype=kv_dtype(job.engine_config, blueprint.types),
        generation=job.machine.generation,
    )
