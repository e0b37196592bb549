"""The library with the 256 bytes as its vocabulary: what a pattern matches, without a model."""

import functools
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tpdet.errors import RequestError

_STEPS = 400


class _Bytes:
    """Id b is byte b, 256 is the end, and marks that no bytes make come from 257 on."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256

    def __init__(self, marks: Sequence[str]) -> None:
        letters = [bytes([byte]) for byte in range(256)]
        self.tokens = (*letters, b"end" if marks else b"", *(mark.encode() for mark in marks))
        self.special_token_ids = tuple(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text."""
        return list(text.encode() if isinstance(text, str) else text)


def import_library() -> Any:
    """The llguidance module. Raises RequestError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "response_format needs the llguidance package, which this server has not installed",
            "response_format",
        ) from None
    return llguidance


@functools.cache
def byte_vocabulary(marks: tuple[str, ...] = ()) -> Any:
    """The bytes, and marks from id 257 on, as an LLTokenizer."""
    return import_library().LLTokenizer(_Bytes(marks), slices=[])


def pattern_error(pattern: str) -> str | None:
    """What the library says of a pattern of a schema that it cannot follow."""
    return _matcher(pattern).get_error() or None


def texts_of(pattern: str, most: int, steps: Iterator[int]) -> set[str] | None:
    """The texts that a schema's pattern matches; None for more than `most`, or too long ones.

    It takes one of `steps` for each byte, and gives up at their end.
    """
    start, found = _matcher(pattern), set[str]()
    if start.is_error():
        return None
    stack = [(start, b"")]
    few = islice(steps, _STEPS)
    while stack:
        matcher, text = stack.pop()
        mask = matcher.compute_bitmask()
        if matcher.is_error() or next(few, None) is None:
            return None
        if mask[32] & 1:
            found.add(json.loads(text))
        following = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if len(found) > most or len(stack) + len(following) > _STEPS:
            return None
        for byte in following:
            after = matcher.deep_copy()
            after.consume_token(byte)
            stack.append((after, text + bytes([byte])))
    return found


def _matcher(pattern: str) -> Any:
    schema = json.dumps({"type": "string", "pattern": pattern})
    library = import_library()
    limits = library.LLParserLimits(verbose_errors=False)
    return library.LLMatcher(
        byte_vocabulary(), f"start: %json {schema}", log_level=0, limits=limits
    )
