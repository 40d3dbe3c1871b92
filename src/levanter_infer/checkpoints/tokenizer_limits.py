"""Bounds on how much longer a tokenizer's steps make a text.

A tokenizer.json comes with a download, and its steps run in the caller's process, which ends when memory runs out.
Steps multiply: four that write a thousand characters for one make 10^12 of it. So the growth of each step is bounded by
its parameters, as the library itself reports them, and no text is given to steps that could make it too long.
"""

import base64
import json
import math
from typing import Any

MAX_GROWTH = 10_000
"""Bytes per byte that a tokenizer's steps may make of a text; those of known models make up to some hundreds."""
HARMLESS_GROWTH = 16
"""Growth of decoders that need no look at the text: what they make is no longer than a few times the tokens."""
MAX_BYTES = 2**25
"""Bytes that the steps may make of one text; the library needs about 150 bytes of memory for each."""

_UNICODE = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0}
"""Growth in UTF-8 of Unicode's normal forms (annex 15, table "maximum expansion factors")."""
_FIXED = {
    **_UNICODE,
    "Lowercase": 1.5,
    "BertNormalizer": 3.0 * 5 / 3 * 1.5,
    "ByteLevel": 2.0,
}
"""Of steps without parameters that matter here. BERT's: NFD, spaces around CJK characters, lower case."""


def growth(*steps: Any) -> float:
    """A bound on the bytes that steps make of one byte, where more than that are given.

    Args:
        steps: normalizers, pre-tokenizers or decoders of the `tokenizers` library, in their order; None is none.
    """
    return math.prod(_growth(json.loads(step.__getstate__())) for step in steps if step is not None)


def check_growth(factor: float, what: str) -> None:
    """Raises: ValueError if no tokenizer of a language model has such a growth."""
    if factor > MAX_GROWTH:
        raise ValueError(
            f"{what} can make a text {factor:.3g} times as long; expected at most {MAX_GROWTH} times: the file would "
            "exhaust the memory, do not use it"
        )


def check_length(num_bytes: int, factor: float, what: str) -> None:
    """Raises: ValueError if `factor` could make more than `MAX_BYTES` of so many."""
    if factor > 1 and num_bytes * factor > MAX_BYTES:
        raise ValueError(
            f"{what} has {num_bytes} bytes, of which tokenizer.json could make {factor:.3g} times as many; "
            f"expected at most {int(MAX_BYTES / factor)} bytes"
        )


def _growth(step: dict[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Sequence":
        inner = next((step[name] for name in ("normalizers", "pretokenizers", "decoders") if name in step), [])
        return math.prod(_growth(each) for each in inner)
    if kind == "Replace":
        return _of_replacement(step["pattern"], _size(step["content"]))
    if kind == "Prepend":
        return 1.0 + _size(step["prepend"])
    if kind == "Metaspace":
        return 2.0 * max(1, _size(step["replacement"]))  # for each space, and one before
    if kind == "Precompiled":
        return max(1.0, float(_longest_entry(step["precompiled_charsmap"])))
    if kind in ("WordPiece", "BPEDecoder", "CTC"):
        return 2.0  # a space for each token
    return _FIXED.get(str(kind), 1.0)


def _of_replacement(pattern: dict[str, str], size: int) -> float:
    if "String" in pattern:
        return max(1.0, size / max(1, _size(pattern["String"])))
    return 1.0 + 2.0 * size  # a regular expression may match nothing, before and after each byte


def _longest_entry(charsmap: str | list[int]) -> int:
    """Bytes of the longest text in a sentencepiece table: the size of a trie, the trie, and texts that end in 0."""
    blob = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap)
    trie = int.from_bytes(blob[:4], "little")
    return max(len(text) for text in blob[4 + trie :].split(b"\0"))


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
