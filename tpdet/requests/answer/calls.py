"""Calls of tools in messages and in the deltas of a stream, as OpenAI's API has them."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tpdet.requests.shown_ids import ShownIds
from tpdet.requests.tools import ToolUse
from tpdet.text.outputs import TextDelta
from tpdet.text.parsing import events

Json = dict[str, Any]


def ending_of(
    reason: str | None, stop_reason: str | int | None, called: bool, use: ToolUse | None
) -> str | None:
    """The finish reason of a choice; `called`: it has calls.

    "tool_calls" where the model ended it by itself; "stop" also where the one tool was named.
    """
    if use is None or use.named or not called or reason != "stop" or stop_reason is not None:
        return reason
    return "tool_calls"


def whole_calls(calls: tuple[events.FunctionCall, ...], ids: ShownIds, choice: int) -> list[Json]:
    """`tool_calls` of a message."""
    return [
        {
            "id": call.id or ids.call(choice, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def call_piece(event: events.Event, ids: ShownIds, choice: int) -> Json | None:
    """What an event adds to `tool_calls` of a delta; None for an event of no call."""
    match event:
        case events.CallBegun(index, name, written):
            return {
                "index": index,
                "id": written or ids.call(choice, index),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        case events.CallArguments(index, text):
            return {"index": index, "function": {"arguments": text}}
    return None


def parts_of(delta: TextDelta) -> Iterator[TextDelta]:
    """A token's deltas that say one thing each, its ids in the first; an end says nothing else."""
    reason, stop = delta.finish_reason, delta.stop_reason
    rest = msgspec.structs.replace(
        delta, text="", reasoning="", events=(), finish_reason=None, stop_reason=None
    )
    without = msgspec.structs.replace(rest, token_ids=(), logprobs=(), cached_tokens=0)
    for event in delta.said:
        match event:
            case events.ContentText(text):
                yield msgspec.structs.replace(rest, text=text)
            case events.ReasoningText(text):
                yield msgspec.structs.replace(rest, reasoning=text)
            case events.CallBegun() | events.CallArguments():
                yield msgspec.structs.replace(rest, events=(event,))
            case _:
                continue
        rest = without
    if reason is not None or rest is not without:
        yield msgspec.structs.replace(rest, finish_reason=reason, stop_reason=stop)
