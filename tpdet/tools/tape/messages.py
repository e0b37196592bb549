"""Answers of `/v1/messages` on a tape: the message of a stream, and the stream of a message."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tpdet.checkpoint.model_config.json_file import json_object
from tpdet.text.parsing.json_text import closed_object
from tpdet.tools.tape.tape_file import Json

_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
_ENDING = ("stop_reason", "stop_sequence", "stop_details", "container")


def message_of(events: Iterable[Json]) -> Json:
    """The message of a stream's events; a call that was cut has the arguments so far."""
    message: Json = {}
    blocks: dict[Any, Json] = {}
    arguments: dict[Any, str] = {}
    for event in events:
        index = event.get("index")
        match event:
            case {"type": "message_start", "message": dict(begun)}:
                message = {**begun}
            case {"type": "content_block_start", "content_block": dict(block)}:
                blocks[index] = {**block}
            case {"type": "content_block_delta", "delta": {"partial_json": str(text)}}:
                arguments[index] = arguments.get(index, "") + text
            case {"type": "content_block_delta", "delta": {"type": str(kind), **delta}}:
                name = _PIECES.get(kind, "")
                block, piece = blocks.setdefault(index, {}), delta.get(name)
                if isinstance(piece, str):
                    block[name] = str(block.get(name) or "") + piece
            case {"type": "message_delta", "delta": dict(ending), **others}:
                usage = {**(message.get("usage") or {}), **(others.pop("usage", None) or {})}
                message |= {**ending, **others, "usage": usage}
    for index, text in arguments.items():
        blocks.setdefault(index, {})["input"] = json_object(closed_object(text)) or {}
    return message | {"content": [*blocks.values()]}


def events_of(message: Json) -> Iterator[Json]:
    """The events of a stream that add up to a message: each block comes in one piece."""
    ending = {name: message[name] for name in _ENDING if name in message}
    begun = {**message, **dict.fromkeys(ending), "content": []}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        names = {kind: name for kind, name in _PIECES.items() if isinstance(block.get(name), str)}
        empty = {**block, **dict.fromkeys(names.values(), "")}
        deltas = [{"type": kind, name: block[name]} for kind, name in names.items()]
        if "input" in block:
            empty["input"] = {}
            written = json.dumps(block["input"], ensure_ascii=False)
            deltas.append({"type": "input_json_delta", "partial_json": written})
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ending, "usage": message.get("usage") or {}}
    yield {"type": "message_stop"}


def texts_in(message: Json) -> Iterator[str]:
    """What a message says, in its order."""
    for block in message["content"]:
        for name in ("thinking", "text", "name"):
            if isinstance(block.get(name), str):
                yield block[name]
        if isinstance(block.get("input"), dict):
            yield json.dumps(block["input"], ensure_ascii=False)


def is_message(answer: Json) -> bool:
    """Whether an answer is a message of blocks."""
    content = answer.get("content")
    blocks = isinstance(content, list) and all(isinstance(block, dict) for block in content)
    return answer.get("type") == "message" and blocks
