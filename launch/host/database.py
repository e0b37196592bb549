"""A SQLite file that several processes may open, and whose deleted pages are overwritten."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tpdet.errors import Refusal

_WAIT_SECONDS = 10.0  # for another process that writes


class Database:
    """One connection; used by one thread at a time.

    Methods raise `unavailable` where the disk does not let the file be read or written, `damaged`
    where it is none of this form.
    """

    def __init__(
        self, path: Path | None, unavailable: type[Refusal], damaged: type[Refusal], schema: str
    ) -> None:
        """path: None for one in memory; schema: of a file that is made, empty to make none."""
        self.path, self._unavailable, self._damaged = path, unavailable, damaged
        with self.available():
            if schema and path is not None:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            name = path or ":memory:"
            self.connection = sqlite3.connect(name, timeout=_WAIT_SECONDS, check_same_thread=False)
            self.connection.isolation_level = None
            self.run("PRAGMA secure_delete = ON")
            if schema:
                self.run("PRAGMA auto_vacuum = INCREMENTAL")
                self.run("PRAGMA journal_mode = WAL")
                self.connection.executescript(schema)

    def run(self, text: str, *values: object) -> list[tuple]:
        """The rows that a statement gives."""
        with self.available(), closing(self.connection.execute(text, values)) as cursor:
            return cursor.fetchall()

    @contextmanager
    def transaction(self, synchronous: str = "FULL") -> Iterator[None]:
        """All or nothing; with FULL durable at its end."""
        with self.available():
            self.connection.execute(f"PRAGMA synchronous = {synchronous}")
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def erase(self) -> None:
        """Take what was deleted out of the write-ahead log too, where the old pages still are."""
        ((busy, _, _),) = self.run("PRAGMA wal_checkpoint(TRUNCATE)")
        if busy:
            raise self._unavailable(
                f"{self.path} is being read, so that what was erased is still in its "
                "write-ahead log: erase it again"
            )

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    @contextmanager
    def available(self) -> Iterator[None]:
        """While it is entered, errors of the disk are those of this database."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise self._unavailable(f"{self.path} cannot be used: {error}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._damaged(f"{self.path} is another file, or damaged: {error}") from error
        except OSError as error:
            raise self._unavailable(f"{self.path}: {error.strerror}") from error
