"""Parses request bodies: bytes to plain Python objects, strictly.

Python's parser accepts what JSON forbids and what no server should work on: NaN and infinities,
numbers that overflow to infinity, lone surrogates, duplicate keys, endless nesting. All of it is
refused here, before any model sees it.
"""

import json
import re
import sys
from typing import Any

from tpdet.requests.body.limits import MAX_JSON_DEPTH
from tpdet.requests.body.problems import bad_request

_BOM = "\ufeff"
_KINDS = {
    list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean",
    type(None): "null",
}  # fmt: skip
_CONTAINERS = {dict, list}
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes, name: str = "the body") -> dict[str, Any]:
    """The JSON object in `body`, called `name`. Raises ApiError 400 with its first error."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"{name} is not UTF-8: byte {error.start} is wrong") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        if text.startswith(_BOM):
            raise bad_request(f"{name} begins with a byte order mark: leave it out") from None
        what = error.msg.removesuffix(" at")
        raise bad_request(f"{name} is not JSON: {what} at character {error.pos}") from None
    except ValueError:
        # CPython refuses integers of thousands of digits, whose conversion takes quadratic time.
        most = sys.get_int_max_str_digits()
        remedy = "send a shorter one"
        raise bad_request(f"{name} holds a number of over {most} digits: {remedy}") from None
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be a JSON object, not {_KINDS[type(value)]}")
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value, name)
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise bad_request(f"the key {name!r} appears twice in one object", name)
            names.add(name)
    return found


def _no_constant(name: str) -> Any:
    raise bad_request(f"{name} is not JSON: numbers must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise bad_request(f"the number {text[:40]} is too large: numbers must be finite")
    return value


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner: list[Any] = []
        for container in level:
            children = container.values() if type(container) is dict else container
            if not _CONTAINERS.isdisjoint(map(type, children)):  # not so in lists of ids
                inner.extend(child for child in children if type(child) in _CONTAINERS)
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> Exception:
    return bad_request(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels")


def _refuse_lone_surrogates(value: dict[str, Any], name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(f"{name} holds half of a surrogate pair, which is no text") from None
