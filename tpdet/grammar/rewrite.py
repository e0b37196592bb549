"""A schema in the words that the library follows: every answer to it is one to the schema.

What it would follow wrongly is refused here, with its place.
"""

import re
from collections.abc import Iterator
from math import comb
from typing import Any

from tpdet.grammar.byte_texts import texts_of
from tpdet.grammar.one_of import as_any_of
from tpdet.grammar.places import Schema, below, every, refuse, resolved, shortened

_ENFORCED = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
_FORMATS = {f"uuid{version}": _UUID.format(version) for version in range(1, 9)}
_FORMATS["base64"] = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_FORMATS["base64url"] = "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$"
# The library counts in doubles; it writes whole ones as int64.
_EXACT, _MOST = 2**53, 2**63
_LAST = _MOST - 1024  # the largest double below
_MOST_STEPS = 2000  # in patterns of keys, 50 us each: forms are compiled between steps of the model
_MOST_PAIRS = 32_640  # of branches that are compared, microseconds each: one oneOf of 256
_NO_DIGITS = "^(?!^[-+.]*$)"  # of pydantic's decimals: at least one digit


def rewritten(schema: Schema) -> Schema:
    """The schema, which is changed. Raises RequestError naming a place that cannot be followed."""
    steps = iter(range(_MOST_STEPS))
    for place, one in list(every(schema)):
        _check_numbers(one, place)
        _bound_numbers(one, place)
        _name_keys(schema, one)
        _merge_patterns(one, place, steps)
        _count_keys(one, place)
        _plain_format(one)
        _plain_decimal(one)
    # From the inside out: a branch is looked at when all in it is plain.
    pairs = 0
    for place, one in reversed(list(every(schema))):
        if isinstance(one.get("oneOf"), list):
            pairs += comb(len(one["oneOf"]), 2)
            if pairs > _MOST_PAIRS:
                raise refuse(below(place, "oneOf"), "is one branch too many to compare: use anyOf")
            as_any_of(schema, one)
    return schema


def _check_numbers(schema: Schema, place: str) -> None:
    """Refuse values that the library would write as other numbers."""
    for keyword in ("const", "enum"):
        for value in _numbers(schema.get(keyword)):
            exact = abs(value) <= _EXACT or (-_MOST < value < _MOST and int(float(value)) == value)
            if not exact and value != _MOST - 1:
                raise refuse(
                    below(place, keyword),
                    f"has {shortened(value, 40)}, past 2^53, where not every number can be "
                    "written: make it a string",
                )


def _numbers(value: Any) -> list[int | float]:
    """The numbers in a JSON value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    inside = value.values() if isinstance(value, dict) else value
    return [n for one in inside for n in _numbers(one)] if isinstance(value, dict | list) else []


def _bound_numbers(schema: Schema, place: str) -> None:
    """Move bounds past 2^53 inward, to numbers that the library has."""
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    whole = "integer" in types and "number" not in types
    for name, exclusive, step in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        bounds = {n: schema[n] for n in (name, exclusive) if type(schema.get(n)) in (int, float)}
        if not any(abs(bound) >= _EXACT for bound in bounds.values()):
            continue
        if whole:
            inside = [int(b) + (step if n == exclusive else 0) for n, b in bounds.items()]
            bounds = {name: max(b * step for b in inside) * step}
        for key in (name, exclusive):
            schema.pop(key, None)
        for key, bound in bounds.items():
            if bound * step > _LAST:
                raise refuse(
                    below(place, key),
                    f"is {shortened(bound, 40)}: integers past int64 are not written",
                )
            schema[key] = bound if bound == _MOST - 1 else _inward(bound, step)


def _inward(bound: int | float, step: int) -> int | float:
    """The nearest number that is a double, in the direction of `step`."""
    near = max(-_LAST, min(_LAST, bound))
    if isinstance(near, float):
        return near
    gap = 2 ** max(0, near.bit_length() - 53)
    return -(-near // gap) * gap if step == 1 else near // gap * gap


def _name_keys(root: Schema, schema: Schema) -> None:
    """`propertyNames` as `properties` or `patternProperties`, where that is the same."""
    names = resolved(root, schema.get("propertyNames"))
    if names is None or "properties" in schema or "patternProperties" in schema:
        return
    value = schema.get("additionalProperties", True)
    listed = [names["const"]] if "const" in names else names.get("enum")
    pattern = names.get("pattern") or _FORMATS.get(str(names.get("format")))
    if names.get("format") == "uuid":
        pattern = _UUID.format("[0-9a-f]")
    rules = names.keys() - {"type", "title", "description"}
    if not rules:
        del schema["propertyNames"]
    elif isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        schema |= {"properties": dict.fromkeys(listed, value), "additionalProperties": False}
        del schema["propertyNames"]
    elif isinstance(pattern, str) and len(rules) == 1:
        schema |= {"patternProperties": {pattern: value}, "additionalProperties": False}
        del schema["propertyNames"]


def _merge_patterns(schema: Schema, place: str, steps: Iterator[int]) -> None:
    """Move patterns of keys into those keys, where all that match are declared and none is else.

    The library would offer a comma behind which no key can follow.
    """
    patterns, declared = schema.get("patternProperties"), schema.get("properties")
    closed = schema.get("additionalProperties") is False
    if not closed or not isinstance(patterns, dict) or not isinstance(declared, dict):
        return
    for pattern, value in list(patterns.items()):
        names = texts_of(pattern, len(declared), steps)
        if next(steps, None) is None:
            raise refuse(
                below(place, "patternProperties"),
                "is too much to compare with the properties beside it: name all keys",
            )
        if names is None or not names <= declared.keys():
            continue
        for name in names if value not in ({}, True) else ():
            if declared[name] != value:
                declared[name] = {"allOf": [declared[name], value]}
        del patterns[pattern]
    if not patterns:
        del schema["patternProperties"]


def _count_keys(schema: Schema, place: str) -> None:
    """Drop counts of keys that hold by themselves; refuse one that repeated keys would break."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    if not isinstance(required, list) or isinstance(least, bool) or not isinstance(least, int):
        return
    if least <= len({*map(str, required)}):
        del schema["minProperties"]
    elif least > len(required) + 1 and (
        schema.get("additionalProperties") is not False or schema.get("patternProperties")
    ):
        raise refuse(
            below(place, "minProperties"),
            f"is {shortened(least, 40)}: keys may repeat, so only one more than those required can "
            "be counted on: name the keys under properties and required",
        )


def _plain_format(schema: Schema) -> None:
    """Formats of text that nobody enforces are notes, as JSON Schema has it."""
    given = schema.get("format")
    if not isinstance(given, str) or given in _ENFORCED:
        return
    types = schema.get("type", "string")
    if types != "string" and not (isinstance(types, list) and "string" in types):
        return
    del schema["format"]
    if given in _FORMATS and "pattern" not in schema:
        schema["pattern"] = _FORMATS[given]


def _plain_decimal(schema: Schema) -> None:
    """The patterns of pydantic's Decimal without their look-ahead, for plain decimals."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not pattern.startswith(_NO_DIGITS + "[+-]?0*"):
        return
    rest = pattern.removeprefix(_NO_DIGITS + "[+-]?0*")
    if rest == r"\d*\.?\d*$":
        schema["pattern"] = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"
    elif found := re.fullmatch(r"\\d\*\\\.\?\\d\{0,(\d{1,4})\}0\*\$", rest):
        schema["pattern"] = _decimal("+", int(found[1]))
    elif found := re.fullmatch(
        r"\(\?:\\d\{0,(\d{1,4})\}\|\(\?=\[\\d\.\]\{1,(\d{1,4})\}0\*\$\)"
        r"\\d\{0,(\d{1,4})\}\\\.\\d\{0,(\d{1,4})\}0\*\$\)",
        rest,
    ):
        whole, most, _, places = map(int, found.groups())
        if whole + places < most:
            schema["pattern"] = (
                _decimal(f"{{1,{whole}}}", places) if whole else _decimal("", places)
            )


def _decimal(whole: str, places: int) -> str:
    """Decimals of at most so many places; `whole` says how many digits are before the point."""
    before = f"[0-9]{whole}" if whole else "0"
    if not places:
        return rf"^[+-]?{before}$"
    return rf"^[+-]?({before}(\.[0-9]{{0,{places}}})?|\.[0-9]{{1,{places}}})$"
