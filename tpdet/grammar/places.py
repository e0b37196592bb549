"""The places of a JSON schema: where schemas stand in it, and how messages name them."""

import re
from collections.abc import Iterator
from typing import Any

from tpdet.errors import RequestError
from tpdet.requests.answer_form import AnswerForm

FIELD = AnswerForm("json_schema", "").field
Schema = dict[str, Any]
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems", "additionalItems"),
)


def below(place: str, *keys: object) -> str:
    """The place of a member, as a JSON pointer: "#/properties/a"."""
    escaped = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    return "/".join([place, *escaped])


def shortened(text: object, most: int) -> str:
    """A long text without its middle."""
    shown = str(text)
    return shown if len(shown) <= most else f"{shown[: most // 2]} ... {shown[-most // 2 :]}"


def refuse(place: str, what: str) -> RequestError:
    """The error of a keyword at `place`."""
    return RequestError(f"the schema's {shortened(place, 120)} {what}", FIELD)


def members(schema: Schema, place: str) -> Iterator[tuple[str, Schema, Any, object]]:
    """The schemas directly in one: each with its place, what holds it, and its key there."""
    for keyword, value in schema.items():
        held: Any = value
        if keyword in _BY_NAME and isinstance(value, dict):
            keys: Any = value.keys()
        elif keyword in _LISTED and isinstance(value, list):
            keys = range(len(value))
        elif keyword in _SINGLE and isinstance(value, dict):
            yield below(place, keyword), value, schema, keyword
            continue
        else:
            continue
        for key in list(keys):
            if isinstance(held[key], dict):
                yield below(place, keyword, key), held[key], held, key


def every(schema: Schema, place: str = "#") -> Iterator[tuple[str, Schema]]:
    """A schema and all those in it, with their places."""
    yield place, schema
    for where, inside, _, _ in members(schema, place):
        yield from every(inside, where)


def resolved(root: Schema, schema: Any) -> Any:
    """What a `$ref` into the same schema names, however often; the schema itself without one."""
    seen = 0
    while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and seen < 32:
        pointer, seen = schema["$ref"], seen + 1
        if pointer != "#" and not pointer.startswith("#/"):
            return None
        found: Any = root
        for part in pointer.split("/")[1:]:
            key: Any = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and _INDEX.fullmatch(part):
                key = int(part)
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        schema = found
    return schema if isinstance(schema, dict) and "$ref" not in schema else None
