"""What is drawn from a seed: requests, and how each is asked in a crowd. Nothing else is random."""

import random
from typing import Any, NamedTuple

from tests.fuzz.models import CONTEXT, VOCABULARY

PAGE = 256
WAYS = (
    *("whole", "stream", "cursor", "resume", "right drafts", "half right drafts"),
    *("wrong drafts", "right prediction", "wrong prediction"),
)
"""How a request is asked; those after `cursor` are for one prompt that is not echoed."""
_LONGEST = 760
_WORDS = (
    "def",
    " the",
    "return",
    "\n\n",
    " é",
    "日本",
    "🎉",
    "e\u0301",
    "  ",
    "<|im_end|>",
    "x = 1",
    ".",
)
_STOPS = ("e", " the", "s", "\n", "or", "é", "(", "self")
_IDS = range(300, 1000)
_SCHEMAS = (
    {"enum": ["alpha", "beta", "gamma delta"]},
    {"type": "integer", "minimum": -20, "maximum": 999},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
     "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 4},
    {"type": "string", "maxLength": 6},
)  # fmt: skip


class Asked(NamedTuple):
    """How a crowd asks one request: in a way, cut after a share of its answer, after a delay."""

    way: str
    share: float
    delay: float
    """Seconds."""


def crowd_of(seed: int, family: str, number: int) -> list[dict[str, Any]]:
    """The bodies of a crowd: 6 to 12 requests, of which some begin alike.

    In every other crowd the first tokens of all fill a page or two: they need pages at once.
    """
    chance = random.Random(f"{seed} {family} {number}")
    shared = [chance.choice(_IDS) for _ in range(_LONGEST)]
    draw = _body_at_an_end if number % 2 else _body
    return [draw(chance, shared) for _ in range(chance.randint(6, 12))]


def asked_in(
    seed: int, family: str, number: int, where: str, bodies: list[dict[str, Any]]
) -> tuple[list[Asked], list[dict[str, Any]]]:
    """How a crowd's requests are asked in a configuration, and what is asked and given up."""
    chance = random.Random(f"{seed} {family} {number} {where}")
    asked = [
        Asked(chance.choice(ways_of(body)), chance.random(), chance.random() * 0.1)
        for body in bodies
    ]
    shared = [chance.choice(_IDS) for _ in range(_LONGEST)]
    given_up = [
        _body(chance, shared) | {"max_tokens": 60, "ignore_eos": True, "echo": False}
        for _ in range(chance.randint(1, 3))
    ]
    return asked, [_without(body, "response_format", "prompt_logprobs") for body in given_up]


def ways_of(body: dict[str, Any]) -> tuple[str, ...]:
    """The ways that a request may be asked in."""
    if "prompt_logprobs" in body:
        return WAYS[:1]
    several = isinstance(body["prompt"], list) and isinstance(body["prompt"][0], list)
    return WAYS[:3] if several or body.get("echo") or not body["max_tokens"] else WAYS


def _body(chance: random.Random, shared: list[int]) -> dict[str, Any]:
    tokens = 0 if chance.random() < 0.04 else chance.choice((1, 2, *range(4, 25), 30, 40))
    body: dict[str, Any] = {
        "prompt": _prompt(chance, shared, tokens),
        "max_tokens": tokens,
        "seed": chance.choice((0, 1, 2**63 - 1, chance.randrange(2**40))),
        "return_token_ids": True,
    }
    for share, draw in _FIELDS:
        if chance.random() < share:
            body |= draw(chance, tokens)
    if chance.random() < 0.3:
        body |= {"temperature": 0}
        return _without(body, *("seed",) * (chance.random() < 0.5))  # it would count for nothing
    return body


def _body_at_an_end(chance: random.Random, shared: list[int]) -> dict[str, Any]:
    """A body whose prompt ends a few tokens before its page does, and whose answer goes on."""
    length = PAGE * chance.choice((1, 1, 2)) - chance.randint(0, 4)
    prompt = shared[: length // 2] + [chance.randrange(VOCABULARY) for _ in range(-(-length // 2))]
    more = {"prompt": prompt, "max_tokens": chance.randint(16, 40), "ignore_eos": True}
    return _without(_body(chance, shared), "stop", "stop_token_ids", "response_format") | more


def _prompt(chance: random.Random, shared: list[int], tokens: int) -> Any:
    kind = chance.random()
    if kind < 0.15:
        return "".join(chance.choice(_WORDS) for _ in range(chance.randint(1, 40)))
    if kind < 0.25:
        return [_ids(chance, shared, tokens) for _ in range(2)]
    return _ids(chance, shared, tokens)


def _ids(chance: random.Random, shared: list[int], tokens: int) -> list[int]:
    """Short, just before the end of a page, or past two pages and any window of the models."""
    length = chance.choice(
        (
            chance.randint(1, 40),
            PAGE * chance.randint(1, 2) - chance.randint(0, max(1, min(tokens, 12))),
            PAGE - chance.randint(0, max(1, min(tokens, 12))),
            chance.randint(560, _LONGEST),
        )
    )
    begin = shared[:length] if chance.random() < 0.6 else []
    return begin + [chance.randrange(VOCABULARY) for _ in range(length - len(begin))]


def _penalties(chance: random.Random, _: int) -> dict[str, Any]:
    signed = lambda: round(chance.uniform(-1.0, 2.0), 2)
    found = {"repetition_penalty": round(chance.uniform(0.8, 1.5), 2)}
    found |= {"frequency_penalty": signed(), "presence_penalty": signed()}
    return {name: found[name] for name in chance.sample(sorted(found), chance.randint(1, 3))}


def _bias(chance: random.Random, _: int) -> dict[str, Any]:
    """Often so strong that an answer repeats itself, and n-grams of it are found."""
    strong = chance.choice((3.0, 30.0))
    ids = chance.sample(_IDS, chance.randint(1, 4))
    return {"logit_bias": {str(i): strong for i in ids} | {str(chance.choice(_IDS)): -100.0}}


def _stops(chance: random.Random, tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {"stop": chance.sample(_STOPS, chance.randint(1, 3))}
    if chance.random() < 0.5:
        found["stop_token_ids"] = chance.sample(_IDS, 20)
    if chance.random() < 0.3:
        found["min_tokens"] = chance.randint(0, tokens)
    return found | {"include_stop_str_in_output": chance.random() < 0.3}


def _schema(chance: random.Random, _: int) -> dict[str, Any]:
    schema = {"name": "x", "schema": chance.choice(_SCHEMAS)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


_FIELDS = (
    (1.0, lambda chance, _: {"temperature": round(chance.uniform(0.3, 1.6), 2)}),
    (0.3, lambda chance, _: {"top_k": chance.choice((-1, 1, 2, 20, 2000))}),
    (0.3, lambda chance, _: {"top_p": round(chance.uniform(0.05, 1.0), 2)}),
    (0.2, lambda chance, _: {"min_p": round(chance.uniform(0.0, 0.3), 2)}),
    (0.25, lambda chance, _: {"n": chance.randint(2, 3)}),
    (0.3, _penalties),
    (0.25, _bias),
    (0.25, _stops),
    (0.4, lambda chance, _: {"ignore_eos": True}),
    (0.12, _schema),
    (0.4, lambda chance, _: {"logprobs": chance.randint(0, 5)}),
    (0.12, lambda chance, _: {"prompt_logprobs": chance.randint(0, 3)}),
    (0.12, lambda chance, _: {"echo": True}),
    (0.2, lambda chance, _: {"skip_special_tokens": False}),
)
"""The share of requests that have some fields, and how these are drawn."""


def _without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


assert _LONGEST + 60 < CONTEXT
