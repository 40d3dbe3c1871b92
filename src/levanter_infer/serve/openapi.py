"""The OpenAPI description of the endpoints, from the tables that check requests."""

from typing import Any

from levanter_infer.fingerprint import package_version
from levanter_infer.io.openai import NO_EFFECT, ONLY, PROMPTS, parameters
from levanter_infer.serve.calls import CALL_KEYS, OWN, STREAM_OPTIONS
from levanter_infer.serve.tools import TOOL_KEYS

_NULL: dict[str, Any] = {"type": "null"}
_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_FLAG: dict[str, Any] = {"type": "boolean"}
_FUNCTION_NAME: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_IDS: dict[str, Any] = {"type": "array", "items": _COUNT, "minItems": 1}


def _array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with all of these properties, and maybe others."""
    return {"type": "object", "properties": properties, "required": list(properties), **more}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, _NULL]}


def _between(low: float, high: float | None = None, kind: str = "number") -> dict[str, Any]:
    return {"type": kind, "minimum": low} | ({} if high is None else {"maximum": high})


_SCHEMAS: dict[str, Any] = {
    "model": _TEXT,
    "prompt": {"anyOf": [_TEXT, _IDS, _array(_TEXT, minItems=1), _array(_IDS, minItems=1)]},
    "messages": _array(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": _TEXT,
                "content": {
                    "anyOf": [_TEXT, _array(_object({"type": {"const": "text"}, "text": _TEXT})), _NULL],
                },
            },
        },
        minItems=1,
    ),
    **dict.fromkeys(("n", "best_of", "num_beams"), _between(1, kind="integer")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs"), _COUNT),
    **dict.fromkeys(("prompt_logprobs", "seed"), _COUNT),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _between(-2, 2)),
    "temperature": _between(0, 1e6),
    "top_k": _between(-1, kind="integer"),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "min_p": _between(0, 1),
    "repetition_penalty": _between(0.01, 100),
    "length_penalty": _between(-10, 10),
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _array({"type": "string", "minLength": 1})]},
    "stop_token_ids": _array({"anyOf": [_COUNT, _IDS]}),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _between(-1e30, 1e30),
    },
    "regex": _TEXT,
    "grammar": _TEXT,
    "json_schema": {"type": ["object", "boolean", "string"]},
    "choice": _array({"type": "string", "minLength": 1}, minItems=1),
    "allowed_token_ids": _IDS,
    "bad_words": _array({"anyOf": [{"type": "string", "minLength": 1}, _IDS]}),
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "required": ["schema"]},
        },
    },
    "early_stopping": {"anyOf": [_FLAG, {"const": "never"}]},
    "cache_salt": _TEXT,
    "priority": _between(-(2**31), 2**31 - 2, "integer"),
    "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9},
    "stream_options": {
        "type": "object",
        "properties": dict.fromkeys(STREAM_OPTIONS, _or_null(_FLAG)),
        "additionalProperties": False,
    },
    "tools": _array(
        _object({"type": {"const": "function"}, "function": _object({"name": _FUNCTION_NAME})}), maxItems=64
    ),
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            _object(
                {
                    "type": {"const": "function"},
                    "function": _object({"name": _FUNCTION_NAME}, additionalProperties=False),
                },
                additionalProperties=False,
            ),
        ]
    },
    "parallel_tool_calls": _FLAG,
    "chat_template_kwargs": {"type": "object"},
    **dict.fromkeys(("stream", "return_token_ids", "echo", "add_generation_prompt", "ignore_eos"), _FLAG),
    **dict.fromkeys(("continue_final_message", "skip_special_tokens"), _FLAG),
}
"""JSON schemas of parameters. An engine is narrower where a schema has no bound, such as for ids of its tokens."""

_USAGE = _object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT))
_TOP = {"type": "object", "additionalProperties": {"type": "number"}}
_ENTRY = {"token": _TEXT, "bytes": _or_null(_array(_between(0, 255, "integer"))), "logprob": {"type": "number"}}
_LOGPROBS = {
    "prompt": {
        "tokens": _array(_TEXT),
        "token_logprobs": _array(_or_null({"type": "number"})),
        "top_logprobs": _or_null(_array(_or_null(_TOP))),
        "text_offset": _array(_COUNT),
    },
    "messages": {
        "content": _array(_object(_ENTRY | {"top_logprobs": _array(_object(_ENTRY))})),
        "refusal": _NULL,
    },
}
_CALL = _object({"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})})
_CONTENT = {
    "prompt": {"text": _TEXT},
    "messages": {
        "message": {
            **_object({"role": {"const": "assistant"}, "content": _or_null(_TEXT), "refusal": _NULL}),
            "dependentSchemas": {"tool_calls": _object({"tool_calls": _array(_CALL, minItems=1)})},
        },
    },
}
_ERROR = _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _NULL, "code": _NULL})})


def _answer(kind: str) -> dict[str, Any]:
    """The body of an answer that is no stream; kind: of the prompt."""
    choice = _CONTENT[kind] | {
        "index": _COUNT,
        "logprobs": _or_null(_object(_LOGPROBS[kind])),
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "stop_reason": {"anyOf": [_TEXT, _COUNT, _IDS, _NULL]},
        "weights_version": _or_null(_COUNT),
        "seed": _or_null(_COUNT),
    }
    return _object(
        {
            "id": _TEXT,
            "object": {"const": "text_completion" if kind == "prompt" else "chat.completion"},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _array(_object(choice), minItems=1),
            "usage": _USAGE,
        }
    )


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


_MODEL = _object({"id": _TEXT})
_GET: dict[str, dict[str, Any]] = {
    "/v1/models": _json(_object({"object": {"const": "list"}, "data": _array(_MODEL)})),
    "/health": _json(_object({"status": {"const": "ok"}})),
    "/metrics": {"content": {"text/plain": {"schema": _TEXT}}},
    "/version": _json(_object({"version": _TEXT})),
    "/tokenizer_info": _json(_object(dict.fromkeys(("bos_token", "eos_token"), _or_null(_TEXT)))),
}
"""The answers of endpoints without parameters."""

_TOKENS = _array(_COUNT)
_TOKENIZATION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/tokenize": (
        {"prompt": _TEXT, "add_special_tokens": _FLAG},
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _TOKENS},
    ),
    "/detokenize": ({"tokens": _TOKENS}, {"prompt": _TEXT}),
}
"""Bodies and answers of the tokenizer's endpoints; the first key of a body is required."""


def description(has_key: bool) -> dict[str, Any]:
    """The description.

    Args:
        has_key: whether requests need an API key.
    """
    statuses = {
        "400": {"description": "The request is malformed, or has an unknown or unsupported parameter."},
        "401": {"description": "The API key is missing or wrong."},
        "408": {"description": "The request's timeout_s passed, or its body did not arrive in time."},
        "413": {"description": "The body is too large."},
        "429": {
            "description": "The queue is full; Retry-After has the seconds to wait.",
            "headers": {"Retry-After": {"required": True, "schema": _between(1, kind="integer")}},
        },
        "500": {"description": "The model's logits were not finite."},
        "503": {"description": "The engine has stopped."},
    }
    failures = {status: {**said, **_json(_ERROR)} for status, said in statuses.items() if has_key or status != "401"}
    paths: dict[str, Any] = {path: {"post": _post(path, kind, failures)} for path, kind in PROMPTS.items()}
    for path, (asked, given) in _TOKENIZATION.items():
        body = {"type": "object", "required": [next(iter(asked))], "properties": asked | {"model": _or_null(_TEXT)}}
        paths[path] = {
            "post": {
                "operationId": path.strip("/"),
                "requestBody": {"required": True, **_json(body | {"additionalProperties": False})},
                "responses": {
                    "200": {"description": "The answer.", **_json(_object(given))},
                    **{status: failures[status] for status in ("400", "401", "408", "413") if status in failures},
                },
            }
        }
    for path, answer in _GET.items():
        found = {"200": {"description": "The answer.", **answer}}
        if path == "/health":
            not_ready = _object({"status": {"const": "not ready"}, "error": _TEXT})
            found |= {"503": {"description": "The engine takes no requests.", **_json(not_ready)}}
        elif has_key:
            found |= {"401": failures["401"]}
        paths[path] = {"get": {"operationId": path.strip("/").replace("/", "_"), "responses": found}}
    missing = {"404": {"description": "There is no such model.", **_json(_ERROR)}}
    paths["/v1/models/{name}"] = {
        "get": {
            "operationId": "v1_model",
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": _TEXT}],
            "responses": {"200": {"description": "The answer.", **_json(_MODEL)}, **missing}
            | ({"401": failures["401"]} if has_key else {}),
        }
    }
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "levanter-infer", "version": package_version()},
        "paths": paths,
    }
    if has_key:
        whole["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        whole["security"] = [{"key": []}]
    return whole


def _post(path: str, kind: str, failures: dict[str, Any]) -> dict[str, Any]:
    stream = {"text/event-stream": {"schema": _object({"data": _TEXT})}}  # of one event
    answers = {"description": "The answer, or a stream of server-sent events.", **_json(_answer(kind))}
    answers["content"] |= stream
    return {
        "operationId": path.removeprefix("/v1/").replace("/", "_"),
        "requestBody": {"required": True, **_json(_body(kind))},
        "responses": {"200": answers, **failures},
    }


def _body(kind: str) -> dict[str, Any]:
    names = [
        *parameters(kind),
        *(TOOL_KEYS if kind == "messages" else ()),
        *OWN,
        *(key for key in CALL_KEYS if kind == "prompt" or key != "echo"),
    ]
    properties = {name: _schema(name, kind) for name in names}
    properties = (
        {name: {} for name in NO_EFFECT} | {name: {"enum": [*o, None]} for name, o in ONLY.items()} | properties
    )
    return {"type": "object", "required": [kind], "properties": properties, "additionalProperties": False}


def _schema(name: str, kind: str) -> dict[str, Any]:
    if name == kind:
        return _SCHEMAS[name]
    if name == "logprobs" and kind == "messages":
        return _or_null(_FLAG)
    return _or_null(_SCHEMAS[name]) if name in _SCHEMAS else {}
