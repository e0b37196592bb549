"""Limits of single fields: at the boundary, one past it, far past it.

`FIELD_LIMITS[name](value)` makes the attempts on the limit `name` of the server's own table. None
of the numbers is written here: what the server says of itself is what it is held to.
"""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from tests.lib.server.harness import MODEL, Server
from tests.server.limit_attempt import CHAT, KIND, PATH, Attempt


def post(path: str, fields: dict[str, Any]) -> Callable[[Server], tuple[int, bytes]]:
    """A POST of a small valid body with these fields."""
    text = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}

    def send(server: Server) -> tuple[int, bytes]:
        data = json.dumps({"model": MODEL, "max_tokens": 1} | text | fields).encode()
        found = server.http.post(path, content=data, headers=KIND)
        return found.status_code, found.content

    return send


def values(
    field: str, inside: Iterable[Any], outside: Iterable[Any], path: str = PATH, **more: Any
) -> list[Attempt]:
    """Values of one field that are taken, and those that are refused by its name."""
    taken = [Attempt(f"{field} taken", post(path, more | {field: v}), 200) for v in inside]
    return taken + [
        Attempt(f"{field} refused", post(path, more | {field: v}), 400, field) for v in outside
    ]


def integers(field: str, path: str = PATH, **more: Any) -> Callable[[Any], list[Attempt]]:
    """A range of integers, its ends included."""

    def make(limit: list[int]) -> list[Attempt]:
        low, high = limit
        outside = (low - 1, high + 1, -(10**30), 10**30)
        return values(field, (low, high), outside, path, **more)

    return make


def numbers(
    field: str, above_low: bool = False, **more: Any
) -> Callable[[list[float]], list[Attempt]]:
    """A range of numbers; `above_low`: its lower end is not included."""

    def make(limit: list[float]) -> list[Attempt]:
        low, high = limit
        below = low if above_low else math.nextafter(low, -math.inf)
        first = math.nextafter(low, math.inf) if above_low else low
        outside = (below, math.nextafter(high, math.inf), -1e300, 1e300)
        return values(field, (first, high), outside, **more)

    return make


def sized(field: str) -> Callable[[int], list[Attempt]]:
    """A text of so many bytes, whatever they spell."""

    def make(limit: int) -> list[Attempt]:
        inside = ("x" * limit, "é" * (limit // 2))
        return values(field, inside, ("x" * (limit + 1), "é" * (limit // 2 + 1), "x" * 2**20))

    return make


def error_bytes(limit: int) -> list[Attempt]:
    """An error repeats what was sent, but no more of it than fits."""

    def refused(fields: dict[str, Any]) -> Callable[[Server], tuple[int, bytes]]:
        def send(server: Server) -> tuple[int, bytes]:
            found = server.http.post(PATH, json={"prompt": "x"} | fields)
            assert found.status_code == 400 and len(found.content) <= limit
            error = json.loads(found.content)["error"]
            assert error["code"] == "unknown_field" and error["param"]
            return 200, b""

        return send

    return [
        Attempt(f"a name of {size}", refused({character * size: 1}), 200)
        for size in (1, limit, 2**20)
        for character in ("x", "\x01", "€")
    ]


def batch_prompts(limit: int) -> list[Attempt]:
    """Prompts in one body, as text and as ids."""
    return [
        attempt
        for one in ("x", [1])
        for attempt in values(
            "prompt", ([one] * limit,), ([one] * (limit + 1), [one] * 100_000, [])
        )
    ]


def logprobs_in_answer(limit: int) -> list[Attempt]:
    """Prompts that are shown beside each of many choices; the context of 256 is filled."""
    choices, length = 128, 256
    most = [[5] * length] * (limit // (choices * length))
    assert len(most) * choices * length == limit
    more = {"n": choices, "max_tokens": 0, "return_token_ids": True}
    return [
        *values("return_token_ids", (True,), (), prompt=most, **more),
        Attempt("one past", post(PATH, more | {"prompt": [*most, [5]]}), 400, "return_token_ids"),
        Attempt(
            "far past",
            post(PATH, more | {"prompt": [[5] * length] * 64, "prompt_logprobs": 20}),
            400,
            "prompt_logprobs",
        ),
    ]


def stop_strings(limit: int) -> list[Attempt]:
    """Stop strings by number."""
    return values("stop", (["#"] * limit,), (["#"] * (limit + 1), ["#"] * 100_000))


def stop_string_bytes(limit: list[int]) -> list[Attempt]:
    """One stop string by size."""
    low, high = limit
    inside = ("#" * low, "#" * high, "é" * (high // 2))
    return values("stop", inside, ("#" * (low - 1), "#" * (high + 1), "#" * 2**20))


def logit_bias_ids(limit: int) -> list[Attempt]:
    """Biased ids by number."""

    def bias(count: int) -> dict[str, int]:
        return {str(i): 0 for i in range(count)}

    return values("logit_bias", (bias(limit),), (bias(limit + 1), bias(100_000)))


def logit_bias(limit: list[float]) -> list[Attempt]:
    """One bias."""
    low, high = limit
    past = (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), -1e300, 1e300)
    return values("logit_bias", ({"1": low}, {"1": high}), [{"1": value} for value in past])


def temperature(limit: list[float]) -> list[Attempt]:
    """From greedy to the highest."""
    low, high = limit
    past = (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), -1e300, 1e300)
    return values("temperature", (low, high), past)


def smallest_temperature(limit: float) -> list[Attempt]:
    """What is between greedy and this is greedy too."""
    return values("temperature", (limit, math.nextafter(limit, 0.0), 5e-324), ())


def above(field: str) -> Callable[[float], list[Attempt]]:
    """Anything above a bound."""

    def make(limit: float) -> list[Attempt]:
        return values(field, (math.nextafter(limit, math.inf), 1e300), (limit, limit - 1, -1e300))

    return make


def schema_format(**more: Any) -> dict[str, Any]:
    """A response format; `more` replaces fields of the wrapper."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "null"}} | more,
    }


def schema_bytes(limit: int) -> list[Attempt]:
    """A schema padded by its description, compact."""

    def padded(size: int) -> dict[str, Any]:
        empty = len(json.dumps({"type": "null", "description": ""}, separators=(",", ":")))
        return schema_format(schema={"type": "null", "description": "d" * (size - empty)})

    return values("response_format", (padded(limit),), (padded(limit + 1), padded(4 << 20)))


def tools(limit: int) -> list[Attempt]:
    """Tools by number; declared and not to be called, as the server's template shows none."""

    def declared(count: int) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]

    past = declared(limit + 1), declared(20_000)
    return values("tools", (declared(limit),), past, CHAT, tool_choice="none")


def schema_description(limit: int) -> list[Attempt]:
    """The wrapper's own description."""
    formats = [schema_format(description="d" * n) for n in (limit, limit + 1, 2**20)]
    return values("response_format", formats[:1], formats[1:])


def names(limit: int) -> list[Attempt]:
    """Of a schema, and of who speaks."""

    def said(size: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "x", "name": "n" * size}]

    formats = [schema_format(name="n" * n) for n in (limit, 0, limit + 1, 2**20)]
    spoken = values("messages", (said(limit),), (said(limit + 1), said(2**20)), CHAT)
    return values("response_format", formats[:1], formats[1:]) + spoken


def model_characters(limit: int) -> list[Attempt]:
    """Another model's name is not served; one that is too long is not even looked up."""

    def send(server: Server) -> tuple[int, bytes]:
        status, body = post(PATH, {"model": "m" * limit})(server)
        assert json.loads(body)["error"]["code"] == "model_not_found", body
        return (200, b"") if status == 404 else (status, body)

    refused = values("model", (), ("m" * (limit + 1), "m" * 2**20))
    return [Attempt("model at its limit", send, 200), *refused]


FIELD_LIMITS: dict[str, Callable[[Any], list[Attempt]]] = {
    "error_bytes": error_bytes,
    "batch_prompts": batch_prompts,
    "n": integers("n"),
    "logprobs": integers("logprobs"),
    "top_logprobs": integers("top_logprobs", CHAT, logprobs=True),
    "prompt_logprobs": integers("prompt_logprobs"),
    "logprobs_in_answer": logprobs_in_answer,
    "stop_strings": stop_strings,
    "stop_string_bytes": stop_string_bytes,
    "logit_bias_ids": logit_bias_ids,
    "logit_bias": logit_bias,
    "temperature": temperature,
    "smallest_temperature_above_zero": smallest_temperature,
    "top_p": numbers("top_p", above_low=True),
    "top_k": integers("top_k"),
    "min_p": numbers("min_p"),
    "presence_penalty": numbers("presence_penalty"),
    "frequency_penalty": numbers("frequency_penalty"),
    "repetition_penalty_above": above("repetition_penalty"),
    "seed": integers("seed"),
    "schema_bytes": schema_bytes,
    "tools": tools,
    "schema_description_characters": schema_description,
    "name_characters": names,
    "model_characters": model_characters,
    "user_bytes": sized("user"),
    "cache_salt_bytes": sized("cache_salt"),
}
