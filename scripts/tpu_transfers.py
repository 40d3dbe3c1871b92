"""Time of a layer of a compiled round, transfers between chips included, and how much of them matmuls hide. Modelled.

    python scripts/tpu_transfers.py v5e:2x2 --mesh model=4 model=8b seqs=256 page=16

Takes the builder `program` of scripts/tpu_builders.py and its keywords. For each loop over layers (there is one for
each size of a step, with and without prompts) the instructions of the compiler's schedule follow one another: each
takes the cycles of its own schedule (`plan/bundles.py`), or the time in which HBM delivers the weights that it reads.
A synchronous collective stops them for as long as its bytes and hops take; a transfer that was started earlier
(collective-permute-start) stops them at its end (-done) for what is left of it. Transfers of one direction of the ring
follow one another. Bandwidths and latencies are those of `plan/targets.py`; attention kernels count nothing.
"""

import argparse
import collections
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.tpu_schedule import compile_builder, literal  # noqa: E402

from levanter_infer.plan.bundles import Schedules  # noqa: E402
from levanter_infer.plan.hlo import codes, computations, largest_array, operation_of  # noqa: E402
from levanter_infer.plan.targets import TPUS  # noqa: E402
from levanter_infer.runtime.libtpu import read_hlo  # noqa: E402

GHZ = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75}
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) [a-z][\w\-]*\((.*)")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_WEIGHT = re.compile(r"bf16\[(?:1,)?\d+,\d+\]")
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}


class Program:
    """A compiled program and its schedules."""

    def __init__(self, directory: str, generation: str):
        text = read_hlo(directory)
        self.bodies = computations(text)
        self._codes, self._schedules = codes(self.bodies), Schedules(directory, generation)
        self._chip, self._cycles_per_us = TPUS[generation], GHZ[generation] * 1e3
        self._alike = collections.defaultdict(list)
        for name in self._schedules.names:
            self._alike[self._codes.get(name)].append(name)

    def layers(self) -> list[str]:
        """Bodies of loops over layers: those with an attention kernel and transfers."""

        def counts(lines: list[str]) -> tuple[int, int]:
            operations = [(operation_of(line) or "").removesuffix("-start") for line in lines]
            return sum('"tpu_custom_call"' in line for line in lines), sum(
                operation in (*PASSES, "collective-permute") for operation in operations
            )

        return [name for name, lines in self.bodies.items() if min(counts(lines)) > 0]

    def time(self, body: str) -> dict[str, float]:
        """Cycles of one trip: in all, of instructions, of transfers, and waited for these; and rows of the step."""
        now = computed = sent = waited = 0.0
        ends: dict[str, float] = {}
        links: dict[str, float] = collections.defaultdict(float)
        for line in self.bodies[body]:
            match, operation = _LINE.match(line), operation_of(line)
            if match is None or operation is None:
                continue
            name, kind, rest = match.groups()
            if operation in PASSES:
                took = self._synchronous(operation, kind, line)
                sent, waited, now = sent + took, waited + took, now + took
            elif operation == "collective-permute-start":
                first = re.match(r"\((\w+\[[\d,]*\])", kind)
                pairs = _PAIRS.search(line)
                assert first is not None and pairs is not None, line
                took = self._us(largest_array(first[1]) / (self._chip.link_gbps / 2 * 1e3))
                links[pairs[1]] = max(now, links[pairs[1]]) + took
                ends[name] = links[pairs[1]] + self._us(self._chip.hop_us)
                sent += took
            elif operation == "collective-permute-done":
                start = next(name for name in ends if re.search(rf"%{re.escape(name)}(?![\w.\-])", rest))
                waited, now = waited + max(0.0, ends[start] - now), max(now, ends[start])
            else:
                took = max(self._cycles(name), self._us(self._weights(line) / (self._chip.memory_gbps * 1e3)))
                computed, now = computed + took, now + took
        sizes = (
            re.search(r"bf16\[(\d+),", line) for line in self.bodies[body] if "collective" in line or "psum" in line
        )
        rows = [int(match[1]) for match in sizes if match is not None]
        return {
            "total": now,
            "computed": computed,
            "sent": sent,
            "waited": waited,
            "rows": max(rows, key=rows.count, default=0),
        }

    def _us(self, microseconds: float) -> float:
        return microseconds * self._cycles_per_us

    def _synchronous(self, operation: str, kind: str, line: str) -> float:
        group = _GROUP.search(line)
        assert group is not None, line
        parts = int(group[2]) if group[2] else len(group[1].split(","))
        size = sum(largest_array(array) for array in re.findall(r"\w+\[[\d,]*\]", kind))
        size *= parts if operation == "reduce-scatter" else 1
        one = (parts - 1) / parts * size / (self._chip.link_gbps * 1e3) + parts // 2 * self._chip.hop_us
        return self._us(PASSES[operation] * one)

    def _cycles(self, name: str) -> int:
        names = [name, *self._alike.get(self._codes.get(name), ())]
        return next((found for each in names if (found := self._schedules.cycles(each)) is not None), 0)

    def _weights(self, line: str) -> int:
        """Bytes of the slices of stacks of weights that an instruction reads."""
        called = _CALLED.search(line)
        if called is None:
            return 0
        total = 0
        for inner in self.bodies.get(called[1], ()):
            match, operation = _LINE.match(inner), operation_of(inner)
            if match is not None and operation == "dynamic-slice" and _WEIGHT.match(match[2]):
                total += largest_array(match[2])
            elif operation == "fusion":
                total += self._weights(inner)
        return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of a layer of a compiled round, transfers included.")
    parser.add_argument("topology", help="such as v5e:2x2")
    parser.add_argument("keywords", nargs="*", help="NAME=VALUE of the builder `program`")
    parser.add_argument("--mesh", default="model=4")
    parser.add_argument("--compiled", help="a directory that tpu_schedule.py --keep has filled; nothing is compiled")
    arguments = parser.parse_intermixed_args()
    generation = arguments.topology.split(":")[0]
    with tempfile.TemporaryDirectory(prefix="tpu_transfers_") as scratch:
        if arguments.compiled is None:
            mesh = {name: int(size) for name, size in (part.split("=") for part in arguments.mesh.split(","))}
            keywords: dict[str, Any] = {
                name: literal(value) for name, value in (word.split("=", 1) for word in arguments.keywords)
            }
            builder = str(ROOT / "scripts" / "tpu_builders.py") + ":program"
            found = compile_builder(
                builder, generation, topology=arguments.topology, mesh=mesh, keep=scratch, **keywords
            )
            if found.error is not None:
                print(found.error, file=sys.stderr)
                return 1
        program = Program(arguments.compiled or scratch, generation)
        for body in program.layers():
            time = program.time(body)
            print(
                f"{body}: {time['rows']:.0f} rows, {time['total']:,.0f} cycles of a layer: {time['computed']:,.0f} of "
                f"instructions, {time['waited']:,.0f} waited for {time['sent']:,.0f} of transfers"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
