"""Requests as agents send them: chats of some turns with tools, drawn from a seed."""

import random
from typing import Any

Json = dict[str, Any]
CITIES = ("Paris", "Köln", "東京", "São Paulo")
FREE_FIELDS = ("created", "usage.prompt_tokens_details", "usage.completion_tokens_details")
"""Fields of an answer that its request does not determine: a time, and counts of saved work."""


def _tool(name: str, strict: bool = False, **properties: Json) -> Json:
    required = [key for key, schema in properties.items() if "default" not in schema]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "parameters": schema | {"additionalProperties": False}}
    more = {"description": f"Do {name}.", **({"strict": True} if strict else {})}
    return {"type": "function", "function": function | more}


_CITY = {"type": "string", "maxLength": 12}


def _tools(draw: random.Random, strict: bool) -> list[Json]:
    """Two to five tools, in any order."""
    count = {"type": "integer", "minimum": 0, "maximum": 99}
    made = [
        _tool("get_weather", strict, city=_CITY, unit={"enum": ["c", "f"], "default": "c"}),
        _tool("search", strict, query={"type": "string", "maxLength": 20}, limit=count),
        _tool("read_file", strict, path={"type": "string", "pattern": "^[a-z]{1,8}\\.py$"}),
        _tool("now", strict),
        _tool("move", strict, to={"type": "array", "items": count, "minItems": 1, "maxItems": 3}),
    ]
    return draw.sample(made, draw.randint(2, 5))


def _round(draw: random.Random, number: int) -> list[Json]:
    """A question, one or two calls, their results, and sometimes what was said of them."""
    city = draw.choice(CITIES)
    calls = [
        {
            "id": f"call_{number}_{i}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for i in range(draw.randint(1, 2))
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{draw.randint(-9, 35)} degrees"}
        for call in calls
    ]
    said = [{"role": "assistant", "content": f"It is fine in {city}."}] * draw.randint(0, 1)
    asked = {"role": "user", "content": f"What is the weather in {city}?"}
    return [asked, {"role": "assistant", "content": None, "tool_calls": calls}, *results, *said]


def _choice(draw: random.Random, tools: list[Json]) -> Json:
    """The fields that say how tools are used."""
    named = [{"type": "function", "function": {"name": t["function"]["name"]}} for t in tools]
    kind = draw.choice(("auto", "auto", "required", "named", "allowed", "none", "one"))
    if kind == "named":
        return {"tool_choice": draw.choice(named)}
    if kind == "allowed":
        allowed = {"mode": draw.choice(("auto", "required")), "tools": named[:2]}
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    if kind == "one":
        return {"parallel_tool_calls": False}
    return {"tool_choice": kind}


def agent_requests(count: int, model: str, known: list[Json], seed: int = 0) -> list[Json]:
    """So many bodies of chats; each fourth asks for what the model `known`s how to answer."""
    draw, found = random.Random(seed), []
    for index in range(count):
        if index % 4 == 0:
            body = dict(known[index // 4 % len(known)])
        else:
            tools = _tools(draw, strict=draw.random() < 0.4)
            turns = [turn for i in range(draw.randint(0, 3)) for turn in _round(draw, i)]
            ends_with_result = bool(turns) and turns[-1]["role"] == "tool"
            if not ends_with_result or draw.random() < 0.5:
                turns.append({"role": "user", "content": f"And in {draw.choice(CITIES)}?"})
            system = {"role": "system", "content": "You are an agent. Use the tools. " * 20}
            body = {"messages": [system, *turns], "tools": tools, **_choice(draw, tools)}
        body |= {"model": model, "seed": index, "max_tokens": draw.choice((20, 60, 90))}
        body |= {"temperature": draw.choice((0, 0.7, 1.0)), "return_token_ids": True}
        body |= draw.choice(({}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}))
        found.append(body)
    return found


def without_free(answer: Json, body: Json) -> Json:
    """An answer without what its request does not determine; without tools its id is random."""
    kept = {**answer, "usage": dict(answer["usage"])}
    names = (*FREE_FIELDS, "id") if body.get("tool_choice") == "none" else FREE_FIELDS
    for name in names:
        outer, _, inner = name.rpartition(".")
        (kept[outer] if outer else kept).pop(inner, None)
    return kept
