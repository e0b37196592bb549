"""The input of the Responses API as messages of a chat.

What the model said in one turn stands there in several items (reasoning, text, calls), and is one
message. Developers speak as the system does.
"""

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any

from tpdet.requests.body.problems import bad_request
from tpdet.requests.body.responses_tools import INPUT

Json = dict[str, Any]
_SEALED = "tpdet-1:"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text")
_STATELESS = {
    "item_reference": "answers are not stored: send the item itself",
    "compaction": "nothing is compacted here: send the items themselves",
}
_OWN = ("id", "status", "type")  # of any item, of no effect
_FIELDS = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "namespace", "async", "caller"),
    "function_call_output": ("call_id", "output", "name", "caller"),
    "custom_tool_call": ("call_id", "name", "input", "namespace", "async", "caller"),
    "custom_tool_call_output": ("call_id", "output", "name", "caller"),
    "reasoning": ("summary", "content", "encrypted_content"),
}


class Items:
    """Makes messages of items: `places` says where each begins, `calls` where its calls stand."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.calls: list[list[str]] = []
        self._messages: list[Json] = []
        self._where = "instructions"
        self._open: Json | None = None  # the assistant's message that more items may belong to
        self._said: list[str] = []  # texts of that one
        self._thoughts: list[str] = []  # its reasoning
        self._last = ""  # type of the item before

    def messages(self, instructions: str | None, items: Any) -> list[Json]:
        """The messages of a body. Raises ApiError naming the item and the field."""
        if instructions is not None:
            self._append({"role": "system", "content": instructions})
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list) or not items:
            raise bad_request("input must be text, or a list of one item or more", "input")
        for index, item in enumerate(items):
            self._where = f"input[{index}]"
            self._add(self._where, item)
        self._close()
        if not self._messages:
            raise bad_request("input has no text: send a message of the user's", "input")
        return self._messages

    def _add(self, where: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise bad_request(f"{where} must be an object with a type", where)
        item = {name: value for name, value in item.items() if value is not None}
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in _FIELDS:
            remedy = _STATELESS.get(str(kind), f"the types are {', '.join(_FIELDS)}")
            raise bad_request(
                f"{where}.type {kind!r:.60} is not supported: {remedy}", where, "not_supported"
            )
        for name in item:
            if name not in _FIELDS[kind] and name not in _OWN:
                known = ", ".join(_FIELDS[kind])
                raise bad_request(
                    f"{where} has the unknown field {name!r:.60}: those of {kind} are {known}",
                    where,
                    "unknown_field",
                )
        add: Callable[[str, Json], None] = getattr(self, f"_{kind}")
        add(where, item)
        self._last = kind

    def _message(self, where: str, item: Json) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_request(
                f"{where}.role is {role!r:.60}: use one of {', '.join(_ROLES)}", f"{where}.role"
            )
        content = _content(f"{where}.content", item.get("content"))
        if role != "assistant":
            self._append({"role": _ROLES[role], "content": content})
            return
        if self._open is None or self._last == "message":
            self._append({"role": "assistant"}, is_open=True)
        assert self._open is not None
        self._open["content"] = content
        self._said.append(_text(content))

    def _reasoning(self, where: str, item: Json) -> None:
        text = _thought(where, item)
        if not text:
            return
        self._assistant()
        self._thoughts.append(text)

    def _function_call(self, where: str, item: Json) -> None:
        self._call(where, item, _of_text(where, item, "arguments"))

    def _custom_tool_call(self, where: str, item: Json) -> None:
        said = {INPUT: _of_text(where, item, "input")}
        self._call(where, item, json.dumps(said, ensure_ascii=False))

    def _call(self, where: str, item: Json, arguments: str) -> None:
        name = _of_text(where, item, "name")
        space = _of_text(where, item, "namespace") if "namespace" in item else ""
        function = {"name": f"{space}__{name}" if space else name, "arguments": arguments}
        call = {"id": _of_text(where, item, "call_id"), "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)
        self.calls[-1].append(where)

    def _function_call_output(self, where: str, item: Json) -> None:
        content = _content(f"{where}.output", item.get("output"))
        called = _of_text(where, item, "call_id")
        self._append({"role": "tool", "tool_call_id": called, "content": content})

    _custom_tool_call_output = _function_call_output

    def _assistant(self) -> Json:
        """The assistant's present message."""
        if self._open is None:
            self._append({"role": "assistant"}, is_open=True)
        assert self._open is not None
        return self._open

    def _close(self) -> None:
        """End the assistant's open message: its texts are one, and so is its reasoning."""
        message = self._open
        if message is None:
            return
        if len(self._said) > 1:
            message["content"] = "".join(self._said)
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if "tool_calls" not in message:
            message.setdefault("content", "")  # it was cut off while it reasoned
        self._said, self._thoughts, self._open = [], [], None

    def _append(self, message: Json, is_open: bool = False) -> None:
        self._close()
        self._messages.append(message)
        self.places.append(self._where)
        self.calls.append([])
        self._open = message if is_open else None


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`, for clients that send no other back: it is no secret."""
    return _SEALED + base64.b64encode(text.encode()).decode("ascii")


def _unsealed(content: str) -> str | None:
    """The reasoning in `encrypted_content`; None in that of another server."""
    if not content.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _thought(where: str, item: Json) -> str:
    """The text of a reasoning item: its content, what it was sealed as, or its summary."""
    if item.get("content"):
        return _joined(f"{where}.content", item["content"], ("reasoning_text",))
    sealed_text = item.get("encrypted_content")
    if isinstance(sealed_text, str) and (text := _unsealed(sealed_text)) is not None:
        return text
    return _joined(f"{where}.summary", item.get("summary") or [], ("summary_text",), "\n\n")


def _content(where: str, value: Any) -> str | list[Json]:
    """Text, or the text parts of a message or a result."""
    if isinstance(value, str):
        return value
    texts = _texts(where, value, _TEXTS)
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] if texts else ""


def _joined(where: str, parts: Any, kinds: tuple[str, ...], between: str = "") -> str:
    return between.join(_texts(where, parts, kinds))


def _texts(where: str, parts: Any, kinds: tuple[str, ...]) -> list[str]:
    """The texts of parts, each of one of these types. Raises ApiError naming the part."""
    if not isinstance(parts, list):
        raise bad_request(f"{where} must be text, or a list of parts of it", where)
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise bad_request(
                f"{where}[{index}] is of type {kind!r:.60}: only text is served, send "
                f"{' or '.join(kinds)}",
                f"{where}[{index}]",
                "not_supported",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise bad_request(f"{where}[{index}].text must be text", f"{where}[{index}].text")
        texts.append(text)
    return texts


def _text(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _of_text(where: str, item: Json, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be text", f"{where}.{name}")
    return value
