"""Bounds on lengths: how many bytes a tokenizer's steps make of a text at most, how many tokens at least.

A tokenizer.json is part of a download, and its steps run in the caller's process, which ends when memory runs out. The
growth of steps multiplies: four that write a thousand characters for one write 10^12. So each step has a bound from its
parameters, as the library itself reports them, and a text that could grow too long is refused.

Encoding takes seconds per megabyte, and much longer for some texts. `TokenBound` refuses a text that cannot fit without
encoding it.
"""

import base64
import json
import math
import unicodedata
from collections.abc import Iterable
from typing import Any, Literal

MAX_GROWTH = 10_000
"""Largest growth of a tokenizer's steps, in bytes per byte; known models have up to some hundreds."""
HARMLESS_GROWTH = 16
"""Growth of decoders up to which the text is not checked: it is at most a few times as long as the tokens."""
MAX_BYTES = 2**25
"""Largest size of one text after the steps, in bytes; the library needs about 150 bytes of memory for each."""

_UNICODE = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0}
"""Growth in UTF-8 of Unicode's normal forms (annex 15, table "maximum expansion factors")."""
_FIXED = {
    **_UNICODE,
    "Lowercase": 1.5,
    "BertNormalizer": 3.0 * 5 / 3 * 1.5,
    "ByteLevel": 2.0,
}
"""Growth of steps whose parameters do not matter here. BERT's: NFD, spaces around CJK characters, lower case."""
_Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_UNICODE_FORMS: tuple[_Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")
_KEEPING_SPLITS = ("ByteLevel", "Metaspace", "Digits", "Punctuation")
"""Pre-tokenizers that split a text and drop nothing of it."""


def growth(*steps: Any) -> float:
    """An upper bound of the bytes that steps make of each byte of a long text.

    Args:
        steps: normalizers, pre-tokenizers or decoders of the `tokenizers` library, in their order; None is none.
    """
    return math.prod(_growth(json.loads(step.__getstate__())) for step in steps if step is not None)


def check_growth(factor: float, what: str) -> None:
    """Raises: ValueError if the growth exceeds that of any tokenizer of a language model."""
    if factor > MAX_GROWTH:
        raise ValueError(
            f"{what} can make a text {factor:.3g} times as long; expected at most {MAX_GROWTH} times: the file would "
            "exhaust the memory, do not use it"
        )


def check_length(num_bytes: int, factor: float, what: str) -> None:
    """Raises: ValueError if `num_bytes` could grow to more than `MAX_BYTES`."""
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


class TokenBound:
    """A lower bound of the number of tokens of a text, linear in its length.

    No token has more bytes (byte-level vocabularies) or characters (byte-fallback ones) than the longest token of the
    vocabulary. The bound needs a tokenizer that drops nothing of the text before it splits it into tokens; for one that
    may drop something, or is of another kind, the bound is 0.

    Args:
        content: tokenizer.json, after changes.
    """

    def __init__(self, content: str):
        parts = json.loads(content)
        model, added = parts.get("model") or {}, parts.get("added_tokens") or []
        vocab = model.get("vocab")
        vocab = vocab if isinstance(vocab, dict) and model.get("type", "BPE") == "BPE" else {}
        steps = _flat(parts.get("pre_tokenizer"), "pretokenizers")
        self._is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
        self._forms: list[_Form] = []
        knows_all = _has_all_bytes(vocab) if self._is_byte_level else bool(model.get("byte_fallback"))
        keeps_all = all(map(_keeps_all, steps)) and self._read_normalizer(_flat(parts.get("normalizer"), "normalizers"))
        lengths = [len(token) for token in vocab]
        lengths += [len(str(token.get("content", "")).encode()) for token in added]
        self._longest = max(lengths, default=0) if knows_all and keeps_all else 0
        self._swallows_spaces = any(token.get("lstrip") or token.get("rstrip") for token in added)

    def _read_normalizer(self, steps: list[dict]) -> bool:
        """Whether its steps are known to drop nothing, except for what Unicode's normal forms compose."""
        for step in steps:
            if step.get("type") in _UNICODE_FORMS:
                self._forms.extend(form for form in _UNICODE_FORMS if form == step["type"])
            elif step.get("type") == "Replace":
                pattern = (step.get("pattern") or {}).get("String")
                if not isinstance(pattern, str) or self._size(str(step.get("content", ""))) < self._size(pattern):
                    return False
            elif step.get("type") != "Prepend":
                return False
        return True

    def __call__(self, text: str) -> int:
        """The bound; 0 where none is known."""
        if self._longest == 0:
            return 0
        for form in self._forms:
            text = unicodedata.normalize(form, text)
        if self._swallows_spaces:  # those beside a special token belong to it
            text = "".join(text.split())
        return -(-self._size(text) // self._longest)

    def _size(self, text: str) -> int:
        """Length in the unit of the bound: bytes or characters."""
        return len(text.encode("utf-8", "surrogatepass")) if self._is_byte_level else len(text)


def _flat(step, name: str) -> list[dict]:
    if not isinstance(step, dict):
        return []
    if step.get("type") == "Sequence":
        return [inner for each in step.get(name) or [] for inner in _flat(each, name)]
    return [step]


def _keeps_all(step: dict) -> bool:
    if step.get("type") in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return step.get("type") in _KEEPING_SPLITS


def _has_all_bytes(vocab: Iterable[str]) -> bool:
    return len({token for token in vocab if len(token) == 1}) >= 256
