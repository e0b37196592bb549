"""What `tpdet check` found, as JSON lines or as a table."""

from collections.abc import Iterator, Sequence

import msgspec

from tpdet.audit.recorded import ChangedPart, Difference
from tpdet.tools.check.computed import Compared, Elsewhere

_SHOWN = 20
"""Differences of a line that the table shows."""


class FoundDifference(msgspec.Struct, frozen=True, tag_field="object", tag="difference"):
    """The first difference of a line, and the paths of all fields that differ.

    A difference of a token has `choice`, which counts the choices of all prompts, and `position`;
    one of another field its path, `part`. Of the tokens, `parts` has the first that differs.
    """

    line: int
    difference: Difference | ChangedPart
    parts: tuple[str, ...]


class Checked(msgspec.Struct, frozen=True, tag_field="object", tag="check"):
    """What was checked, by what, and how fast.

    tokens: recorded ones, prompts not counted; different: answers; seconds: without the start;
    elsewhere: what names another environment of equal answers.
    """

    contract: str
    weights: str
    system_fingerprint: str
    answers: int
    tokens: int
    different: int
    seconds: float
    elsewhere: tuple[Elsewhere, ...] = ()

    @classmethod
    def of(
        cls,
        contract: str,
        weights: str,
        fingerprint: str,
        compared: Sequence[Compared],
        seconds: float,
    ) -> "Checked":
        """The totals of what was compared."""
        return cls(
            contract,
            weights,
            fingerprint,
            len(compared),
            sum(one.line.tokens for one in compared),
            sum(bool(one.differences) for one in compared),
            seconds,
            tuple(other for one in compared for other in one.elsewhere),
        )


def json_lines(compared: Sequence[Compared], checked: Checked) -> Iterator[str]:
    """A line for each answer that differs, and one for what was checked."""
    for one in compared:
        if one.differences:
            parts = tuple(_path(one, difference) for difference in one.differences)
            shown = FoundDifference(one.line.number, one.differences[0], parts)
            yield msgspec.json.encode(shown).decode()
    yield msgspec.json.encode(checked).decode()


def table_lines(compared: Sequence[Compared], checked: Checked) -> Iterator[str]:
    """A line for each difference, then the totals."""
    for one in compared:
        for difference in one.differences[:_SHOWN]:
            yield f"line {one.line.number}, {difference}"
        if len(one.differences) > _SHOWN:
            more = len(one.differences) - _SHOWN
            yield f"line {one.line.number}: {more} fields more"
    if checked.different:
        yield ""
    equal = f"{checked.different} differ" if checked.different else "all equal"
    yield f"answers       {checked.answers}, {equal}"
    for other in checked.elsewhere[:_SHOWN]:
        shown = ChangedPart(other.part, other.recorded, other.computed)
        yield f"elsewhere     line {other.line}, {shown}"
    if len(checked.elsewhere) > _SHOWN:
        yield f"elsewhere     {len(checked.elsewhere) - _SHOWN} lines more"
    rate = checked.tokens / checked.seconds if checked.seconds else 0.0
    yield f"tokens        {checked.tokens}, {rate:.0f} a second"
    yield f"contract      {checked.contract}"
    yield f"model digest  {checked.weights}"
    yield f"fingerprint   {checked.system_fingerprint}"


def _path(compared: Compared, difference: Difference | ChangedPart) -> str:
    if isinstance(difference, ChangedPart):
        return difference.part
    ids = (difference.recorded and difference.recorded.id) != (
        difference.computed and difference.computed.id
    )
    name = "token_ids" if ids else "logprob_bits"
    return f"{compared.line.path(difference.choice)}.{name}[{difference.position}]"
