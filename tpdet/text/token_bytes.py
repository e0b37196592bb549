"""The bytes that a token stands for, by the rules of a tokenizer's decoder.

A text is the bytes of its tokens, one after the other, read as UTF-8; each maximal ill-formed part
becomes one U+FFFD, as Unicode recommends. So an incremental UTF-8 decoder streams text exactly, at
constant cost for each token, and no window of tokens is decoded again.

`tokenizers` computes the same with one exception: if any byte of a run of byte tokens is
ill-formed, its ByteFallback turns the whole run into U+FFFD, also characters that were complete. A
stream has sent those already, so here they stay.
"""

import codecs
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

from tpdet.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderRules:
    """The checked decoder of `tokenizer.json`: byte-level, or in the style of SentencePiece."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        """Raises CheckpointError naming decoder steps that are not supported in this order."""
        steps = _steps(decoder)
        kinds = [step.get("type") for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._metaspace = kinds == ["Metaspace"]
        self._replace: list[tuple[str, str]] = []
        self._byte_fallback = "ByteFallback" in kinds
        self.strip_left: tuple[str, int] = ("", 0)
        self._drop_first = ""
        if self._metaspace:
            mark = steps[0].get("replacement", "▁")
            self._replace = [(mark, " ")]
            self._drop_first = mark if steps[0].get("prepend_scheme", "always") != "never" else ""
        elif not self._byte_level:
            self._read_sequence(steps, kinds)

    def _read_sequence(self, steps: list[dict[str, Any]], kinds: list[Any]) -> None:
        order = " ".join(map(str, kinds))
        if not re.fullmatch(r"(Replace )*(ByteFallback )?Fuse( Strip)?", order):
            raise CheckpointError(
                f"tokenizer.json: decoder {order or None!r} is not supported: ByteLevel, Metaspace "
                "and Replace, ByteFallback, Fuse, Strip (in this order) are"
            )
        for step in steps:
            if step["type"] == "Replace":
                pattern = step["pattern"].get("String")
                if not pattern:
                    raise CheckpointError(
                        f"tokenizer.json: decoder Replace with {step['pattern']} is not supported: "
                        "use a string"
                    )
                self._replace.append((pattern, step["content"]))
            elif step["type"] == "Strip":
                if step["stop"] or len(step["content"]) != 1:
                    raise CheckpointError(
                        f"tokenizer.json: decoder Strip of {step['content']!r} with stop "
                        f"{step['stop']} is not supported: stop must be 0"
                    )
                self.strip_left = (step["content"], step["start"])

    def token_bytes(self, token: str, first: bool) -> bytes:
        """The bytes of a token, before the text is stripped; `first`: it is the text's first."""
        if self._byte_level:
            table = byte_of_character()
            values = [table.get(character) for character in token]
            # A token with any other character was added in plain text, not in the alphabet.
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if first and self._drop_first:
            token = token.replace(self._drop_first, "")
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode()

    def is_byte_token(self, token: str) -> bool:
        """Whether a token stands for the byte that it names, as `<0x41>`."""
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None

    def same_bytes(self, token: str) -> str | bytes:
        """A key that tokens have in common if their bytes behind other tokens are equal."""
        if not self._byte_level:
            return self.token_bytes(token, first=False)
        if not _OUTSIDE_ALPHABET.search(token):
            return token
        return "".join(map(character_of_byte().__getitem__, token.encode()))


class TokenPlace:
    """The place of the next token in a text, whose first tokens may lose blanks."""

    def __init__(self, rules: DecoderRules) -> None:
        self._rules = rules
        self._first = True
        self._strip, self._left_to_strip = rules.strip_left

    @property
    def settled(self) -> bool:
        """Whether the bytes of further tokens depend on these alone."""
        return not (self._first or self._left_to_strip)

    def bytes_here(self, token: str) -> bytes:
        """The bytes that a token would add here."""
        return self._bytes(token)[0]

    def take(self, token: str) -> bytes:
        """The bytes that this token adds; the place is behind it now."""
        data, self._left_to_strip = self._bytes(token)
        self._first = False
        return data

    def _bytes(self, token: str) -> tuple[bytes, int]:
        """The bytes, and how many marks may still be stripped behind them."""
        data, left = self._rules.token_bytes(token, self._first), self._left_to_strip
        if left and data:
            mark = self._strip.encode()
            while left and data.startswith(mark):
                data = data[len(mark) :]
                left -= 1
            left = 0 if data else left
        return data, left


class TokenJoiner:
    """Turns tokens into text one by one; the pieces concatenate to the whole text.

    At most the three bytes of an unfinished character are held back.
    """

    def __init__(self, rules: DecoderRules) -> None:
        self._place = TokenPlace(rules)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        """The text that this token completes."""
        return self._utf8.decode(self._place.take(token))

    @property
    def settled(self) -> bool:
        """Whether nothing is held back, and the next token's place in the text does not matter."""
        return self._place.settled and not self._utf8.getstate()[0]

    def finish(self) -> str:
        """The text that was held back: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


def join_tokens(rules: DecoderRules, tokens: Iterable[str]) -> str:
    """The whole text of `tokens`."""
    joiner = TokenJoiner(rules)
    pieces = [joiner.push(token) for token in tokens]
    return "".join([*pieces, joiner.finish()])


def read_rules(state: bytes | None) -> DecoderRules:
    """The rules of a decoder, given as the JSON that `tokenizers` writes."""
    return DecoderRules(None if state is None else json.loads(state))


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return list(decoder.get("decoders", []))
    return [decoder]


@functools.cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


@functools.cache
def character_of_byte() -> dict[int, str]:
    """`byte_of_character`, the other way round."""
    return {byte: character for character, byte in byte_of_character().items()}


_OUTSIDE_ALPHABET = re.compile(f"[^{re.escape(''.join(byte_of_character()))}]")
