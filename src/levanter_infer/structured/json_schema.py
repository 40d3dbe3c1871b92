"""JSON schemas as regular expressions, where they are regular, with all of their keywords.

What is not (a schema that refers to itself, an object of any properties) or has a keyword that is not known here is
llguidance's (`guide`), which applies it or says that it cannot.
"""

import json
import re
from collections.abc import Mapping

from levanter_infer.structured.work import Work

_ANNOTATIONS = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated",
    "readOnly", "writeOnly",
}  # fmt: skip
_KEYWORDS: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_VALUES = {"enum", "const", "default", "examples"}
"""Keywords whose values are no schemas."""
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose values are schemas by name, whatever the names."""
_CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])'
_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_PLAIN = {
    "integer": "-?(?:0|[1-9][0-9]*)",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "boolean": "(?:true|false)",
    "null": "null",
}
_SAFE_PATTERN = re.compile(r"\^(?:[A-Za-z0-9 _\-:/,@#=!%&+*?|(){}\[\]]|\\[dw.\-/+*?()\[\]{}|])*\$")
"""Patterns for the whole text whose matches need no escapes in JSON. `.` and `[^…]` would match a quotation mark."""
_SET = re.compile(r"\\.|\[((?:\\.|[^\]\\])+)\]")
"""A set of such a pattern with what is in it; or an escaped character, which begins none."""
_RANGE = re.compile(r"(?=([^\\])-\\?(.))")
"""A possible range in a set: its first and its last character."""
_ESCAPED = ('"', "\\")
"""The printable characters that JSON escapes."""
_COMMA, _COLON = ", ?", ": ?"
_MAX_DEPTH, _MAX_CHARS, _MAX_OPTIONAL = 32, 2**18, 32
_MAX_WORK, _PER_SCHEMA = 2**22, 64
"""Characters of the regexes of all parts together, in which references may multiply, and how many a part counts as
besides."""
_LOCAL = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


class _NotRegular(Exception):
    """The schema is for llguidance."""


def regex_of(schema: object) -> str | None:
    """The regular expression of the JSON texts that conform to a schema; None if it has something that is not known.

    Properties come in the order of the schema, and no others; after a comma and a colon there may be one space.
    """
    try:
        return _regex(schema, schema, 0, frozenset(), Work(_MAX_WORK, _NotRegular()))
    except _NotRegular:
        return None


def _regex(schema: object, root: object, depth: int, inside: frozenset[str], work: Work) -> str:
    work.take(_PER_SCHEMA)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        raise _NotRegular

    def of(part: object) -> str:
        found = _regex(part, root, depth + 1, inside, work)
        work.take(len(found))
        return found

    keys = set(schema) - _ANNOTATIONS
    if "$ref" in keys:
        target, name = _referred(schema, keys, root)
        if name in inside:
            raise _NotRegular
        return _regex(target, root, depth + 1, inside | {name}, work)
    if keys & {"enum", "const"}:
        return _values(schema, keys)
    if "anyOf" in keys:
        return _bounded("|".join(map(of, _list(schema, "anyOf", keys == {"anyOf"}))))
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in _KEYWORDS or keys - {"type"} - _KEYWORDS[kind]:
        raise _NotRegular
    if kind == "object":
        return _object(schema, of)
    if kind == "array":
        return _array(schema, of)
    return _string(schema, keys) if kind == "string" else _PLAIN[kind]


def _bounded(regex: str) -> str:
    """In a group. References may multiply a schema, and its regex with it."""
    if len(regex) > _MAX_CHARS:
        raise _NotRegular
    return f"(?:{regex})"


def _list(schema: Mapping, key: str, is_alone: bool) -> list:
    found = schema[key]
    if not (is_alone and isinstance(found, list) and found):
        raise _NotRegular
    return found


def _referred(schema: Mapping, keys: set[str], root: object) -> tuple[object, str]:
    found = _LOCAL.fullmatch(str(schema["$ref"]))
    if keys != {"$ref"} or found is None or not isinstance(root, Mapping):
        raise _NotRegular
    group = root.get(found[1])
    return (group.get(found[2]) if isinstance(group, Mapping) else None), found[0]


def _values(schema: Mapping, keys: set[str]) -> str:
    if len(keys & {"enum", "const"}) != 1 or keys - {"enum", "const"}:
        raise _NotRegular
    values = schema["enum"] if "enum" in keys else [schema["const"]]
    if (
        not isinstance(values, list)
        or not values
        or not all(v is None or isinstance(v, str | int | float) for v in values)
    ):
        raise _NotRegular
    return _bounded("|".join(re.escape(json.dumps(value, ensure_ascii=False)) for value in values))


def _object(schema: Mapping, of) -> str:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not properties or schema.get("additionalProperties", False) is not False:
        raise _NotRegular
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise _NotRegular
    pairs = [
        f"{re.escape(json.dumps(name, ensure_ascii=False))}{_COLON}{of(part)}" for name, part in properties.items()
    ]
    needed = list(map(set(required).__contains__, properties))

    def after(begin: int) -> str:
        rest = zip(pairs[begin:], needed[begin:], strict=True)
        return "".join(f"{_COMMA}{pair}" if must else f"(?:{_COMMA}{pair})?" for pair, must in rest)

    if any(needed):
        first = needed.index(True)
        before = "".join(f"(?:{pair}{_COMMA})?" for pair in pairs[:first])
        return _bounded(rf"\{{{before}{pairs[first]}{after(first + 1)}\}}")
    if len(pairs) > _MAX_OPTIONAL:
        raise _NotRegular
    return _bounded(rf"\{{(?:{'|'.join(pair + after(i + 1) for i, pair in enumerate(pairs))})?\}}")


def _array(schema: Mapping, of) -> str:
    if "items" not in schema:
        raise _NotRegular
    least, most = _counts(schema, "minItems", "maxItems")
    if most == 0:
        return r"\[\]"
    item = of(schema["items"])
    further = f"(?:{_COMMA}{item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    return _bounded(rf"\[{item}{further}\]" if least else rf"\[(?:{item}{further})?\]")


def _string(schema: Mapping, keys: set[str]) -> str:
    if len(keys & {"pattern", "format"}) + bool(keys & {"minLength", "maxLength"}) > 1:
        raise _NotRegular
    if "pattern" in keys:
        pattern = schema["pattern"]
        if (
            not isinstance(pattern, str)
            or len(pattern) > _MAX_CHARS
            or "[^" in pattern
            or _SAFE_PATTERN.fullmatch(pattern) is None
        ):
            raise _NotRegular
        ranges = [pair for inside in _SET.findall(pattern) for pair in _RANGE.findall(inside)]
        if "[]" in pattern or any(first <= each <= last for first, last in ranges for each in _ESCAPED):
            raise _NotRegular
        if "|" in _outside_of_groups(pattern):  # `^a|b$` is found in any text that begins with an a
            raise _NotRegular
        return f'"(?a:{pattern[1:-1]})"'
    if "format" in keys:
        if schema["format"] not in _FORMATS:
            raise _NotRegular
        return f'"{_FORMATS[schema["format"]]}"'
    least, most = _counts(schema, "minLength", "maxLength")
    return f'"{_CHARACTER}{{{least},{"" if most is None else most}}}"'


def _outside_of_groups(pattern: str) -> str:
    """The characters of a pattern that stand in no group and no set, without escaped ones."""
    found, depth = [], 0
    for char in re.sub(r"\\.|\[[^\]]*\]", "", pattern):
        depth -= char == ")"
        if depth <= 0:
            found.append(char)
        depth += char == "("
    return "".join(found)


def _counts(schema: Mapping, low: str, high: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for value in (least, 0 if most is None else most):
        if type(value) is not int or value < 0:
            raise _NotRegular
    if most is not None and least > most:
        raise _NotRegular
    return least, most


def closed(schema: object) -> object:
    """The schema, in which objects with `properties` have no others unless `additionalProperties` says so."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {key: _closed_part(key, value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), Mapping) and schema.get("type", "object") == "object"
    return {**parts, "additionalProperties": False} if is_object and "additionalProperties" not in schema else parts


def _closed_part(key: str, value: object) -> object:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: closed(part) for name, part in value.items()}
    return value if key in _VALUES else closed(value)
