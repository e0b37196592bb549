"""What the text of an answer says, in its order: reasoning, content, and calls of tools."""

from collections.abc import Iterable

import msgspec


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """Text of the reasoning."""

    text: str


class ContentText(msgspec.Struct, frozen=True, gc=False):
    """Text of the content."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """A call begins; `index` counts the answer's calls from 0, `id` is one that the model wrote."""

    index: int
    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of a call's arguments, which are JSON of an object."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """The arguments are complete."""

    index: int


Event = ReasoningText | ContentText | CallBegun | CallArguments | CallEnded


def text_events(reasoning: str, content: str) -> tuple[Event, ...]:
    """The events of texts without calls: the reasoning is said first."""
    thought = (ReasoningText(reasoning),) if reasoning else ()
    return (*thought, ContentText(content)) if content else thought


class FunctionCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool; `arguments` are the text of a JSON object.

    ended: not of a call in which the answer was cut, whose arguments are the beginning of it.
    """

    name: str
    arguments: str
    id: str | None = None
    ended: bool = True

    def events(self, index: int) -> tuple[Event, ...]:
        """The call as events; `index`: how many calls the answer had before."""
        begun = CallBegun(index, self.name, self.id)
        said = (CallArguments(index, self.arguments),) if self.arguments else ()
        return (begun, *said, CallEnded(index)) if self.ended else (begun, *said)


class Message(msgspec.Struct, frozen=True, gc=False):
    """A whole answer: the sum of its events."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[FunctionCall, ...] = ()

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Message":
        """The sum of the events of one answer."""
        reasoning: list[str] = []
        content: list[str] = []
        begun: dict[int, tuple[CallBegun, list[str]]] = {}
        calls: list[FunctionCall] = []
        for event in events:
            match event:
                case ReasoningText(text):
                    reasoning.append(text)
                case ContentText(text):
                    content.append(text)
                case CallBegun(index):
                    begun[index] = event, []
                case CallArguments(index, text):
                    begun[index][1].append(text)
                case CallEnded(index):
                    call, pieces = begun.pop(index)
                    calls.append(FunctionCall(call.name, "".join(pieces), call.id))
        for call, pieces in begun.values():
            calls.append(FunctionCall(call.name, "".join(pieces), call.id, ended=False))
        return cls("".join(reasoning), "".join(content), tuple(calls))
