"""A log's directory under its lock: commits to the journal, tiles, recovery at the start.

What a killed process or a power loss leaves behind is completed by the next start: leaves whose
commit is whole stay, and a torn one, of which nobody was told, is cut off.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tpdet.audit.log.checkpoint import LogCheckpoint, NoteKey, Sign
from tpdet.audit.log.disk import Disk, DurableFolder
from tpdet.audit.log.journal import FOLDER, Journal, Record
from tpdet.audit.log.merkle import EMPTY_ROOT
from tpdet.audit.log.reader import CHECKPOINT, LogReader
from tpdet.audit.log.tiles import TileFile, Tiles
from tpdet.errors import AuditError, AuditUnavailableError

LOCK = "lock"


class LogStore:
    """A log that this process alone writes. `commit` and `publish` may run in two threads.

    Every checkpoint that was signed is kept to: its leaves stay in the log, also where the commit
    failed. Raises as `AuditLog`.
    """

    def __init__(
        self,
        directory: Path,
        sign: Sign,
        origin: str,
        key: NoteKey,
        trusted: Sequence[NoteKey] = (),
        disk: Disk | None = None,
    ) -> None:
        self._directory, self._sign, self._origin, self._key = directory, sign, origin, key
        self._disk = disk or Disk()
        self._files = DurableFolder(self._disk, directory)
        self._state = threading.Lock()  # guards _note and _tail, of which all is durable
        self._publishing = threading.Lock()
        with self._unavailable():
            self._lock = self._take_lock()
        try:
            with self._unavailable():
                self._open([key, *trusted])
        except BaseException:
            self._disk.close(self._lock)
            raise

    def _take_lock(self) -> int:
        top = self._directory.parent
        while not self._disk.has_folder(top):
            top = top.parent
        DurableFolder(self._disk, top).make(self._directory)
        return self._disk.lock(self._directory / LOCK)

    def _open(self, keys: Sequence[NoteKey]) -> None:
        names = self._disk.names(self._directory)
        if CHECKPOINT not in names:
            if {"tile", FOLDER} & {*names}:
                raise AuditError(
                    f"{self._directory} holds tiles and no {CHECKPOINT}: bring it back, or choose "
                    "another directory"
                )
            note = self._signed(LogCheckpoint(self._origin, 0, EMPTY_ROOT))
            self._files.write([(CHECKPOINT, note)])
        reader = LogReader(self._directory, keys, self._disk)
        if reader.checkpoint.origin != self._origin:
            raise AuditError(
                f"{self._directory} is the log of {reader.checkpoint.origin}, not of "
                f"{self._origin}: choose another directory"
            )
        self._tree, self._tail = reader.tree, reader.tail
        self._note = self._signed(reader.checkpoint)
        self._edge = Tiles(reader.read_file, reader.published.size).right_edge()
        self._full: list[TileFile] = []  # tiles and bundles that are full and not written yet
        self._published = b""
        self._behind = False  # publishing failed
        self._doubtful: tuple[int, Record] | None = None  # what may not be durable, and its index
        self._journal = Journal(self._disk, self._directory)
        self.publish()
        self._journal.start(self.size)

    def _signed(self, checkpoint: LogCheckpoint) -> bytes:
        """The checkpoint as a note. Raises AuditUnavailableError where the key does not sign."""
        try:
            return checkpoint.signed(self._key, self._sign)
        except Exception as error:  # of a key store, a network, a token
            raise AuditUnavailableError(f"key {self._key.name} does not sign: {error}") from error

    @property
    def size(self) -> int:
        """The number of leaves."""
        return self._tree.size

    def commit(self, leaves: Sequence[bytes]) -> int:
        """Make leaves durable together; the first's index. Raises AuditUnavailableError."""
        with self._unavailable():
            if self._behind:
                self.publish()
            if self._doubtful is not None:
                self._journal.start(self._doubtful[0])
                self._write(*self._doubtful)
            tree = self._tree.extended(leaves)
            note = self._signed(LogCheckpoint(self._origin, tree.size, tree.root()))
            first, self._tree = self._tree.size, tree
            self._write(first, Record(note, [*leaves]))
        return first

    def _write(self, first: int, record: Record) -> None:
        """Make a record durable, then known to `publish`."""
        self._doubtful = first, record
        self._journal.append(record, first)
        self._doubtful = None
        with self._state:
            self._note = record.note
            self._tail += record.leaves

    def publish(self) -> None:
        """Bring the tiles, then the checkpoint beside them, up to the last commit.

        Raises AuditUnavailableError; the next call, or the next commit, tries again.
        """
        with self._unavailable(), self._publishing:
            with self._state:
                note, leaves, self._tail = self._note, self._tail, []
            self._full += self._edge.extend(leaves)
            if note is self._published:
                return
            try:
                self._write_tiles(note)
            except BaseException:
                self._behind = True
                raise
            self._published, self._behind = note, False

    def _write_tiles(self, note: bytes) -> None:
        """Write the tiles, and when all are durable the checkpoint; remove what they replace."""
        tiles = [*self._full, *self._edge.partial()]
        self._files.write((tile.path, tile.data) for tile in tiles)
        self._files.write([(CHECKPOINT, note)])
        for tile in self._full:
            self._files.remove(f"{tile.path}.p")
        self._full = []
        self._journal.trim(self._edge.size)

    def close(self) -> None:
        """Publish, and give the lock back. A log that cannot be published stays in its journal."""
        try:
            self.publish()
            if self._doubtful is None:
                self._journal.remove()
        except (AuditUnavailableError, OSError):
            pass  # all that was promised is durable in the journal: the next start publishes it
        finally:
            self._journal.close()
            self._disk.close(self._lock)

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            holder = self._disk.read(self._directory / LOCK).decode(errors="replace").strip()
            raise AuditUnavailableError(
                f"audit log {self._directory} is in use by process {holder or 'unknown'}: stop "
                "that server or choose another directory"
            ) from error
        except OSError as error:
            raise AuditUnavailableError(
                f"audit log {self._directory} cannot be written ({error.strerror or error}): free "
                "space, or make it writable, or choose another directory"
            ) from error
