"""Searches tiles of the attention for TPUs for one shape, without a TPU.

    python scripts/search_tiles.py --heads 32,8,128 --page 16 [--gens v5e] [--kv-dtype int8] [--write]

For both paths what `kernels.tpu.tiling` proposes, and what is twice or half as large, is compiled; the loops of those
that fit are compared by the cycles for a token (modelled, plan/cycles.py). A quarter of a minute for each.
`--write` puts the best into the table, src/levanter_infer/kernels/tpu/tiling.py.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.tpu_schedule import compile_builder  # noqa: E402

from levanter_infer.kernels.tpu import tiling  # noqa: E402
from levanter_infer.kernels.tpu.sizes import Tile  # noqa: E402
from levanter_infer.kernels.tpu.tiling import Tiles, TileShape, propose  # noqa: E402
from levanter_infer.runtime.libtpu import TARGETS  # noqa: E402

BUILDERS = ROOT / "scripts" / "tpu_builders.py"
CHUNK_TOKENS = 256
LEAST_GAIN = 0.01
"""Least gain over the proposal that is worth an entry."""


def variants(tile: Tile) -> Iterator[Tile]:
    """The proposal and its neighbours."""
    yield tile
    yield dataclasses.replace(tile, pages=2 * tile.pages)
    yield dataclasses.replace(tile, pages=2 * tile.pages, slots=2)
    if tile.pages > 1:
        yield dataclasses.replace(tile, pages=tile.pages // 2)
    if tile.queries > 1:
        yield dataclasses.replace(tile, queries=2 * tile.queries)


def cycles_per_token(shape: TileShape, path: str, tile: Tile) -> float | str:
    """Cycles of the loop over full items, for all heads; or the reason why it does not compile."""
    schedule = compile_builder(
        f"{BUILDERS}:{path}",
        shape.generation or "",
        heads=(shape.kv_heads * shape.q_per_kv, shape.kv_heads, shape.head_dim),
        page=shape.page_size,
        kv_dtype=shape.kv_dtype,
        seqs=1,
        tokens=1 if path == "decode" else max(CHUNK_TOKENS, tile.queries),
        tiles={path: dataclasses.asdict(tile)},
    )
    if schedule.error is not None:
        return str(schedule.short_of or schedule.error[:100])
    loop = schedule.kernel(f"attend_{path}").main_loop()
    assert loop is not None
    return loop.cycles * tile.parts / (tile.pages * shape.page_size * tile.queries)


def search(shape: TileShape, path: str) -> Tile | None:
    """The best tile of a path; None if none compiles."""
    first, best, least = None, None, float("inf")
    for tile in variants(getattr(propose(shape), path)):
        cycles = cycles_per_token(shape, path, tile)
        print(shape.generation, path, tile, cycles, flush=True)
        if isinstance(cycles, str):
            continue
        first = cycles if first is None else first
        if cycles < least and (best is None or cycles < (1 - LEAST_GAIN) * first):
            best, least = tile, cycles
    return best


def write(found: dict[TileShape, Tiles]) -> None:
    """The table with what was found."""
    entries = sorted((tiling.TABLE | found).items(), key=lambda entry: str(entry[0]))
    lines = [
        f"    {tuple(map(dataclasses.astuple, (shape, tiles.decode, tiles.prefill)))}," for shape, tiles in entries
    ]
    path = Path(tiling.__file__)
    body = "\n".join(["_FOUND: list[tuple[tuple, tuple, tuple]] = [", *lines, "]"])
    path.write_text(re.sub(r"_FOUND: \S+? .*?\](?=\n\"\"\")", lambda _: body, path.read_text(), flags=re.S))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", required=True, help="query heads,kv heads,head size, of one device")
    parser.add_argument("--page", type=int, required=True)
    parser.add_argument("--gens", default=",".join(TARGETS))
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    q_heads, kv_heads, head_dim = map(int, options.heads.split(","))
    found = {}
    for gen in options.gens.split(","):
        shape = TileShape(gen, kv_heads, head_dim, q_heads // kv_heads, options.page, options.kv_dtype)
        best = {path: search(shape, path) for path in ("decode", "prefill")}
        if best["decode"] is None or best["prefill"] is None:
            print(f"{shape}: no tile that was tried fits; levanter_infer.engine.tile_search tries smaller ones")
            return 1
        found[shape] = Tiles(best["decode"], best["prefill"])
        print(shape, found[shape])
    if options.write:
        write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
