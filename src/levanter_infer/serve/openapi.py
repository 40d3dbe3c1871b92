"""The OpenAPI description of the endpoints, from the tables that check requests."""

import dataclasses
from typing import Any

from levanter_infer.engine.params import SamplingParams
from levanter_infer.fingerprint import package_version
from levanter_infer.io.openai import PROMPTS, parameters
from levanter_infer.io.prompts import ROW_POLICIES
from levanter_infer.serve.calls import CALL_KEYS, OWN

_NULL: dict[str, Any] = {"type": "null"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
}
_SCHEMAS: dict[str, Any] = {
    "model": {"type": "string"},
    "prompt": {
        "anyOf": [
            {"type": "string"},
            _IDS,
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            {"type": "array", "items": _IDS, "minItems": 1},
        ]
    },
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"]}},
        },
    },
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "stop_token_ids": {"type": "array", "items": {"anyOf": [{"type": "integer"}, _IDS]}},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "early_stopping": {"anyOf": [{"type": "boolean"}, {"const": "never"}]},
    "json_schema": {"type": ["object", "boolean", "string"]},
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    "allowed_token_ids": _IDS,
    "bad_words": {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}},
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "required": ["schema"]},
        },
    },
    "cache_salt": {"type": "string"},
    "priority": {"type": "integer"},
    "timeout_s": {"type": "number"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "max_completion_tokens": {"type": "integer"},
    "top_logprobs": {"type": "integer"},
    "tools": {"type": "array", "items": {"type": "object"}},
    "chat_template_kwargs": {"type": "object"},
    **dict.fromkeys(("stream", "return_token_ids", "echo", "add_generation_prompt"), {"type": "boolean"}),
    "continue_final_message": {"type": "boolean"},
}


def description(has_key: bool) -> dict[str, Any]:
    """The description.

    Args:
        has_key: whether requests need an API key.
    """
    answer = {"content": {"application/json": {"schema": {"type": "object"}}}}
    statuses = {
        "200": {"description": "The answer, or a stream of server-sent events."},
        "400": {"description": "The request is malformed, or has an unknown or unsupported parameter."},
        "401": {"description": "The API key is missing or wrong."},
        "408": {"description": "The request's timeout_s passed."},
        "413": {"description": "The body is too large."},
        "429": {"description": "The queue is full; Retry-After has the seconds to wait."},
        "500": {"description": "The model's logits were not finite."},
        "503": {"description": "The engine has stopped."},
    }
    responses = {
        status: {**said, **({} if status == "200" else answer)}
        for status, said in statuses.items()
        if has_key or status != "401"
    }
    paths: dict[str, Any] = {
        path: {
            "post": {
                "operationId": path.removeprefix("/v1/").replace("/", "_"),
                "requestBody": {"required": True, "content": {"application/json": {"schema": _body(kind)}}},
                "responses": responses,
            }
        }
        for path, kind in PROMPTS.items()
    }
    for path in ("/v1/models", "/health", "/metrics", "/version"):
        found = {"200": {"description": "The answer."}}
        if path == "/health":
            found |= {"503": statuses["503"]}
        elif has_key:
            found |= {"401": statuses["401"]}
        paths[path] = {"get": {"operationId": path.strip("/").replace("/", "_"), "responses": found}}
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "levanter-infer", "version": package_version()},
        "paths": paths,
    }
    if has_key:
        whole["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        whole["security"] = [{"key": []}]
    return whole


def _body(kind: str) -> dict[str, Any]:
    names = [*parameters(kind), *OWN, *(key for key in CALL_KEYS if kind == "prompt" or key != "echo")]
    properties = {name: _schema(name, kind) for name in dict.fromkeys(names)}
    return {"type": "object", "required": [kind], "properties": properties, "additionalProperties": False}


def _schema(name: str, kind: str) -> dict[str, Any]:
    if name == kind:
        return _SCHEMAS[name]
    if name == "logprobs" and kind == "messages":
        return {"anyOf": [{"type": "boolean"}, _NULL]}
    if name in _SCHEMAS:
        return {"anyOf": [_SCHEMAS[name], _NULL]}
    written = {f.name: str(f.type) for f in dataclasses.fields(SamplingParams)}.get(name, "")
    own = [_TYPES[each] for each in written.split(" | ") if each in _TYPES]
    return {"anyOf": [*own, _NULL]} if own else {}


assert set(ROW_POLICIES) <= set(_SCHEMAS)
