"""Random schemas: what is taken is followed to valid answers, and never has a dead end."""

import json
import random

import pytest

from tests.grammar.grammar_walks import compiled, walk
from tpdet.errors import RequestError

jsonschema = pytest.importorskip("jsonschema")
LOWS = (0, -5, 2**53 + 1, -(2**63), 2**60 + 7)
HIGHS = (9, 2**53 + 5, 2**63 - 1, 2**64, 2**60 + 900)
TEXTS = ("^a|b$", "^[ab]$", "x", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$")
KEYS = ("^a$", "^[ab]$", "^(a|k)$", "^k", "b$", "^a?$", "x")
NAMES = ({"enum": ["a", "b"]}, {"pattern": "^[xy]$"}, {"type": "string"})


def leaf(draw: random.Random) -> dict:
    return draw.choice(
        [
            {"type": "integer", "minimum": draw.choice(LOWS), "maximum": draw.choice(HIGHS)},
            {"const": draw.choice([1, "a", True, None, 2**60, [1, "x"]])},
            {"enum": draw.sample([1, 2, "a", "b", True, None, 1.5], 2)},
            {"type": "string", "pattern": draw.choice(TEXTS)},
            {"type": "string", "format": draw.choice(["uuid4", "path", "date"]), "maxLength": 40},
            {"type": ["integer", "null"], "exclusiveMaximum": draw.choice([3, 2**53 + 3])},
            {"type": "number", "minimum": draw.choice([0, -1e308, 1e17])},
            {"type": draw.choice(["null", "boolean"])},
        ]
    )


def made(draw: random.Random, depth: int = 0) -> dict:
    kind = draw.random()
    if depth > 2 or kind < 0.3:
        return leaf(draw)
    if kind < 0.6:
        properties = {
            name: made(draw, depth + 1) for name in draw.sample("abkx", draw.randint(0, 3))
        }
        if draw.random() < 0.5:
            properties["kind"] = {"const": draw.choice("uvw")}
        required = [name for name in properties if draw.random() < 0.5]
        found = {"type": "object", "properties": properties, "required": required}
        if draw.random() < 0.7:
            found["additionalProperties"] = False
        if draw.random() < 0.4:
            value = draw.choice([{}, made(draw, depth + 1), {"type": "integer"}])
            found["patternProperties"] = {draw.choice(KEYS): value}
        if draw.random() < 0.2:
            found["minProperties"] = draw.randint(0, 3)
        return found
    if kind < 0.85:
        branches = [made(draw, depth + 1) for _ in range(draw.randint(2, 3))]
        return {draw.choice(["oneOf", "oneOf", "anyOf"]): branches}
    if kind < 0.9:
        names = {"propertyNames": draw.choice(NAMES)}
        return {"type": "object", "additionalProperties": made(draw, depth + 1)} | names
    return {"type": "array", "items": made(draw, depth + 1), "maxItems": 2}


@pytest.mark.slow
def test_what_is_taken_is_followed_to_the_end():
    taken = 0
    for seed in range(600):
        schema = made(random.Random(seed))
        try:
            start = compiled(schema)
        except RequestError:
            continue
        taken += 1
        for draw in range(4):
            text = walk(start, draw, 200)
            if text is not None:
                jsonschema.validate(json.loads(text), schema)
    assert taken > 300
