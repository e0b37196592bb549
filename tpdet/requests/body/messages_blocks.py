"""Messages of Anthropic's Messages API, made of content blocks, as messages of a chat.

A user's message holds text and the results of tools, which are messages of their own in a chat. An
assistant's holds text, reasoning and calls, which are one. Turns of one role that follow each other
are one turn.
"""

import re
from typing import Any

from tpdet.requests.body.problems import bad_request

Json = dict[str, Any]
BILLING = "x-anthropic-billing-header"
"""What the first words of a block are that tells who pays: no model reads it."""
_TAKEN = frozenset("type cache_control citations caller toolset_name".split())
"""Fields of a block that change no answer."""
_FIELDS: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str, "signature": str},
    "redacted_thinking": {"data": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content": object, "is_error": bool},
    "tool_reference": {"tool_name": str},
    "tool_addition": {"tool": dict},
    "tool_removal": {"tool": dict},
}
"""The fields of blocks, by their type, and what stands in them."""
_OPTIONAL = ("content", "is_error", "signature", "data")
_NOUNS: dict[type, str] = {str: "text", dict: "an object", bool: "true or false"}
_CHANGES = ("tool_addition", "tool_removal")
_OF_ROLE: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", *_CHANGES),
}
_FAILED = "Error"  # the result of a tool that failed and said nothing
_MESSAGE = re.compile(r"messages\[(\d{1,9})\]((?:\.\w+(?:\[\d+\])*)*)")
_NAMES = {"tool_call_id": "tool_use_id", "reasoning_content": "thinking"}


class Conversation:
    """A chat's messages, the client's `places` of each, and the types of blocks `dropped`."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.places: list[str] = []
        self.dropped: dict[str, None] = {}

    def read(self, system: Any, messages: Any) -> None:
        """Add the messages of a body. Raises ApiError naming the block and the field."""
        if system is not None:
            self._system("system", system)
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages must be a list of one message or more", "messages")
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            role = message.get("role") if isinstance(message, dict) else None
            if not isinstance(role, str) or role not in _OF_ROLE:
                raise bad_request(
                    f"{where}.role is {role!r:.60}: use one of {', '.join(_OF_ROLE)}",
                    f"{where}.role",
                )
            _check_fields(where, message, ("role", "content"), "a message")
            if role == "system":
                self._system(f"{where}.content", message.get("content"))
            elif role == "user":
                self._user(where, message)
            else:
                self._assistant(where, message)
        for message in self.messages:
            _finish(message)

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the answer goes on with the last message."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and "tool_calls" not in last

    def by_its_names(self, text: str) -> str:
        """A text about messages of the chat, as the client knows them."""

        def named(match: re.Match[str]) -> str:
            number = int(match[1])
            if number >= len(self.places):
                return match[0]
            where = self.places[number]
            field = match[2].rpartition(".")[2].partition("[")[0]
            if field in ("", "content", "tool_calls"):
                return where
            return f"{where}.{_NAMES.get(field, field)}"

        return _MESSAGE.sub(named, text)

    def _system(self, where: str, content: Any) -> None:
        texts = []
        for _, block in self._blocks(where, content, "system"):
            if block["type"] in _CHANGES:
                self.dropped[block["type"]] = None
            elif isinstance(content, str) or not block["text"].startswith(BILLING):
                texts.append(block["text"])
        if texts:
            self._append(where, {"role": "system", "content": texts})

    def _user(self, where: str, message: Json) -> None:
        before = len(self.messages)
        is_open = bool(self.messages) and self.messages[-1]["role"] == "user"
        for name, block in self._blocks(f"{where}.content", message.get("content"), "user"):
            if block["type"] == "tool_result":
                self._append(name, self._result(name, block))
                is_open = False
                continue
            if not is_open:
                self._append(where, {"role": "user", "content": []})
                is_open = True
            self.messages[-1]["content"].append(block["text"])
        if len(self.messages) == before and not is_open:
            self._append(where, {"role": "user", "content": []})

    def _assistant(self, where: str, message: Json) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._append(where, {"role": "assistant", "content": []})
        said = self.messages[-1]
        for _, block in self._blocks(f"{where}.content", message.get("content"), "assistant"):
            if block["type"] == "text":
                said["content"].append(block["text"])
            elif block["type"] == "thinking":
                said.setdefault("reasoning_content", []).append(block["thinking"])
            elif block["type"] == "tool_use":
                said.setdefault("tool_calls", []).append(_call(block))

    def _result(self, where: str, block: Json) -> Json:
        """A tool's result; what is referred to is named."""
        texts = [
            inner["text"] if inner["type"] == "text" else inner["tool_name"]
            for _, inner in self._blocks(f"{where}.content", block.get("content") or "", "result")
        ]
        failed = bool(block.get("is_error")) and not any(texts)
        content = [_FAILED] if failed else texts
        return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}

    def _append(self, where: str, message: Json) -> None:
        self.messages.append(message)
        self.places.append(where)

    def _blocks(self, where: str, content: Any, role: str) -> list[tuple[str, Json]]:
        """The blocks of a content with their places; a text is one block.

        Raises ApiError for one that no role's message has here.
        """
        if isinstance(content, str):
            return [(where, {"type": "text", "text": content})]
        if not isinstance(content, list):
            raise bad_request(f"{where} must be text, or a list of blocks", where)
        kinds = _OF_ROLE.get(role, ("text", "tool_reference"))
        return [
            (f"{where}[{index}]", _checked(f"{where}[{index}]", block, kinds))
            for index, block in enumerate(content)
        ]


def _checked(where: str, block: Any, kinds: tuple[str, ...]) -> Json:
    """A block of one of these types, its fields known and of their types. Raises ApiError."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise bad_request(f"{where} must be an object with a type, such as text", where)
    if kind not in kinds:
        why = "text is the only kind of content" if kind not in _FIELDS else "not here"
        raise bad_request(
            f"{where} is of type {kind!r:.60}, which is not supported ({why}): send blocks of the "
            f"types {', '.join(kinds)}",
            where,
            "not_supported",
        )
    _check_fields(where, block, (*_FIELDS[kind],), kind)
    for name, expected in _FIELDS[kind].items():
        value = block.get(name)
        if value is None and name not in _OPTIONAL:
            raise bad_request(f"{where}.{name} is missing", f"{where}.{name}")
        if value is not None and not isinstance(value, expected):
            raise bad_request(f"{where}.{name} must be {_NOUNS[expected]}", f"{where}.{name}")
    return block


def _check_fields(where: str, value: Json, fields: tuple[str, ...], noun: str) -> None:
    for name in value:
        if name not in fields and name not in _TAKEN:
            raise bad_request(
                f"{where} has the unknown field {name!r:.60}: those of {noun} are "
                f"{', '.join(fields)}",
                where,
                "unknown_field",
            )


def _finish(message: Json) -> None:
    """Make the texts of a message its content: one text of an assistant's, else a part of each."""
    texts = message["content"]
    if message["role"] == "assistant":
        thought = "".join(message.pop("reasoning_content", ()))
        message |= {"reasoning_content": thought} if thought else {}
        message["content"] = "".join(texts) or (None if "tool_calls" in message else "")
    elif len(texts) < 2:
        message["content"] = "".join(texts)
    else:
        message["content"] = [{"type": "text", "text": text} for text in texts]


def _call(block: Json) -> Json:
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}
