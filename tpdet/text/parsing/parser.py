"""Reads one answer as its tokens come: reasoning, content, and calls of tools.

Its text is that of an answer without a parser; every character of it is content, reasoning, part
of a call, or neither (marks, and headers between harmony's). So stop strings, ids and
log-probabilities know nothing of this. Needs no torch.
"""

import re
from collections import deque
from collections.abc import Sequence

from tpdet.text.parsing import json_text
from tpdet.text.parsing.bodies import begun_call
from tpdet.text.parsing.call_reader import CALLS, CallReader, Span
from tpdet.text.parsing.events import ContentText, Event, FunctionCall, ReasoningText
from tpdet.text.parsing.marks import CONTENT, NEITHER, REASONING, TO_TOOL, Harmony, State, TextThink
from tpdet.text.tokenizer import Tokenizer

_ROLE = re.compile(r"\s*(t|to|to=\S*)?\s*")
_MOST_OF_ROLE = 80  # tokens


class OutputParser:
    """Reads one choice.

    Each token is pushed with the text that it completed; `take` tells what the next characters of
    that text are, as far as stop strings have let them go. `feed` does both for many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: State | None,
        reader: CallReader | None = None,
        keep: bool = True,
    ) -> None:
        """marks: None where nothing is reasoning. reader: None where no tools may be called.

        keep: tell the reasoning, or drop it.
        """
        self.reasoning_tokens = 0
        self._tokenizer, self._marks, self._keep = tokenizer, marks, keep
        self._reader = reader
        self._last = CONTENT  # the part of the last token that was in one
        self._spans: deque[Span] = deque() if reader is None else reader.spans
        self._free = 0  # characters that were taken, and not released yet
        self._call_count = 0  # calls
        self._message: list[str] | None = None  # one of harmony's that is addressed to a tool
        # What a prompt that ends in a header's role goes on with, until it is no recipient.
        self._role: list[str] | None = None
        if reader is not None and isinstance(marks, Harmony) and marks.in_role:
            self._role = []
        self._recipient = ""
        # Tokens of the reasoning behind what may begin a call, until the reasoning ends.
        self._aside: list[tuple[int, str]] | None = None
        self._cuts = marks if isinstance(marks, TextThink) else None
        # Whether a token's part depends on more than its marks.
        self._in_messages = reader is not None and (
            reader.in_reasoning or isinstance(marks, Harmony)
        )

    def passes(self, token_id: int, text: str) -> bool:
        """Whether a token's text is content as it stands, and nothing before it waits.

        Then it counts as pushed and taken: most tokens of an answer are told so.
        """
        marks, reader = self._marks, self._reader
        if self._spans or self._free or "\ufffd" in text:
            return False
        if marks is not None and not marks.settled:
            return False
        if reader is not None and not reader.passes(token_id, text):
            return False
        self._last = CONTENT
        return True

    def push(self, token_id: int, text: str, last: bool = False) -> None:
        """The next token, and what the detokenizer gave for it; last: it ended the answer."""
        if self._cuts is not None:
            for part, id_, piece in self._cuts.cut(-1 if last and not text else token_id, text):
                self._tell(part, id_, piece)
            self.reasoning_tokens += self._cuts.step(token_id, text) == REASONING
            return
        part = CONTENT if self._marks is None else self._marks.step(token_id, text)
        reader = self._reader
        if reader is None and part == TO_TOOL:
            part = REASONING
        if not self._in_messages:
            if part == REASONING:
                self.reasoning_tokens += 1
            if text and part != NEITHER and "\ufffd" not in text:
                if reader is not None and part == CONTENT:
                    reader.push(token_id, text)
                else:
                    self._spans.append((part, len(text), text))
                self._last = part
                return
        else:
            part = self._part_of_message(part, token_id)
        if last and not text:
            token_id = -1
        own = text
        if text and (part == NEITHER or "\ufffd" in text):
            # Bytes of earlier tokens may come with this one, as U+FFFD: they are of their part.
            own = self._tokenizer.token_text(token_id)
            if not text.endswith(own):
                hidden = part == NEITHER or (reader is not None and reader.is_terminal(token_id))
                own = "" if hidden else text
            if len(own) < len(text):
                self._tell(self._last, -1, text[: len(text) - len(own)])
        self._tell(part, token_id, own)
        if part != NEITHER:
            self._last = part

    def _part_of_message(self, part: int, token_id: int) -> int:
        """A token's part where messages may be addressed to tools, or reasoning end with a call."""
        if self._recipient and part in (CONTENT, REASONING):
            part = TO_TOOL
        if part == REASONING:
            self.reasoning_tokens += 1
        self._set_aside(part, token_id)
        if self._message is not None and part != TO_TOOL:
            self._end_message(ended=True)
        if part == NEITHER and self._role is not None:
            self._end_role()
        return part

    def _tell(self, part: int, token_id: int, text: str) -> None:
        reader = self._reader
        if reader is not None and part == CONTENT:
            if self._role is not None:
                self._role.append(text)
                if len(self._role) < _MOST_OF_ROLE and _ROLE.fullmatch("".join(self._role)):
                    return
                text, self._role = "".join(self._role), None
            reader.push(token_id, text)
        elif reader is not None and part == TO_TOOL:
            self._message = [] if self._message is None else self._message
            self._message.append(text)
        elif self._aside is not None and part == REASONING:
            self._aside.append((token_id, text))
        elif text:
            self._spans.append((part, len(text), text))

    def _set_aside(self, part: int, token_id: int) -> None:
        """Reasoning may end with a call, if nothing else ends it: then it is none."""
        reader = self._reader
        if self._aside is None:
            if part == REASONING and reader is not None and reader.begins_in_reasoning(token_id):
                self._aside = []
        elif part != REASONING:
            self._end_aside(ended=True)

    def _end_aside(self, ended: bool, cut: bool = False) -> None:
        aside, self._aside = self._aside or [], None
        reader = self._reader
        if not ended and reader is not None:
            reader = reader.fresh()
            for token_id, text in aside:
                reader.push(token_id, text)
            reader.finish(cut)
            if reader.call_count:
                self.reasoning_tokens -= len(aside)
                self._spans.extend(reader.spans)
                return
        self._spans.extend((REASONING, len(text), text) for _, text in aside if text)

    def take(
        self, text: str, last: bool = False, cut: bool = False
    ) -> tuple[str, str, tuple[Event, ...]]:
        """The content and the reasoning in the next characters of the text.

        Where calls are among them, also the events of these characters, in their order. last: the
        text ends behind them; what was pushed and not taken is dropped. cut: it did not end by
        itself, so a call that it has begun is told.
        """
        spans = self._spans
        if len(spans) == 1 and not self._free and not last:
            part, size, said = spans[0]
            if size == len(text) and part == CONTENT and isinstance(said, str):
                spans.popleft()
                return said, "", ()
        released = self._release(len(text))
        if last:
            self._end(cut)
            released += self._release(0)
        if len(released) == 1:
            part, said = released[0]
            if part == CONTENT:
                return str(said), "", ()
            if part == REASONING:
                return "", str(said) if self._keep else "", ()
        elif not released:
            return "", "", ()
        events = self._events(released)
        content = "".join([event.text for event in events if isinstance(event, ContentText)])
        reasoning = "".join([event.text for event in events if isinstance(event, ReasoningText)])
        called = any(part == CALLS for part, _ in released)
        return content, reasoning, tuple(events) if called else ()

    def feed(self, token_ids: Sequence[int], texts: Sequence[str]) -> list[Event]:
        """The events of the next tokens, given what the detokenizer gave for each."""
        for token_id, text in zip(token_ids, texts, strict=True):
            self.push(token_id, text)
        return self._events(self._release(sum(map(len, texts))))

    def finish(self, cut: bool = False) -> list[Event]:
        """The events that were held back; nothing may be pushed afterwards. cut: as in `take`."""
        self._end(cut)
        return self._events(self._release(0))

    def _end(self, cut: bool) -> None:
        for part, id_, piece in () if self._cuts is None else self._cuts.finish():
            self._tell(part, id_, piece)
        if self._reader is None:
            return
        if self._aside is not None:
            self._end_aside(ended=False, cut=cut)
        if self._role:
            role = "".join(self._role)
            if cut and "to=" in role:
                self._spans.append((NEITHER, len(role), ""))
            else:
                self._reader.text(role)
        if self._message is not None:
            self._end_message(ended=False, cut=cut)
        self._reader.finish(cut)

    def _end_role(self) -> None:
        """The text behind the prompt's role was part of a header."""
        text, self._role = "".join(self._role or ()), None
        self._recipient = text.partition("to=")[2].strip()
        if text:
            self._spans.append((NEITHER, len(text), ""))

    def _end_message(self, ended: bool, cut: bool = False) -> None:
        """A message to a tool is over; ended: by its end, not by the answer's, which was `cut`."""
        reader, marks = self._reader, self._marks
        text, self._message = "".join(self._message or ()), None
        if reader is None or not isinstance(marks, Harmony):
            return
        recipient, self._recipient = self._recipient or marks.recipient, ""
        name, arguments = recipient.removeprefix("functions."), text.strip()
        call: FunctionCall | None = FunctionCall(name, arguments)
        try:
            json_text.members(arguments)
        except ValueError:
            call = begun_call(name, text) if cut else None
        if call is not None and reader.known([call]):
            reader.add([call], len(text))
        elif ended and recipient.startswith("functions."):
            reader.text(text)
        elif text:
            self._spans.append((NEITHER, len(text), ""))  # cut short, or to no tool of the request

    def _release(self, size: int) -> list[tuple[int, str | list[FunctionCall]]]:
        """What the next characters are, as far as that is known."""
        spans = self._spans
        released: list[tuple[int, str | list[FunctionCall]]] = []
        free = self._free + size
        while spans:
            part, length, said = spans[0]
            if length > free:
                if free and len(said) == length and isinstance(said, str):
                    released.append((part, said[:free]))
                    spans[0] = part, length - free, said[free:]
                    free = 0
                break
            spans.popleft()
            free -= length
            released.append((part, said))
        self._free = free
        return released

    def _events(self, released: Sequence[tuple[int, str | list[FunctionCall]]]) -> list[Event]:
        events: list[Event] = []
        for part, said in released:
            if not isinstance(said, str):
                for call in said:
                    events.extend(call.events(self._call_count))
                    self._call_count += 1
            elif part == CONTENT and said:
                events.append(ContentText(said))
            elif part == REASONING and said and self._keep:
                events.append(ReasoningText(said))
        return events
