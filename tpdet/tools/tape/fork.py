"""Which turns a tape answers: those before turn K, to the very requests that are recorded there."""

from typing import Any

import msgspec

from tpdet.audit.recorded import ChangedPart
from tpdet.errors import DisagreementError, UsageError
from tpdet.tools.check.computed import changed_parts
from tpdet.tools.tape.answers import edited_bytes
from tpdet.tools.tape.tape_file import Ids, Json, RunTape, Turn, bytes_of, canonical, content_of

_SHOWN = 3
"""Differing fields of a request that are shown."""


class Fork:
    """Answers turns from a tape up to the one where it is to fork, and then no more.

    Requests that ran together may come in another order, so each is found by what it asks. What
    only reads (GET) is answered from the tape where that has it, and by the server where not.
    """

    def __init__(self, tape: RunTape, fork_turn: int, edited: Json | None) -> None:
        """edited: the answer that `fork_turn` gets; None: the server's. Raises UsageError."""
        turn = tape.turn(fork_turn)
        before = [one for one in tape.turns if one.turn < fork_turn]
        if len(before) != fork_turn - 1:
            raise UsageError(
                f"--turn {fork_turn}: {tape.path} lacks turns before it, record it again"
            )
        if edited is not None and (turn.method != "POST" or turn.body is None):
            raise UsageError(f"--turn {fork_turn} is {turn.method} {turn.path}: no answer to edit")
        self._tape, self._edited, self._turn = tape, edited, fork_turn
        self._left = before if edited is None else [*before, turn]
        self._behind = [one for one in tape.turns if one not in self._left]
        self.replayed: dict[int, Ids] = {}
        """The ids of recorded turns, by the numbers that these have now."""

    def __call__(self, asked: Turn) -> Turn | None:
        """The answer to a request; None: the server's. Raises DisagreementError."""
        for turn in self._left:
            if not _differences(turn, asked):
                self._left.remove(turn)
                return self._answer(turn, asked)
        waiting = [turn for turn in self._left if turn.method == "POST"]
        reads = asked.method in ("GET", "HEAD")
        if not waiting or reads or any(not _differences(one, asked) for one in self._behind):
            return None
        turn = waiting[0]
        first, *more = _differences(turn, asked)
        parts = [str(part).replace(", computed ", ", asked now ") for part in (first, *more)]
        further = f"; {len(parts) - _SHOWN} fields more" if len(parts) > _SHOWN else ""
        raise DisagreementError(
            f"turn {turn.turn} was not asked again as {self._tape.path} has it, so the fork stops: "
            f"{'; '.join(parts[:_SHOWN])}{further}"
        )

    def check_replayed(self) -> None:
        """Raise DisagreementError if the client ended before it had asked for all turns again."""
        waiting = [turn.name for turn in self._left if turn.method == "POST"]
        if waiting:
            raise DisagreementError(
                f"the command ended before it asked for {waiting[0]} of {self._tape.path} again"
            )

    def _answer(self, turn: Turn, asked: Turn) -> Turn:
        if turn.turn == self._turn and self._edited is not None:
            is_stream, data = edited_bytes(self._edited, asked.body or {})
            return msgspec.structs.replace(
                turn,
                status=200,
                event_stream=is_stream,
                answer=content_of(data),
                ended="whole",
                source="edit",
            )
        if turn.turn in self._tape.ids:
            ids = self._tape.ids[turn.turn]
            self.replayed[asked.turn] = msgspec.structs.replace(ids, turn=asked.turn)
        return msgspec.structs.replace(turn, source="tape" if turn.source == "server" else "edit")


def answer_live(asked: Turn) -> None:
    """The answer to every request of a run that is recorded for the first time: the server's."""


def _differences(turn: Turn, asked: Turn) -> list[ChangedPart]:
    """What makes a request another one than that of a turn."""
    names: list[tuple[str, Any, Any]] = [
        ("method", turn.method, asked.method),
        ("path", turn.path, asked.path),
    ]
    parts = [ChangedPart(name, one, other) for name, one, other in names if one != other]
    theirs, ours = turn.body, asked.body
    if parts or turn.request == asked.request:
        return parts
    if theirs is None or ours is None:
        sizes = len(bytes_of(turn.request)), len(bytes_of(asked.request))
        return [ChangedPart("bytes of the body", sizes[0], sizes[1])]
    return changed_parts(canonical(theirs), canonical(ours))
