"""The directory of `--audit-dir`: the log, the content store, and the public keys that signed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec

from tpdet.audit.log.checkpoint import NoteKey
from tpdet.audit.log.disk import Disk
from tpdet.audit.log.reader import CHECKPOINT, LogReader
from tpdet.audit.log.store import LOCK
from tpdet.audit.log.writer import AuditLog
from tpdet.audit.receipts.content import ContentStore
from tpdet.audit.receipts.envelope import PAYLOAD_TYPE
from tpdet.audit.receipts.keys import SigningKey, TrustedKeys, open_key
from tpdet.audit.receipts.statement import Statement, read_statement
from tpdet.errors import AuditError, AuditUnavailableError, NotFoundError, UsageError

MOST_ORIGIN_BYTES = 256


class AuditDirectory:
    """Paths below one directory; nothing is read or made before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, path / "log"
        self.content, self.keys = path / "content.sqlite", path / "keys.json"

    def known_keys(self) -> TrustedKeys:
        """The public keys that the operator put there; none without the file."""
        return TrustedKeys.read(self.keys) if self.keys.exists() else TrustedKeys()

    def note_keys(self, key: SigningKey) -> list[NoteKey]:
        """The keys that signed this log's checkpoints, `key` among them."""
        return TrustedKeys((*self.known_keys().keys, key.public)).note_keys()

    def open_key(self, name: str) -> SigningKey:
        """The key of `--audit-key`, which signs what comes next. Raises UsageError for others."""
        known = self.known_keys()
        key = open_key(name, known)
        if key.public.note_key is None:
            raise UsageError(
                f"--audit-key {name} is of the kind {key.public.scheme}, and checkpoints are "
                "signed with Ed25519 or ECDSA on P-256: give a key of these kinds"
            )
        listed = [one for one in known.keys if one.keyid == key.public.keyid]
        if listed and (listed[0].end is not None or listed[0].revoked is not None):
            raise UsageError(
                f"--audit-key {name} is ended or revoked in {self.keys}: give the key that took "
                "its place, or make one with tpdet audit keygen --keys"
            )
        return key

    def open_log(self, key: SigningKey) -> AuditLog:
        """The log, to append to. Raises AuditUnavailableError, and AuditError for another's."""
        try:
            if not self.path.is_dir():
                self.path.mkdir(mode=0o700)
                Disk().sync_folder(self.path.parent)
        except OSError as error:
            raise AuditUnavailableError(
                f"--audit-dir {self.path} cannot be made or written ({error.strerror}): name a "
                "directory that this user may write"
            ) from error
        note_key = key.public.note_key
        assert note_key is not None
        origin = self._origin() or key.public.name
        names = origin, note_key.name, note_key.public
        return AuditLog(self.log, key.sign, *names, self.note_keys(key))

    def _origin(self) -> str | None:
        """The origin that the log has had from its beginning."""
        try:
            with (self.log / CHECKPOINT).open("rb") as file:
                return file.read(MOST_ORIGIN_BYTES).split(b"\n")[0].decode()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise AuditError(f"{self.log / CHECKPOINT} is no checkpoint: it was changed") from error

    def open_store(self, key: SigningKey) -> ContentStore:
        """The content store, which knows every leaf of the log; for who holds the log's lock."""
        store = ContentStore(self.content, create=True)
        try:
            log = LogReader(self.log, self.note_keys(key))
            check_not_cut(log, store.last_leaf)
            store.catch_up(_leaves(log, store.known_leaves))
        except BaseException:
            store.close()
            raise
        return store

    def length(self, keys: TrustedKeys) -> int:
        """The log's leaves, while no server adds any. Raises AuditUnavailableError beside one."""
        disk, path = Disk(), self.log / LOCK
        try:
            lock = disk.lock(path) if path.exists() else -1
        except OSError as error:
            raise AuditUnavailableError(
                f"{self.path} is in use by a server: stop it first"
            ) from error
        try:
            return LogReader(self.log, keys.note_keys()).checkpoint.size
        finally:
            if lock >= 0:
                disk.close(lock)

    @staticmethod
    def locate(log: LogReader, store: ContentStore, receipt_id: str) -> tuple[int, bytes | None]:
        """A receipt's leaf, and its content, None once erased. Raises NotFoundError."""
        stored = store.read(receipt_id)
        if stored is not None and stored.leaf is not None:
            if unverified_statement(log.leaf(stored.leaf), stored.leaf).predicate.id != receipt_id:
                raise misplaced(receipt_id, stored.leaf)
            return stored.leaf, stored.content
        for index, leaf in enumerate(log.leaves()):  # a copy of the log alone
            if unverified_statement(leaf, index).predicate.id == receipt_id:
                return index, None
        raise NotFoundError(f"{log.directory} has no receipt {receipt_id!r}: copy the id again")

    @contextmanager
    def reading(self, keys: TrustedKeys) -> Iterator[tuple[LogReader, ContentStore]]:
        """The log as it is now, and the content, which is of no more leaves.

        Without a content store, as in a copy of the log alone, all is as if it were erased.
        """
        store = ContentStore(self.content if self.content.exists() else None)
        try:
            known = store.last_leaf  # before the log is read, which may grow meanwhile
            log = LogReader(self.log, keys.note_keys())
            check_not_cut(log, known)
            yield log, store
        finally:
            store.close()


def check_directory(path: str, key: str) -> None:
    """Raise what would stop a server with this directory and key. Leaves the log as it was."""
    directory = AuditDirectory(Path(path))
    signer = directory.open_key(key)
    if not os.access(directory.path if directory.path.exists() else directory.path.parent, os.W_OK):
        raise AuditUnavailableError(
            f"--audit-dir {path} cannot be written: chmod u+w it, or "
            "name one on a file system that is not read-only"
        )
    log = directory.open_log(signer)
    try:
        directory.open_store(signer).close()
    finally:
        log.close()


def check_not_cut(log: LogReader, last: int) -> None:
    """Refuse (AuditError) a log that ends before the last leaf that the content store knows."""
    if last >= log.checkpoint.size:
        raise AuditError(
            f"the content store has a receipt that is leaf {last}, and {log.directory} has "
            f"{log.checkpoint.size} leaves: its end was cut off"
        )


def misplaced(receipt_id: str, leaf: int) -> AuditError:
    """The error of a content store that has a receipt in another one's place."""
    return AuditError(
        f"the content store has receipt {receipt_id} as leaf {leaf}, which is another one: the "
        "store was changed"
    )


def _leaves(log: LogReader, begin: int) -> Iterator[tuple[str, int, float]]:
    """Id, number and end of the log's leaves from one on."""
    for index, leaf in enumerate(log.leaves(begin), begin):
        statement = unverified_statement(leaf, index)
        predicate = statement.predicate
        yield predicate.id, index, datetime.fromisoformat(predicate.facts.ended).timestamp()


class _Envelope(msgspec.Struct):
    payload: bytes
    payload_type: str = msgspec.field(name="payloadType")


def unverified_statement(leaf: bytes, index: int) -> Statement:
    """The statement of a leaf whose signature nobody has looked at."""
    try:
        envelope = msgspec.json.decode(leaf, type=_Envelope)  # bytes are base64 in JSON
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AuditError(f"leaf {index} is no DSSE envelope ({error}): it was changed") from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise AuditError(f"leaf {index} holds {envelope.payload_type!r}, not {PAYLOAD_TYPE}")
    return read_statement(envelope.payload, f"leaf {index}")
