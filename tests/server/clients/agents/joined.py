"""Whole answers, of the events that a stream has of them, as clients add them up."""

import json

from tests.server.clients.agents.requests import PATHS, Json
from tpdet.tools.tape.messages import message_of
from tpdet.tools.tape.responses import response_of

TEXTS = ("content", "reasoning", "reasoning_content")
LISTS = ("token_ids", "logprob_bits")


def joined(route: str, text: str) -> Json:
    """The whole answer that a stream of a route is of."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    if route == PATHS[2]:
        return message_of(json.loads(line[6:]) for line in lines)
    *data, done = lines
    assert done == "data: [DONE]", done
    events = [json.loads(line[6:]) for line in data]
    if route == PATHS[0]:
        return _chat_of(events)
    last = events[-1]["response"]
    added = response_of([event for event in events if event.get("response") is not last])
    assert added is not None and added["output"] == last["output"]
    return last


def plain(answer: Json) -> Json:
    """An answer whose messages lack what they say nothing in: streams of chats have no nulls."""
    choices = [
        {**choice, "message": {k: v for k, v in choice["message"].items() if v}}
        for choice in answer.get("choices", ())
    ]
    return {**answer, "choices": choices} if choices else answer


def _chat_of(events: list[Json]) -> Json:
    answer, choices = {**events[-1], "object": "chat.completion", "choices": []}, {}
    for event in events:
        for key in event.keys() - {"choices", "usage", "tpdet", "object", "created"}:
            assert event[key] == answer[key], key
        answer["tpdet"] = answer.get("tpdet", {}) | event.get("tpdet", {})
        for piece in event["choices"]:
            _add(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
    answer["choices"] = [choices[index] for index in sorted(choices)]
    # Of a chat's one prompt: a whole answer has it beside its choices too.
    return {**answer, "prompt_token_ids": answer["choices"][0]["prompt_token_ids"]}


def _add(choice: Json, piece: Json) -> None:
    """Add a piece of a stream to a choice."""
    message = choice.setdefault("message", {})
    for key, value in piece.items():
        if key in LISTS:
            choice[key] = choice.get(key, []) + value
        elif key == "logprobs" and value and choice.get(key):
            choice[key]["content"] += value["content"]
        elif key != "delta" and (value is not None or key not in choice):
            choice[key] = value
    for key, value in piece["delta"].items():
        if key in TEXTS:
            message[key] = (message.get(key) or "") + (value or "")
        elif key != "tool_calls":
            message[key] = value
    for part in piece["delta"].get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({k: v for k, v in part.items() if k != "index"})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
