"""The published schema: FastAPI's list of routes, our bodies and the answers we really give."""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tpdet.requests.answer.messages import is_of_messages
from tpdet.requests.body.work import BODIES
from tpdet.requests.routes import PATHS
from tpdet.server.about.operations import BATCH_OPERATIONS, CONTROL_OPERATIONS, OPERATIONS
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
        [(body, "validation") for body in _BODIES.values()], ref_template=_REFERENCE
    )
    schemas = dict(definitions.get("$defs", {}))
    schemas |= {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    document["components"] = {"schemas": schemas}
    if guarded:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe_operation(path, operation)
            if path in BATCH_OPERATIONS:
                _describe_batches(path, method, operation)
            if guarded and path not in PUBLIC_PATHS:
                operation["security"] = [{"key": []}]
    return document


def _describe_operation(path: str, operation: dict[str, Any]) -> None:
    errors = _ANY_ERRORS + (_BODY_ERRORS if path in _BODIES else ())
    answers = {code: answer for code, answer in operation["responses"].items() if code != "422"}
    error = "MessagesError" if is_of_messages(path) else "Error"
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=error)}}}
    answers |= {code: {"description": "refused", "content": content} for code in errors}
    operation["responses"] = dict(sorted(answers.items()))
    operation["summary"], operation["description"] = (
        OPERATIONS | CONTROL_OPERATIONS | BATCH_OPERATIONS
    )[path]
    if path in _TEXTS:
        answers["200"]["content"] = {_TEXTS[path]: {"schema": _TEXT}}
    if path in _BODIES:
        answers["200"]["content"] = {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": _EVENT},
        }
        reference = _REFERENCE.format(model=_BODIES[path].__name__)
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": reference}}},
        }
    if names := _PARAMETER.findall(path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]


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
