"""Tools of a chat: which calls its answer may have, and the grammar that forces one."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Request
from levanter_infer.policies import ToolCallParser
from levanter_infer.serve.tool_calls import FORMATS, CallParser, Format, Writing
from levanter_infer.structured.json_schema import closed

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer

TOOL_KEYS = ("tool_choice", "parallel_tool_calls")
"""Keys of a body that are read here."""
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclasses.dataclass(frozen=True)
class Tools:
    """Tools that the answer to a chat may call."""

    form: Format
    names: frozenset[str]
    parallel: bool
    """Whether an answer may have several calls."""

    def parser(self) -> CallParser:
        """A parser for one choice."""
        return CallParser(self.form, self.names, None if self.parallel else 1)


class ToolReader:
    """Reads what bodies say about tools.

    Args:
        kind: the format of calls; NONE: calls are text like any other.
        tokenizer: of the model.
    Raises: ValueError without a tokenizer, if calls have a format.
    """

    def __init__(self, kind: str = ToolCallParser.NONE, tokenizer: "Tokenizer | None" = None):
        self._form = FORMATS.get(ToolCallParser(kind))
        self._special: dict[str, int] = {}
        if self._form is None:
            return
        if tokenizer is None:
            raise ValueError(f"serve.tool_call_parser={kind} needs a tokenizer, and the model has none; set it to none")
        for token in self._form.tokens:
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) == 1 and tokenizer.is_special(ids[0]):
                self._special[token] = ids[0]

    def read(self, body: Mapping[str, Any], request: Request) -> tuple[Request, Tools | None]:
        """The request with what `TOOL_KEYS` of its body ask for, and what its answer may call.

        Args:
            request: a chat, with its tools.
        Raises: ValueError that names what is wrong.
        """
        choice = body.get("tool_choice")
        parallel = body.get("parallel_tool_calls")
        if parallel is not None and type(parallel) is not bool:
            raise ValueError(f"body.parallel_tool_calls is {brief(parallel)}; expected true or false")
        if choice == "none":
            return dataclasses.replace(request, tools=None), None
        forced = _forced(choice)
        if self._form is None:
            if forced is not None:
                raise ValueError(
                    f"body.tool_choice is {brief(choice)}, and this server does not know how the model writes calls; "
                    "start it with --tool_call_parser, or expect auto or none"
                )
            return request, None
        functions = _functions(request.tools or ())
        if forced is not None and not functions:
            raise ValueError(f"body.tool_choice is {brief(choice)} without body.tools; give tools, or leave it out")
        if not functions:
            return request, None
        if forced and forced not in functions:
            raise ValueError(f"body.tool_choice names {brief(forced)}; expected one of {', '.join(functions)}")
        sampling = request.sampling
        assert sampling is not None
        if self._special:
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
        if forced is not None:
            wanted = {forced: functions[forced]} if forced else functions
            sampling = _constrained(sampling, self._grammar(wanted, not forced and parallel is not False), choice)
        tools = Tools(self._form, frozenset(functions), parallel is not False)
        return dataclasses.replace(request, sampling=sampling), tools

    def _grammar(self, functions: Mapping[str, Any], many: bool) -> str:
        """The texts of one call, or of `many`, in llguidance's Lark."""
        assert self._form is not None
        *others, writing = self._form.writings
        writing = next((each for each in others if self._has_tokens(each)), writing)
        again = f" ({self._spelled(writing.separator)} call)*" if many else ""
        rules = [
            f"start: {self._spelled(writing.before)} call{again} {self._spelled(writing.after)}",
            f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}",
        ]
        for i, (name, schema) in enumerate(functions.items()):
            opening, closing = self._spelled(writing.opening.replace("NAME", name)), self._spelled(writing.closing)
            rules += [
                f"call{i}: {opening} arguments{i} {closing}",
                f"arguments{i}: %json {_with_options(name, schema)}",
            ]
        return "\n".join(rules)

    def _has_tokens(self, writing: Writing) -> bool:
        assert self._form is not None
        return all(token in self._special for token in self._form.tokens if token in writing.before + writing.opening)

    def _spelled(self, text: str) -> str:
        """A text in Lark, with special tokens by their ids."""
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text) if self._special else [text]
        spelled = (
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts if part
        )
        return " ".join(spelled)


def _forced(choice: Any) -> str | None:
    """The function that must be called; "": any; None: none has to be. Raises: ValueError."""
    if choice in (None, "auto"):
        return None
    if choice == "required":
        return ""
    if isinstance(choice, Mapping) and set(choice) == {"type", "function"} and choice["type"] == "function":
        function = choice["function"]
        name = function.get("name") if isinstance(function, Mapping) and len(function) == 1 else None
        if isinstance(name, str) and name:
            return name
    raise ValueError(
        f'body.tool_choice is {brief(choice)}; expected "none", "auto", "required" or '
        '{"type": "function", "function": {"name": …}}'
    )


def _functions(tools) -> dict[str, Any]:
    """The schema of the arguments of each function, by its name. Raises: ValueError."""
    found: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise ValueError(
                f'body.tools[{i}] is {brief(tool)}; expected {{"type": "function", "function": {{"name": …}}}}'
            )
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or _FUNCTION_NAME.fullmatch(name) is None:
            raise ValueError(
                f"body.tools[{i}].function.name is {brief(name)}; expected 1 to 64 letters, digits, _, - or ."
            )
        if name in found:
            raise ValueError(f"body.tools[{i}].function.name is {brief(name)}, as that of another tool; names differ")
        if not isinstance(schema, Mapping | None) or (schema and schema.get("type", "object") != "object"):
            raise ValueError(
                f"body.tools[{i}].function.parameters is {brief(schema)}; expected the JSON schema of an object"
            )
        found[name] = schema or _NO_ARGUMENTS
    return found


def _with_options(name: str, schema: Mapping[str, Any]) -> str:
    """The schema of a function as `json_schema` of `SamplingParams` is understood: no other properties, and no free
    white space. Raises: ValueError."""
    try:
        same = closed(schema)
        assert isinstance(same, dict)
        return json.dumps({"type": "object", **same, "x-guidance": _JSON_OPTIONS})
    except RecursionError:
        raise ValueError(
            f"body.tools: the parameters of {brief(name)} nest too deeply; expected a flatter schema"
        ) from None


def _constrained(sampling: SamplingParams, grammar: str, choice: Any) -> SamplingParams:
    name = next((n for n in ("regex", "json_schema", "choice", "grammar") if getattr(sampling, n) is not None), None)
    if name is not None:
        raise ValueError(
            f"body.tool_choice is {brief(choice)}, which says all of the text, together with {name} or "
            "response_format; leave one out"
        )
    try:
        return dataclasses.replace(sampling, grammar=grammar)
    except ValueError as error:
        raise ValueError(f"body.tool_choice is {brief(choice)}, which becomes a grammar: {error}") from None
