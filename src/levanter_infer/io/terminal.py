"""Text for people on standard error, made safe for a terminal."""

import re
import sys
import unicodedata

_MAX_MESSAGE = 800
"""Characters of one error on the terminal."""
_JOINERS = "\u200c\u200d"
"""Format characters within words and emoji of many scripts; they change no order."""
_UNSAFE = re.compile("[^\\n\\t\\x20-\\x7e]")


def say(text: str) -> None:
    """Print for people, on standard error."""
    print(escape_for_terminal(text), file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """`text` in one line of bounded length, so that nothing in it looks like another message."""
    text = " ".join(text.split())
    if len(text) > _MAX_MESSAGE:
        text = f"{text[: _MAX_MESSAGE - 100]} ... {text[-80:]}"
    return escape_for_terminal(text)


def escape_for_terminal(text: str) -> str:
    """`text` with escapes for everything that a terminal obeys, or that changes the order of characters.

    Newlines and tabs stay; control and format characters, line separators, surrogates and unassigned codes become
    escapes such as \\x1b.
    """
    return _UNSAFE.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    c = match[0]
    if c in _JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
        return c
    code = ord(c)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
