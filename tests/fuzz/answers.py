"""Asks a server over HTTP in any way, and holds what a reader sees against the reference."""

import asyncio
import json
from typing import Any

import httpx

from tests.fuzz.draws import Asked
from tests.fuzz.models import VOCABULARY

Answer = dict[str, Any]
_ROUTE = "/v1/completions"
_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
_WHOLE_ONLY = ("prompt_logprobs", "prompt_token_ids")
_JOINED = ("token_ids", "logprob_bits")


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """The answer to a body, or its refusal."""
    found = await client.post(_ROUTE, json=body)
    if found.status_code != 200:
        return {"refused": (found.status_code, found.json()["error"]["message"])}
    return _seen(found.json())


async def ask_in(
    client: httpx.AsyncClient, body: dict[str, Any], how: Asked, reference: Answer
) -> Answer:
    """The answer to a body that is asked in a way, as if it had been asked plainly."""
    await asyncio.sleep(how.delay)
    if "refused" in reference or how.way == "whole":
        return await ask(client, body)
    if how.way in ("stream", "cursor"):
        return await _streamed(client, body, how)
    ids = [choice["token_ids"] for choice in reference["choices"]]
    return await ask(client, body | _guess(how, ids, reference))


def _guess(how: Asked, ids: list[list[int]], reference: Answer) -> dict[str, Any]:
    """The fields of drafts, a prediction or a resume."""
    cut = [each[: round(how.share * len(each))] for each in ids]
    wrong = [[(i + 1) % VOCABULARY for i in each] for each in ids]
    if how.way == "resume":
        names = "contract", "weights", "seed", "logprobs_mode"
        origin = {name: reference["tpdet"][name] for name in names}
        return {"tpdet": {"resume": origin | {"choices": cut}}}
    if how.way.endswith("prediction"):
        text = reference["choices"][0]["text"]
        text = text if how.way.startswith("right") else text[::-1]
        return {"prediction": {"type": "content", "content": text or "x"}}
    mixed = [a + b[len(a) :] for a, b in zip(cut, wrong, strict=True)]
    drafts = {"right drafts": ids, "half right drafts": mixed, "wrong drafts": wrong}
    return {"tpdet": {"drafts": drafts[how.way]}}


async def give_up(client: httpx.AsyncClient, body: dict[str, Any], how: Asked) -> None:
    """Leave a stream after some of its events."""
    await asyncio.sleep(how.delay)
    await _events(client, body, {}, round(how.share * 12))


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any], how: Asked) -> Answer:
    """A stream joined; in the way "cursor" it is cut off, and goes on behind its last event."""
    if how.way == "stream":
        return _join(await _events(client, body))
    first = await _events(client, body, {}, 1 + round(how.share * max(1, body["max_tokens"])))
    if not first or first[-1][0] is None or first[-1][1].get("usage"):
        return _join(first)
    return _join(first + await _events(client, body, {"last-event-id": first[-1][0]}))


async def _events(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    most: int = 1 << 30,
) -> list[tuple[str | None, Answer]]:
    """Cursor and JSON of each event, at most `most` of them."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"accept": "text/event-stream"} | (headers or {})
    found: list[tuple[str | None, Answer]] = []
    cursor = None
    async with client.stream("POST", _ROUTE, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            error = json.loads(await answer.aread())["error"]
            return [(None, {"refused": (answer.status_code, error["message"])})]
        async for line in answer.aiter_lines():
            if len(found) >= most:
                break
            if line.startswith("id: "):
                cursor = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                found.append((cursor, json.loads(line.removeprefix("data: "))))
    return found


def _join(events: list[tuple[str | None, Answer]]) -> Answer:
    """The whole answer that a stream's events make."""
    whole: Answer = {}
    choices: dict[int, Answer] = {}
    for _, event in events:
        if "choices" not in event:  # a refusal, or an error in the middle
            return {"refused": event.get("refused", event)}
        whole |= {name: event[name] for name in ("usage", "system_fingerprint") if event.get(name)}
        whole["tpdet"] = whole.get("tpdet", {}) | event.get("tpdet", {})
        for part in event["choices"]:
            _extend(choices.setdefault(part["index"], {"index": part["index"]}), part)
    return _seen(whole | {"choices": list(choices.values())})


def _extend(choice: Answer, part: Answer) -> None:
    choice["text"] = choice.get("text", "") + part["text"]
    for name in _JOINED:
        choice[name] = choice.get(name, []) + (part.get(name) or [])
    for name in ("finish_reason", "stop_reason"):
        choice[name] = part.get(name) if part.get(name) is not None else choice.get(name)
    shown = choice.setdefault("logprobs", None)
    if part.get("logprobs") is not None:
        shown = choice["logprobs"] = shown or {}
        for name, values in part["logprobs"].items():
            shown[name] = shown.get(name, []) + (values or [])


def _seen(answer: Answer) -> Answer:
    """What of an answer is a function of its request."""
    usage = answer.get("usage") or {}
    return {
        "choices": sorted(answer["choices"], key=lambda choice: choice["index"]),
        "tpdet": answer.get("tpdet"),
        "fingerprint": answer.get("system_fingerprint"),
        "usage": {name: usage.get(name) for name in _USAGE},
    }


def difference(reference: Answer, found: Answer, way: str, seeded: bool = True) -> str | None:
    """The first field of an answer that is not the reference's, with both values.

    seeded: the request has a seed; else each answer names another one, which reaches nothing.
    """
    if not seeded:
        reference, found = (_without_seed(each) for each in (reference, found))
    if way in ("stream", "cursor") and "choices" in reference:
        reference = reference | {"choices": [_streamable(c) for c in reference["choices"]]}
    return _first(reference, found, "answer")


def _streamable(choice: Answer) -> Answer:
    return {name: value for name, value in choice.items() if name not in _WHOLE_ONLY}


def _without_seed(answer: Answer) -> Answer:
    if "tpdet" not in answer:
        return answer
    rest = {name: value for name, value in answer["tpdet"].items() if name != "seed"}
    return answer | {"tpdet": rest}


def _first(left: Any, right: Any, place: str) -> str | None:
    if left == right and type(left) is type(right):
        return None
    if isinstance(left, dict) and isinstance(right, dict):
        names = [n for n in left | right if n not in left or n not in right or left[n] != right[n]]
        if names and names[0] in left and names[0] in right:
            return _first(left[names[0]], right[names[0]], f"{place}.{names[0]}")
        return f"{place} has {sorted(left)}, not {sorted(right)}"
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            if one != other:
                return _first(one, other, f"{place}[{index}]")
    return f"{place} is {right!r:.120}, the reference has {left!r:.120}"
