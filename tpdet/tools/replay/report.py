"""What `tpdet replay` found, as JSON lines or as a table."""

from collections.abc import Iterator, Sequence

import msgspec

from tpdet.audit.replayed import NotReplayed, ReceiptDiffers, ReplaySummary
from tpdet.tools.replay.fault import Examination

_SHOWN = 20
"""Receipts of a kind that the table shows."""


Findings = Sequence[NotReplayed | ReceiptDiffers]


def json_lines(
    findings: Findings, examination: Examination, summary: ReplaySummary
) -> Iterator[bytes]:
    """A line for each receipt that is not equal, with who is at fault where it was examined."""
    faults = examination.faults()
    for one in findings:
        if isinstance(one, ReceiptDiffers):
            one = msgspec.structs.replace(one, fault=faults.get(one.id))
        yield msgspec.json.encode(one)
    yield msgspec.json.encode(summary)


def table_lines(
    findings: Findings, examination: Examination, summary: ReplaySummary
) -> Iterator[str]:
    """The receipts that are not equal, then the totals."""
    faults = examination.faults()
    differing = [one for one in findings if isinstance(one, ReceiptDiffers)]
    for one in differing[:_SHOWN]:
        for difference in one.differences:
            yield f"receipt {one.id} (leaf {one.leaf}), {difference}"
        if one.id in faults:
            yield f"  {faults[one.id]}"
    if len(differing) > _SHOWN:
        yield f"{len(differing) - _SHOWN} receipts more differ"
    others = [one for one in findings if isinstance(one, NotReplayed)]
    for other in others[:_SHOWN]:
        yield f"receipt {other.id} (leaf {other.leaf}) was not replayed: {other.why}"
    if len(others) > _SHOWN:
        yield f"{len(others) - _SHOWN} receipts more were not replayed"
    if examination.untried is not None:
        yield examination.untried
    if findings:
        yield ""
    yield (
        f"receipts      {summary.receipts}: {summary.equal} equal, {summary.different} differ, "
        f"{summary.incomparable} not replayed; of {summary.erased} more the content was erased"
    )
    rate = summary.tokens / summary.seconds if summary.seconds else 0.0
    yield f"tokens        {summary.tokens}, {rate:.0f} a second at TP {summary.tp}"
    yield f"contract      {summary.contract}"
    yield f"model digest  {summary.weights}"
    yield f"fingerprint   {summary.system_fingerprint}"
