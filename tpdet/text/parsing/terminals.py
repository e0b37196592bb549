"""Cuts an answer into terminals and the text between them.

A terminal that is an added token of the tokenizer is that token's id, and its letters in other
tokens are text. A terminal that is none is matched in the text, wherever tokens cut it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Piece(NamedTuple):
    """A terminal, or text between two. `shown`: what of it the detokenizer gave."""

    terminal: str
    text: str
    shown: str


class Terminals:
    """The terminals of a family in one tokenizer; immutable."""

    def __init__(self, names: Iterable[str], text: Iterable[str], added: Mapping[str, int]) -> None:
        """text: those of the names that may be text; added: the tokenizer's added tokens."""
        names, allowed = dict.fromkeys(names), frozenset(text)
        self.ids = {added[name]: name for name in names if name in added}
        in_text = sorted((n for n in names if n not in added and n in allowed), key=len)[::-1]
        self._pattern = re.compile("|".join(map(re.escape, in_text))) if in_text else None
        self._beginnings = frozenset(
            name[:size] for name in in_text for size in range(1, len(name))
        )
        self._longest = max(map(len, in_text), default=1) - 1
        self._first = frozenset(name[0] for name in in_text)

    def lexer(self) -> "Lexer":
        """What cuts one answer."""
        return Lexer(self)

    def search(self, text: str, position: int) -> re.Match[str] | None:
        """The first terminal in a text, from a position on."""
        return self._pattern.search(text, position) if self._pattern else None

    @property
    def has_text(self) -> bool:
        """Whether a terminal is text."""
        return self._pattern is not None

    def beginning(self, text: str) -> int:
        """How many characters at the end of a text may begin a terminal."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size] in self._first and text[-size:] in self._beginnings:
                return size
        return 0


class Lexer:
    """Cuts one answer; text that may begin a terminal waits, which is shorter than the longest."""

    __slots__ = ("_ids", "_terminals", "_waits")

    def __init__(self, terminals: Terminals) -> None:
        self._terminals, self._ids = terminals, terminals.ids
        self._waits = ""

    def push(self, token_id: int, text: str) -> list[Piece]:
        """The pieces that the next token completes."""
        name = self._ids.get(token_id)
        if name is not None:
            return [*self.finish(), Piece(name, name, text)]
        if not self._terminals.has_text:
            return [Piece("", text, text)] if text else []
        text = self._waits + text
        pieces: list[Piece] = []
        position = 0
        while match := self._terminals.search(text, position):
            if match.start() > position:
                pieces.append(_plain(text[position : match.start()]))
            pieces.append(Piece(match[0], match[0], match[0]))
            position = match.end()
        end = len(text) - self._terminals.beginning(text[position:])
        if end > position:
            pieces.append(_plain(text[position:end]))
        self._waits = text[end:]
        return pieces

    def finish(self) -> list[Piece]:
        """The text that waits."""
        text, self._waits = self._waits, ""
        return [_plain(text)] if text else []


def _plain(text: str) -> Piece:
    return Piece("", text, text)
