"""Writes JSON in pieces: an answer of any size never holds up the event loop.

Python's encoder holds the interpreter for the whole of a value. Here large arrays and texts come
in parts, each of which takes a fraction of a millisecond.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_ITEMS = 512  # scalars of a list that are encoded together
_CHARACTERS = 16 << 10


@dataclass(frozen=True)
class Each:
    """A JSON array whose small elements are made one by one, as they are written; read once."""

    elements: Iterable[object]


@dataclass(frozen=True)
class Written:
    """A value that is JSON text already, of which no number or escape is written anew."""

    text: str


def to_json(value: object) -> bytes:
    """`json_text` in UTF-8."""
    return json_text(value).encode("utf-8")


def json_pieces(value: object) -> Iterator[str]:
    """The text of `to_json`, in pieces.

    Beside what JSON knows, a value may hold an `Each`, `Written` text, and an iterator in place of
    a list; the elements of an iterator, and the values of a dictionary, may be large themselves.
    """
    if isinstance(value, dict):
        opening = "{"
        for name, inner in value.items():
            yield f"{opening}{json_text(name)}:"
            yield from json_pieces(inner)
            opening = ","
        yield "{}" if opening == "{" else "}"
    elif isinstance(value, Written):
        yield value.text
    elif isinstance(value, Each):
        yield from _array(json_text(element) for element in value.elements)
    elif isinstance(value, Iterator) or (isinstance(value, list) and _nested(value)):
        yield from _array_of_large(value)
    elif isinstance(value, list | tuple):
        parts = (value[i : i + _ITEMS] for i in range(0, len(value), _ITEMS))
        yield from _array(json_text(part)[1:-1] for part in parts)
    elif isinstance(value, str):
        yield '"'
        for i in range(0, len(value), _CHARACTERS):
            yield json_text(value[i : i + _CHARACTERS])[1:-1]
        yield '"'
    else:
        yield json_text(value)


def _nested(value: list[object]) -> bool:
    return len(value) > 0 and isinstance(value[0], dict)


def _array(texts: Iterable[str]) -> Iterator[str]:
    opening = "["
    for text in texts:
        yield opening + text
        opening = ","
    yield "[]" if opening == "[" else "]"


def _array_of_large(values: Iterable[object]) -> Iterator[str]:
    opening = "["
    for value in values:
        yield opening
        yield from json_pieces(value)
        opening = ","
    yield "[]" if opening == "[" else "]"


def json_text(value: object) -> str:
    """Compact JSON of a small value, in one go."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
