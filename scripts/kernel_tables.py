"""Writes the tables of docs/kernels.md again, from what libtpu makes of the kernels, without a TPU.

    python scripts/kernel_tables.py [--gens v4,v5e,v5p,v6e] [--again]

What was compiled is kept in docs/tpu_loops.json, by generation, shape and the digest of the kernels' sources: only what
is missing is compiled (`--again`: everything), 10 to 20 s of a processor each. The table of the sweep comes from
docs/tpu_sweep.csv, which scripts/sweep_tpu.py writes. Tables stand between `<!-- NAME -->` and `<!-- end -->`.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import jax.numpy as jnp  # noqa: E402
from scripts.sweep_tpu import RECORD, read, sources  # noqa: E402
from scripts.tpu.bundles import Kernel  # noqa: E402
from scripts.tpu.limits import prefill_limits  # noqa: E402
from scripts.tpu_schedule import compile_builder  # noqa: E402

from levanter_infer.kernels.tpu.pool import LANES  # noqa: E402
from levanter_infer.kernels.tpu.sizes import Sizes  # noqa: E402
from levanter_infer.kernels.tpu.tiling import TileShape, choose  # noqa: E402
from levanter_infer.runtime.libtpu import TARGETS  # noqa: E402

DOCUMENT, LOOPS = ROOT / "docs" / "kernels.md", ROOT / "docs" / "tpu_loops.json"
BUILDERS = ROOT / "scripts" / "tpu_builders.py"
HBM_BYTES_PER_S = {"v4": 1.23e12, "v5e": 0.82e12, "v5p": 2.765e12, "v6e": 1.64e12}
CLOCK = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
FLOPS_PER_CYCLE = {"v4": 131072, "v5e": 131072, "v5p": 131072, "v6e": 524288}
"""Operations per cycle of one core's matrix units, in bfloat16."""
SHORT_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Shape:
    """A line of a table."""

    path: str
    heads: tuple[int, int, int]
    page: int
    dtype: str = "bfloat16"
    value_dim: int | None = None

    def __str__(self) -> str:
        dtype = "" if self.dtype == "bfloat16" else f", {self.dtype}"
        return f"{self.path}: {', '.join(map(str, self.heads))}, page {self.page}{dtype}"

    def tile_shape(self, gen: str) -> TileShape:
        q_heads, kv_heads, head_dim = self.heads
        return TileShape(gen, kv_heads, head_dim, q_heads // kv_heads, self.page, self.dtype, self.value_dim)


SHAPES = (
    Shape("decode", (32, 8, 128), 128),
    Shape("decode", (32, 8, 128), 64),
    Shape("decode", (32, 8, 128), 16),
    Shape("decode", (32, 8, 64), 128),
    Shape("decode", (8, 4, 256), 128),
    Shape("decode", (32, 8, 128), 128, "int8"),
    Shape("decode", (32, 8, 128), 128, "float8_e4m3fn"),
    Shape("prefill", (32, 8, 128), 128),
    Shape("prefill", (8, 4, 256), 128),
)
LATENTS = tuple(
    Shape(path, (heads, 1, 576), page, value_dim=512)
    for path in ("decode", "prefill")
    for heads in (128, 16)
    for page in (64, 16)
)
"""DeepSeek-V3's, on one chip and on each of eight."""


def compile_loop(shape: Shape, gen: str) -> dict:
    """The loop over items that are seen whole, of one kernel; or why there is none."""
    sizes = dict(seqs=1, tokens=1) if shape.path == "decode" else dict(seqs=1, tokens=256)
    builder = f"{BUILDERS}:{shape.path}"
    if shape.value_dim is not None:
        sizes["value_dim"] = shape.value_dim
    schedule = compile_builder(builder, gen, heads=shape.heads, page=shape.page, kv_dtype=shape.dtype, **sizes)
    if schedule.error is not None:
        return {"error": str(schedule.short_of or schedule.error[:200])}
    kernel = schedule.kernel(f"attend_{shape.path}")
    loop = kernel.main_loop()
    assert loop is not None, kernel.name
    vmem = kernel.memory["vmem"]["total"]
    found = {"bundles": loop.bundles, "cycles": loop.cycles, "spills": loop.spills, "fills": loop.fills, "vmem": vmem}
    return found | ({"short": short_bundles(kernel, shape, gen)} if shape.path == "decode" else {})


def short_bundles(kernel: Kernel, shape: Shape, gen: str) -> int:
    """Bundles that a part executes for a sequence of SHORT_TOKENS, all of which stand in items that are masked: what
    there is once for each item, the sub-blocks, and the loop that prefetches pages of a later item."""
    size, main = shape.tile_shape(gen), kernel.main_loop()
    tile = choose(size).decode
    assert main is not None
    inside = [loop for loop in kernel.loops if loop.depth == main.depth and loop.first > main.last]
    outer = [loop for loop in kernel.loops if loop.depth == main.depth - 1]
    around = next(loop for loop in outer if loop.first <= main.first <= loop.last)
    masked = max(inside, key=lambda loop: loop.slots.get("MATMUL", 0))
    send = next(loop for loop in inside if loop.dmas and not loop.slots.get("MATMUL", 0))
    static = Sizes(tile, size.pool, shape.page, size.q_per_kv, rows=8, operand=jnp.dtype(jnp.bfloat16))

    def turns(tokens: int) -> int:
        return -(-SHORT_TOKENS // tokens)

    return (
        turns(static.tokens) * around.own_bundles
        + turns(static.subblock_pages * shape.page) * masked.bundles
        + turns(min(8, tile.pages) * shape.page) * send.bundles
    )


def figures(shape: Shape, gen: str, loop: dict) -> str:
    """Text of a cell."""
    if "error" in loop:
        return loop["error"]
    tiles = choose(shape.tile_shape(gen))
    tile = tiles.decode if shape.path == "decode" else tiles.prefill
    heads, tokens = shape.heads[1] // tile.parts, tile.pages * shape.page
    counts = loop["bundles"], loop["cycles"]
    if shape.path == "prefill":
        rows = min(tile.queries, 256) * shape.heads[0] // shape.heads[1]
        flops = 2 * rows * tokens * heads * _depth(shape) / FLOPS_PER_CYCLE[gen]
        unit, least = bound(shape, gen, tokens, rows, tile.parts)
        of_bound = f"{least / counts[0]:.0%} ({least / counts[1]:.0%}) of {unit}"
        return f"{flops / counts[0]:.0%} ({flops / counts[1]:.0%}); {of_bound}; {_memory(loop)}"
    per_head = [count / (tokens * heads) for count in counts]
    bytes_per_s = HBM_BYTES_PER_S[gen] / min(shape.tile_shape(gen).cores, tile.parts * tile.row_shares)
    item = shape.tile_shape(gen).page_bytes * tile.pages / tile.parts
    least = item / bytes_per_s * CLOCK[gen]
    if shape.value_dim is not None:
        least = max(least, 2 * shape.heads[0] * tokens * _depth(shape) / FLOPS_PER_CYCLE[gen])
    over = [count / least for count in counts]
    return f"{per_head[0]:.3f} ({per_head[1]:.3f}); {over[0]:.2f} ({over[1]:.2f}); {_memory(loop)}; {loop['short']}"


def bound(shape: Shape, gen: str, tokens: int, rows: int, parts: int) -> tuple[str, float]:
    """The unit that a KV block of prefill needs longest, and the bundles of one grid step for it."""
    pool = shape.tile_shape(gen).pool
    limits = prefill_limits(
        gen,
        keys=tokens,
        columns=rows * pool.heads_per_group,
        head_dim=pool.lane_tiles * LANES,
        value_dim=pool.value_tiles * LANES,
        scales=shape.value_dim is not None,
    )
    unit = max(limits, key=limits.__getitem__)
    return unit, limits[unit] * (pool.groups // parts)


def _depth(shape: Shape) -> int:
    """Multiplications for a query and a key: those of the score, and those with the value; of whole lanes for
    latents."""
    head_dim = shape.heads[2]
    return 2 * head_dim if shape.value_dim is None else -(-head_dim // LANES) * LANES + shape.value_dim


def _memory(loop: dict) -> str:
    return f"{loop['spills'] / loop['bundles']:.1%}; {loop['vmem'] / 2**20:.1f}"


def loops_table(loops: dict, gens: list[str], shapes: Sequence[Shape]) -> str:
    lines = [f"| | {' | '.join(gens)} |", "|---" * (len(gens) + 1) + "|"]
    for shape in shapes:
        loop = {gen: loops.get(gen, {}).get(str(shape)) for gen in gens}
        cells = ["–" if loop[gen] is None else figures(shape, gen, loop[gen]) for gen in gens]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sweep_table(gens: list[str]) -> str:
    rows = read(RECORD).values()
    lines = ["| | compiled | the same kernels | failed | not tried |", "|---|---|---|---|---|"]
    for gen in gens:
        how = Counter(row.how for row in rows if row.case.gen == gen)
        counts = [how["compiled"], how["same"], how["failed"]]
        lines.append(f"| {gen} | {' | '.join(map(str, counts))} | {300 - sum(counts)} |")
    return "\n".join(lines)


def replace(text: str, name: str, table: str) -> str:
    """The document with another table. Raises: ValueError if it has no place for it."""
    place = rf"(<!-- {name} -->\n)(?:.*?\n)??(<!-- end -->)"
    changed, count = re.subn(place, lambda match: f"{match[1]}{table}\n{match[2]}", text, flags=re.S)
    if count != 1:
        raise ValueError(f"{DOCUMENT}: {count} places for the table {name!r}, expected 1")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gens", default=",".join(TARGETS), help="of what is compiled")
    parser.add_argument("--again", action="store_true", help="compile what has been compiled, too")
    options = parser.parse_args()
    loops = json.loads(LOOPS.read_text()) if LOOPS.exists() else {}
    stamp = sources()
    for gen in options.gens.split(","):
        for shape in (*SHAPES, *LATENTS):
            known = loops.setdefault(gen, {}).get(str(shape))
            if known is None or options.again or known["sources"] != stamp:
                loops[gen][str(shape)] = compile_loop(shape, gen) | {"sources": stamp}
                print(gen, shape, loops[gen][str(shape)], flush=True)
                LOOPS.write_text(json.dumps(loops, indent=1) + "\n")
    gens = list(TARGETS)
    text = replace(DOCUMENT.read_text(), "loops", loops_table(loops, gens, SHAPES))
    text = replace(text, "latents", loops_table(loops, gens, LATENTS))
    DOCUMENT.write_text(replace(text, "sweep", sweep_table(gens)))


if __name__ == "__main__":
    main()
