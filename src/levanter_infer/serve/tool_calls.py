"""Tool calls in the text of a model: `CallParser` finds them while the text grows.

Sources: the formats are those of vLLM's parsers of the same names (hermes, llama3_json, mistral); what a model writes
is in its chat template.
"""

import dataclasses
import json
import re
import uuid
from collections.abc import Set
from typing import Any

from levanter_infer.io.prompts import parse_json
from levanter_infer.policies import ToolCallParser

_BLANK = re.compile(r"\s{0,64}")
_NAMED = re.compile(r"[\w.\-\[\]\s]{0,256}")
_NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?")
_MARK = re.compile(r'\\[\s\S]?|["{}\[\]]')


@dataclasses.dataclass(frozen=True)
class Writing:
    """The text of calls, as a model is made to write them: `before`, calls with `separator` between them, `after`. A
    call is `opening`, in which NAME stands for the function's, its arguments in JSON, and `closing`."""

    opening: str
    closing: str
    separator: str = ""
    before: str = ""
    after: str = ""


@dataclasses.dataclass(frozen=True)
class Format:
    """How a model writes calls: a marker, a head, JSON, and another marker."""

    begin: str
    end: str
    """Empty: the JSON ends the call."""
    head: re.Pattern[str]
    """Between `begin` and the first brace; with a text it also matches every begin of that text."""
    writings: tuple[Writing, ...]
    """The first is used whose special tokens the tokenizer has; the last needs none."""
    begins_text: bool = False
    """Whether JSON at the start of the text is a call, without a marker."""
    separator: str = ""
    """Behind a call, in place of the marker of the next."""
    tokens: tuple[str, ...] = ()
    """Markers that are single tokens, special ones in some vocabularies."""
    has_short_ids: bool = False
    """Whether templates take ids of nine letters and digits only."""

    def new_id(self) -> str:
        """An id for a call."""
        drawn = uuid.uuid4().hex
        return drawn[:9] if self.has_short_ids else f"call_{drawn[:24]}"


FORMATS = {
    ToolCallParser.HERMES: Format(
        begin="<tool_call>",
        end="</tool_call>",
        head=_BLANK,
        writings=(Writing('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n"),),
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolCallParser.LLAMA3_JSON: Format(
        begin="<|python_tag|>",
        end="",
        head=_BLANK,
        writings=(Writing('{"name": "NAME", "parameters": ', "}", "; "),),
        begins_text=True,
        separator=";",
        tokens=("<|python_tag|>",),
    ),
    ToolCallParser.MISTRAL: Format(
        begin="[TOOL_CALLS]",
        end="",
        head=_NAMED,
        writings=(
            Writing("[TOOL_CALLS]NAME[ARGS]", ""),
            Writing('{"name": "NAME", "arguments": ', "}", ", ", before="[TOOL_CALLS][", after="]"),
        ),
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        has_short_ids=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call."""

    name: str
    arguments: str
    """A JSON object."""


class CallParser:
    """Divides a text that arrives in pieces into content and calls; how it is cut into pieces makes no difference.

    Content comes as soon as it cannot be part of a call. What is no call remains content: other JSON, a call of an
    unknown function, one that the end of the text cuts off. White space around calls is dropped.

    Args:
        names: of the functions that may be called.
        most: calls that are returned; further ones are dropped.
    """

    def __init__(self, form: Format, names: Set[str], most: int | None = None):
        self._form, self._names, self._most = form, names, most
        self._held = ""
        """Text that has not been decided on."""
        self._step = self._text
        self._marker = "" if form.begins_text else None
        """Text that begins a call at this very place, besides `begin`; None: none."""
        self._is_behind_call = False
        self._head_at, self._value_at, self._extent, self._name = 0, 0, _Extent(0), ""
        self._calls: list[ToolCall] = []
        self._found: list[str | ToolCall] = []
        self.num_calls = 0
        """Calls that have been returned."""

    def push(self, text: str) -> list[str | ToolCall]:
        """Take more text; returns what has become certain, in order."""
        self._held += text
        while self._step():
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest of the text, when no more follows."""
        if self._step == self._tail:  # the JSON is whole, and only the marker behind it is missing
            self._accept("")
        if not (self._is_behind_call and self._step == self._text and not self._held.strip()):
            self._say(len(self._held))
        found, self._found = self._found, []
        return found

    # Steps: each looks at `_held` and returns whether another one can follow without more text

    def _text(self) -> bool:
        if self._marker is not None or self._is_behind_call:
            rest = self._held.lstrip()
            if not rest:
                return False
            if self._marker is not None and rest.startswith(self._marker or "{"):
                return self._begin(len(self._held) - len(rest) + len(self._marker))
            if not self._form.begin.startswith(rest[: len(self._form.begin)]):
                self._marker, self._is_behind_call = None, False
        at = self._held.find(self._form.begin)
        if at >= 0:
            blank = at - len(self._held[:at].rstrip())
            self._say(at - blank)
            return self._begin(blank + len(self._form.begin))
        begin = self._form.begin
        sizes = range(min(len(begin) - 1, len(self._held)), 0, -1)
        part = next((size for size in sizes if self._held.endswith(begin[:size])), 0)
        self._say(len(self._held[: len(self._held) - part].rstrip()))
        return False

    def _begin(self, size: int) -> bool:
        """A call may follow the first `size` characters."""
        self._head_at, self._step = size, self._head
        return True

    def _head(self) -> bool:
        brace = self._held.find("{", self._head_at)
        head = self._held[self._head_at : None if brace < 0 else brace]
        inner = head.strip()
        fits = self._form.head.fullmatch(head) is not None
        if fits and brace < 0:
            return False
        named = _NAME.fullmatch(inner)
        if not fits or not (inner in ("", "[") or named):
            return self._reject(self._head_at)
        self._name = named[1] if named else ""
        self._value_at = self._head_at + head.index("[") if inner == "[" else brace
        self._extent, self._step = _Extent(self._value_at), self._value
        return True

    def _value(self) -> bool:
        end = self._extent.end(self._held)
        if end is None:
            return False
        self._calls = self._read(self._held[self._value_at : end])
        if not self._calls:
            return self._reject(end)
        self._step = self._tail
        return True

    def _tail(self) -> bool:
        assert self._extent.found is not None
        rest, end = self._held[self._extent.found :], self._form.end
        if not end:
            self._accept(rest)
        elif (rest := rest.lstrip()).startswith(end):
            self._accept(rest[len(end) :])
        elif end.startswith(rest):
            return False
        else:
            self._reject(self._extent.found)
        return True

    def _accept(self, rest: str) -> None:
        left = None if self._most is None else self._most - self.num_calls
        self._found += self._calls[:left]
        self.num_calls += len(self._calls[:left])
        self._held, self._step = rest, self._text
        self._marker, self._is_behind_call = self._form.separator or None, True

    def _reject(self, size: int) -> bool:
        """The first `size` characters are content after all."""
        self._say(size)
        self._step = self._text
        return True

    def _say(self, size: int) -> None:
        if size:
            self._found.append(self._held[:size])
            self._held = self._held[size:]
            self._marker, self._is_behind_call = None, False

    def _read(self, text: str) -> list[ToolCall]:
        """The calls of a JSON text; none if it is malformed."""
        try:
            value = parse_json(text, "a call")
            if self._name:
                return [self._call(self._name, value)]
            calls = value if isinstance(value, list) else [value]
            return [self._call(call.get("name"), call.get("arguments", call.get("parameters"))) for call in calls]
        except (ValueError, AttributeError, RecursionError):
            return []

    def _call(self, name: Any, arguments: Any) -> ToolCall:
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            raise ValueError("no call")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair raises
        return ToolCall(name, text)


class _Extent:
    """Finds the end of a JSON object or array that begins at `at`, in a text that grows."""

    def __init__(self, at: int):
        self._at, self._depth, self._in_string = at, 0, False
        self.found: int | None = None

    def end(self, text: str) -> int | None:
        """Behind its last character; None if that has not come. Args: text: the former one, and perhaps more."""
        for mark in _MARK.finditer(text, self._at):
            found = mark[0]
            if found == "\\":  # and what it escapes has not come
                self._at = mark.start()
                return None
            if found == '"':
                self._in_string = not self._in_string
            elif not self._in_string and len(found) == 1:
                self._depth += 1 if found in "{[" else -1
                if self._depth == 0:
                    self.found = mark.end()
                    return self.found
        self._at = len(text)
        return None
