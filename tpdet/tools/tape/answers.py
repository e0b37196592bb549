"""An answer of a tape as one JSON object, and one that was edited as the bytes of an answer.

A stream's object is what its whole answer would be: `delta` is `message`, pieces are joined.
"""

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tpdet.checkpoint.model_config.json_file import json_object
from tpdet.errors import UsageError
from tpdet.tools.tape import messages, responses
from tpdet.tools.tape.tape_file import DONE, Json, Turn, bytes_of

EDITED = {"edited": True}
"""What stands under `tpdet` in an answer that no model gave."""

_PIECES = frozenset({"content", "reasoning", "reasoning_content", "text", "arguments"})
_TEXTS = (*sorted(_PIECES), "name")
_NUMBERED = frozenset({"choices", "tool_calls"})
_CHUNK = ".chunk"


def shown_answer(turn: Turn) -> Json | None:
    """The answer that the client got, as one object; None for one that is no JSON."""
    data = bytes_of(turn.answer)
    if not turn.event_stream:
        return json_object(data)
    events = [*_events(data)]
    for event in events:
        if "error" in event:
            return event
    if events and events[0].get("type") == "message_start":
        return messages.message_of(events)
    if (response := responses.response_of(events)) is not None:
        return response
    whole: Json = {}
    for event in events:
        _join(whole, event)
    for choice in _objects(whole.get("choices")):
        if isinstance(choice.get("delta"), dict):
            choice["message"] = message = choice.pop("delta")
            if message.get("tool_calls"):
                message["content"] = message.get("content") or None  # as whole answers have it
            for call in _objects(message.get("tool_calls")):
                call.pop("index", None)
    if "object" in whole:
        whole["object"] = str(whole["object"]).removesuffix(_CHUNK)
    return whole or None


def texts_of(answer: Json) -> str:
    """All that an answer says, in its order: a guess of what a model says to the same request."""
    if (form := _form_of(answer)) is not None:
        return "".join(form.texts_in(answer))
    return "".join(_texts(answer.get("choices")))


def read_edited(data: bytes, name: str) -> Json:
    """An edited answer: the object that `tape show --turn` prints. Raises UsageError."""
    answer = json_object(data)
    if answer is not None and _form_of(answer) is not None:
        return answer
    choices = None if answer is None else answer.get("choices")
    if answer is None or not isinstance(choices, list) or not choices:
        raise UsageError(
            f"{name} is no answer with choices, no message and no response: edit what tpdet tape "
            "show TAPE --turn K prints"
        )
    for index, choice in enumerate(choices):
        shown = isinstance(choice, dict) and (choice.get("message"), choice.get("text"))
        if not shown or not (isinstance(shown[0], dict) or isinstance(shown[1], str)):
            raise UsageError(f"{name}: choices[{index}] has neither a message nor a text")
    return answer


def edited_bytes(answer: Json, body: Json) -> tuple[bool, bytes]:
    """Whether a request asks for a stream, and the edited answer as it asks for it.

    It names no fingerprint, seed or digest: no model gave it.
    """
    answer = {**answer, "tpdet": EDITED}
    answer |= {} if messages.is_message(answer) else {"system_fingerprint": None}
    if not body.get("stream"):
        return False, _json(answer)
    if (form := _form_of(answer)) is not None:
        written = [
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _json(event))
            for event in form.events_of(answer)
        ]
        return True, b"".join([*written, b"" if form is messages else DONE])
    usage = answer.pop("usage", None)
    events = [*_chunks(answer)]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append({**answer, "object": events[0]["object"], "choices": [], "usage": usage})
    return True, b"".join(b"data: " + _json(event) + b"\n\n" for event in events) + DONE


def _form_of(answer: Json) -> ModuleType | None:
    """What reads and writes an answer of another form than a chat's."""
    if messages.is_message(answer):
        return messages
    return responses if responses.is_response(answer) else None


def _chunks(answer: Json) -> Iterator[Json]:
    """Two events for each choice: all that it says, then how it ended."""
    for number, choice in enumerate(answer["choices"]):
        index = choice.get("index", number)
        said: Json = {"text": choice.get("text")}
        ended: Json = {"text": ""}
        kind = answer.get("object")
        if isinstance(choice.get("message"), dict):
            said, ended, kind = (
                {"delta": _delta(choice["message"])},
                {"delta": {}},
                f"{kind}{_CHUNK}",
            )
        reason = {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
        for part in (said | {"finish_reason": None}, ended | reason):
            yield {**answer, "object": kind, "choices": [{"index": index, **part}]}


def _delta(message: Json) -> Json:
    """A message as one piece of a stream, in which calls are numbered."""
    calls = _objects(message.get("tool_calls"))
    if not calls:
        return message
    numbered = [{**call, "index": index} for index, call in enumerate(calls)]
    return {**message, "tool_calls": numbered}


def _objects(value: Any) -> list[Json]:
    """The objects in a list; of a stream that no tpdet wrote, anything may stand there."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _events(data: bytes) -> Iterator[Json]:
    """The objects of a stream; an event that is none is left out."""
    for line in data.split(b"\n"):
        if line.startswith(b"data:") and (event := json_object(line[5:].strip())) is not None:
            yield event


def _join(whole: Json, piece: Json) -> None:
    """Add an event to those before it."""
    for key, value in piece.items():
        before = whole.get(key)
        if isinstance(value, dict):
            whole[key] = before if isinstance(before, dict) else {}
            _join(whole[key], value)
        elif isinstance(value, list):
            whole[key] = before if isinstance(before, list) else []
            _join_lists(whole[key], value, key in _NUMBERED)
        elif isinstance(value, str) and isinstance(before, str) and key in _PIECES:
            whole[key] = before + value
        elif value is not None or before is None:
            whole[key] = value


def _join_lists(whole: list[Any], pieces: list[Any], numbered: bool) -> None:
    """Add elements behind the others; numbered: to those that have the same index."""
    for piece in pieces:
        if not numbered or not isinstance(piece, dict):
            whole.append(piece)
            continue
        index = piece.get("index")
        one = next((each for each in _objects(whole) if each.get("index") == index), None)
        if one is None:
            whole.append(one := {})
        _join(one, piece)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key in sorted(value, key=lambda key: (key not in _TEXTS, key)):
            inner = value[key]
            if key in _TEXTS and isinstance(inner, str) and key != "reasoning_content":
                yield inner
            elif isinstance(inner, dict | list) and key != "logprobs":
                yield from _texts(inner)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _json(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
