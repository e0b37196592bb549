"""JSON inside of answers: where a value ends, and the members of an object as they were written."""

import json
import re
from typing import Any, NoReturn

from pydantic_core import from_json

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_TOKEN = re.compile(
    r"""[ \t\n\r]*+("(?:[^"\\]++|\\.)*+"|[][{},:]|[-+.eE0-9]++|true|false|null)""", re.DOTALL
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# A string that was cut, without an escape that was, and without the first half of a pair that was.
_CUT_STRING = re.compile(
    r"""[ \t\n\r]*+"(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\?\Z|\\u[0-9a-fA-F]{0,3}\Z))*+"""
)


class JsonScanner:
    """Finds the end of one object or list in text that comes in pieces, in linear time.

    `done`: the end was seen. `bad`: it begins with something else. `in_string`: the text so far
    ends inside of a string.
    """

    __slots__ = ("_depth", "_escaped", "bad", "done", "in_string")

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = self._escaped = self.done = self.bad = False

    @property
    def begun(self) -> bool:
        """Whether the value has begun."""
        return self._depth > 0 or self.done

    def feed(self, text: str) -> int:
        """How many characters of the next piece belong to the value, or stand in front of it."""
        position, size = 0, len(text)
        if not self._depth:
            position = _space_end(text, 0)
            if position == size:
                return size
            if text[position] not in "{[":
                self.bad = True
                return position
        while position < size:
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            match = (_IN_STRING if self.in_string else _OUTSIDE).search(text, position)
            if match is None:
                return size
            character, position = match[0], match.end()
            if character == '"':
                self.in_string = not self.in_string
            elif character == "\\":
                self._escaped = True
            elif character in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    self.done = True
                    return position
        return size


def _space_end(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _members_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object names a member twice")
    return members


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_float=str,
    parse_int=str,  # a number of a million digits takes no time
    object_pairs_hook=_members_once,
)


def load(text: str) -> Any:
    """The value of a text, its numbers as strings. Raises ValueError if it is not strict JSON."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def written(value: Any) -> str:
    """The JSON of a value; where its strings have lone surrogates, as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _encodes(text) else json.dumps(value, allow_nan=False)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def values(text: str) -> list[str]:
    """The texts of a list's values, or a text that is no list alone.

    Raises ValueError where a list is not strict JSON.
    """
    text = text.strip(" \t\n\r")
    if not text.startswith("["):
        return [text]
    parts: list[str] = []
    position = _space_end(text, 1)
    ended = text.startswith("]", position)
    while not ended:
        _, end = _decoded(text, position)
        parts.append(text[position:end])
        position, ended = _behind(text, end, "]")
    _check_end(text, position)
    return parts


def members(text: str) -> dict[str, str]:
    """The members of the object that is the text, each value as it was written.

    Raises ValueError if it is not an object of strict JSON, or names a member twice.
    """
    text = text.strip(" \t\n\r")
    if not text.startswith("{"):
        raise ValueError("this is no object")
    pairs: dict[str, str] = {}
    position = _space_end(text, 1)
    ended = text.startswith("}", position)
    while not ended:
        key, end = _decoded(text, position)
        position = _space_end(text, end)
        if not isinstance(key, str) or text[end - 1 : end] != '"' or key in pairs:
            raise ValueError("a member needs a name of its own")
        if not text.startswith(":", position):
            raise ValueError("a member needs a colon")
        position = _space_end(text, position + 1)
        _, end = _decoded(text, position)
        pairs[key] = text[position:end]
        position, ended = _behind(text, end, "}")
    _check_end(text, position)
    return pairs


def begun_values(text: str) -> tuple[list[str], str]:
    """The texts of a list's whole values, and of the one in which it was cut.

    A text that is no list is such a value itself.
    """
    text = text.strip(" \t\n\r")
    if not text.startswith("["):
        return [], text
    parts: list[str] = []
    position = _space_end(text, 1)
    while position < len(text):
        try:
            _, end = _decoded(text, position)
        except ValueError:
            break
        parts.append(text[position:end])
        position = _space_end(text, end)
        if text.startswith(",", position):
            position = _space_end(text, position + 1)
    return parts, text[position:]


def begun_members(text: str) -> tuple[dict[str, str], str, str]:
    """The whole members of an object that was cut, and the name and the text of the last one.

    Both are empty where none had begun. Raises ValueError where this is no object.
    """
    if not text.startswith("{"):
        raise ValueError("this is no object")
    pairs: dict[str, str] = {}
    position = _space_end(text, 1)
    while position < len(text):
        try:
            key, end = _decoded(text, position)
            position = _space_end(text, end)
            if not isinstance(key, str) or not text.startswith(":", position):
                break
        except ValueError:
            break
        position = _space_end(text, position + 1)
        if key in pairs:
            raise ValueError("a member needs a name of its own")
        try:
            _, end = _decoded(text, position)
        except ValueError:
            return pairs, key, text[position:]
        pairs[key] = text[position:end]
        position = _space_end(text, end)
        if text.startswith(",", position):
            position = _space_end(text, position + 1)
    return pairs, "", ""


def begins_object(text: str) -> bool:
    """Whether a text is the beginning of a JSON object, in which surrogates may be alone."""
    text = _SURROGATE.sub(r"\\ufffd", text)
    try:
        return isinstance(from_json(text, allow_inf_nan=False, allow_partial=True), dict)
    except ValueError:
        return False


def closed_object(text: str, strings: bool = False) -> str:
    """What has come of an object that was cut, as it was written, and what closes it.

    These are its whole values, and a number as far as it is one: what clients make of the pieces of
    a stream. strings: and a string as far as it came. A whole object stays as it is; where none has
    begun it is empty. The text is a beginning of JSON.
    """
    closing: list[str] = []
    position = end = 0
    is_key = False
    while (match := _TOKEN.match(text, position)) is not None:
        token, position = match[1], match.end()
        if token in ",:":
            is_key = token == "," and closing[-1:] == ["}"]
            continue
        if token in "[{":
            closing.append("}" if token == "{" else "]")
        elif token in "]}":
            del closing[-1:]
        elif is_key or (token[0] in "-+.eE0123456789" and not _NUMBER.fullmatch(token)):
            continue
        is_key, end = token == "{", position
        if not closing:
            break
    kept = text[:end]
    if strings and closing and not is_key and (cut := _CUT_STRING.match(text, position)):
        kept = text[: cut.end()] + '"'
    return (kept + "".join(reversed(closing))) or "{}"


def _decoded(text: str, position: int) -> tuple[Any, int]:
    """The value at a place, and where it ends. Raises ValueError."""
    try:
        return _DECODER.raw_decode(text, position)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def _behind(text: str, end: int, bracket: str) -> tuple[int, bool]:
    """Where the next part begins, or the bracket that closes, and whether it does."""
    position = _space_end(text, end)
    if text.startswith(bracket, position):
        return position, True
    if not text.startswith(",", position):
        raise ValueError(f"a comma or {bracket} is missing")
    return _space_end(text, position + 1), False


def _check_end(text: str, position: int) -> None:
    if position + 1 != len(text):
        raise ValueError("text stands behind the value")
