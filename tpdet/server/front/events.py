"""The events of one stream: what each token adds, as server-sent JSON.

Most events differ in their text alone. Their other bytes are prepared once for each choice, for its
content and for its reasoning, by the writer that writes every other event too.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from tpdet.requests.answer.choices import ChoiceWriter, Json, usage
from tpdet.requests.answer.json_pieces import json_pieces, json_text
from tpdet.requests.answer.prompt_scores import PromptScores
from tpdet.requests.answer.whole_answer import FormWriter
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError
from tpdet.requests.shown_ids import ShownIds
from tpdet.text.outputs import TextDelta

ChoiceKey = tuple[str, int]  # request id, choice
_MARK = "\0"  # a text whose place in an event's JSON is found: no string follows the text
_encode = msgspec.json.Encoder().encode


class Event(NamedTuple):
    """A choice's next piece; `tokens` of all choices, up to this piece.

    `cursor`: the tail of the cursor that stands behind it; None where events have no cursors, b""
    where an answer cannot be continued from here on. `weights`: as in `TokenOutput`. `versions`:
    of a choice's last piece, where they are shown. `position`: of the choice's tokens, up to this
    piece, where receipts are made.
    """

    key: ChoiceKey
    delta: TextDelta
    tokens: int
    cursor: bytes | None = None
    weights: int = 0
    versions: list[Json] | None = None
    position: int = 0


class EventWriter:
    """Writes the events of one call; `chunk` holds the fields around the choices."""

    def __init__(
        self,
        call: Call,
        chunk: Json,
        writers: dict[ChoiceKey, ChoiceWriter],
        prompts: dict[str, PromptScores],
    ) -> None:
        self._call, self._writers, self._prompts = call, writers, prompts
        self.chunk = chunk
        self.origin: Json = {}
        """What the first event of a choice names beside the seed."""
        self.weights = 0
        """Of the events that name the present fingerprint."""
        self.fingerprint_of: Callable[[int], str] | None = None
        """Names the weights of a number, where events may be of several."""
        self.cursor_head = b""
        """What the cursors of all events begin with."""
        self._repeats_prompt = call.echo or call.token_ids
        self._cumulative = call.sglang is not None
        self._text_only = not call.shows_tokens and not call.continuous_usage
        self._around: tuple[dict[ChoiceKey, list[bytes]], ...] = ({}, {})  # content, reasoning

    def set_fingerprint(self, fingerprint: str) -> None:
        """What further events name."""
        self.chunk["system_fingerprint"] = fingerprint
        for prepared in self._around:
            prepared.clear()

    def _turn_to(self, weights: int) -> None:
        self.weights = weights
        if self.fingerprint_of is not None:
            self.set_fingerprint(self.fingerprint_of(weights))

    def id_line(self, tail: bytes | None) -> bytes:
        """The line of an event that holds its cursor; an empty one makes clients forget theirs."""
        if tail is None:
            return b""
        return b"id: %b.%b\n" % (self.cursor_head, tail) if tail else b"id:\n"

    def opening(self, ids: ShownIds | None) -> Iterator[str]:
        """What stands before a stream's first token; ids: those that the answer shows."""
        if ids is not None:
            self.chunk["id"] = ids.chat
        yield from ()

    def small(self, events: list[Event]) -> bool:
        """Whether these may be written at once: a choice's first event may repeat the prompt."""
        if self._cumulative:
            return False
        return not self._repeats_prompt or all(self._writers[e.key].begun for e in events)

    def latest(self, events: list[Event]) -> Iterator[Event]:
        """The events that are written: of those that hold all so far, each choice's last one."""
        last = {event.key: number for number, event in enumerate(events)}
        for number, event in enumerate(events):
            if self._cumulative and last[event.key] != number:
                self._writers[event.key].pass_over(event.delta)
            else:
                yield event

    def data(self, event: Event) -> bytes:
        """A small event."""
        if event.weights != self.weights:
            self._turn_to(event.weights)
        delta = event.delta
        text, reasoning = delta.text, delta.reasoning
        plain = self._text_only and not delta.finish_reason and not (text and reasoning)
        plain = plain and not delta.events
        if not plain or not self._writers[event.key].begun:
            return "".join(self.pieces(event)).encode()
        prepared = self._around[reasoning != ""]
        around = prepared.get(event.key)
        if around is None:
            marks = {"reasoning": _MARK} if reasoning else {"text": _MARK}
            marked = event._replace(delta=msgspec.structs.replace(delta, **marks), cursor=None)
            whole = "".join(self.pieces(marked)).encode()
            around = whole.rsplit(_encode(_MARK), 2 if reasoning else 1)  # reasoning has two names
            prepared[event.key] = around
        content = _encode(reasoning or text).join(around)
        return content if event.cursor is None else self.id_line(event.cursor) + content

    def ending(
        self, last: Event, own_fields: Json, counts: Json, cursor: bytes | None
    ) -> Iterator[str]:
        """The last event, and the usage's if it is asked for; the receipt is in the later one."""
        if not self._call.include_usage:
            yield from self.pieces(last, tpdet=own_fields)
            return
        yield from self.pieces(last)
        content = self.chunk | {"tpdet": own_fields, "choices": [], "usage": counts}
        yield f"{self.id_line(cursor).decode()}data: {json_text(content)}\n\n"

    def mark(self, cursor: bytes | None) -> bytes:
        """What a stream ends with that came to its end; cursor: the tail of the last one."""
        return self.id_line(cursor) + b"data: [DONE]\n\n"

    def failure(self, problem: ApiError) -> bytes:
        """What a stream ends with that an error ends."""
        return b"data: " + problem.body() + b"\n\n"

    def pieces(self, event: Event, **fields: object) -> Iterator[str]:
        """Any event, bit by bit where it may repeat the prompt; `fields` replace those around."""
        if event.weights != self.weights:
            self._turn_to(event.weights)
        call, writer = self._call, self._writers[event.key]
        first = not writer.begun
        large = self._cumulative or (self._repeats_prompt and first)
        piece = writer.piece(event.delta, self._prompts.get(event.key[0]), event.versions)
        so_far = usage(call, event.tokens) if call.continuous_usage else None
        extra = {"usage": so_far} if call.include_usage else {}
        around: Json = {**self.chunk, **fields}
        if first and self.origin:
            around["tpdet"] = {**self.origin, **around["tpdet"]}
        content = writer.event(around, piece, first) | extra
        yield self.id_line(event.cursor).decode()
        yield "data: "
        yield from json_pieces(content) if large else (json_text(content),)
        yield "\n\n"


class FormEvents(EventWriter):
    """Writes the events that a form's writer tells of one call."""

    def __init__(self, form: FormWriter, call: Call, chunk: Json) -> None:
        super().__init__(call, chunk, {}, {})
        self._form = form

    def opening(self, ids: ShownIds | None) -> Iterator[str]:
        """The events before the first token."""
        assert ids is not None, "an answer in a form shows ids"
        for event in self._form.begin(ids, self.chunk):
            yield from _pieces(event)

    def small(self, events: list[Event]) -> bool:
        """Whether these may be written at once: none repeats the prompt."""
        return True

    def data(self, event: Event) -> bytes:
        """The events of what a token adds."""
        return "".join(self.pieces(event)).encode()

    def pieces(self, event: Event, **fields: object) -> Iterator[str]:
        """The same as text; what stands around a choice is in the first and the last event."""
        if event.weights != self.weights:
            self._turn_to(event.weights)
        yield from map(_text, self._form.add(event.delta))

    def ending(
        self, last: Event, own_fields: Json, counts: Json, cursor: bytes | None
    ) -> Iterator[str]:
        """The last token's events, and those of the end, which have the receipt."""
        yield from self.pieces(last)
        around = self.chunk | {"tpdet": own_fields}
        if own_fields.get("mixed_weights"):  # the end tells of the whole answer
            around["system_fingerprint"] = None
        for event in self._form.end(around, counts):
            yield from _pieces(event)

    def mark(self, cursor: bytes | None) -> bytes:
        """What stands behind the events of the end."""
        return self._form.mark

    def failure(self, problem: ApiError) -> bytes:
        """The events of an error."""
        events = self._form.fail(problem)
        return "".join(piece for event in events for piece in _pieces(event)).encode()


def _pieces(event: Json) -> Iterator[str]:
    """An event that may hold the whole answer, and what that repeats of its request."""
    yield f"event: {event['type']}\ndata: "
    yield from json_pieces(event)
    yield "\n\n"


def _text(event: Json) -> str:
    return f"event: {event['type']}\ndata: {json_text(event)}\n\n"
