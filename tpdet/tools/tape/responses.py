"""Answers of `/v1/responses` on a tape: the response of a stream, and the stream of a response."""

from collections.abc import Iterator, Sequence
from typing import Any

from tpdet.tools.tape.tape_file import Json

_TEXTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}
_SAID = {
    "arguments": "response.function_call_arguments",
    "input": "response.custom_tool_call_input",
}


_GROWN = {f"{name}.delta": kind for kind, name in _TEXTS.items()}
_SPOKEN = {f"{name}.delta": field for field, name in _SAID.items()}
"""What an event adds to: the type of an item's text, the field of a call."""


def response_of(events: Sequence[Json]) -> Json | None:
    """The response that a stream ended with, or that it had come to; None for other streams."""
    shown = [event["response"] for event in events if isinstance(event.get("response"), dict)]
    if not shown or not is_response(shown[-1]):
        return None
    if events[-1].get("response") is shown[-1]:
        return shown[-1]
    items: dict[int, Json] = {}
    for event in events:
        match event:
            case {"output_index": int(index), "item": dict(item)}:
                items[index] = {**item}
            case {"output_index": int(index), "type": str(kind), "delta": str(text)}:
                _add(items.setdefault(index, {}), kind, text)
    return {**shown[-1], "output": [*items.values()]}


def _add(item: Json, kind: str, text: str) -> None:
    """Add a piece of text to an item, by the type of its event."""
    if kind in _GROWN:
        before = "".join(part["text"] for part in _parts(item))
        item["content"] = [{"type": _GROWN[kind], "text": before + text}]
    elif kind in _SPOKEN:
        item[_SPOKEN[kind]] = str(item.get(_SPOKEN[kind], "")) + text


def events_of(response: Json) -> Iterator[Json]:
    """The events of a stream that ends with a response: each text comes in one piece."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        events += _events_of_item(item, {"output_index": index})
    status = response.get("status", "completed")
    events.append({"type": f"response.{status}", "response": response})
    for number, event in enumerate(events):
        yield {"sequence_number": number, **event}


def texts_in(response: Json) -> Iterator[str]:
    """What a response says, in its order."""
    for item in response["output"]:
        for part in _parts(item):
            yield part["text"]
        for name in ("name", *_SAID):
            if isinstance(item.get(name), str):
                yield item[name]


def is_response(answer: Json) -> bool:
    """Whether an answer is a response of items."""
    output = answer.get("output")
    items = isinstance(output, list) and all(isinstance(item, dict) for item in output)
    return answer.get("object") == "response" and items


def _events_of_item(item: Json, where: Json) -> list[Json]:
    said = [name for name in _SAID if isinstance(item.get(name), str)]
    empty = {**item, "status": "in_progress", **dict.fromkeys(said, "")}
    empty |= {"content": []} if "content" in item else {}
    events: list[Json] = [{"type": "response.output_item.added", **where, "item": empty}]
    where = {**where, "item_id": item.get("id")}
    for index, part in enumerate(_parts(item)):
        text, name, part_place = (
            part["text"],
            _TEXTS[part["type"]],
            {**where, "content_index": index},
        )
        scores: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        added, done = "response.content_part.added", "response.content_part.done"
        events += [
            {"type": added, **part_place, "part": {**part, "text": ""}},
            {"type": f"{name}.delta", **part_place, "delta": text, **scores},
            {"type": f"{name}.done", **part_place, "text": text, **scores},
            {"type": done, **part_place, "part": part},
        ]
    for name in said:
        events += [
            {"type": f"{_SAID[name]}.delta", **where, "delta": item[name]},
            {"type": f"{_SAID[name]}.done", **where, name: item[name]},
        ]
    return [*events, {"type": "response.output_item.done", **where, "item": item}]


def _parts(item: Json) -> list[Json]:
    """The texts of an item."""
    content: Any = item.get("content")
    parts = content if isinstance(content, list) else []
    return [
        part
        for part in parts
        if isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part["text"], str)
    ]
