"""libtpu as a compiler: one place makes devices to compile for, and a chip is one of them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from levanter_infer.plan.targets import parse_target
from levanter_infer.runtime.libtpu import TARGETS, compiler_environment

ROOT = Path(__file__).resolve().parents[2]
OWNER = ROOT / "src" / "levanter_infer" / "runtime" / "libtpu.py"


def topologies_of_tpus(source: str) -> list[int]:
    """Lines that make the devices of a topology of TPUs, by hand."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func).endswith("get_topology_desc"))
    return [call.lineno for call in made if "'cuda'" not in ast.unparse(call)]


def test_devices_of_a_topology_are_made_in_one_place():
    """A v4 has two devices for a chip where its options are forgotten."""
    paths = [path for folder in ("src", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    found = {path: lines for path in paths if (lines := topologies_of_tpus(path.read_text()))}
    assert set(found) == {OWNER} and len(found[OWNER]) == 1, found


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", TARGETS)
def test_a_chip_is_one_device(generation):
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    topology, name = TARGETS[generation]
    code = f"from levanter_infer.runtime.libtpu import topology_devices\nprint(len(topology_devices({topology!r})))"
    environment = compiler_environment(generation) | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == parse_target(name).num_chips == 4
