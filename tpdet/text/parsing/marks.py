"""Follows the marks that divide an answer's tokens into reasoning and content.

A mark is a token id: the same letters made of other tokens are text.
"""

from collections.abc import Collection, Sequence

from tpdet.text.parsing.terminals import Piece, Terminals
from tpdet.text.tokenizer import Tokenizer

CONTENT, REASONING, NEITHER, TO_TOOL = range(4)
"""The parts of an answer; TO_TOOL, what harmony addresses to a tool, is reasoning where no tools
are read.
"""

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
TEXT_BLOCK = ("<think>", "</think>")
_TEXT_MARKS = Terminals(TEXT_BLOCK, TEXT_BLOCK, {})
_MORE_ENDS = ("<|return|>", "<|call|>")


class Think:
    """One block of reasoning, opened at the beginning of the answer or at the end of its prompt.

    Behind other content, and behind the block, both marks are text: an answer may be about them.
    """

    def __init__(self, marks: Sequence[str], added: dict[str, int], last: int | None) -> None:
        """last: the prompt's last added token.

        Not its last mark: a message may hold one, and tokens of roles stand behind it.
        """
        self._opening, self._closing = (added[mark] for mark in marks)
        self._opening_text = marks[0]
        self._part = REASONING if last == self._opening else CONTENT
        self._may_open = last != self._closing
        self.settled = self._part == CONTENT and not self._may_open

    @property
    def schema_after(self) -> tuple[int, ...]:
        """The ids behind which the answer to the prompt is content; () if all of it is."""
        if self._part == REASONING:
            return (self._closing,)
        return (self._opening, self._closing) if self._may_open else ()

    def step(self, token_id: int, text: str) -> int:
        """The part that the next token is in."""
        if token_id == self._closing and self._part == REASONING:
            self._part, self._may_open, self.settled = CONTENT, False, True
            return NEITHER
        if self._may_open:
            opens = token_id == self._opening
            self._may_open = not (text.removesuffix(self._opening_text) if opens else text).strip()
            if opens and self._may_open:
                self._part = REASONING
                return NEITHER
            self.settled = self._part == CONTENT and not self._may_open
        return self._part


class TextThink:
    """The same block where its marks are text; a token may be in several parts."""

    schema_after: tuple[int, ...] = ()
    settled = False

    def __init__(self, added: Collection[int], prompt: str) -> None:
        """added: the ids of added tokens, which are no part of a mark; prompt: its end."""
        self._lexer, self._added = _TEXT_MARKS.lexer(), added
        opening, closing = map(prompt.rstrip().endswith, TEXT_BLOCK)
        self._part = REASONING if opening else CONTENT
        self._may_open = not opening and not closing

    def step(self, token_id: int, text: str) -> int:
        """The part that the next token ends in, as far as it is known."""
        return self._part

    def cut(self, token_id: int, text: str) -> list[tuple[int, int, str]]:
        """The parts, ids and texts that the next token completes; a text may wait.

        The id is -1 where a text may be of several tokens.
        """
        if token_id in self._added:
            return [*self.finish(), (self._part, token_id, text)]
        return [(self._part_of(piece), -1, piece.text) for piece in self._lexer.push(-1, text)]

    def finish(self) -> list[tuple[int, int, str]]:
        """The text that waits."""
        return [(self._part_of(piece), -1, piece.text) for piece in self._lexer.finish()]

    def _part_of(self, piece: Piece) -> int:
        if piece.terminal == TEXT_BLOCK[0] and self._may_open:
            self._part, self._may_open = REASONING, False
            return NEITHER
        if piece.terminal == TEXT_BLOCK[1] and self._part == REASONING:
            self._part = CONTENT
            return NEITHER
        self._may_open = self._may_open and not piece.text.strip()
        return self._part


class Harmony:
    """Messages with headers: `<|channel|>analysis<|message|>...<|end|><|start|>assistant...`.

    What is addressed to a tool is that, else the channel `analysis` is reasoning; any other is
    content, as is text outside of messages.
    """

    settled = False

    def __init__(self, marks: Sequence[str], tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        added = tokenizer.added_tokens
        self._start, self._channel, self._message, end = (added[mark] for mark in marks)
        self._ends = {end, *(added[mark] for mark in _MORE_ENDS if mark in added)}
        self._tokenizer = tokenizer
        self._part = CONTENT
        self.recipient = ""
        self._header: list[int] | None = None  # None outside of one
        begin = len(prompt) - 1
        while begin > 0 and prompt[begin] != self._start:
            begin -= 1
        for token in prompt[begin:]:
            self.step(token, "")
        self.in_role = self._header is not None and self._channel not in self._header
        if self.in_role:
            self._header = None  # the role is complete: what comes may be text without a header
        breaks = {self._start, self._message, *self._ends}
        last = next((token for token in reversed(prompt) if token in breaks), None)
        self._begun = last == self._message or self._header is not None

    @property
    def schema_after(self) -> tuple[int, ...]:
        """The ids behind which the answer is final; () if the prompt has begun a message of it."""
        if self._begun:
            return ()
        final = self._tokenizer.encode("final", add_special_tokens=False)
        return (self._channel, *final, self._message)

    def step(self, token_id: int, text: str) -> int:
        """The part that the next token is in."""
        if token_id == self._message:
            self._part, self._header = self._part_of(self._header or []), None
        elif token_id in (self._start, self._channel):
            fresh = self._header is None or token_id == self._start
            self._header = [token_id] if fresh else [*(self._header or []), token_id]
        elif token_id in self._ends:
            self._part, self._header = CONTENT, None
        elif self._header is None:
            return self._part
        else:
            self._header.append(token_id)
        return NEITHER

    def _part_of(self, header: list[int]) -> int:
        words = self._tokenizer.decode(header, skip_special_tokens=False)
        channel = words.partition(CHANNEL)[2].strip()
        self.recipient = "".join(words.partition(" to=")[2].partition("<")[0].split()[:1])
        if " to=" in words:
            return TO_TOOL
        return REASONING if channel.startswith("analysis") else CONTENT


State = Think | TextThink | Harmony
"""Where one answer is among its marks; `settled` once all that comes is content.

`schema_after`: the ids behind which a schema holds, before any token of the answer.
"""
