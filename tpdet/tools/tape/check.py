"""Computes a tape's answers again, as verified drafts, and names the first thing that differs."""

import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from tpdet.audit.recorded import ChangedPart, Difference, Scored
from tpdet.errors import CheckpointError
from tpdet.tools.check.answers import Line, line_of
from tpdet.tools.check.computed import Compared, changed_parts
from tpdet.tools.check.targets import Compare, compare_each
from tpdet.tools.tape.answers import shown_answer
from tpdet.tools.tape.ids import question_of
from tpdet.tools.tape.tape_file import RunTape, Turn

_SHOWN = 8
_BODY = "response.body."
_HELD = (
    "choices", "usage", "tpdet", "system_fingerprint", "content", "stop_reason", "stop_sequence",
    "output", "status", "error", "incomplete_details",
)  # fmt: skip
"""Fields of a client's answer that are functions of its request."""
_COUNTS = ("accepted_prediction_tokens", "rejected_prediction_tokens", "cached_tokens",
           "input_tokens")  # fmt: skip
"""Counts in a client's answer that depend on the load."""


class TurnVerdict(NamedTuple):
    """What was found of one answer: differences, or why it cannot be compared."""

    turn: Turn
    differences: Sequence[Difference | ChangedPart]
    incomparable: str = ""
    tokens: int = 0


class CheckedTape(NamedTuple):
    """The answers of a tape, in order. seconds: of computing."""

    tape: RunTape
    verdicts: list[TurnVerdict]
    seconds: float

    @property
    def different(self) -> list[TurnVerdict]:
        """Those that differ."""
        return [one for one in self.verdicts if one.differences]

    @property
    def incomparable(self) -> list[TurnVerdict]:
        """Those that cannot be compared."""
        return [one for one in self.verdicts if one.incomparable]

    def lines(self) -> Iterator[str]:
        """A line for each difference, the first turn's first, then the totals."""
        for one in self.verdicts:
            name = f"{one.turn.name} ({one.turn.method} {one.turn.url})"
            if one.incomparable:
                yield f"{name} cannot be compared: {one.incomparable}"
            for difference in one.differences[:_SHOWN]:
                yield f"{name}, {_shown(difference)}"
            if len(one.differences) > _SHOWN:
                yield f"{name}: {len(one.differences) - _SHOWN} fields more"
        if not self.tape.is_whole:
            yield "the tape has no end: its recording was cut off"
        answers = len(self.verdicts)
        different, incomparable = len(self.different), len(self.incomparable)
        tokens = sum(one.tokens for one in self.verdicts)
        yield (
            f"{len(self.tape.turns)} turns, {answers} answers, {tokens} tokens: "
            f"{answers - different - incomparable} equal, {different} differ, {incomparable} "
            f"cannot be compared; {self.seconds:.1f} s"
        )
        yield f"tape digest {self.tape.digest}"


def line_of_turn(tape: RunTape, turn: Turn) -> Line:
    """The answer of a turn as `tpdet check` takes it. Raises CheckpointError if it has no ids."""
    ids = tape.ids.get(turn.turn)
    if ids is None or ids.body is None:
        reason = "its recording ended before" if ids is None else ids.reason
        raise CheckpointError(f"it was recorded without its ids: {reason}")
    question = question_of(turn, tape.head.chat_template_date)
    fields = question.line({"id": "", **ids.body})
    return line_of(fields, turn.name, turn.turn, turn.name)


def check_tape(tape: RunTape, compare: Compare) -> CheckedTape:
    """A verdict on each answer."""
    begin = time.monotonic()
    verdicts: dict[int, TurnVerdict] = {}
    lines: dict[int, Line] = {}
    for turn in tape.turns:
        if turn.is_answer:
            try:
                lines[turn.turn] = line_of_turn(tape, turn)
            except CheckpointError as error:
                verdicts[turn.turn] = TurnVerdict(turn, (), str(error))
    turns = {turn.turn: turn for turn in tape.turns}
    found = compare_each([*lines.values()], compare) if lines else []
    for (number, line), one in zip(lines.items(), found, strict=True):
        verdicts[number] = _verdict(turns[number], line, one)
    ordered = [verdicts[number] for number in sorted(verdicts)]
    return CheckedTape(tape, ordered, time.monotonic() - begin)


def _verdict(turn: Turn, line: Line, found: Compared | str) -> TurnVerdict:
    """found: what differs, or why it cannot be compared."""
    shown = _shown_otherwise(turn, line)
    if isinstance(found, str):
        return TurnVerdict(turn, shown, found, line.tokens)
    parts = found.differences
    others = [part for part in parts if isinstance(part, ChangedPart)]
    named = {f"answer.{part.part.removeprefix(_BODY)}" for part in others}
    shown = [part for part in shown if part.part not in named]
    return TurnVerdict(turn, [*parts, *shown], "", line.tokens)


def _shown_otherwise(turn: Turn, line: Line) -> list[ChangedPart]:
    """The fields of the answer that the client got which the answer with ids has otherwise."""
    shown = shown_answer(turn) or {}
    kept = {key: value for key, value in shown.items() if key in _HELD}
    return [
        msgspec.structs.replace(part, part=f"answer.{part.part}")
        for part in changed_parts(kept, line.body)
        if part.recorded is not None and not part.part.endswith(_COUNTS)
    ]


def _shown(difference: Difference | ChangedPart) -> str:
    """A difference with both log-probabilities."""
    if isinstance(difference, ChangedPart):
        return str(difference)
    place = f"choice {difference.choice}, token {difference.position}"
    recorded, computed = difference.recorded, difference.computed
    return f"{place}: recorded {_scored(recorded)}, computed {_scored(computed)}"


def _scored(token: Scored | None) -> str:
    if token is None:
        return "the end"
    try:
        value = f"{token.logprob:.7f}"
    except (ValueError, struct.error):
        value = "that is no fp32 number"
    return f"id {token.id}, log-probability {value} (bits {token.bits})"
