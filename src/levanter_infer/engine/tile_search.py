"""Finds tiles of the attention for TPUs that its compiler accepts, without a TPU.

With spill slots and all else that the compiler adds, a kernel fits where it compiles and nowhere else. So `find_tiles`
compiles one candidate after another until one is accepted, in a process of its own (`python -m
levanter_infer.engine.tile_search GENERATION`, a JSON object on standard input), because the compiler may end it.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from levanter_infer.decode.programs import Program
from levanter_infer.decode.shapes import Shapes
from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.kernels.tpu.backend import TpuBackend
from levanter_infer.kernels.tpu.choice import MAX_QUERIES, choice_type
from levanter_infer.kernels.tpu.sizes import Tile, align_queries
from levanter_infer.kernels.tpu.tiling import TABLE, Tiles, TileShape, candidates
from levanter_infer.layers.layout import Layout
from levanter_infer.runtime.libtpu import TARGETS, compiler_environment, short_of, topology_devices

_ROWS, _ROW_PAGES = 16, 256
"""Sizes of the call that is compiled; the kernels do not depend on them (`kernels.tpu.tables`)."""


def tile_shape(
    config, layout: Layout, shapes: Shapes, kv_dtype: jnp.dtype, *, generation: str | None = None
) -> TileShape:
    """The sizes that tiles depend on, from a model's `DecoderConfig` and its layout on a mesh."""
    copies = layout.kv_copies
    return TileShape(
        generation=generation,
        kv_heads=layout.kv_heads,
        head_dim=config.head_dim,
        q_per_kv=-(-(config.num_heads // config.num_kv_heads) // copies),
        page_size=shapes.page_size,
        kv_dtype=kv_dtype.name,
        value_dim=config.value_dim,
        index_dim=config.index_dim,
        masked=config.chooses_keys(shapes.max_seq_len),
    )


def check_given_tiles(tiles: Tiles | None, config, layout: Layout, shapes: Shapes, kv_dtype: jnp.dtype) -> None:
    """`check_tiles` for a configuration that may leave them out; the rest as in `tile_shape`."""
    if tiles is not None:
        check_tiles(tile_shape(config, layout, shapes, kv_dtype), tiles)


def check_tiles(shape: TileShape, tiles: Tiles) -> None:
    """Raises: ValueError for tiles that the kernels cannot have, whatever memory there is."""
    groups, align = shape.pool.groups, align_queries(shape.q_per_kv * shape.pool.heads_per_group)
    queries, problems = tiles.prefill.queries, []
    units = queries // align
    if shape.masked and queries > MAX_QUERIES:
        problems.append(f"engine.tiles.prefill.queries={queries}: expected at most {MAX_QUERIES} with sparse attention")
    if queries < 2 or queries % align or units & (units - 1):
        problems.append(f"engine.tiles.prefill.queries={queries}: expected {align} times a power of two, 2 or more")
    if tiles.decode.queries != 1:
        problems.append(f"engine.tiles.decode.queries={tiles.decode.queries}: expected 1")
    for path, tile in (("decode", tiles.decode), ("prefill", tiles.prefill)):
        if tile.pages < 1 or tile.pages & (tile.pages - 1):
            problems.append(f"engine.tiles.{path}.pages={tile.pages}: expected a power of two")
        if tile.slots < 2:
            problems.append(f"engine.tiles.{path}.slots={tile.slots}: expected 2 or more")
        if tile.row_shares < 1:
            problems.append(f"engine.tiles.{path}.row_shares={tile.row_shares}: expected 1 or more")
        if tile.parts < 1 or groups % tile.parts:
            problems.append(
                f"engine.tiles.{path}.parts={tile.parts}: expected a divisor of the {groups} groups of kv heads that a "
                "device has"
            )
    if problems:
        raise ValueError("; ".join(problems))


def find_tiles(shape: TileShape, *, max_tokens: int, q_dtype: str = "bfloat16", tiles: Tiles | None = None) -> Tiles:
    """Tiles that compile, with the paths for one query and for many in one program.

    Args:
        max_tokens: query tokens of a call, at most.
        tiles: these and no others; None for those of `tiling.TABLE` or, if it does not know the shape, the first of
            `tiling.candidates` that compile.
    Raises: ValueError if none do: with the memory that is short, and by how much.
    """
    if shape.generation not in TARGETS:
        raise ValueError(f"generation={shape.generation}: expected one of {', '.join(TARGETS)}")
    if tiles is None and shape in TABLE:
        return TABLE[shape]
    tried = list(candidates(shape)) if tiles is None else [tiles]
    call = {"shape": dataclasses.asdict(shape), "max_tokens": max_tokens, "q_dtype": q_dtype}
    error = ""
    for candidate, error in zip(tried, _refusals(shape.generation, call, tried), strict=True):
        if not error:
            return candidate
    which = "none of the tiles that were tried fits" if tiles is None else f"{tiles} cannot be used"
    raise ValueError(
        f"attention of {shape}: {which}: {error}; give engine.tiles with fewer pages, slots or queries, or more parts, "
        "which need less memory"
    )


def _refusals(generation: str, call: dict, tried: Sequence[Tiles]) -> Iterator[str]:
    """Why each of the tiles is refused, until one is not: an empty text."""
    place = 0
    while place < len(tried):
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "levanter_infer.engine.tile_search", generation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=compiler_environment(generation),
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            json.dump({**call, "tiles": [dataclasses.asdict(tiles) for tiles in tried[place:]]}, child.stdin)
            child.stdin.close()
            for line in child.stdout:
                if line.startswith("{"):
                    place += 1
                    yield json.loads(line)["error"]
        if child.returncode != 0 and place < len(tried):
            place += 1
            yield f"the compiler ended its process with {child.returncode}"


def main() -> None:
    """The child: compiles the candidates on standard input until one is accepted, a line of JSON for each."""
    generation, job = sys.argv[1], json.load(sys.stdin)
    shape = TileShape(**job["shape"])
    devices = topology_devices(TARGETS[generation][0])
    with jax.set_mesh(Mesh(np.asarray(devices[:1]), ("device",))):
        for fields in job["tiles"]:
            tiles = Tiles(**{path: Tile(**sizes) for path, sizes in fields.items()})
            error = _compile(shape, job["max_tokens"], job["q_dtype"], tiles)
            print(json.dumps({"error": error}), flush=True)
            if not error:
                return


def _compile(shape: TileShape, max_tokens: int, q_dtype: str, tiles: Tiles) -> str:
    """Why the call cannot be compiled; nothing if it can."""
    mesh = jax.sharding.get_mesh()

    def array(*sizes: int, dtype="int32"):
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))

    pages = shape.pool.shape(num_layers=1, num_pages=_ROWS * _ROW_PAGES, page_size=shape.page_size)
    arrays = dict(
        q=array(max_tokens, shape.kv_heads * shape.q_per_kv, shape.head_dim, dtype=q_dtype),
        kv_pages=array(*pages, dtype=shape.kv_dtype),
        layer=array(),
        page_indices=array(_ROWS, _ROW_PAGES),
        seq_lens=array(_ROWS),
        cu_q_lens=array(_ROWS + 1),
        num_seqs=array(),
    )
    if shape.masked:
        choice = choice_type(max_tokens, _ROW_PAGES, shape.page_size, jnp.dtype(shape.kv_dtype))
        arrays["chosen"] = array(*choice.shape, dtype=choice.dtype)

    def attend(arrays):
        call = AttentionCall(
            **arrays,
            rules=ScoreRules(scale=shape.head_dim**-0.5),
            kv_dtype=jnp.dtype(shape.kv_dtype),
            kv_heads=shape.kv_heads,
            page_size=shape.page_size,
            value_dim=shape.value_dim,
            index_dim=shape.index_dim,
        )
        return TpuBackend(tiles=tiles).attend(call)

    try:
        Program(attend).jitted.trace(arrays).lower(lowering_platforms=("tpu",)).compile()
    except Exception as problem:  # what the compiler says is the result
        if short := short_of(str(problem)):
            space, wanted, there = short
            return f"{wanted:.2f} MiB of {space} are needed and {there:.2f} there, {wanted - there:.2f} too few"
        return " ".join(f"{type(problem).__name__}: {problem}".split())[:500]
    return ""


if __name__ == "__main__":
    main()
