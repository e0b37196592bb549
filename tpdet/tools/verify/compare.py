"""Compares every trace with its reference, and names the first difference."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec

from tpdet.tools.verify.logits_log import HEADER_BYTES, position_header
from tpdet.tools.verify.spec import Trace, WorldReport
from tpdet.tools.worlds.ways import USUAL, LaunchWay


class LogitDifference(msgspec.Struct, frozen=True):
    """The first logit that differs: whose, where, and the bits (8 hex digits) of both."""

    probe: str
    position: int
    token: int
    bits: str
    reference_bits: str

    def __str__(self) -> str:
        ours, theirs = (
            f"{struct.unpack('>f', bytes.fromhex(bits))[0]!r} (0x{bits})"
            for bits in (self.bits, self.reference_bits)
        )
        return (
            f"{self.probe} position {self.position}: logit of token {self.token} is {ours}, the "
            f"reference has {theirs}"
        )


class Relation(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one circumstance, size and way with the reference of its dtype and mode.

    difference: the first one; logit: what it is of, where it is in one. differing: positions whose
    logits are not the reference's. Older files lack the fields with defaults.
    """

    circumstance: str = msgspec.field(name="relation")
    dtype: str
    mode: str
    tp: int
    equal: bool
    digest: str
    reference: str
    positions: int
    differing: int = 0
    launcher: str = USUAL.launcher
    transport: str = USUAL.transport
    nodes: int = USUAL.nodes
    difference: str | None = None
    logit: LogitDifference | None = None

    @property
    def way(self) -> LaunchWay:
        """How its ranks were started and connected."""
        return LaunchWay(self.launcher, self.transport, self.nodes)


def compare(reports: list[WorldReport], folder: Path) -> list[Relation]:
    """Hold every trace to the first world's first circumstance of the same probes."""
    relations = []
    first = reports[0]
    references: dict[tuple[str, str, str], Trace] = {}
    for trace in first.traces:
        references.setdefault((trace.dtype, trace.mode, trace.texts), trace)
    for report in reports:
        for trace in report.traces:
            reference = references[trace.dtype, trace.mode, trace.texts]
            if not trace.scored:
                reference = _answers_of(reference)
            difference = next(_differences(reference, trace, report.vocab_size, folder), None)
            relations.append(
                Relation(
                    dtype=trace.dtype,
                    mode=trace.mode,
                    circumstance=trace.circumstance,
                    tp=report.tp,
                    equal=difference is None,
                    digest=digest_of(trace),
                    reference=digest_of(reference),
                    positions=sum(len(seen) for seen in trace.logits.values()),
                    difference=None if difference is None else str(difference),
                    **asdict(report.way),
                    logit=difference if isinstance(difference, LogitDifference) else None,
                    differing=_differing(reference, trace),
                )
            )
        if not report.fingerprints.items() <= first.fingerprints.items():
            raise ValueError(
                f"fingerprints differ between TP {first.tp} ({first.way}) and TP {report.tp} "
                f"({report.way})"
            )
    return relations


def _answers_of(trace: Trace) -> Trace:
    """Without the logits that no token of an answer was sampled from: those of prompts."""
    logits = {
        name: {position: seen[position] for position in sorted(seen)[-len(trace.tokens[name]) :]}
        for name, seen in trace.logits.items()
    }
    return msgspec.structs.replace(trace, logits=logits)


def digest_of(trace: Trace) -> str:
    """SHA-256 over the logit digests of every probe and position, in order."""
    digest = hashlib.sha256()
    for name in sorted(trace.logits):
        for position in sorted(trace.logits[name]):
            digest.update(f"{name} {position} {trace.logits[name][position]}\n".encode())
    return digest.hexdigest()


def _differing(reference: Trace, trace: Trace) -> int:
    """Positions, of the reference and of the trace, whose logits are not the same on both sides."""
    return sum(
        ours.get(position) != theirs.get(position)
        for name in {*reference.logits, *trace.logits}
        for ours, theirs in [(reference.logits.get(name, {}), trace.logits.get(name, {}))]
        for position in {*ours, *theirs}
    )


def _differences(
    reference: Trace, trace: Trace, vocab_size: int, folder: Path
) -> Iterator[str | LogitDifference]:
    """What differs, by probe and position: a logit, or in words."""
    for name in sorted(reference.logits):
        ours, theirs = reference.logits[name], trace.logits.get(name, {})
        for position in sorted({*ours, *theirs}):
            if ours.get(position) == theirs.get(position):
                continue
            if position not in ours or position not in theirs:
                yield f"{name} position {position}: logits are missing on one side"
            elif theirs[position].startswith("recomputed"):
                yield f"{name} position {position}: {theirs[position]}"
            else:
                files = folder / reference.values, folder / trace.values
                yield _first_value(*files, name, position, vocab_size)
        answers = (trace.tokens.get(name), trace.logprob_bits.get(name))
        if any(answers) and answers != (reference.tokens[name], reference.logprob_bits[name]):
            yield (
                f"{name}: tokens {answers[0]} against {reference.tokens[name]}"
                if answers[0]
                else f"{name}: another vector, or other labels or scores"
            )
    drafted = trace.drafted
    if drafted is not None and not drafted.shows:
        yield (f"{drafted.accepted} of {drafted.drafts} drafts were accepted: this shows nothing")


def _first_value(
    left: Path, right: Path, name: str, position: int, vocab_size: int
) -> str | LogitDifference:
    """The first token whose logit differs; words where the values do not tell it."""
    ours, theirs = (_values(path, name, position, vocab_size) for path in (left, right))
    where = f"{name} position {position}"
    if ours is None or theirs is None:
        return f"{where}: logits differ (raw values were not kept)"
    for token in range(vocab_size):
        a, b = ours[4 * token : 4 * token + 4], theirs[4 * token : 4 * token + 4]
        if a != b:
            return LogitDifference(name, position, token, b[::-1].hex(), a[::-1].hex())
    return f"{where}: digests differ but the kept values do not"


def _values(path: Path, name: str, position: int, vocab_size: int) -> bytes | None:
    """The raw fp32 logits of a probe at a position, or None if they were not kept."""
    header = position_header(name, position)
    with path.open("rb") as file:
        while True:
            read = file.read(HEADER_BYTES)
            if len(read) < HEADER_BYTES:
                return None
            if read == header:
                return file.read(4 * vocab_size)
            file.seek(4 * vocab_size, 1)
