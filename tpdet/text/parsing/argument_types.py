"""JSON of an argument that was written as plain text, by the schema of its tool."""

import re
from collections.abc import Mapping
from typing import Any

from tpdet.text.parsing import json_text

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {
    "null": ("null", "null"), "None": ("null", "null"), "true": ("boolean", "true"),
    "True": ("boolean", "true"), "false": ("boolean", "false"), "False": ("boolean", "false"),
}  # fmt: skip
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_MOST_REFERENCES = 8
_INDEX = re.compile("[0-9]{1,9}")


def argument_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON of an argument; schema: its own, root: that of all its tool's arguments.

    What the schema lets be a string only is one. Another text is what it reads as: a number, a
    truth value, null, an object or a list, as far as the schema allows that; else it is a string.
    """
    types = _types(schema, root, _MOST_REFERENCES, {})
    if types == {"string"}:
        return json_text.written(text)
    bare = text.strip()
    kind, written = _WORDS.get(bare, ("", bare))
    if not kind:
        if _INTEGER.fullmatch(bare):
            kind = "integer"
        elif _NUMBER.fullmatch(bare):
            kind = "number"
        elif bare[:1] in ("{", "["):
            kind = _kind_of_json(bare)
    allowed = not types or kind in types or (kind == "integer" and "number" in types)
    return written if kind and allowed else json_text.written(text)


def _kind_of_json(text: str) -> str:
    try:
        json_text.load(text)
    except ValueError:
        return ""
    return "object" if text[0] == "{" else "array"


def _types(
    schema: Any, root: Mapping[str, Any], references: int, known: dict[tuple[int, int], set[str]]
) -> set[str]:
    """The types that a schema names; empty: any. known: those of what was looked at, by its id."""
    if not isinstance(schema, Mapping):
        return set()
    place = id(schema), references
    if place not in known:  # else a schema that refers to itself takes exponential time
        known[place] = _types_of(schema, root, references, known)
    return known[place]


def _types_of(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    references: int,
    known: dict[tuple[int, int], set[str]],
) -> set[str]:
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and references:
        target: Any = root
        for key in reference[2:].split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and _INDEX.fullmatch(key) and int(key) < len(target):
                target = target[int(key)]
            else:
                target = target.get(key) if isinstance(target, Mapping) else None
        return _types(target, root, references - 1, known)
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list) and references:
            options = [_types(part, root, references - 1, known) for part in parts]
            return set() if key != "allOf" and not all(options) else set().union(*options)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(choices, list) and choices:
        return {_NAMES.get(type(option), "object") for option in choices}
    return set()
