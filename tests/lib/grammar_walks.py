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
    draw, matcher, text = random.Random(seed), start.deep_copy(), b""
    while len(text) < most:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (text, matcher.get_error())
        following = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        complete = mask[32] & 1
        assert following or complete, text
        if complete and (not following or len(text) > 6 or draw.random() < 0.5):
            return text
        closing = [byte for byte in following if byte in b'"}]']
        byte = draw.choice(closing if closing and draw.random() < 0.4 else following)
        matcher.consume_token(byte)
        text += bytes([byte])
    return None
