"""Reading a log's directory: its signed head, leaves and proofs, while a server writes it too."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tpdet.audit.log.checkpoint import LogCheckpoint, NoteKey, verified_checkpoint
from tpdet.audit.log.disk import Disk
from tpdet.audit.log.journal import tail
from tpdet.audit.log.merkle import consistency_proof, inclusion_proof
from tpdet.audit.log.tiles import Tiles
from tpdet.audit.log.verify import verify_tree
from tpdet.errors import AuditError, NotFoundError

CHECKPOINT = "checkpoint"
_TRIES = 10


class LogReader:
    """A log as it was when this was made: the tiles, and what the journal holds beyond them.

    `note` is the latest signed checkpoint and `checkpoint` what it says; `published` is that of
    the tiles alone. Raises NotFoundError where there is no log, and AuditError where a checkpoint
    is signed by none of the keys, or a root is not that of the tiles and leaves.
    """

    def __init__(self, directory: Path, keys: Sequence[NoteKey], disk: Disk | None = None) -> None:
        self.directory, self.keys = directory, keys
        self._disk = disk or Disk()
        for _ in range(_TRIES):
            note = self._read_note()
            try:
                self._read(note)
                return
            except FileNotFoundError:  # the server published, and removed a segment
                continue
            except AuditError:
                if self._read_note() == note:
                    raise
        raise AuditError(f"{directory} changes faster than it is read: try again")

    def _read_note(self) -> bytes:
        try:
            return self._disk.read(self.directory / CHECKPOINT)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(
                f"{self.directory} holds no audit log: it has no file {CHECKPOINT}"
            ) from None

    def _read(self, note: bytes) -> None:
        self._unpublished: dict[str, bytes] = {}
        self.published = verified_checkpoint(note, self.keys)
        records = tail(self._disk, self.directory, self.published.size)
        tiles = Tiles(self.read_file, self.published.size)
        edge = tiles.right_edge()
        if edge.tree().root() != self.published.root:
            verify_tree(tiles, self.published.root)
        self.tail = [leaf for record in records for leaf in record.leaves]
        self.note = records[-1].note if records else note
        self.checkpoint = verified_checkpoint(self.note, self.keys)
        tiles_beyond = [*edge.extend(self.tail), *edge.partial()]
        self._unpublished = {tile.path: tile.data for tile in tiles_beyond}
        self.tree = edge.tree()
        expected = LogCheckpoint(self.published.origin, self.tree.size, self.tree.root())
        if self.checkpoint != expected:
            raise AuditError(
                f"the journal's last checkpoint is of {self.checkpoint.size} leaves of "
                f"{self.checkpoint.origin}, and not of those it holds: it was changed"
            )
        self.tiles = Tiles(self.read_file, self.tree.size)

    def read_file(self, path: str) -> bytes:
        """The bytes of a tile or bundle, by its path. Raises FileNotFoundError."""
        data = self._unpublished.get(path)
        return self._disk.read(self.directory / path) if data is None else data

    def leaf(self, index: int) -> bytes:
        """One leaf. Raises NotFoundError for one the log does not hold."""
        if not 0 <= index < self.checkpoint.size:
            raise NotFoundError(f"the log has {self.checkpoint.size} leaves, and no leaf {index}")
        return self.tiles.leaf(index)

    def leaves(self, begin: int = 0) -> Iterator[bytes]:
        """The leaves from one on."""
        return map(self.leaf, range(begin, self.checkpoint.size))

    def inclusion_proof(self, index: int) -> list[bytes]:
        """The proof that leads from a leaf to the root of `checkpoint`. Raises as `leaf`."""
        if not 0 <= index < self.checkpoint.size:
            raise NotFoundError(f"the log has {self.checkpoint.size} leaves, and no leaf {index}")
        return inclusion_proof(index, self.checkpoint.size, self.tiles.subtree)

    def consistency_proof(self, size: int) -> list[bytes]:
        """The proof that a tree of `size` leaves begins this one. Raises AuditError if larger."""
        if size > self.checkpoint.size:
            raise AuditError(
                f"the log has {self.checkpoint.size} leaves, and had {size}: some were taken away"
            )
        return consistency_proof(size, self.checkpoint.size, self.tiles.subtree)

    def verify(self, earlier: Sequence[LogCheckpoint] = ()) -> None:
        """Check every leaf, every tile, and that the log goes on from the earlier checkpoints.

        Raises AuditError by the first leaf or tile that is wrong, or the checkpoint that the log
        does not go on from.
        """
        verify_tree(self.tiles, self.checkpoint.root)
        for checkpoint in earlier:
            self.check_goes_on(checkpoint)

    def check_goes_on(self, earlier: LogCheckpoint) -> None:
        """Refuse (AuditError) a log that, by its tiles, does not go on from an earlier one."""
        if earlier.origin != self.checkpoint.origin:
            raise AuditError(f"the checkpoint is of {earlier.origin}: compare it with that log")
        if earlier.size > self.checkpoint.size:
            raise AuditError(
                f"the log has {self.checkpoint.size} leaves, and had {earlier.size}: some were "
                "taken away"
            )
        if self.tiles.root_at(earlier.size) != earlier.root:
            raise AuditError(
                f"the log was forked: its first {earlier.size} leaves are not those of the earlier "
                "checkpoint"
            )
