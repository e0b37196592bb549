"""Checks the messages of a conversation, and brings them into the form that chat templates expect.

The arguments of a tool call reach the template as an object, as in transformers and vLLM, also if
the client sent them as JSON text, as OpenAI's clients do. As in transformers, what is null is left
out: an assistant's message that only calls tools has no content.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tpdet.errors import RequestError

RENDERED = ("messages", "tools", "documents", "chat_template", "add_generation_prompt",
            "continue_final_message", "tokenize", "strftime_now")  # fmt: skip
"""Names in a template, or of transformers' arguments, that `chat_template_kwargs` cannot give."""

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_ARGUMENTS_DEPTH = 32
_TYPES = frozenset("function object string number integer boolean array null".split())
_TEXT_FIELDS = ("content", "name", "tool_call_id", "reasoning_content")

Message = dict[str, Any]
"""`role`, some of _TEXT_FIELDS (text), and `tool_calls`: [{id, type, function: {name, arguments}}]
where `arguments` is an object. `content` may be absent only beside tool calls, and a list of parts,
[{type: text, text}]."""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in a template's form. Raises RequestError naming the message and the field."""
    if not messages:
        raise RequestError("messages is empty: give at least one message", "messages")
    return [_check_message(f"messages[{index}]", m) for index, m in enumerate(messages)]


def check_variables(given: object, named_tokens: Mapping[str, str]) -> dict[str, Any]:
    """A copy of `chat_template_kwargs`, JSON values by name. Raises RequestError naming one."""
    place = "chat_template_kwargs"
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise RequestError(f"{place} must be an object, not {str(given)[:40]!r}", place)
    for name in given:
        if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
            raise RequestError(f"{place} has {str(name)[:40]!r}: a variable is a word", place)
        if name in RENDERED or name in named_tokens:
            raise RequestError(f"{place} has {name!r}, which is not for a request to set", place)
    found: dict[str, Any] = _check_json(place, given, 0)
    return found


def texts_in(value: Any) -> list[str]:
    """Every text in a JSON value, also the names in its objects."""
    return _taken(partial(_changed, value))


def refuse_other_parts(place: str, content: object) -> None:
    """Refuse (RequestError) a part of a message that is an image or anything else but text.

    content: of one message; `place` names it in messages. What is no list is left to the caller.
    """
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise RequestError(
                f'{place}[{index}] has no type: send it as {{"type": "text", "text": ...}}',
                f"{place}[{index}]",
            )
        if kind != "text":
            raise RequestError(
                f"{place}[{index}] is of type {kind[:40]!r}: only the text part of a model is "
                "served, send parts of type 'text'",
                f"{place}[{index}]",
            )
        if not isinstance(part.get("text"), str):
            found = f"{part['text']!r:.40} and must be text" if "text" in part else "missing"
            raise RequestError(f"{place}[{index}].text is {found}", f"{place}[{index}].text")


def texts_of(messages: Sequence[Message]) -> list[str]:
    """Every text that the client wrote, including the arguments of tool calls."""
    return _taken(partial(each_text, messages))


def _taken(change: Callable[[Callable[[str], str]], object]) -> list[str]:
    """The texts that a change of all is asked for."""
    found: list[str] = []

    def take(text: str) -> str:
        found.append(text)
        return text

    change(take)
    return found


def as_templates_read(messages: Sequence[Message]) -> list[Message]:
    """The messages with their reasoning under its other names: gpt-oss reads `thinking`."""
    return [
        dict.fromkeys(("thinking", "reasoning"), message["reasoning_content"]) | message
        if "reasoning_content" in message
        else message
        for message in messages
    ]


def parts_of(message: Message) -> list[Message]:
    """The content of a message as text parts."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def each_text(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    """The messages with `change` applied to every text of the client, not to roles and types."""
    return [_changed_message(message, change) for message in messages]


def changed_tool(
    tool: Mapping[str, Any], change: Callable[[str], str], change_key: Callable[[str], str]
) -> dict[str, Any]:
    """A tool's declaration with its texts changed, but for the names of types."""
    changed: dict[str, Any] = _changed(
        tool, lambda text: text if text in _TYPES else change(text), change_key
    )
    return changed


def _check_message(place: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} must be an object with role and content", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{place}.role is {role!r}: use one of {', '.join(ROLES)}", f"{place}.role"
        )
    checked: Message = {"role": role}
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise RequestError(
            f"{place} has tool_calls, its role is {role}: only an assistant calls tools",
            f"{place}.tool_calls",
        )
    for field, value in message.items():
        if field == "role" or (value is None and (field != "content" or calls)):
            continue
        if field == "tool_calls":
            found = _check_calls(f"{place}.tool_calls", value)
            checked |= {"tool_calls": found} if found else {}
            continue
        if field == "reasoning":  # vLLM's newer name
            field = "reasoning_content"
            if message.get(field) not in (None, value):
                raise RequestError(
                    f"{place} has reasoning and another reasoning_content: send one of the two",
                    f"{place}.reasoning",
                )
        if field not in _TEXT_FIELDS:
            raise RequestError(f"{place}.{field} is not supported", f"{place}.{field}")
        if field == "content":
            refuse_other_parts(f"{place}.content", value)
            value = _checked_parts(f"{place}.content", value)
        elif not isinstance(value, str):
            raise RequestError(f"{place}.{field} must be text", f"{place}.{field}")
        checked[field] = value
    if "content" not in checked and not calls:
        raise RequestError(f"{place}.content is missing", f"{place}.content")
    return checked


def _check_calls(place: str, calls: object) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{place} must be a list", place)
    return [_check_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _check_call(place: str, call: object) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{place} must be an object with function: {{name, arguments}}", place)
    for field, value in (("name", function.get("name")), ("id", call.get("id", ""))):
        if not isinstance(value, str):
            raise RequestError(f"{place}: {field} must be text", place)
    if call.get("type", "function") != "function":
        raise RequestError(f"{place}: type is {call['type']!r}: use function", place)
    arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
    named = {"id": call["id"]} if "id" in call else {}
    return {
        **named,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _arguments(place: str, value: object) -> dict[str, Any]:
    """The arguments as an object, parsed if they are JSON text; {} if there are none."""
    try:
        found = json.loads(value, parse_constant=_no_constant) if isinstance(value, str) else value
    except ValueError as error:
        if not value:
            return {}
        raise RequestError(f"{place} are not JSON: {error}", place) from None
    except RecursionError:
        raise _too_deep(place) from None
    found = {} if found is None else found
    if not isinstance(found, Mapping):
        raise RequestError(f"{place} must be a JSON object, or one as text", place)
    return dict(_check_json(place, found, 0))


def _check_json(place: str, value: Any, depth: int) -> Any:
    if depth > MAX_ARGUMENTS_DEPTH:
        raise _too_deep(place)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{place} must have texts as keys", place)
        for key in value:
            _check_text(place, key)
        return {key: _check_json(place, inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_check_json(place, inner, depth + 1) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{place} must hold finite numbers, not {value}", place)
    if isinstance(value, str):
        _check_text(place, value)
    elif value is not None and not isinstance(value, bool | int | float):
        raise RequestError(f"{place} cannot hold a {type(value).__name__}", place)
    return value


def _check_text(place: str, text: str) -> None:
    """Refuse (RequestError) half of a surrogate pair: JSON can spell it, and it is no Unicode."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"{place} hold a lone surrogate (U+{code:04X}), which is no character: leave it out",
            place,
        ) from None


def _too_deep(place: str) -> RequestError:
    return RequestError(f"{place} are nested deeper than {MAX_ARGUMENTS_DEPTH} levels", place)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _checked_parts(place: str, content: object) -> str | list[Message]:
    """A content that is text or a list of text parts, with nothing else in these."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{place} must be text", place)
    return [{"type": "text", "text": text} for text in texts]


def _changed_message(message: Message, change: Callable[[str], str]) -> Message:
    changed = dict(message)
    for field in _TEXT_FIELDS:
        if isinstance(message.get(field), str):
            changed[field] = change(message[field])
        elif field in message:
            changed[field] = [{**part, "text": change(part["text"])} for part in message[field]]
    if "tool_calls" in message:
        changed["tool_calls"] = [_changed_call(call, change) for call in message["tool_calls"]]
    return changed


def _changed_call(call: Message, change: Callable[[str], str]) -> Message:
    function = call["function"]
    changed = {
        "name": change(function["name"]),
        "arguments": _changed(function["arguments"], change),
    }
    named = {"id": change(call["id"])} if "id" in call else {}
    return {**call, **named, "function": changed}


def _changed(
    value: Any, change: Callable[[str], str], change_key: Callable[[str], str] | None = None
) -> Any:
    """A JSON value with its texts changed; change_key: the names in its objects, None as others."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_changed(inner, change, change_key) for inner in value]
    if isinstance(value, Mapping):
        name = change_key or change
        return {name(key): _changed(inner, change, change_key) for key, inner in value.items()}
    return value
