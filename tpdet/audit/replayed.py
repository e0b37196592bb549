"""What `tpdet replay` says of receipts: lines of JSON, which a report reads. Needs no torch."""

from typing import Any, Literal, NamedTuple

import msgspec

from tpdet.audit.recorded import ChangedPart, Difference
from tpdet.errors import UsageError


class FaultySide(msgspec.Struct, frozen=True):
    """Who is at fault. layouts: all that were tried; between: the two first that differ, where."""

    side: Literal["receipt", "this machine"]
    layouts: tuple[str, ...]
    between: tuple[str, str] | None = None
    difference: Difference | None = None

    def __str__(self) -> str:
        if self.between is None or self.difference is None:
            return (
                f"all replays agree ({'; '.join(self.layouts)}): the receipt is at fault, that is "
                "the machine that gave it or its weights in memory. Another machine tells whether "
                "it is this one, in a way that none of these shows"
            )
        one, other = self.between
        return (
            f"the replays differ among themselves, first at choice {self.difference.choice}, "
            f"position {self.difference.position}, between {one} and {other}: this machine is at "
            "fault, its processors or its memory"
        )


class NotReplayed(msgspec.Struct, frozen=True, tag_field="object", tag="not_replayed"):
    """A receipt that holds, and that this model does not compute."""

    id: str
    leaf: int
    why: str


class ReceiptDiffers(
    msgspec.Struct, frozen=True, tag_field="object", tag="difference", omit_defaults=True
):
    """A receipt whose answer is not what was computed; fault: of whom, where it was examined."""

    id: str
    leaf: int
    differences: tuple[Difference | ChangedPart, ...]
    fault: FaultySide | None = None


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="replay"):
    """What was replayed, by what, and how fast.

    receipts: those with content that were asked for; incomparable: not replayed; erased: of the
    directory; tokens: replayed ones; seconds: of computing.
    """

    contract: str
    weights: str
    system_fingerprint: str
    tp: int
    receipts: int
    different: int
    incomparable: int
    erased: int
    tokens: int
    seconds: float

    @property
    def equal(self) -> int:
        """Receipts whose answers are what was computed."""
        return self.receipts - self.different - self.incomparable


class Replayed(NamedTuple):
    """A whole replay: the receipts that are not equal, and the totals."""

    findings: list[NotReplayed | ReceiptDiffers]
    summary: ReplaySummary


class _DifferenceLine(msgspec.Struct, tag_field="object", tag="difference"):
    id: str
    leaf: int
    differences: tuple[dict[str, Any], ...]
    fault: FaultySide | None = None

    def whole(self) -> ReceiptDiffers:
        differences = tuple(
            msgspec.convert(fields, Difference)
            if "position" in fields
            else msgspec.convert(fields, ChangedPart)
            for fields in self.differences
        )
        return ReceiptDiffers(self.id, self.leaf, differences, self.fault)


def read_replay(text: str, where: str) -> Replayed:
    """What `tpdet replay --json` printed. Raises UsageError for any other text."""
    line = msgspec.json.Decoder(_DifferenceLine | NotReplayed | ReplaySummary)
    findings: list[NotReplayed | ReceiptDiffers] = []
    try:
        *others, last = [line.decode(one) for one in text.splitlines() if one.strip()]
        for one in others:
            if isinstance(one, ReplaySummary):
                raise ValueError("it holds more than one replay")
            findings.append(one.whole() if isinstance(one, _DifferenceLine) else one)
        if not isinstance(last, ReplaySummary):
            raise ValueError("its last line is no summary")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} is not what tpdet replay --json prints ({error}): give all of its output"
        ) from None
    return Replayed(findings, last)
