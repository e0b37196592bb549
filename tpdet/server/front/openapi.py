"""The published schema: FastAPI's list of routes, our bodies and the answers we really give."""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tpdet.requests.answer.messages import is_of_messages
from tpdet.requests.body.work import BODIES
from tpdet.requests.routes import PATHS, TEI_PATHS
from tpdet.server.about.operations import (
    BATCH_OPERATIONS,
    CALL_OPERATIONS,
    CONTROL_OPERATIONS,
    OPERATIONS,
)
from tpdet.server.front.door import PUBLIC_PATHS

_BODIES = {path: BODIES[route] for path, route in PATHS.items()}
_TEXTS = {"/metrics": "text/plain", "/": "text/html", "/docs": "text/html"}
_PARAMETER = re.compile(r"\{(\w+)\}")
_REFERENCE = "#/components/schemas/{model}"
_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {
            "message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL,
        },
    }},
}  # fmt: skip
_MESSAGES_ERROR = {
    "type": "object", "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"}, "request_id": _TEXT,
        "error": {
            "type": "object", "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}  # fmt: skip
_TEI_ERROR = {
    "type": "object", "required": ["error", "error_type"],
    "properties": {"error": _TEXT, "error_type": _TEXT},
}  # fmt: skip
_EVENT = {"type": "object", "required": ["data"], "properties": {"id": _TEXT, "data": _TEXT}}
_PAGE = {"limit": {"type": "integer", "minimum": 1}, "after": _TEXT, "order": _TEXT}
_BATCH_BODIES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("/v1/files", "post"): ("multipart/form-data", {
        "type": "object", "required": ["file", "purpose"],
        "properties": {"file": _TEXT | {"format": "binary"}, "purpose": _TEXT},
    }),
    ("/v1/batches", "post"): ("application/json", {
        "type": "object", "required": ["input_file_id", "endpoint"],
        "properties": {
            "input_file_id": _TEXT, "endpoint": _TEXT, "completion_window": _TEXT,
            "metadata": {"type": "object", "additionalProperties": _TEXT},
        },
    }),
}  # fmt: skip
_ANY_ERRORS = ("401", "404", "405", "408", "431", "500", "503")
_BODY_ERRORS = ("400", "409", "411", "413", "415")


def describe(app: FastAPI, guarded: bool) -> dict[str, Any]:
    """The OpenAPI document of `app`'s routes; `guarded` says whether keys are asked for."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema(
        [(body, "validation") for bodies in _BODIES.values() for body in bodies],
        ref_template=_REFERENCE,
    )
    schemas = dict(definitions.get("$defs", {}))
    schemas |= {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR, "TeiError": _TEI_ERROR}
    document["components"] = {"schemas": schemas}
    if guarded:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe_operation(path, method, operation)
            if path in BATCH_OPERATIONS:
                _describe_batches(path, method, operation)
            if guarded and path not in PUBLIC_PATHS:
                operation["security"] = [{"key": []}]
    return document


def _describe_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    asks = path in _BODIES and method == "post"
    errors = _ANY_ERRORS + (_BODY_ERRORS if asks else ("400",) if path == "/info" else ())
    answers = {code: answer for code, answer in operation["responses"].items() if code != "422"}
    content = {"application/json": {"schema": _error_schema(path, asks)}}
    answers |= {code: {"description": "refused", "content": content} for code in errors}
    operation["responses"] = dict(sorted(answers.items()))
    known = OPERATIONS | CONTROL_OPERATIONS | BATCH_OPERATIONS | (CALL_OPERATIONS if asks else {})
    operation["summary"], operation["description"] = known[path]
    if path in _TEXTS and not asks:
        answers["200"]["content"] = {_TEXTS[path]: {"schema": _TEXT}}
    if asks:
        answers["200"]["content"] = {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": _EVENT},
        }
        names = [body.__name__ for body in _BODIES[path]]
        references = [{"$ref": _REFERENCE.format(model=name)} for name in names]
        schema = {"anyOf": references} if references[1:] else references[0]
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if names := _PARAMETER.findall(path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]


def _error_schema(path: str, asks: bool) -> dict[str, Any]:
    """The forms of a path's errors: two where a body says whose it is."""
    reference = lambda name: {"$ref": _REFERENCE.format(model=name)}
    if path in ("/", "/rerank") and asks:
        return {"anyOf": [reference("Error"), reference("TeiError")]}
    other = "TeiError" if path in TEI_PATHS else "Error"
    return reference("MessagesError" if is_of_messages(path) else other)


def _describe_batches(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add what stands in queries and bodies of files and batches."""
    if (path, method) in _BATCH_BODIES:
        kind, schema = _BATCH_BODIES[path, method]
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
        error = operation["responses"]["404"]
        operation["responses"] |= dict.fromkeys(_BODY_ERRORS, error)
    if method == "get" and path in ("/v1/files", "/v1/batches"):
        operation["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in _PAGE.items()
        ]
        operation["responses"]["400"] = operation["responses"]["404"]
