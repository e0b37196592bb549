"""Random texts of a form, byte by byte, and whether a given text has it."""

import json
import random
from typing import Any

from tpdet.grammar.byte_texts import byte_vocabulary
from tpdet.grammar.compile import compile_form
from tpdet.requests.answer_form import AnswerForm


def compiled(schema: dict[str, Any]) -> Any:
    """The matcher of a schema over bytes. Raises RequestError as `compile_form`."""
    return compile_form(AnswerForm("json_schema", json.dumps(schema)), byte_vocabulary())


def allows(schema: dict[str, Any], text: str) -> bool:
    """Whether the whole text may be written."""
    matcher = compiled(schema)
    for byte in text.encode():
        if not matcher.compute_bitmask()[byte >> 3] >> (byte & 7) & 1:
            return False
        matcher.consume_token(byte)
    return bool(matcher.compute_bitmask()[32] & 1)


def walk(start: Any, seed: int, most: int = 300) -> bytes | None:
    """A text that ends early rather than late; None for one that is too long.

    Raises AssertionError where nothing may follow a text that is not complete.
    """
    ids = walk_ids(start, seed, most)
    return None if ids is None else bytes(ids)


def walk_ids(start: Any, seed: int, most: int, marks: int = 0) -> list[int] | None:
    """As `walk`, the ids; behind that of the end come those of so many marks."""
    draw, matcher, ids = random.Random(seed), start.deep_copy(), []
    tokens = [*range(256), *range(257, 257 + marks)]
    while len(ids) < most:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (ids, matcher.get_error())
        following = [token for token in tokens if mask[token >> 3] >> (token & 7) & 1]
        complete = mask[32] & 1
        assert following or complete, ids
        if complete and (not following or len(ids) > 6 or draw.random() < 0.5):
            return ids
        closing = [token for token in following if token > 256 or token in b'"}]']
        token = draw.choice(closing if closing and draw.random() < 0.4 else following)
        matcher.consume_token(token)
        ids.append(token)
    return None
