"""What writes an answer in another API's form: the same deltas, told as that API's events.

A form's whole answer is what its events add up to, so both come from one description.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from tpdet.requests.answer.messages import MessageWriter
from tpdet.requests.answer.responses import ResponseWriter
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError
from tpdet.requests.shown_ids import ShownIds
from tpdet.text.outputs import TextDelta

Json = dict[str, Any]


class FormWriter(Protocol):
    """Writes the one choice of a call. Each method gives the events that a stream has, by type.

    mark: what stands behind the last event of a stream.
    """

    mark: ClassVar[bytes]

    def begin(self, ids: ShownIds, around: Json) -> list[Json]:
        """The events before the first token; around: `envelope` of the answer."""

    def add(self, delta: TextDelta) -> list[Json]:
        """The events of what a token adds."""

    def end(self, around: Json, counts: Json) -> list[Json]:
        """The events of the end; around: the envelope with the receipt, counts: the usage."""

    def fail(self, problem: ApiError) -> list[Json]:
        """The events of an error behind the first byte."""

    @property
    def whole(self) -> Json:
        """The answer, once it has ended."""


FORM_WRITERS: dict[str, Callable[[Call], FormWriter]] = {
    "messages": MessageWriter,
    "responses": ResponseWriter,
}
"""By `Call.form.api`."""


def form_writer(call: Call) -> FormWriter | None:
    """What writes the answer to a call; None where it has the form of its route's own."""
    return None if call.form is None else FORM_WRITERS[call.form.api](call)
