"""Text of a growing sequence: `IncrementalDecoder` turns tokens into text, `StopMatcher` finds stop strings in it."""

import codecs
import copy
import functools
import itertools
from collections.abc import Container, Sequence

from levanter_infer.checkpoints.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 4
"""Tokens held back until their bytes make a character: UTF-8 needs four bytes at most."""
_MAX_SOUGHT = 16
"""Tokens at the end of a prompt among which those that have text are sought."""


class IncrementalDecoder:
    """Text of a sequence, token by token, in pieces that together are `tokenizer.decode` of all its tokens.

    After a prompt they are what the tokens add to the text of the prompt: decoders of SentencePiece vocabularies remove
    the space at the start of a text, and this one is not removed from the first word after the prompt.

    Bytes of an unfinished character are held back. Special tokens, and ids of a padded vocabulary that no token has,
    give no text. Each token costs the same however long the sequence is.

    One difference from `decode`: with byte-fallback vocabularies (Llama 2) a broken byte there also spoils the whole
    characters next to it, which have been given out here by then and stay.

    Args:
        hidden: special tokens without text; the others have theirs. None: all of them.
        prompt: tokens before the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Container[int] | None = None, prompt: Sequence[int] = ()):
        self._tokenizer, self._hidden = tokenizer, hidden
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._given = _last_of_text(tokenizer, prompt) if self._bytes is None else []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        tokenizer = self._tokenizer
        if not 0 <= token_id < tokenizer.vocab_size:
            return ""
        if tokenizer.is_special(token_id):
            if self._hidden is None or token_id in self._hidden:
                return ""
            return self.flush() + tokenizer.decode([token_id], skip_special_tokens=False)
        if self._bytes is not None:
            return self._bytes.decode(tokenizer.token_bytes(token_id))
        self._held.append(token_id)
        piece = self._held_text()
        if piece.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        self._give(piece)
        return piece

    def copy(self) -> "IncrementalDecoder":
        """An independent copy with the same state."""
        other = copy.copy(self)
        other._bytes, other._held = copy.copy(self._bytes), list(self._held)
        return other

    def flush(self) -> str:
        """Text of what is held back, when no more tokens follow."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        piece = self._held_text() if self._held else ""
        self._give(piece)
        return piece

    def _give(self, piece: str) -> None:
        """Note that the tokens held back are given out as `piece`."""
        if piece or not self._given:  # after tokens without text, decoders would see the start of a text
            self._given = self._held or self._given
        self._held = []

    def _held_text(self) -> str:
        """Decoded after the tokens before them: decoders treat the start of a text in their own way."""
        before = self._tokenizer.decode(self._given)
        text = self._tokenizer.decode(self._given + self._held)
        return text[len(before) :] if text.startswith(before) else self._tokenizer.decode(self._held)


def _last_of_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The last few tokens that have a text of whole characters; all if none has text, as the "▁" that begins one; none
    if there are only broken bytes near the end."""
    with_text = (i for i in reversed(tokens) if 0 <= i < tokenizer.vocab_size and not tokenizer.is_special(i))
    last = list(itertools.islice(with_text, _MAX_SOUGHT))[::-1]
    for end in range(len(last), 0, -1):
        for begin in range(end - 1, max(-1, end - 1 - _MAX_HELD), -1):
            text = tokenizer.decode(last[begin:end])
            if text and _REPLACEMENT not in text:
                return last[begin:end]
    return [] if tokenizer.decode(last) else last


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The first is the one that is complete first; of several that end at the same character, the longest. Only the text
    given to `push` counts, so nothing matches across the end of the prompt. For each stop
    string, time is linear in the text.

    Args:
        stops: non-empty strings.
        min_tokens: a stop string completed by an earlier token than this one does not count.
    Source: Knuth, Morris, Pratt, Fast Pattern Matching in Strings, 1977.
    """

    def __init__(self, stops: Sequence[str], *, min_tokens: int = 0):
        if not all(stops):
            raise ValueError("a stop string is empty; expected at least one character")
        self._patterns = [(stop, _failure_table(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._patterns)
        self._min_tokens = min_tokens
        self._length = 0
        self.found: str | None = None
        """The stop string that was found."""

    def copy(self) -> "StopMatcher":
        """An independent copy with the same state."""
        other = copy.copy(self)
        other._matched = list(self._matched)
        return other

    def push(self, piece: str, num_tokens: int) -> int | None:
        """Take the text that token number `num_tokens` (from 1) added.

        Returns: where the stop string begins, in characters of the whole text, or None; after a match, `piece` may
            hold text behind it, and nothing more is to be pushed.
        """
        counts = num_tokens >= self._min_tokens
        best: tuple[int, int, str] | None = None
        for i, (stop, table) in enumerate(self._patterns):
            if self._matched[i] == 0 and stop[0] not in piece:
                continue
            end, self._matched[i] = _advance(stop, table, self._matched[i], piece, stop_at_match=counts)
            if end is not None:
                candidate = (self._length + end, self._length + end - len(stop), stop)
                best = candidate if best is None else min(best, candidate)
        self._length += len(piece)
        if best is None:
            return None
        self.found = best[2]
        return best[1]


@functools.lru_cache(maxsize=1024)
def _failure_table(stop: str) -> tuple[int, ...]:
    """Length of the longest proper suffix of each prefix of `stop` that is a prefix too."""
    table, length = [0], 0
    for c in stop[1:]:
        while length and stop[length] != c:
            length = table[length - 1]
        length += stop[length] == c
        table.append(length)
    return tuple(table)


def _advance(stop: str, table: tuple[int, ...], matched: int, piece: str, *, stop_at_match: bool):
    """(end of the first match in `piece` or None, characters of `stop` matched at the end of what was read)."""
    for position, c in enumerate(piece):
        while matched and stop[matched] != c:
            matched = table[matched - 1]
        matched += stop[matched] == c
        if matched == len(stop):
            if stop_at_match:
                return position + 1, matched
            matched = table[matched - 1]
    return None, matched
