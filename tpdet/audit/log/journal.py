"""The journal: leaves and checkpoints that are durable, and not yet tiles.

A commit is one record at the end of the last segment, and one sync: all its leaves, and the signed
checkpoint that covers them. Segments lie in `journal/`, named by the number of their first leaf.
A record is a mark, its length (uint32, big-endian), SHA-256 over the rest, and that rest: the
length of the note (uint32), the note, and the leaves as an entry bundle.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from tpdet.audit.log.disk import Disk, DurableFolder, write_whole
from tpdet.audit.log.tiles import decode_entries, encode_entries
from tpdet.errors import AuditError

FOLDER = "journal"
SEGMENT_BYTES = 1 << 20

_MARK = b"tpdetlog"
_HEAD = len(_MARK) + 4 + 32


class Record(NamedTuple):
    """One commit: its leaves, and the signed checkpoint (a note) of the tree they end."""

    note: bytes
    leaves: list[bytes]


def encode_record(record: Record) -> bytes:
    """The record's bytes."""
    entries = encode_entries(record.leaves)
    rest = len(record.note).to_bytes(4, "big") + record.note + entries
    return _MARK + len(rest).to_bytes(4, "big") + sha256(rest).digest() + rest


def decode_records(data: bytes, name: str) -> list[Record]:
    """The records of a segment up to a torn end: what a commit wrote that never was durable.

    Raises AuditError where whole records follow a damaged one, which no commit leaves behind.
    """
    records, begin = [], 0
    while (rest := _whole_record(data, begin)) is not None:
        end = 4 + int.from_bytes(rest[:4], "big")
        records.append(Record(rest[4:end], decode_entries(rest[end:], name)))
        begin += _HEAD + len(rest)
    later = data.find(_MARK, begin + 1)
    while later >= 0:
        if _whole_record(data, later) is not None:
            raise AuditError(f"{name} is damaged at byte {begin}, and goes on: take it again")
        later = data.find(_MARK, later + 1)
    return records


def _whole_record(data: bytes, begin: int) -> bytes | None:
    """What follows a record's head, where all of it is there and unchanged."""
    start = begin + len(_MARK)
    size = int.from_bytes(data[start : start + 4], "big")
    rest = data[begin + _HEAD : begin + _HEAD + size]
    if data[begin:start] != _MARK or len(rest) != size or size < 4:
        return None
    return rest if sha256(rest).digest() == data[start + 4 : begin + _HEAD] else None


def segment_path(first: int) -> str:
    """Where the segment lies that begins with a leaf."""
    return f"{FOLDER}/{first:020}"


def segments(disk: Disk, directory: Path) -> list[int]:
    """The first leaf of each segment, in order. Raises AuditError for any other file."""
    names = disk.names(directory / FOLDER)
    strange = [name for name in names if not (name.isdecimal() and len(name) == 20)]
    if strange:
        raise AuditError(f"{FOLDER}/{strange[0]} is no part of a log: take it away")
    return [int(name) for name in names]


class Journal:
    """The segments as the one process writes them that holds the log's lock."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk, self._directory = disk, directory
        self._firsts = segments(disk, directory)
        self._descriptor: int | None = None
        self._bytes = 0

    def start(self, size: int) -> None:
        """Begin an empty segment; `size`: the tree's. No record may be needed that began there."""
        self.close()
        DurableFolder(self._disk, self._directory).make(self._directory / FOLDER)
        self._descriptor = self._disk.create(self._directory / segment_path(size))
        self._disk.sync_folder(self._directory / FOLDER)
        if size not in self._firsts[-1:]:
            self._firsts.append(size)  # the publishing thread takes from the other end
        self._bytes = 0

    def append(self, record: Record, size: int) -> None:
        """Make a record durable; `size`: the tree's before it."""
        if self._descriptor is None or self._bytes >= SEGMENT_BYTES:
            self.start(size)
            assert self._descriptor is not None
        data = encode_record(record)
        self._bytes += len(data)
        write_whole(self._disk, self._descriptor, data)

    def trim(self, size: int) -> None:
        """Remove the segments whose leaves are all in the tiles of a tree of `size` leaves."""
        while len(self._firsts) > 1 and self._firsts[1] <= size:
            self._disk.remove(self._directory / segment_path(self._firsts[0]))
            self._firsts.pop(0)

    def remove(self) -> None:
        """Remove all segments, whose leaves are in the tiles."""
        self.close()
        for first in self._firsts:
            self._disk.remove(self._directory / segment_path(first))
        self._firsts = []

    def close(self) -> None:
        """Close the last segment."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._disk.close(descriptor)


def tail(disk: Disk, directory: Path, size: int) -> Sequence[Record]:
    """The records that go on from a tree of `size` leaves; the first may begin before its end.

    Raises AuditError where leaves are missing between two segments, FileNotFoundError where the
    log's process removes a segment meanwhile.
    """
    records: list[Record] = []
    reached = size
    for first in segments(disk, directory):
        if first > reached:
            raise AuditError(f"{segment_path(first)} goes on from leaf {first}, not from {reached}")
        path = segment_path(first)
        for record in decode_records(disk.read_durable(directory / path), path):
            end = first + len(record.leaves)
            if end > reached:
                records.append(Record(record.note, record.leaves[reached - first :]))
                reached = end
            first = end
    return records
