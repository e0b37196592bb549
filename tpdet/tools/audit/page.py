"""The page of `tpdet audit report`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tpdet
from tpdet.audit.replayed import NotReplayed, ReceiptDiffers, Replayed
from tpdet.tools.audit.report import AuditReport, KeyUse, WholeReport
from tpdet.tools.report.report import share, write_report

MOST_SHOWN = 100
"""Receipts of a kind that the page lists."""
_SIDES = {"receipt": "the receipt", "this machine": "the machine that replayed it"}
_UNIT_NAMES = {1: "1 s", 60: "1 minute", 3600: "1 hour", 86400: "1 day"}


def write_page(path: Path, report: WholeReport) -> None:
    """Write the page. Raises NotPermittedError."""
    audit, replay = report.audit, report.replay
    good, heading, text = _verdict(report)
    write_report(
        path,
        "tpdet.tools.audit/page.html",
        title=f"{heading} · tpdet audit",
        command_name="audit report",
        version=tpdet.__version__,
        made=_readable(audit.checked),
        good=good,
        heading=heading,
        text=text,
        tiles=[*_tiles(report)],
        audit=audit,
        failures=audit.failures[:MOST_SHOWN],
        more=audit.failed - len(audit.failures[:MOST_SHOWN]),
        columns=_columns(audit),
        period=_period(audit.period_seconds),
        shares=_shares(audit),
        keys=[_key(key, audit.leaves) for key in audit.keys[:MOST_SHOWN]],
        facts=[*_facts(audit)],
        replay=None if replay is None else _replay(replay),
    )


def _verdict(report: WholeReport) -> tuple[bool, str, str]:
    """Whether all holds, in a few words, and in a sentence."""
    audit, different = report.audit, report.different
    if audit.unreadable is not None:
        return False, "The log cannot be checked", audit.unreadable
    broken = [part for part in audit.parts if part.failure is not None]
    if audit.failed:
        heading = f"{audit.failed:,} of {audit.leaves:,} receipts do not hold"
        return False, heading, f"The first: {audit.failures[0].reason}"
    if broken:
        return False, "The log does not hold", f"{broken[0].failure}"
    if different:
        heading = f"{different:,} of {_replay_total(report):,} replayed answers differ"
        return False, heading, _fault(report)
    if not audit.leaves:
        return True, "The log is empty", "It holds no receipts yet."
    text = "Each signature, each leaf and tile, the root and the content are what was signed."
    if report.replay is not None:
        equal = report.replay.summary.equal
        text += f" {equal:,} answers were computed again and are equal, bit for bit."
    if audit.leaves == 1:
        return True, "The one receipt holds", text
    return True, f"All {audit.leaves:,} receipts hold", text


def _fault(report: WholeReport) -> str:
    """Who is at fault of the first answer that differs, where it was examined."""
    assert report.replay is not None
    faults = [one.fault for one in report.replay.findings if isinstance(one, ReceiptDiffers)]
    said = "The receipts hold, but the model that computed them again gave other tokens or bits."
    return (
        said
        if faults[0] is None
        else f"{said} Of the first one {_SIDES[faults[0].side]} is at fault."
    )


def _replay_total(report: WholeReport) -> int:
    assert report.replay is not None
    return report.replay.summary.receipts - report.replay.summary.incomparable


def _tiles(report: WholeReport) -> Iterator[tuple[str, str, str]]:
    audit = report.audit
    yield "receipts verified", f"{audit.verified:,}", "" if audit.failed else "good"
    yield "failed", f"{audit.failed:,}", "bad" if audit.failed else ""
    if report.replay is None:
        yield "replayed", "none", ""
    else:
        different = report.different
        yield "replayed, equal", f"{report.replay.summary.equal:,}", "" if different else "good"
        yield "replayed, different", f"{different:,}", "bad" if different else ""
    yield "content erased", f"{audit.erased:,}", ""
    yield "size of the log", _size(audit.bytes), ""


def _size(count: int) -> str:
    power = min(4, (len(str(count)) - 1) // 3)
    unit = ("B", "KB", "MB", "GB", "TB")[power]
    return f"{count / 1000**power:,.{min(power, 1)}f} {unit}"


def _columns(audit: AuditReport) -> dict[str, Any]:
    """The time line: bars in a picture of 1000 by 100, failed receipts on top."""
    most = max((one.verified + one.failed for one in audit.periods), default=0)
    width = 1000 / max(1, len(audit.periods))
    bars = []
    for number, period in enumerate(audit.periods):
        verified, failed = (_height(count, most) for count in (period.verified, period.failed))
        bars.append(
            {
                "x": round(number * width + 0.08 * width, 2),
                "width": round(0.84 * width, 2),
                "verified": verified,
                "failed": failed,
                "period": period,
                "begin": _readable(period.begin),
            }
        )
    return {"bars": bars, "most": most}


def _readable(moment: str) -> str:
    """A time in RFC 3339, as of `AuditReport`, for people."""
    return moment.replace("T", " ").replace("Z", " UTC")


def _height(count: int, most: int) -> float:
    """A bar's height, at least 4 where there is anything: one among thousands is seen."""
    return max(4.0, round(92 * count / most, 2)) if count else 0.0


def _period(seconds: int) -> str:
    names = sorted(_UNIT_NAMES.items(), reverse=True)
    for unit, name in names:
        if seconds >= unit and seconds % unit == 0:
            count = seconds // unit
            return name if count == 1 else f"{count} {name.split()[1]}{'s' * (unit > 1)}"
    return ""


def _shares(audit: AuditReport) -> list[dict[str, Any]]:
    """The receipts by their result, as parts of a bar of 100."""
    parts = (
        ("verified, with content", audit.with_content, "good"),
        ("verified, content erased", audit.erased, "gone"),
        ("failed", audit.failed, "bad"),
    )
    total, x, shares = sum(count for _, count, _ in parts), 0.0, []
    for name, count, kind in parts:
        width = share(count, total)
        shares.append({"name": name, "count": count, "kind": kind, "x": x, "width": width})
        x = round(x + width, 2)
    return shares


def _key(key: KeyUse, leaves: int) -> dict[str, Any]:
    """A key, and the leaves that it may sign as a part of a bar of 100."""
    ends = [end for end in (key.end, key.revoked, leaves) if end is not None]
    begin, end = share(key.first, leaves), share(min(ends), leaves)
    if key.revoked is not None:
        state = f"revoked from leaf {key.revoked:,} on"
    elif key.end is not None:
        state = f"leaves {key.first:,} to {key.end - 1:,}; another key took over"
    else:
        state = f"leaves {key.first:,} on"
    width = round(max(0.0, end - begin), 2)
    return {"key": key, "state": state, "begin": begin, "width": width}


def _facts(audit: AuditReport) -> Iterator[tuple[str, str]]:
    yield "directory", audit.directory
    yield "origin", audit.origin or "unknown"
    yield "leaves", f"{audit.leaves:,}"
    yield "root", audit.root or "unknown"
    yield "answers ended", _counted(audit.outcomes)
    yield "tokens", f"{audit.prompt_tokens:,} of prompts, {audit.tokens:,} of answers"
    yield "contracts", _counted(audit.contracts, 16)
    yield "weights", _counted(audit.weights, 16)
    yield "checked", audit.checked


def _counted(counts: Mapping[str, int], digits: int = 80) -> str:
    shown = (
        f"{name[:digits]}{'…' * (len(name) > digits)} ({count:,})" for name, count in counts.items()
    )
    return ", ".join(shown) or "none"


def _replay(replay: Replayed) -> dict[str, Any]:
    summary, findings = replay.summary, replay.findings
    differing = [one for one in findings if isinstance(one, ReceiptDiffers)]
    others = [one for one in findings if isinstance(one, NotReplayed)]
    rate = summary.tokens / summary.seconds if summary.seconds > 0 else 0.0
    result = (
        f"{summary.equal:,} equal, {summary.different:,} differ, {summary.incomparable:,} not "
        f"replayed, {summary.erased:,} erased"
    )
    return {
        "differing": [
            (one, "; ".join(map(str, one.differences)), one.fault and str(one.fault))
            for one in differing[:MOST_SHOWN]
        ],
        "others": others[:MOST_SHOWN],
        "more": max(0, len(differing) - MOST_SHOWN) + max(0, len(others) - MOST_SHOWN),
        "facts": [
            ("result", result),
            ("tokens", f"{summary.tokens:,}, {rate:,.0f} a second at TP {summary.tp}"),
            ("contract", summary.contract),
            ("model digest", summary.weights),
            ("fingerprint", summary.system_fingerprint),
        ],
    }
