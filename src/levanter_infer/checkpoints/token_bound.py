"""`TokenBound`: how many tokens a text has at least, known without encoding it.

Encoding takes seconds per megabyte, and for some texts much longer. A text that cannot fit anyway is refused by this.
"""

import json
import unicodedata
from collections.abc import Iterable
from typing import Literal

_Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_UNICODE_FORMS: tuple[_Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")
_KEEPING_SPLITS = ("ByteLevel", "Metaspace", "Digits", "Punctuation")
"""Pre-tokenizers that divide a text and drop nothing of it."""


class TokenBound:
    """A lower bound of the tokens of a text, linear in its length.

    Every token stands for at most as many bytes (byte-level vocabularies) or characters (byte-fallback ones) as the
    longest token of the vocabulary has. That holds where nothing of the text is dropped before it is divided into
    tokens; for a tokenizer that may drop something, or is of another kind, the bound is 0.

    Args:
        content: tokenizer.json, as it is in use.
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
        """Whether its steps are known to drop nothing, but for what Unicode's normal forms put together."""
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
        """At least so many tokens; 0 where nothing is known."""
        if self._longest == 0:
            return 0
        for form in self._forms:
            text = unicodedata.normalize(form, text)
        if self._swallows_spaces:  # those beside a special token belong to it
            text = "".join(text.split())
        return -(-self._size(text) // self._longest)

    def _size(self, text: str) -> int:
        """In what tokens are measured: bytes or characters."""
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
