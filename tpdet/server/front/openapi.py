"""The published schema: FastAPI's list of routes, our bodies and the answers we really give."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tpdet.requests.body.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from tpdet.server.about.operations import OPERATIONS
from tpdet.server.front.middleware import PUBLIC_PATHS

_BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_TEXTS = {"/metrics": "text/plain", "/": "text/html", "/docs": "text/html"}
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
_EVENT = {"type": "object", "required": ["data"], "properties": {"id": _TEXT, "data": _TEXT}}
_ANY_ERRORS = ("401", "404", "405", "408", "431", "500", "503")
_BODY_ERRORS = ("400", "409", "411", "413", "415")


def describe(app: FastAPI, guarded: bool) -> dict[str, Any]:
    """The OpenAPI document of `app`'s routes; `guarded` says whether keys are asked for."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template=_REFERENCE
    )
    schemas = dict(definitions.get("$defs", {}))
    schemas["Error"] = _ERROR
    document["components"] = {"schemas": schemas}
    if guarded:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _describe_operation(path, operation)
            if guarded and path not in PUBLIC_PATHS:
                operation["security"] = [{"key": []}]
    return document


def _describe_operation(path: str, operation: dict[str, Any]) -> None:
    errors = _ANY_ERRORS + (_BODY_ERRORS if path in _BODIES else ())
    answers = {code: answer for code, answer in operation["responses"].items() if code != "422"}
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    answers |= {code: {"description": "refused", "content": content} for code in errors}
    operation["responses"] = dict(sorted(answers.items()))
    operation["summary"], operation["description"] = OPERATIONS[path]
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
    if "{model_id}" in path:
        operation["parameters"] = [
            {"name": "model_id", "in": "path", "required": True, "schema": _TEXT}
        ]
