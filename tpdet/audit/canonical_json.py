"""Canonical JSON by RFC 8785 (JCS): equal values have equal bytes, in every language.

Keys are sorted by their UTF-16 code units, numbers written as ECMAScript writes them, nothing is
escaped that need not be. Integers past 2**53 are refused, since a reader with doubles would change
them: write them as text.
"""

import json
import math

_MAX_SAFE_INTEGER = 2**53 - 1
_PLAIN_DIGITS = 21  # from here on, and below 1e-6, ECMAScript writes an exponent


def canonical_json(value: object) -> bytes:
    """The bytes of a value of dicts with text keys, lists, tuples, text, numbers, bools and None.

    Raises ValueError for a number that has no JSON or not the same in every reader, TypeError for
    another type, UnicodeEncodeError for text with half a surrogate pair.
    """
    return _write(value).encode("utf-8")


def _write(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        if abs(value) > _MAX_SAFE_INTEGER:
            raise ValueError(f"integer {value} is past 2**53: write it as text")
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_write, value)) + "]"
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return "{" + ",".join(f"{_write(name)}:{_write(value[name])}" for name in names) + "}"
    raise TypeError(f"{type(value).__name__} has no canonical JSON")


def _number(value: float) -> str:
    """A double as ECMA-262, Number::toString, writes it: the digits are those of `repr`."""
    if not math.isfinite(value):
        raise ValueError(f"{value} has no JSON")
    if value == 0.0:
        return "0"
    sign = "-" if value < 0 else ""
    digits, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = digits.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = (whole + fraction).lstrip("0")
    point -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= point <= _PLAIN_DIGITS:
        return sign + digits + "0" * (point - count)
    if 0 < point <= _PLAIN_DIGITS:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    mantissa = digits if count == 1 else f"{digits[0]}.{digits[1:]}"
    return f"{sign}{mantissa}e{point - 1:+d}"
