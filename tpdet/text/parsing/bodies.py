"""What stands in a call, by the form of its family: where it ends, and which calls it is.

No call is repaired: what is not whole is none. Each piece is looked at once, and what was written
is read once, at its end, so that time is linear in the answer's length.
"""

import re
from collections.abc import Mapping
from typing import Any

from tpdet.text.parsing import json_text, python_calls
from tpdet.text.parsing.argument_types import argument_json
from tpdet.text.parsing.events import FunctionCall
from tpdet.text.parsing.family import CallFamily, Tags
from tpdet.text.parsing.terminals import Piece

MORE, OVER, BROKEN = range(3)
Tools = Mapping[str, Mapping[str, Any]]
"""The schema of the arguments of each tool, by its name."""

_SPACE = " \t\n\r"
_FIRST_KEYS = ("name", "type", "id")


class _JsonBody:
    """Objects or lists of JSON; between two may be the family's separator."""

    def __init__(self, family: CallFamily, marked: bool) -> None:
        self._family, self._marked = family, marked
        self._scanner = json_text.JsonScanner()
        self._written: list[str] = []  # of the value that is read
        self._values: list[str] = []
        self._first: str | None = None if marked else ""  # until its first key is known

    def push(self, piece: Piece) -> tuple[int, int]:
        text, position = piece.text, 0
        if piece.terminal and not self._scanner.in_string:
            if self._scanner.done and piece.terminal in self._family.end:
                return OVER, len(text)
            return (self._behind if self._scanner.done else BROKEN), 0
        while position < len(text):
            if self._scanner.done:
                bare = text[position:].lstrip(_SPACE)
                if not bare:
                    break
                separator = self._family.separator
                if not separator or not bare.startswith(separator):
                    return self._behind, len(text) - len(bare)
                position = len(text) - len(bare) + len(separator)
                self._scanner = json_text.JsonScanner()
            position += self._scan(text[position:])
            if self._scanner.bad:
                over = self._values and self._marked  # nothing follows the separator
                return (OVER if over else BROKEN), position
            if self._first is not None and not self._may_be_call():
                return BROKEN, position
        return MORE, len(text)

    def _scan(self, text: str) -> int:
        taken = self._scanner.feed(text)
        self._written.append(text[:taken])
        if self._scanner.done:
            self._values.append("".join(self._written))
            self._written = []
        return taken

    @property
    def _behind(self) -> int:
        """What something else behind the last value means."""
        return OVER if self._marked and not self._family.needs_end else BROKEN

    def _may_be_call(self) -> bool:
        """Whether the first key is one that calls have, so that other JSON need not wait."""
        written = self._values[:1] or self._written
        self._first = "".join(written).lstrip(_SPACE)[:64]
        match = re.match(r'\{\s*"([^"]*)"|\[?\s*\{\s*\}', self._first)
        if match is None:
            return len(self._first) < 64
        self._first = None
        return match[1] in (*_FIRST_KEYS, *self._family.argument_keys)

    def finish(self) -> bool:
        return self._scanner.done or bool(self._values and not self._scanner.begun)

    def calls(self) -> list[FunctionCall]:
        keys = self._family.argument_keys
        written = (value for text in self._values for value in json_text.values(text))
        return [_json_call(value, keys) for value in written]

    def begun(self) -> list[FunctionCall]:
        keys, calls = self._family.argument_keys, self.calls()
        values, last = json_text.begun_values("".join(self._written))
        calls += [_json_call(value, keys) for value in values]
        return [*calls, _begun_json_call(last, keys)] if last else calls


def _json_call(text: str, keys: tuple[str, ...]) -> FunctionCall:
    members = json_text.members(text)
    arguments = [members[key] for key in keys if key in members]
    name = members.get("name", "")
    if not name.startswith('"') or len(arguments) != 1 or not arguments[0].startswith("{"):
        raise ValueError("a call has a name and one object of arguments")
    return FunctionCall(json_text.load(name), arguments[0])


def _begun_json_call(text: str, keys: tuple[str, ...]) -> FunctionCall:
    members, key, written = json_text.begun_members(text)
    whole = [members[key] for key in keys if key in members]
    last = [written] if key in keys else []
    name, arguments = members.get("name", ""), [*whole, *last, ""]
    if not name.startswith('"') or len(arguments) > 2:
        raise ValueError("a call has a name and one object of arguments")
    return FunctionCall(json_text.load(name), _begun_object(arguments[0]), ended=False)


def begun_call(name: str, text: str) -> FunctionCall | None:
    """A call whose arguments were cut; None where they begin none."""
    try:
        return FunctionCall(name, _begun_object(text.lstrip(_SPACE)), ended=False)
    except ValueError:
        return None


def _begun_object(text: str) -> str:
    """The beginning of an object. Raises ValueError where it is none."""
    text = text.rstrip("\ufffd")  # a character that was cut
    if text and not json_text.begins_object(text):
        raise ValueError("arguments are an object")
    return text


class _NamedJsonBody:
    """A name, terminals, and an object; or what `_JsonBody` takes, where no name comes first."""

    def __init__(self, family: CallFamily) -> None:
        self._family = family
        self._scanner = json_text.JsonScanner()
        self._parts: dict[str, list[str]] = {"": []}  # what stands behind each terminal
        self._part = ""
        self._written: list[str] = []
        self._list: _JsonBody | None = None

    def push(self, piece: Piece) -> tuple[int, int]:
        if self._list is not None:
            return self._list.push(piece)
        text, start = piece.text, 0
        if piece.terminal and not self._scanner.in_string:
            known = piece.terminal in (self._family.call_id, self._family.arguments)
            if not known or piece.terminal in self._parts or self._written or not self._name:
                return BROKEN, 0
            self._part = piece.terminal
            self._parts[self._part] = []
            return MORE, len(text)
        if not self._written and self._part != self._family.arguments:
            match = re.search(r"[{\[]", text)
            start = len(text) if match is None else match.start()
            self._parts[self._part].append(text[:start])
            if match is None:
                return MORE, len(text)
            if not self._name:
                self._list = _JsonBody(self._family, marked=True)
                status, taken = self._list.push(Piece("", text[start:], text[start:]))
                return status, start + taken
        taken = self._scanner.feed(text[start:])
        if self._scanner.bad:
            return BROKEN, len(text)
        if self._scanner.begun:
            self._written.append(text[start : start + taken])
        return (OVER if self._scanner.done else MORE), start + taken

    @property
    def _name(self) -> str:
        return "".join(self._parts[""]).strip()

    def finish(self) -> bool:
        return self._scanner.done if self._list is None else self._list.finish()

    def calls(self) -> list[FunctionCall]:
        if self._list is not None:
            return self._list.calls()
        arguments = "".join(self._written).strip(_SPACE)
        json_text.members(arguments)
        call_id = "".join(self._parts.get(self._family.call_id, ())).strip()
        return [FunctionCall(self._name, arguments, call_id or None)]

    def begun(self) -> list[FunctionCall]:
        if self._list is not None:
            return self._list.begun()
        if not self._name or not (self._part or self._written):
            raise ValueError("the name may go on")
        call_id = "".join(self._parts.get(self._family.call_id, ())).strip()
        if self._part == self._family.call_id and not self._written:
            call_id = ""  # it may go on
        arguments = _begun_object("".join(self._written).lstrip(_SPACE))
        return [FunctionCall(self._name, arguments, call_id or None, ended=False)]


_ESCAPE = "<\ue000"


class _TaggedBody:
    """Name, keys and values between tags; where those are ids, the "<" of other text is escaped."""

    def __init__(
        self, family: CallFamily, tools: Tools | None, tags_are_ids: bool, marked: bool
    ) -> None:
        if family.tags is None:
            raise ValueError(f"family {family.name} has no tags")
        self._family, self._tags, self._tools = family, family.tags, tools
        self._ids = tags_are_ids
        self._first: str | None = None if marked else ""  # until the name is known
        self._written: list[str] = []
        self._end = 0  # how much was written in front of an end that may be the call's
        self._may_end = False
        # Whether what was written last, but for space, may end the call.
        self._closed = not self._tags.call_end
        self._keyed = False  # whether a key has begun
        self._tail, self._space = "", False

    def push(self, piece: Piece) -> tuple[int, int]:
        family, text = self._family, piece.text
        begins = piece.terminal in family.begin and piece.terminal not in family.line_begin
        if self._may_end and begins and piece.terminal:
            return OVER, 0  # the end was in front of the last space
        bare = text.strip()
        if self._may_end and bare:
            self._may_end = False
        if piece.terminal and piece.terminal in family.end:
            self._end = len(self._written)
            if self._closed:
                return OVER, len(text)
            self._may_end = not self._tags.call_end
        self._written.append(
            text if piece.terminal or not self._ids else text.replace("<", _ESCAPE)
        )
        self._follow(piece, bare)
        if self._first is not None:
            self._first += text
            if not self._may_be_call(self._first):
                return BROKEN, len(text)
        return MORE, len(text)

    def _may_be_call(self, text: str) -> bool:
        """Whether text without a mark names a tool, so that other text need not wait."""
        begun = _patterns(self._tags).begin.match(text)
        if begun is None:
            return len(text) < 256 and "\n" not in text
        self._first = None
        return self._tools is None or begun[1].strip() in self._tools

    def _follow(self, piece: Piece, bare: str) -> None:
        tags = self._tags
        if not tags.call_end:
            if piece.terminal == tags.key_begin:
                self._closed, self._keyed = False, True
            elif bare and self._keyed:
                self._closed = piece.terminal == tags.value_end
            return
        written = ("" if self._space else self._tail) + piece.text
        stripped = written.rstrip()
        if stripped:
            self._tail = stripped[-len(tags.call_end) :]
        self._space = len(stripped) != len(written)
        self._closed = self._tail == tags.call_end

    def finish(self) -> bool:
        if self._may_end:
            return True
        self._end = len(self._written)
        return bool(self._tags.call_end) and self._closed

    def calls(self) -> list[FunctionCall]:
        text = "".join(self._written[: self._end])
        name, position = self._named(text)
        end = len(text.rstrip()) - len(self._tags.call_end)
        arguments, position = self._arguments(name, text, position, end)
        if text[position:end].strip():
            raise ValueError("text stands beside the arguments")
        return [FunctionCall(name, "{" + ", ".join(arguments) + "}")]

    def begun(self) -> list[FunctionCall]:
        text = "".join(self._written)
        name, position = self._named(text)
        if not self._tags.name_end and not self._keyed:
            raise ValueError("the name may go on")
        arguments, _ = self._arguments(name, text, position, len(text), cut=True)
        return [FunctionCall(name, "{" + ", ".join(arguments), ended=False)]

    def _named(self, text: str) -> tuple[str, int]:
        """The tool's name, and where its arguments begin. Raises ValueError."""
        begun = _patterns(self._tags).begin.match(text)
        if begun is None:
            raise ValueError("a call needs a name")
        return begun[1].strip(), begun.end()

    def _arguments(
        self, name: str, text: str, position: int, end: int, cut: bool = False
    ) -> tuple[list[str], int]:
        """The members of the arguments in a text up to `end`, and where they end.

        cut: only those behind which another one begins, since others may go on. Raises ValueError.
        """
        patterns = _patterns(self._tags)
        schema = (self._tools or {}).get(name, {})
        properties = schema.get("properties", {})
        arguments: dict[str, str] = {}
        while key := patterns.key.match(text, position, end):
            value_end = patterns.value_end.search(text, key.end(), end)
            if cut and (value_end is None or not patterns.key.match(text, value_end.end(), end)):
                break
            if value_end is None or key[1] in arguments:
                raise ValueError("an argument needs a name of its own, and a value")
            value = text[key.end() : value_end.start()]
            if self._tags.line_breaks:
                value = value.removeprefix("\n")
                if not value_end[0].startswith("\n"):
                    value = value.removesuffix("\n")
            if self._ids:
                value = value.replace(_ESCAPE, "<")
            of_key = properties.get(key[1]) if isinstance(properties, Mapping) else None
            arguments[key[1]] = argument_json(value, of_key, schema)
            position = value_end.end()
        written = [f"{json_text.written(key)}: {value}" for key, value in arguments.items()]
        return written, position


class _Patterns:
    """The regular expressions of a family's tags."""

    def __init__(self, tags: Tags) -> None:
        escape = re.escape
        key = escape(tags.key_begin)
        name_end = escape(tags.name_end) if tags.name_end else rf"(?={key}|\Z)"
        self.begin = re.compile(rf"\s*{escape(tags.call_begin)}([^<>\n]+?)\s*{name_end}")
        self.key = re.compile(
            rf"\s*{key}([^<>\n]+){escape(tags.key_end)}"
            + (rf"\s*{escape(tags.value_begin)}" if tags.value_begin else "")
        )
        ends = [rf"{escape(tags.value_end)}(?=\s*(?:{key}|\Z))", r"\Z"]
        if tags.line_breaks:
            ends.insert(1, rf"\n(?={key}[^<>\n]+{escape(tags.key_end)})")
        self.value_end = re.compile("|".join(ends))


_PATTERNS: dict[Tags, _Patterns] = {}


def _patterns(tags: Tags) -> _Patterns:
    if tags not in _PATTERNS:
        _PATTERNS[tags] = _Patterns(tags)
    return _PATTERNS[tags]


class _PythonBody:
    """Calls in brackets, where the family has no end that is needed, or one a line."""

    def __init__(self, family: CallFamily, marked: bool) -> None:
        self._family, self._marked = family, marked
        self._brackets = family.unmarked == "["
        self._scanner = python_calls.PythonScanner(goes_on=not self._brackets)
        self._written: list[str] = []
        self._first: str | None = ""  # until it shows that a call begins

    def push(self, piece: Piece) -> tuple[int, int]:
        text = piece.text
        if piece.terminal and not self._scanner.in_string:
            over = piece.terminal in self._family.end and self._marked
            return (OVER, len(text)) if over else (BROKEN, 0)
        if not self._brackets:
            self._scanner.feed(text)
        elif not self._scanner.done:
            taken = self._scanner.feed(text)
            if text[taken:].strip():
                return BROKEN, taken
        elif text.strip():
            return BROKEN, 0
        self._written.append(text)
        if self._first is not None:
            self._first += text
            if not self._may_be_call(self._first.lstrip()):
                return BROKEN, len(text)
        return MORE, len(text)

    def _may_be_call(self, text: str) -> bool:
        if not text:
            return True
        if self._brackets and text[0] != "[":
            return False
        name = text[1:] if self._brackets else text
        if len(name) > 256 or "(" in name:
            self._first = None
        return len(name) <= 256 and python_calls.may_begin(name)

    def finish(self) -> bool:
        return self._brackets and self._scanner.done

    def calls(self) -> list[FunctionCall]:
        return [FunctionCall(*call) for call in python_calls.read("".join(self._written))]

    def begun(self) -> list[FunctionCall]:
        whole, last = python_calls.begun("".join(self._written))
        calls = [FunctionCall(*call) for call in python_calls.read(whole)] if whole else []
        for name, arguments in python_calls.read(last) if last else ():
            calls.append(FunctionCall(name, arguments[:-1], ended=False))
        return calls


CallBody = _JsonBody | _NamedJsonBody | _TaggedBody | _PythonBody
"""One call, or a list of them, between a begin and an end.

`push`: whether it goes on, is over or is none, and how much of the piece belongs to it; `finish`:
whether the answer may end here; `calls` of one that is over. `begun`: those of one in which the
answer was cut, whole ones and one that has not ended, whose arguments begin those that it would
have had. Both raise ValueError where there are none.
"""


def body_of(family: CallFamily, tools: Tools | None, marked: bool, tags_are_ids: bool) -> CallBody:
    """A body that begins; marked: behind a begin, not where an answer begins without one."""
    match family.form:
        case "tagged":
            return _TaggedBody(family, tools, tags_are_ids, marked)
        case "python":
            return _PythonBody(family, marked)
        case "named_json":
            return _NamedJsonBody(family)
    return _JsonBody(family, marked)
