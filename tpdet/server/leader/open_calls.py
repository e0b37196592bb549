"""Calls whose prompts come in parts: between two parts they run, though the engine has no work."""

from collections.abc import Container

from tpdet.server.wire.protocol import REFUSALS, CallPart

_LETS_FINISH = ("draining", "reloading", "paused")
"""States in which new requests are refused, and what runs may end."""
_ENDED = "aborted", "a control call has ended this request: ask again"


class OpenCalls:
    """The ids of calls of which more parts come. It is true while there is one."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def refusal(self, part: CallPart | None, state: str) -> tuple[str, str] | None:
        """Code and message by which a group, or a part of a call, is refused; None: it is not."""
        if part is not None and not part.first:
            if part.call_id not in self._ids:
                return _ENDED
            if state in _LETS_FINISH:
                return None
        return None if state == "accepting" else REFUSALS[state]

    def accepted(self, part: CallPart | None) -> None:
        """The engine has taken a group, or this part of a call."""
        if part is not None and part.last:
            self.give_up(part.call_id)
        elif part is not None:
            self._ids[part.call_id] = None

    def give_up(self, call_id: str) -> None:
        """No more parts of this call come."""
        self._ids.pop(call_id, None)

    def end(self, asked: Container[str] | None = None) -> list[str]:
        """End calls by their ids or those of their HTTP requests, None: all; the ids of these."""
        ended = [
            call_id
            for call_id in self._ids
            if asked is None or call_id in asked or call_id.rpartition("-")[2] in asked
        ]
        for call_id in ended:
            self.give_up(call_id)
        return ended
