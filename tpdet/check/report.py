"""What `tpdet check` found, as JSON lines or as a table."""

from collections.abc import Iterator, Sequence

import msgspec

from tpdet.llm.recorded import Difference


class Found(msgspec.Struct, frozen=True, tag_field="object", tag="difference"):
    """The first difference of a line; `choice` counts the choices of all its prompts."""

    line: int
    difference: Difference


class Checked(msgspec.Struct, frozen=True, tag_field="object", tag="check"):
    """What was checked, by what, and how fast.

    tokens: recorded ones, prompts not counted; seconds: without the start.
    """

    contract: str
    weights: str
    system_fingerprint: str
    answers: int
    tokens: int
    different: int
    seconds: float


def json_lines(differences: Sequence[Found], checked: Checked) -> Iterator[str]:
    """A line for each difference, and one for what was checked."""
    for line in (*differences, checked):
        yield msgspec.json.encode(line).decode()


def table_lines(differences: Sequence[Found], checked: Checked) -> Iterator[str]:
    """A line for each difference, then the totals."""
    for found in differences:
        yield f"line {found.line}, {found.difference}"
    if differences:
        yield ""
    equal = f"{checked.different} differ" if checked.different else "all equal"
    yield f"answers       {checked.answers}, {equal}"
    rate = checked.tokens / checked.seconds if checked.seconds else 0.0
    yield f"tokens        {checked.tokens}, {rate:.0f} a second"
    yield f"contract      {checked.contract}"
    yield f"model digest  {checked.weights}"
    yield f"fingerprint   {checked.system_fingerprint}"
