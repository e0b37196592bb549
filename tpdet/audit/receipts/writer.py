"""The durable writer of receipts: content first, so that no leaf lacks its own, then the log."""

import threading
from collections.abc import Sequence

import msgspec

from tpdet.audit.receipts.content import ContentRow
from tpdet.audit.receipts.directory import AuditDirectory
from tpdet.audit.receipts.keys import SigningKey


class SealedReceipt(msgspec.Struct, frozen=True, array_like=True):
    """A receipt that is signed and not durable yet: its id, its end (Unix time), content, leaf."""

    id: str
    ended: float
    content: bytes
    leaf: bytes


class ReceiptWriter:
    """Writes the receipts of one directory, for any thread. Raises as `AuditDirectory` opens."""

    def __init__(self, directory: AuditDirectory, key: SigningKey) -> None:
        self._log = directory.open_log(key)
        try:
            self._store = directory.open_store(key)
        except BaseException:
            self._log.close()
            raise
        self._storing = threading.Lock()  # the store is one thread's at a time

    def write(self, batch: Sequence[SealedReceipt]) -> list[str | None]:
        """Make receipts durable together; for each why it may not be, None once it is.

        Raises AuditUnavailableError and AuditError where that is so of all.
        """
        with self._storing:
            self._store.add([ContentRow(one.id, one.ended, one.content) for one in batch])
        appended = [self._log.append(one.leaf) for one in batch]
        errors = [future.exception() for future in appended]
        ended = zip(batch, appended, errors, strict=True)
        leaves = [(one.id, future.result()) for one, future, error in ended if error is None]
        with self._storing:
            self._store.set_leaves(leaves)
        return [None if error is None else str(error) for error in errors]

    def close(self) -> None:
        """Give the directory back."""
        self._log.close()
        self._store.close()
