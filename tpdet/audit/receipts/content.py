"""The content store: prompts, ids, bits and salts of receipts, apart from the log.

One SQLite file. It also says which leaf of the log a receipt is, which an erasure leaves: then the
receipt can still be shown and checked, and what it was about cannot be learned from it. Erased
pages are overwritten (`secure_delete`).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tpdet.errors import AuditError, AuditUnavailableError, NotFoundError
from tpdet.launch.host.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS receipts (
    id TEXT PRIMARY KEY, leaf INTEGER, ended REAL NOT NULL, content BLOB
);
CREATE UNIQUE INDEX IF NOT EXISTS by_leaf ON receipts (leaf);
CREATE INDEX IF NOT EXISTS by_time ON receipts (ended) WHERE content IS NOT NULL;
"""
_STORED = {" ".join(one.split()) for one in _SCHEMA.replace("IF NOT EXISTS ", "").split(";")[:-1]}
"""The statements as SQLite keeps them."""


class ContentRow(NamedTuple):
    """A receipt's id, its end (Unix time), and its content."""

    id: str
    ended: float
    content: bytes


class Stored(NamedTuple):
    """Where a receipt is: its leaf, None before it is logged; its content, None once erased."""

    leaf: int | None
    content: bytes | None


class ContentStore:
    """The store of one directory; used by one thread at a time.

    Several processes may open it: a server adds, `tpdet audit erase` takes away. Methods that
    write raise AuditUnavailableError where the disk does not let them.
    """

    def __init__(self, path: Path | None, create: bool = False) -> None:
        """path: None for an empty one. Raises NotFoundError, AuditError for another form."""
        if path is not None and not create and not path.exists():
            raise NotFoundError(f"{path} does not exist: name the directory of --audit-dir")
        self.path, schema = path, _SCHEMA if create or path is None else ""
        self._database = Database(path, AuditUnavailableError, AuditError, schema)
        self._run = self._database.run
        self._database.connection.text_factory = bytes  # a stranger's file may have any
        self._check_schema()

    def add(self, rows: Sequence[ContentRow]) -> None:
        """Add receipts whose leaves are not known yet; durable when it returns."""
        with self._database.transaction():
            self._database.connection.executemany(
                "INSERT INTO receipts VALUES (?, NULL, ?, ?)", rows
            )

    def set_leaves(self, leaves: Iterable[tuple[str, int]]) -> None:
        """Note which leaf each receipt is. What a power loss takes, `catch_up` finds in the log."""
        with self._database.transaction("NORMAL"):
            pairs = [(leaf, name) for name, leaf in leaves]
            self._database.connection.executemany(
                "UPDATE receipts SET leaf = ? WHERE id = ?", pairs
            )

    def catch_up(self, ids: Iterable[tuple[str, int, float]]) -> None:
        """Note leaves that a start finds in the log, and drop what never came to be logged.

        ids: of each leaf from `known_leaves` on, its receipt, its number, and its end (Unix time).
        """
        with self._database.transaction():
            self._database.connection.executemany(
                "INSERT INTO receipts VALUES (?, ?, ?, NULL) "
                "ON CONFLICT (id) DO UPDATE SET leaf = excluded.leaf",
                ids,
            )
            self._run("DELETE FROM receipts WHERE leaf IS NULL")

    @property
    def known_leaves(self) -> int:
        """The number of the log's leaves that are known here; 0 where some between are not."""
        ((count, last),) = self._run("SELECT count(leaf), max(leaf) FROM receipts")
        return count if last == count - 1 else 0

    @property
    def last_leaf(self) -> int:
        """The last leaf that is known here; -1 for none."""
        ((last,),) = self._run("SELECT max(leaf) FROM receipts")
        return -1 if last is None else self._checked(last, int)

    def read(self, receipt_id: str) -> Stored | None:
        """Where a receipt is; None for an id that is none."""
        rows = self._run("SELECT leaf, content FROM receipts WHERE id = ?", receipt_id)
        if not rows:
            return None
        ((leaf, content),) = rows
        return Stored(self._checked(leaf, int | None), self._checked(content, bytes | None))

    def erase(self, ids: Iterable[str]) -> int:
        """Erase the content of these receipts for good; how many had some."""
        connection = self._database.connection
        before = connection.total_changes
        with self._database.transaction():
            connection.executemany(
                "UPDATE receipts SET content = NULL WHERE content IS NOT NULL AND id = ?",
                [(name,) for name in ids],
            )
        count = connection.total_changes - before
        self._database.erase()
        return count

    def before(self, moment: float) -> list[ContentRow]:
        """All that ended before a Unix time; content: empty where it was erased."""
        query = "SELECT id, ended, coalesce(content, x'') FROM receipts WHERE ended < ?"
        return [ContentRow(name.decode(), *row) for name, *row in self._run(query, moment)]

    def close(self) -> None:
        """Close the store."""
        self._database.close()

    def _check_schema(self) -> None:
        """Refuse (AuditError) other tables, views or triggers, which may do anything."""
        rows = self._run("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        texts = [self._checked(text, bytes).decode(errors="replace") for (text,) in rows]
        others = {" ".join(text.split()) for text in texts} ^ _STORED
        if others:
            raise AuditError(
                f"{self.path} is no content store: it has, or lacks, {min(others)[:200]!r}"
            )

    def _checked(self, value: Any, kind: Any) -> Any:
        """The value. Raises AuditError for one of another type."""
        if not isinstance(value, kind):
            raise AuditError(f"{self.path} is damaged: it has {value!r:.100} where it should not")
        return value
