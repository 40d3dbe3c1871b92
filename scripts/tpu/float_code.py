"""The instructions of a compiled program that compute floats, in a form in which two programs can be compared.

Names, metadata, memory spaces and the compiler's estimates are left out, and integers count as data: what remains of an
instruction is its operation, the types and layouts of its results and operands, its windows (the tiles that the
compiler has chosen), what it calls, and the instructions that its float operands come from.
"""

import collections
import functools
import hashlib
import re

from levanter_infer.kernels import scopes
from levanter_infer.plan.hlo import computations, loops_of, operation_of

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_NAME = re.compile(r"%([\w.\-]+)")
_FLOAT = re.compile(r"\b(?:f32|bf16|f16|f8\w+|f64)\[")
_SPACE = re.compile(r"S\(\d+\)")
_WINDOW = re.compile(r'"(?:kernel_window_bounds|output_window_bounds|iteration_bounds|input_window_bounds)":\[[^\]]*\]')
_CONFIG = re.compile(r"backend_config=(\{.*\}|\".*\")")
_MODULE = re.compile(r'"body":"([^"]*)"')
_METADATA = re.compile(r", metadata=\{[^}]*\}|, frontend_attributes=\{[^}]*\}|, channel_id=\d+|, origin=\{.*?\}")
_MOVED = {"parameter", "get-tuple-element", "tuple", "constant", "copy-start", "copy-done", "copy", "bitcast"}
"""Operations that only hand numbers on; copies depend on where the compiler keeps an array."""
_SUMS = ("all-reduce", "reduce-scatter")


def float_code(hlo: str, loop: str) -> collections.Counter[str]:
    """Fingerprints of the float instructions in the loop of the scope `loop`, inner loops included, and how many of
    each there are."""
    program = _Program(hlo)
    return program.code_of(program.body_of(loop))


def added_floats(hlo: str) -> list[str]:
    """Collectives that add floats in an order of the network's: for each stretch of an array another one."""
    bodies, found = computations(hlo), []
    for lines in bodies.values():
        for line in lines:
            operation = (operation_of(line) or "").removesuffix("-start")
            if operation in _SUMS and _FLOAT.search(line.split(operation)[0]):
                adder = bodies.get((_CALLED.findall(line) or [""])[0], [])
                if any(operation_of(each) == "add" for each in adder):
                    found.append(line.strip())
    return found


class _Program:
    def __init__(self, hlo: str):
        self._lines = computations(hlo)

    def body_of(self, loop: str) -> str:
        for _, line in loops_of(self._lines, loop):
            return _BODY.findall(line)[0]
        raise ValueError(f"the program has no loop of {loop}")

    @functools.cache  # noqa: B019
    def code_of(self, name: str) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        seen: dict[str, str] = {}
        for line in self._lines[name]:
            match = _INSTRUCTION.match(line)
            operation = operation_of(line)
            if match is None or operation is None:
                continue
            made = _SPACE.sub("", match[2].split(f" {operation}(")[0])
            if not _FLOAT.search(made):
                seen[match[1]] = "data"
                continue
            if operation in _MOVED:
                sources = [seen.get(each, "") for each in _NAME.findall(match[2].split(f"{operation}(")[1])]
                source = next((each for each in sources if each), "")
                seen[match[1]] = source if operation in ("copy", "copy-start", "copy-done", "bitcast") else "state"
                continue
            called = [each for each in _CALLED.findall(line) if each in self._lines]
            inner = sum((self.code_of(each) for each in called), collections.Counter())
            if operation in ("while", "call", "conditional"):
                found.update(inner)
                seen[match[1]] = "state"
                continue
            arguments = match[2].split(f"{operation}(", 1)[1]
            end = arguments.index(")")
            operands = [seen.get(each, "data") for each in _NAME.findall(arguments[:end])]
            rest = _METADATA.sub("", _SPACE.sub("", arguments[end:]))
            config = _CONFIG.search(rest)
            windows = _WINDOW.findall(config[0]) if config else []
            module = _MODULE.findall(config[0]) if config else []
            attributes = _CALLED.sub("", _CONFIG.sub("", rest))
            text = repr((operation, made, attributes, windows, module, operands, sorted(inner.items())))
            seen[match[1]] = hashlib.sha256(text.encode()).hexdigest()[:16]
            found[f"{operation} {made} {seen[match[1]]}"] += 1
            if operation == "custom-call":  # a kernel, whose arrays may be of other sizes
                seen[match[1]] = "kernel"
        return found


def block_code(hlo: str, size: int) -> collections.Counter[str]:
    """`float_code` of the forward of a block and of the head of one."""
    return float_code(hlo, scopes.forward(size)) + float_code(hlo, scopes.head(size))
