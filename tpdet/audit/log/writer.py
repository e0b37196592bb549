"""The durable writer of a log: appends that wait are committed together, by a thread, in one sync.

A commit signs a checkpoint over all leaves that wait, writes both to the journal and syncs it; then
the appends are told. A second thread publishes the journal's leaves as tiles.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from tpdet.audit.log.checkpoint import NoteKey, Sign
from tpdet.audit.log.disk import Disk
from tpdet.audit.log.store import LogStore
from tpdet.audit.log.tiles import MOST_LEAF_BYTES
from tpdet.errors import AuditUnavailableError, UsageError

MOST_WAITING = 1 << 16
MOST_TOGETHER = 1 << 10


class AuditLog:
    """A log that this process alone appends to, from any thread.

    `sign` gives the Ed25519 signature over a checkpoint's text under the key that `key_name` and
    `public_key` (32 bytes) name; `trusted`: keys that signed earlier checkpoints of the log. The
    tiles follow at most `publish_seconds` behind a commit; None: only at `publish` and `close`.
    Time plays no other part, so a clock that jumps changes nothing.

    Raises AuditUnavailableError for a directory that is locked, read-only or full, and AuditError
    for a log of another origin, of other keys, or that is damaged.
    """

    def __init__(
        self,
        directory: Path,
        sign: Sign,
        origin: str,
        key_name: str,
        public_key: bytes,
        trusted: Sequence[NoteKey] = (),
        *,
        publish_seconds: float | None = 1.0,
        disk: Disk | None = None,
    ) -> None:
        key = NoteKey(key_name, public_key)
        self._store = LogStore(directory, sign, origin, key, trusted, disk)
        self._waiting: list[tuple[bytes, Future[int]]] = []
        self._changed = threading.Condition()  # guards _waiting and _closing
        self._closing = False
        self._committed, self._ended = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._commit_all, daemon=True, name="audit-commit")
        ]
        if publish_seconds is not None:
            publisher = threading.Thread(
                target=self._publish_all, args=(publish_seconds,), daemon=True, name="audit-publish"
            )
            self._threads.append(publisher)
        for thread in self._threads:
            thread.start()

    def append(self, leaf: bytes) -> "Future[int]":
        """Append a leaf; the future gives its index once the leaf is durable.

        Durable means synced together with a signed checkpoint that covers it. The future cannot be
        cancelled, and has AuditUnavailableError where the leaf may not be durable; it may be in the
        log all the same. Raises UsageError for a leaf above 65,535 bytes.
        """
        if len(leaf) > MOST_LEAF_BYTES:
            raise UsageError(f"a leaf of {len(leaf)} bytes is above {MOST_LEAF_BYTES}: shorten it")
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            if not self._closing and len(self._waiting) < MOST_WAITING:
                self._waiting.append((leaf, future))
                self._changed.notify()
                return future
            why = "is closed" if self._closing else f"has {MOST_WAITING} leaves that wait"
        future.set_exception(AuditUnavailableError(f"the audit log {why}: nothing was recorded"))
        return future

    def publish(self) -> None:
        """Bring tiles and checkpoint up to the last commit. Raises AuditUnavailableError."""
        self._store.publish()

    def close(self) -> None:
        """Commit what waits, publish it and give the directory back. A second call does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._ended.set()
        self._committed.set()
        for thread in self._threads:
            thread.join()
        self._store.close()

    def _commit_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                batch = self._waiting[:MOST_TOGETHER]
                del self._waiting[:MOST_TOGETHER]
            if not batch:
                return
            try:
                first = self._store.commit([leaf for leaf, _ in batch])
            except Exception as error:
                for _, future in batch:
                    future.set_exception(_unavailable(error))
            else:
                for index, (_, future) in enumerate(batch, first):
                    future.set_result(index)
            self._committed.set()

    def _publish_all(self, seconds: float) -> None:
        while True:
            self._committed.wait()
            self._committed.clear()
            if self._ended.wait(seconds):
                return
            with suppress(AuditUnavailableError):  # the next commit tries again, and tells
                self._store.publish()


def _unavailable(error: Exception) -> AuditUnavailableError:
    """An error of its own for each append, whose traceback is its own."""
    if isinstance(error, AuditUnavailableError):
        return AuditUnavailableError(str(error))
    return AuditUnavailableError(f"the audit log failed: {error!r}")
