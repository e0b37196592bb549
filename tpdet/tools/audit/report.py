"""What `tpdet audit report` says of a directory, gathered behind failures too: plain data."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from tpdet.audit.log.reader import LogReader
from tpdet.audit.receipts.directory import AuditDirectory, unverified_statement
from tpdet.audit.receipts.keys import TrustedKeys, check_installed
from tpdet.audit.receipts.statement import Statement
from tpdet.audit.receipts.verify import ReceiptCheck, check_note, check_receipts
from tpdet.audit.replayed import Replayed
from tpdet.errors import AuditError

MOST_FAILURES = 1000
"""Failed receipts that are listed; all are counted."""
MOST_NAMES = 50
"""Different weights, contracts and reasons that are listed."""
PERIODS = 48
"""Columns of the time line, at most."""
_UNITS = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400, 365 * 86400)


class LogPart(msgspec.Struct, frozen=True):
    """A part of the log that was checked: what it is, and why it does not hold, or None."""

    name: str
    what: str
    failure: str | None = None


class FailedReceipt(msgspec.Struct, frozen=True):
    """A receipt that does not hold. id, ended: as it says itself, which nobody vouches for."""

    leaf: int
    id: str | None
    ended: str | None
    reason: str


class KeyUse(msgspec.Struct, frozen=True, kw_only=True):
    """A trusted key: which leaves it may sign, and how many receipts it signed."""

    keyid: str
    name: str
    scheme: str
    first: int
    end: int | None
    revoked: int | None
    signed: int


class Period(msgspec.Struct, frozen=True):
    """A column of the time line: its begin (RFC 3339), and its receipts by their result."""

    begin: str
    verified: int
    failed: int


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """A directory's receipts: how many hold, which do not, and why.

    leaves: of the log; bytes: of its files. erased: receipts that hold, without content.
    unreadable: why no receipt could be checked.
    """

    directory: str
    checked: str
    origin: str | None
    leaves: int
    bytes: int
    root: str | None
    parts: tuple[LogPart, ...]
    verified: int
    failed: int
    with_content: int
    erased: int
    outcomes: dict[str, int]
    prompt_tokens: int
    tokens: int
    weights: dict[str, int]
    contracts: dict[str, int]
    failures: tuple[FailedReceipt, ...]
    keys: tuple[KeyUse, ...]
    period_seconds: int
    periods: tuple[Period, ...]
    unreadable: str | None = None

    @property
    def holds(self) -> bool:
        """Whether all of it does."""
        broken = any(part.failure is not None for part in self.parts)
        return not (self.failed or broken or self.unreadable)


def gather(
    path: Path,
    keys: TrustedKeys,
    earlier: bytes | None,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> AuditReport:
    """Check a directory to its end, whatever fails on the way.

    earlier: the note of a checkpoint that the log must go on from. tick: as of `check_directory`.
    Raises NotFoundError without a directory or a log.
    """
    check_installed()
    counts = _ReceiptCounts()
    directory = AuditDirectory(path)
    parts: list[LogPart] = []
    log = unreadable = None
    try:
        with directory.reading(keys) as (log, store):
            parts += _log_parts(log, keys, earlier)
            for check in check_receipts(log, store, keys):
                counts.add(check, log)
                tick(check.leaf + 1, log.checkpoint.size)
    except AuditError as error:
        unreadable = str(error)
    unit, periods = counts.periods()
    head = None if log is None else log.checkpoint
    return AuditReport(
        directory=str(path),
        checked=_moment(time.time()),
        origin=head.origin if head else None,
        leaves=head.size if head else 0,
        bytes=_bytes_below(directory.log),
        root=head.root.hex() if head else None,
        parts=tuple(parts),
        verified=counts.verified,
        failed=counts.failed,
        with_content=counts.with_content,
        erased=counts.verified - counts.with_content,
        outcomes=dict(sorted(counts.outcomes.items())),
        prompt_tokens=counts.prompt_tokens,
        tokens=counts.tokens,
        weights=dict(counts.weights.most_common(MOST_NAMES)),
        contracts=dict(counts.contracts.most_common(MOST_NAMES)),
        failures=tuple(counts.failures),
        keys=tuple(
            KeyUse(
                keyid=key.keyid,
                name=key.name,
                scheme=key.scheme,
                first=key.first,
                end=key.end,
                revoked=key.revoked,
                signed=counts.by_key[key.keyid],
            )
            for key in keys.keys
        ),
        period_seconds=unit,
        periods=tuple(periods),
        unreadable=unreadable,
    )


def _log_parts(log: LogReader, keys: TrustedKeys, earlier: bytes | None) -> Iterable[LogPart]:
    """What is checked of a log as a whole; each part although one before it failed."""
    size = log.checkpoint.size
    yield _part(
        "checkpoint",
        f"the signed head of {size:,} leaves; {log.published.size:,} of them are in tiles",
        lambda: check_note(log.note, keys),
    )
    yield _part("tree", "leaves and tiles lead to the signed root", log.verify)
    if earlier is not None:
        try:
            old = check_note(earlier, keys)
        except AuditError as error:
            yield LogPart("earlier checkpoint", "the one that was given", str(error))
            return
        what = f"by its tiles the log goes on from that of {old.size:,} leaves"
        yield _part("earlier checkpoint", what, lambda: log.check_goes_on(old))


def _part(name: str, what: str, check: Callable[[], object]) -> LogPart:
    try:
        check()
    except AuditError as error:
        return LogPart(name, what, str(error))
    return LogPart(name, what)


class _ReceiptCounts:
    """What was counted of the receipts so far."""

    def __init__(self) -> None:
        self.verified = self.failed = self.with_content = self.prompt_tokens = self.tokens = 0
        self.outcomes, self.weights = Counter[str](), Counter[str]()
        self.contracts, self.by_key = Counter[str](), Counter[str]()
        self.failures: list[FailedReceipt] = []
        self._moments: list[tuple[float, bool]] = []
        self._unplaced = 0

    def add(self, check: ReceiptCheck, log: LogReader) -> None:
        """Count a receipt."""
        if check.keyid is not None:
            self.by_key[check.keyid] += 1
        if check.failure is not None:
            self._add_failed(check, log)
            return
        assert check.statement is not None
        predicate = check.statement.predicate
        self.verified += 1
        self.with_content += check.has_content
        self.outcomes[predicate.outcome] += 1
        self.weights[predicate.weights] += 1
        self.contracts[predicate.contract] += 1
        self.prompt_tokens += sum(predicate.prompt_tokens)
        self.tokens += sum(predicate.tokens)
        ended = datetime.fromisoformat(predicate.facts.ended).timestamp()
        self._moments += [(ended, True), *[(ended, False)] * self._unplaced]
        self._unplaced = 0

    def _add_failed(self, check: ReceiptCheck, log: LogReader) -> None:
        """A failed receipt stands in the time line beside one that holds: its time may be wrong."""
        self.failed += 1
        if self._moments:
            self._moments.append((self._moments[-1][0], False))
        else:
            self._unplaced += 1
        if len(self.failures) < MOST_FAILURES:
            statement = check.statement or _unverified(log, check.leaf)
            predicate = None if statement is None else statement.predicate
            self.failures.append(
                FailedReceipt(
                    check.leaf,
                    None if predicate is None else predicate.id,
                    None if predicate is None else predicate.facts.ended,
                    str(check.failure),
                )
            )

    def periods(self) -> tuple[int, list[Period]]:
        """The seconds of a period, and the periods from the first receipt to the last."""
        if not self._moments:
            return 0, []
        times = [moment for moment, _ in self._moments]
        first, last = min(times), max(times)
        unit = next((one for one in _UNITS if (last - first) / one < PERIODS - 1), _UNITS[-1])
        while (last - first) / unit >= PERIODS - 1:
            unit *= 10
        begin = first - first % unit
        results = Counter((int((moment - begin) // unit), holds) for moment, holds in self._moments)
        count = int((last - begin) // unit) + 1
        return unit, [
            Period(_moment(begin + number * unit), results[number, True], results[number, False])
            for number in range(count)
        ]


def _unverified(log: LogReader, leaf: int) -> Statement | None:
    """What a leaf says that does not hold; None for one that says nothing."""
    try:
        return unverified_statement(log.leaf(leaf), leaf)
    except AuditError:
        return None


def _moment(seconds: float) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(seconds))
    return moment.isoformat().replace("+00:00", "Z")


def _bytes_below(folder: Path) -> int:
    """Bytes of all files of a log; one that a server removes meanwhile does not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


class WholeReport(msgspec.Struct, frozen=True):
    """A directory's report, and the replay of its receipts, where one was given."""

    audit: AuditReport
    replay: Replayed | None = None

    @property
    def different(self) -> int:
        """Receipts whose answers were not what was computed."""
        return 0 if self.replay is None else self.replay.summary.different
