"""Finds the calls of tools in an answer's content, and tells them from its text.

A call is told once it is whole, or once the answer was cut in it. So a stream takes nothing back,
and says what the whole answer does.
"""

from collections import deque
from collections.abc import Mapping

from tpdet.text.parsing.bodies import BROKEN, MORE, CallBody, Tools, body_of
from tpdet.text.parsing.events import FunctionCall
from tpdet.text.parsing.family import CallFamily
from tpdet.text.parsing.marks import CONTENT, NEITHER
from tpdet.text.parsing.terminals import Piece, Terminals

CALLS = 4
"""Beside the parts of `marks`: calls of tools."""

Span = tuple[int, int, str | list[FunctionCall]]
"""A part of an answer: what it is, how many characters the detokenizer gave for it, and its text or
calls. Text as long as what the detokenizer gave is that, and may be cut.
"""


class CallReader:
    """Reads the content of one answer; `spans` are its parts so far."""

    def __init__(
        self,
        family: CallFamily,
        terminals: Terminals,
        tools: Tools | None,
        hidden: Mapping[int, str],
    ) -> None:
        """tools: those that may be called, None for any; hidden: tokens that may have no text."""
        self._family, self._tools, self._hidden = family, tools, hidden
        self._terminals, self._lexer = terminals, terminals.lexer()
        self._tags_are_ids = (
            family.tags is not None and family.tags.key_begin in terminals.ids.values()
        )
        self._ids = terminals.ids
        self.in_reasoning = family.in_reasoning
        # Whether text is no more than text until a token is a terminal.
        self._by_ids = not terminals.has_text and not family.unmarked
        self.spans: deque[Span] = deque()
        self.call_count = 0  # calls so far
        self._body: CallBody | None = None
        self._marked = True
        self._raw: list[str] = []  # all text of the body, and how much of it was shown
        self._shown = 0
        self._space: list[str] = []  # behind the last text: a call may follow
        self._begun = self._line = True  # at the beginning of the answer, of a line
        self._behind_call = False

    def fresh(self) -> "CallReader":
        """Another one, which has read nothing."""
        return CallReader(self._family, self._terminals, self._tools, self._hidden)

    def begins_in_reasoning(self, token_id: int) -> bool:
        """Whether a token may begin a call in reasoning that does not end."""
        return self.in_reasoning and self._terminals.ids.get(token_id) in self._family.begin

    def is_terminal(self, token_id: int) -> bool:
        """Whether a token is one."""
        return token_id in self._ids

    def push(self, token_id: int, text: str) -> None:
        """The next token of the content, and what the detokenizer gave for it."""
        if self._body is None and self._by_ids and token_id not in self._ids:
            self.text(text)
            return
        if self._body is not None and not text and token_id in self._hidden:
            for piece in self._lexer.push(-1, self._hidden[token_id]):
                self._push(piece._replace(shown=""))
            return
        for piece in self._lexer.push(token_id, text):
            self._push(piece)

    def passes(self, token_id: int, text: str) -> bool:
        """Whether a token is text as it stands, and nothing before it waits; then it is read."""
        if self._body is not None or not self._by_ids or token_id in self._ids or self._space:
            return False
        if not text or text[-1].isspace():
            return False
        self._begun = self._behind_call = self._line = False
        return True

    def finish(self, cut: bool = False) -> None:
        """The answer ends; cut: by somebody else than the model, which may have been in a call."""
        for piece in self._lexer.finish():
            if cut and self._body is not None:  # it may begin a mark: of the call it is no part
                self._raw.append(piece.text)
                self._shown += len(piece.shown)
            else:
                self._push(piece)
        if self._body is not None:
            if self._body.finish():
                self._close()
            elif cut and self._tell_begun(self._body):
                self._body = None
            elif self._marked:
                self.spans.append((NEITHER, self._shown, ""))  # a call that was not made
                self._body, self._behind_call = None, True
            else:
                self._break()
        self._flush_space(CONTENT if not self._behind_call else NEITHER)

    def add(self, calls: list[FunctionCall], shown: int) -> None:
        """Calls that were read elsewhere; shown: the characters they took."""
        self._flush_space(NEITHER)
        self.spans.append((CALLS, shown, calls))
        self.call_count += len(calls)
        self._begun, self._behind_call = False, True

    def text(self, text: str) -> None:
        """Text of the content, without looking for calls in it."""
        if text and not self._space and not text[-1].isspace():
            self.spans.append((CONTENT, len(text), text))
            self._begun = self._behind_call = self._line = False
            return
        bare = text.rstrip()
        if bare:
            self._flush_space(CONTENT)
            self.spans.append((CONTENT, len(bare), bare))
            self._begun = self._behind_call = False
        if len(bare) != len(text):
            self._space.append(text[len(bare) :])
        if text:
            self._line = text[-1] == "\n"

    def known(self, calls: list[FunctionCall]) -> bool:
        """Whether all calls are of tools that may be called."""
        return all(self._tools is None or call.name in self._tools for call in calls)

    def _flush_space(self, kind: int) -> None:
        if self._space:
            space = "".join(self._space)
            self.spans.append((kind, len(space), space))
            self._space = []

    def _push(self, piece: Piece) -> None:
        rest: Piece | None = piece
        while rest is not None:
            rest = self._outside(rest) if self._body is None else self._inside(self._body, rest)

    def _outside(self, piece: Piece) -> Piece | None:
        """Takes a piece of the content; returns what of it belongs to a call that it begins."""
        family = self._family
        if piece.terminal in family.begin and piece.terminal:
            if piece.terminal not in family.line_begin:
                self._begin(piece, marked=True)
                return None
            if self._line:
                self._begin(Piece("", "", ""), marked=False)
                return piece
        elif family.unmarked and self._begun and not piece.terminal:
            bare = piece.text.lstrip()
            if bare and bare[0] in family.unmarked:
                if len(bare) != len(piece.text):
                    self.text(piece.text[: -len(bare)])
                self._begin(Piece("", "", ""), marked=False)
                return Piece("", bare, bare)
        self.text(piece.shown)
        return None

    def _begin(self, piece: Piece, marked: bool) -> None:
        self._body = body_of(self._family, self._tools, marked, self._tags_are_ids)
        self._marked = marked
        self._raw, self._shown = [piece.text], len(piece.shown)

    def _inside(self, body: CallBody, piece: Piece) -> Piece | None:
        """Takes a piece of a call; returns what of it stands behind the call."""
        status, taken = body.push(piece)
        whole = taken == len(piece.text)
        self._raw.append(piece.text[:taken])
        self._shown += len(piece.shown) if whole else min(taken, len(piece.shown))
        if status == MORE:
            return None
        if status == BROKEN:
            self._break()
        else:
            self._close()
        if whole:
            return None
        return Piece(piece.terminal if not taken else "", piece.text[taken:], piece.shown[taken:])

    def _close(self) -> None:
        body, self._body = self._body, None
        try:
            calls = [] if body is None else body.calls()
        except ValueError:
            calls = []
        if calls and self.known(calls):
            self.add(calls, self._shown)
        else:
            self._break()

    def _tell_begun(self, body: CallBody) -> bool:
        """Tell the calls of a body in which the answer was cut, if it names tools."""
        try:
            calls = body.begun()
        except ValueError:
            return False
        if not calls or not self.known(calls):
            return False
        self.add(calls, self._shown)
        return True

    def _break(self) -> None:
        """What began like a call is text."""
        self._body, self._begun = None, False
        text = "".join(self._raw)
        if len(text) == self._shown:
            self.text(text)
            return
        self._flush_space(CONTENT)
        self.spans.append((CONTENT, self._shown, text))
        self._behind_call = False
        self._line = text.endswith("\n")
