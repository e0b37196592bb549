"""What the library says of a form that it cannot follow, with the place and a remedy."""

import re

from tpdet.grammar.byte_texts import pattern_error
from tpdet.grammar.places import Schema, below, every, shortened

_POSITION = re.compile(r"^at \d+\(\d+\): ")
_UNKNOWN = re.compile(r'Unimplemented keys: \["([^"]+)"')
_CASES = "write the cases as anyOf"
_REMEDIES = {
    "uniqueItems": "leave it out, and drop what is repeated from the answer",
    "contains": "name the items under prefixItems, or leave it out",
    "minContains": "name the items under prefixItems, or leave it out",
    "maxContains": "name the items under prefixItems, or leave it out",
    "propertyNames": "name the keys under properties or patternProperties",
    "not": "list what is allowed by enum or anyOf",
    "if": _CASES,
    "then": _CASES,
    "else": _CASES,
    "dependentRequired": _CASES,
    "dependentSchemas": _CASES,
    "dependencies": _CASES,
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
}
ONE_OF = (
    "its branches cannot be told apart: give each a property of one name, with a const of its own, "
    "or use anyOf"
)
"""Why a `oneOf` is refused."""
_COUNTS = "it is followed only where all keys under properties are required"
_NO_TEXT = "no text has this form: a $ref that leads to itself, for one, needs a case without it"


def one_line(error: str) -> str:
    """The library's message without its position and its listing."""
    first, *more = error.rpartition("failed to compile JSON schema: ")[2].splitlines() or [""]
    first = _POSITION.sub("", first)
    if first.endswith("regex parse error:") and more:  # the expression follows, and then the error
        why = [line.removeprefix("error: ") for line in more if line.startswith("error: ")]
        first = ": ".join(["regex parse error", shortened(more[0].strip(), 80), *why])
    return _NO_TEXT if first == "NoExtensionBias" else shortened(first, 240)


def with_place(reason: str, schema: Schema) -> str:
    """A reason with the place of the keyword that it is about, and what to write instead."""
    if unknown := _UNKNOWN.search(reason):
        name = unknown[1]
        remedy = _REMEDIES.get(name, "leave it out")
        return _at(schema, (name,), f"is not supported: {remedy}") or reason
    if reason.startswith("oneOf constraints"):
        return _at(schema, ("oneOf",), f"is not supported: {ONE_OF}") or reason
    if reason.startswith("min/maxProperties"):
        names = ("minProperties", "maxProperties")
        return _at(schema, names, f"is not supported: {_COUNTS}") or reason
    for place, one in every(schema) if "regex" in reason.lower() else ():
        keys = one.get("patternProperties")
        patterns = [("patternProperties", key) for key in (keys if isinstance(keys, dict) else ())]
        patterns.append(("pattern", one.get("pattern")))
        for keyword, pattern in patterns:
            error = pattern_error(pattern) if isinstance(pattern, str) else None
            if error is not None:
                why = one_line(error).rpartition(": ")[2]
                shown = f"{shortened(below(place, keyword), 120)} {shortened(repr(pattern), 80)}"
                return f"{shown} is not supported: {why}"
    return reason


def _at(schema: Schema, keywords: tuple[str, ...], what: str) -> str | None:
    """`what`, behind the first place that has one of the keywords."""
    for place, one in every(schema):
        for keyword in keywords:
            if keyword in one:
                return f"{shortened(below(place, keyword), 120)} {what}"
    return None
