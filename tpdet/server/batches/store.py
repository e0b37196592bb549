"""The directory of --batch-dir: files that were sent, batches, and the answers to their requests.

Files that were sent lie below `files`, by their ids. Batches, and each answer by its line, are in
one SQLite file; an output file is rendered from the answers, so that what is erased there is in no
file either.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec

from tpdet.audit.log.disk import Disk
from tpdet.errors import CheckpointError, NotFoundError, NotPermittedError, Refusal, ResourceError
from tpdet.launch.host.database import Database
from tpdet.server.batches.record import OPEN, Batch, BatchFile

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, batch TEXT,
    record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL,
    input TEXT NOT NULL, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, request TEXT, failed INTEGER NOT NULL,
    output BLOB NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_request ON answers (request) WHERE request IS NOT NULL;
"""
_DATABASE, _LOCK, _FILES, _UNFINISHED = "batches.sqlite", "lock", "files", ".new-"
LOCK_SECONDS = 5.0  # for the HTTP process of a server that was killed a moment ago
_PORTION = 64
_MARKS = ", ".join("?" * len(OPEN))
_ERASED = {"code": "erased", "message": "the content of this request was erased"}
BOM = b"\xef\xbb\xbf"
Record = TypeVar("Record", BatchFile, Batch)


class StoreUnavailableError(Refusal):
    """The disk does not let the store be read or written."""


class AnswerRow(NamedTuple):
    """The answer to a line; request: the id of its request, as its receipt has it."""

    line: int
    request: str | None
    failed: bool
    output: bytes


class StoredFiles:
    """One server's files, used by a thread at a time. Raises StoreUnavailableError by the disk."""

    def __init__(self, directory: Path, lock: bool = True) -> None:
        """lock: for a server, which also makes what is not there.

        Raises ResourceError where another server uses the directory, NotPermittedError where it
        cannot be written, CheckpointError for one of another form, and without `lock`
        NotFoundError where there is no store.
        """
        self._directory, self._folder = directory, directory / _FILES
        self._disk, self._lock = Disk(), -1
        path = directory / _DATABASE
        if not lock and not path.exists():
            raise NotFoundError(f"{path} does not exist: name the directory of --batch-dir")
        try:
            if lock:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory.chmod(0o700)
                self._lock = self._locked(directory / _LOCK)
            schema = _SCHEMA if lock else ""
            self._database = Database(path, StoreUnavailableError, CheckpointError, schema)
            if lock:
                self._remove_remains()
        except (OSError, StoreUnavailableError) as error:
            self._unlock()
            why = error.strerror if isinstance(error, OSError) else error
            raise NotPermittedError(
                f"--batch-dir {directory} cannot be used ({why}): name a directory of this "
                "user's, or leave it out"
            ) from error
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        """Close the store, and let another server have it."""
        self._database.close()
        self._unlock()

    @contextmanager
    def new_content(self, file_id: str) -> Iterator[IO[bytes]]:
        """A file to write what is sent to; `put` keeps it afterwards, an error removes it."""
        draft = self._folder / f"{_UNFINISHED}{file_id}"
        try:
            with self._database.available(), draft.open("xb") as file:
                draft.chmod(0o600)
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def put(self, file: BatchFile) -> None:
        """Keep a file whose content has been written; durable when it returns."""
        with self._database.available():
            self._disk.rename(self._folder / f"{_UNFINISHED}{file.id}", self._folder / file.id)
            self._disk.sync_folder(self._folder)
        with self._database.transaction():
            self._insert(file)

    def file(self, file_id: str, owner: str) -> BatchFile | None:
        """A file of an owner's; None for one that is not there, or another's."""
        query = "SELECT record FROM files WHERE id = ? AND owner = ?"
        return next(iter(self._records(BatchFile, query, file_id, owner)), None)

    def files(self, owner: str) -> list[BatchFile]:
        """An owner's files, the newest first."""
        query = "SELECT record FROM files WHERE owner = ? ORDER BY number DESC"
        return self._records(BatchFile, query, owner)

    def size(self) -> tuple[int, int]:
        """How many files there are, of all owners, and their bytes."""
        query = "SELECT count(*), coalesce(sum(json_extract(record, '$.bytes')), 0) FROM files"
        ((count, total),) = self._database.run(query)
        return count, total

    def remove_unused(self, file: BatchFile) -> bool:
        """Remove a file; False where a batch that is worked on reads it."""
        query = f"SELECT 1 FROM batches WHERE input = ? AND status IN ({_MARKS}) LIMIT 1"
        if self._database.run(query, file.id, *OPEN):
            return False
        self.remove(file)
        return True

    def remove(self, file: BatchFile) -> None:
        """Remove a file; of an output also the answers that it was rendered from."""
        with self._database.transaction():
            run = self._database.run
            run("DELETE FROM files WHERE id = ?", file.id)
            if file.batch is not None:
                values = file.batch, file.failed
                run("DELETE FROM answers WHERE batch = ? AND failed = ?", *values)
                self._forget_digest(file.batch)
        with self._database.available():
            self._disk.remove(self._folder / file.id)
        self._database.run("PRAGMA incremental_vacuum")
        # What was deleted leaves the write-ahead log now, or once nobody reads it.
        self._database.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def open_content(self, file_id: str) -> IO[bytes]:
        """What was sent as a file."""
        with self._database.available():
            return (self._folder / file_id).open("rb")

    def rendered(self, batch_id: str, failed: bool, after: int) -> list[AnswerRow]:
        """Some lines of an output file, those behind line `after` of the input; none at its end."""
        query = (
            "SELECT line, request, failed, output FROM answers WHERE batch = ? AND failed = ? "
            "AND line > ? ORDER BY line LIMIT ?"
        )
        rows = self._database.run(query, batch_id, failed, after, _PORTION)
        return [AnswerRow(*row) for row in rows]

    def output_bytes(self, batch_id: str, failed: bool) -> int:
        """The size of an output file."""
        query = (
            "SELECT coalesce(sum(length(output) + 1), 0) FROM answers "
            "WHERE batch = ? AND failed = ?"
        )
        ((size,),) = self._database.run(query, batch_id, failed)
        return int(size)

    def _forget_digest(self, batch_id: str) -> None:
        """Drop the digest of an output that is not whole any more: it could confirm a guess."""
        query = "UPDATE batches SET record = json_set(record, '$.digest', '') WHERE id = ?"
        self._database.run(query, batch_id)

    def _insert(self, file: BatchFile) -> None:
        values = file.id, file.owner, file.batch, _json(file)
        query = "INSERT INTO files (id, owner, batch, record) VALUES (?, ?, ?, ?)"
        self._database.run(query, *values)

    def _records(self, kind: type[Record], query: str, *values: object) -> list[Record]:
        rows = self._database.run(query, *values)
        return [msgspec.json.decode(record, type=kind) for (record,) in rows]

    def _remove_remains(self) -> None:
        """Remove what a server that was killed had begun to receive, or to remove."""
        known = {name for (name,) in self._database.run("SELECT id FROM files")}
        for name in self._disk.names(self._folder):
            if name not in known:
                self._disk.remove(self._folder / name)

    def _locked(self, path: Path) -> int:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return self._disk.lock(path)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResourceError(
                        f"--batch-dir {self._directory} is used by another server: stop it, or "
                        "name another directory"
                    ) from None
            time.sleep(0.05)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            self._disk.close(lock)


class BatchStore(StoredFiles):
    """The batches of one directory too, and their answers. `erase` works beside a server."""

    def save(self, batch: Batch, outputs: Sequence[BatchFile] = ()) -> None:
        """Keep a batch as it is now, with its output files; durable when it returns."""
        names = batch.id, batch.owner, batch.status, batch.input_file_id, _json(batch)
        with self._database.transaction():
            self._database.run(
                "INSERT INTO batches (id, owner, status, input, record) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET status = excluded.status, record = excluded.record",
                *names,
            )
            for file in outputs:
                self._insert(file)

    def begin(self, batch: Batch) -> bool:
        """Keep a new batch; False where its owner has no such file that was sent."""
        file = self.file(batch.input_file_id, batch.owner)
        if file is None or file.batch is not None:
            return False
        self.save(batch)
        return True

    def batch(self, batch_id: str, owner: str) -> Batch | None:
        """A batch of an owner's; None for one that is not there, or another's."""
        query = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        return next(iter(self._records(Batch, query, batch_id, owner)), None)

    def batches(self, owner: str) -> list[Batch]:
        """An owner's batches, the newest first."""
        query = "SELECT record FROM batches WHERE owner = ? ORDER BY number DESC"
        return self._records(Batch, query, owner)

    def open_batches(self) -> list[Batch]:
        """All that are worked on, the oldest first."""
        query = f"SELECT record FROM batches WHERE status IN ({_MARKS}) ORDER BY number"
        return self._records(Batch, query, *OPEN)

    def add_answers(self, batch_id: str, rows: Iterable[AnswerRow]) -> None:
        """Keep answers; durable when it returns."""
        with self._database.transaction():
            self._database.connection.executemany(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?)",
                [(batch_id, *row) for row in rows],
            )

    def answered(self, batch_id: str) -> dict[int, bool]:
        """The lines of a batch that are answered, and whether each failed."""
        query = "SELECT line, failed FROM answers WHERE batch = ?"
        return {line: bool(failed) for line, failed in self._database.run(query, batch_id)}

    def erase(self, requests: Iterable[str]) -> int:
        """Erase the answers to requests of these ids, and what was asked; how many they were.

        Their lines stay, with `custom_id` alone. Digests that could confirm a guess go too.
        """
        erased: dict[str, set[int]] = {}
        run = self._database.run
        with self._database.transaction():
            for name in requests:
                query = "SELECT batch, line, output FROM answers WHERE request = ?"
                for batch_id, line, output in run(query, name):
                    left = {**json.loads(output), "response": None, "error": _ERASED}
                    query = (
                        "UPDATE answers SET output = ?, request = NULL WHERE batch = ? AND line = ?"
                    )
                    run(query, json_line(left), batch_id, line)
                    erased.setdefault(batch_id, set()).add(line)
            for batch_id in erased:
                self._forget_digest(batch_id)
                query = "SELECT record FROM files WHERE batch = ?"
                for file in self._records(BatchFile, query, batch_id):
                    self._set_size(file.id, self.output_bytes(batch_id, file.failed))
        for batch_id, lines in erased.items():
            self._erase_requests(batch_id, lines)
        if erased:
            self._database.erase()
        return sum(map(len, erased.values()))

    def _erase_requests(self, batch_id: str, lines: set[int]) -> None:
        """Rewrite what was sent, without the bodies of these lines."""
        ((name,),) = self._database.run("SELECT input FROM batches WHERE id = ?", batch_id)
        path, draft = self._folder / name, self._folder / f"{_UNFINISHED}{name}"
        if not path.exists():
            return
        with self._database.available(), path.open("rb") as old, draft.open("wb") as new:
            draft.chmod(0o600)
            for number, line in enumerate(old, 1):
                if number in lines:
                    asked = {**json.loads(line.removeprefix(BOM)), "body": {}}
                    line = json_line(asked) + b"\n"
                new.write(line)
            new.flush()
            os.fsync(new.fileno())
            size = new.tell()
            self._disk.rename(draft, path)
            self._disk.sync_folder(self._folder)
        with self._database.transaction():
            self._set_size(name, size)

    def _set_size(self, file_id: str, size: int) -> None:
        query = "UPDATE files SET record = json_set(record, '$.bytes', ?) WHERE id = ?"
        self._database.run(query, size, file_id)


def _json(record: BatchFile | Batch) -> str:
    return msgspec.json.encode(record).decode()


def json_line(value: object) -> bytes:
    """Compact JSON of a value in UTF-8, without a line feed."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
