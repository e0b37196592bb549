"""A schema as text with the library's options: how it is written, and what is not left to it."""

import json
import math
from typing import Any

from tpdet.errors import RequestError
from tpdet.grammar.places import FIELD, shortened
from tpdet.grammar.rewrite import rewritten

# Blanks between JSON tokens are limited: a model could write them until it runs out of tokens.
_WHITESPACE = r"[ \n\t\r]{1,40}"
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_LIBRARY_KEY = "x-guidance"  # the library's options, of which clients may set one
_CHOICE = "whitespace_flexible"


def schema_with_options(schema: str) -> str:
    """The text of a schema with the library's options. Raises RequestError for no schema."""
    try:
        value = json.loads(schema, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}", FIELD) from None
    if not isinstance(value, dict):
        raise RequestError("the schema must be a JSON object", FIELD)
    return with_options(value, flexible=False)


def with_options(schema: dict[str, Any], flexible: bool) -> str:
    """A schema with the library's options; flexible: blanks are allowed unless it says otherwise.

    Raises RequestError for what the library would follow wrongly.
    """
    flexible = _flexible(schema.get(_LIBRARY_KEY, {}), flexible)
    try:
        value = rewritten({key: one for key, one in schema.items() if key != _LIBRARY_KEY})
    except RecursionError:
        raise RequestError("the schema is nested too deep: flatten it", FIELD) from None
    options: dict[str, object] = {"lenient": False}
    options |= {"whitespace_pattern": _WHITESPACE} if flexible else _COMPACT
    return json.dumps(value | {_LIBRARY_KEY: options})


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        shown = shortened(literal, 40)
        raise RequestError(f"the schema has the number {shown}, which is not finite", FIELD)
    return number


def _flexible(options: object, default: bool) -> bool:
    """Whether the schema allows blanks between the tokens of JSON."""
    if not isinstance(options, dict) or set(options) - {_CHOICE}:
        raise RequestError(
            f"the schema's key {_LIBRARY_KEY!r} may hold {_CHOICE!r} alone: leave the rest out",
            FIELD,
        )
    flexible = options.get(_CHOICE, default)
    if not isinstance(flexible, bool):
        raise RequestError(f"{_LIBRARY_KEY}.{_CHOICE} must be true or false", FIELD)
    return flexible
