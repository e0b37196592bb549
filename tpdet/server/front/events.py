"""The events of one stream: what each token adds, as server-sent JSON.

Most events differ in their text alone. Their other bytes are prepared once for each choice, by the
writer that writes every other event too.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tpdet.server.body.prepare import Call
from tpdet.server.front.answers import ChoiceWriter, Json, usage
from tpdet.server.wire.json_pieces import json_pieces, json_text
from tpdet.server.wire.prompt_scores import PromptScores
from tpdet.text.outputs import TextDelta

ChoiceKey = tuple[str, int]  # request id, choice
_MARK = "\0"  # a text whose place in an event's JSON is found: no string follows the text
_encode = msgspec.json.Encoder().encode


class Event(NamedTuple):
    """A choice's next piece; `tokens` of all choices, up to this piece."""

    key: ChoiceKey
    delta: TextDelta
    tokens: int


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
        self._repeats_prompt = call.echo or call.token_ids
        self._text_only = call.logprobs is None and not call.token_ids and not call.continuous_usage
        self._around: dict[ChoiceKey, tuple[bytes, bytes]] = {}

    def set_fingerprint(self, fingerprint: str) -> None:
        """What further events name."""
        self.chunk["system_fingerprint"] = fingerprint
        self._around.clear()

    def small(self, events: list[Event]) -> bool:
        """Whether these may be written at once: a choice's first event may repeat the prompt."""
        return not self._repeats_prompt or all(self._writers[e.key].begun for e in events)

    def data(self, event: Event) -> bytes:
        """A small event."""
        delta = event.delta
        if not self._text_only or delta.finish_reason or not self._writers[event.key].begun:
            return "".join(self.pieces(event)).encode()
        around = self._around.get(event.key)
        if around is None:
            marked = event._replace(delta=msgspec.structs.replace(delta, text=_MARK))
            whole = "".join(self.pieces(marked)).encode()
            head, _, tail = whole.rpartition(_encode(_MARK))
            around = self._around[event.key] = head, tail
        return around[0] + _encode(delta.text) + around[1]

    def pieces(self, event: Event, **fields: object) -> Iterator[str]:
        """Any event, bit by bit where it may repeat the prompt; `fields` replace those around."""
        call, writer = self._call, self._writers[event.key]
        large = self._repeats_prompt and not writer.begun
        piece = writer.piece(event.delta, self._prompts.get(event.key[0]))
        so_far = usage(call, event.tokens) if call.continuous_usage else None
        extra = {"usage": so_far} if call.include_usage else {}
        content = {**self.chunk, **fields, "choices": [piece], **extra}
        yield "data: "
        yield from json_pieces(content) if large else (json_text(content),)
        yield "\n\n"
