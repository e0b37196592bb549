"""Compares every trace with its reference, and names the first difference."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tpdet.tools.verify.logits_log import HEADER_BYTES, position_header
from tpdet.tools.verify.spec import Trace, WorldReport
from tpdet.tools.worlds.ways import USUAL, LaunchWay


@dataclass(frozen=True)
class Relation:
    """The comparison of one circumstance, size and way with the reference of its dtype and mode."""

    dtype: str
    mode: str
    circumstance: str
    tp: int
    equal: bool
    digest: str
    reference: str
    positions: int
    difference: str | None
    way: LaunchWay = USUAL


def compare(reports: list[WorldReport], folder: Path) -> list[Relation]:
    """Compare every trace of every world with the first world's first circumstance.

    Circumstances with probes of their own have their own first one.
    """
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
                    difference=difference,
                    way=report.way,
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


def _differences(reference: Trace, trace: Trace, vocab_size: int, folder: Path) -> Iterator[str]:
    """Descriptions of the differences, by probe and position."""
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
                yield f"{name} position {position}: " + _first_value(
                    folder / reference.values, folder / trace.values, name, position, vocab_size
                )
        answers = (trace.tokens.get(name), trace.logprob_bits.get(name))
        if answers[0] and answers != (reference.tokens[name], reference.logprob_bits[name]):
            yield f"{name}: tokens {answers[0]} against {reference.tokens[name]}"
    drafted = trace.drafted
    if drafted is not None and not drafted.shows:
        yield (f"{drafted.accepted} of {drafted.drafts} drafts were accepted: this shows nothing")


def _first_value(left: Path, right: Path, name: str, position: int, vocab_size: int) -> str:
    """Describes the first token whose logit differs, with both values and their bits."""
    ours, theirs = (_values(path, name, position, vocab_size) for path in (left, right))
    if ours is None or theirs is None:
        return "logits differ (raw values were not kept)"
    for token in range(vocab_size):
        a, b = ours[4 * token : 4 * token + 4], theirs[4 * token : 4 * token + 4]
        if a != b:
            values = [struct.unpack("<f", part)[0] for part in (a, b)]
            return (
                f"logit of token {token} is {values[1]!r} (0x{b[::-1].hex()}), the reference has "
                f"{values[0]!r} (0x{a[::-1].hex()})"
            )
    return "digests differ but the kept values do not"


def _values(path: Path, name: str, position: int, vocab_size: int) -> bytes | None:
    """The raw fp32 logits of a probe at a position, or None if they were not kept."""
    header = position_header(name, position)
    with path.open("rb") as file:
        while True:
            found = file.read(HEADER_BYTES)
            if len(found) < HEADER_BYTES:
                return None
            if found == header:
                return file.read(4 * vocab_size)
            file.seek(4 * vocab_size, 1)
