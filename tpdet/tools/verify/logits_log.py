"""Rank 0's log of the probes' logits: a digest for each position, and raw values on disk."""

import hashlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tpdet.control.plan import Row
from tpdet.tools.verify.drafted import count_right

MAX_VALUE_BYTES = 128 << 20  # of raw logits kept for each circumstance, to name a difference
_THREADS = 8  # hashing is slower than the GPU: a prompt of 4,096 tokens has 2.5 GB of logits
_WORTH_A_THREAD = 1 << 16  # bytes; fewer are hashed at once
_UNHASHED_BYTES = 1 << 30  # bytes that may wait for a thread
HEADER_BYTES = 32
NO_POSITION = b"refused".ljust(HEADER_BYTES)
"""In a header's place: the values behind it are no part of an answer."""


def position_header(name: str, position: int) -> bytes:
    """The 32 bytes before a position's values: the probe's name and the position."""
    return f"{name}@{position}".encode().ljust(HEADER_BYTES)


class _Seen(NamedTuple):
    """Logits of a probe at a position; row: if it has drafts; offset: if values are kept."""

    name: str
    position: int
    digest: str | Future[str]
    row: Row | None
    offset: int | None


class LogitsLog:
    """Hashes the probes' logits position by position, and keeps the first raw values on disk.

    `digests[probe][position]` (hex) is complete once `close` has returned. Logits behind a draft
    that was wrong are no part of it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._kept = 0
        self._threads = ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))))
        self._seen: list[_Seen] = []  # in order
        self._waiting: deque[tuple[Future[str], int]] = deque()
        self._unhashed = 0
        self.names: dict[int, str] = {}  # admission -> request id
        self.digests: dict[str, dict[int, str]] = {}

    def tap(self, row: Row, position: int, logits: torch.Tensor) -> None:
        """Log the logits [n, V] of a row at `position`, `position + 1`, ... (on the CPU).

        Nobody may write to them afterwards, because threads read them. A position that comes again
        (after a preemption) must have the same bits.
        """
        name = self.names.get(row.admission)
        if name is None:
            return
        drafted = row if row.samples > 1 else None
        for reached, values in enumerate(logits, position):
            body = values.contiguous()
            offset = self._file.tell() if self._kept < MAX_VALUE_BYTES else None
            self._seen.append(_Seen(name, reached, self._hashed(body), drafted, offset))
            if offset is not None:
                self._file.write(position_header(name, reached))
                self._file.write(body.numpy().data)
                self._kept += body.nbytes

    def _hashed(self, values: torch.Tensor) -> str | Future[str]:
        """The digest of `values` or a future of it; waits while too many bytes are unhashed."""
        if values.nbytes < _WORTH_A_THREAD:
            return _sha256(values)
        while self._waiting and self._unhashed > _UNHASHED_BYTES:
            future, size = self._waiting.popleft()
            future.result()
            self._unhashed -= size
        future = self._threads.submit(_sha256, values)
        self._waiting.append((future, values.nbytes))
        self._unhashed += values.nbytes
        return future

    def close(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Finish digests and values; tokens: prompt and answer of probes with drafts."""
        for name, position, hashed, row, offset in self._seen:
            if row is not None and not _committed(row, position, tokens[name]):
                if offset is not None:
                    self._file.seek(offset)
                    self._file.write(NO_POSITION)
                continue
            digest = hashed if isinstance(hashed, str) else hashed.result()
            digests = self.digests.setdefault(name, {})
            known = digests.setdefault(position, digest)
            if known != digest:
                digests[position] = f"recomputed: {known} then {digest}"
        self._threads.shutdown()
        self._file.close()


def _committed(row: Row, position: int, tokens: Sequence[int]) -> bool:
    """Whether no draft up to a position of a row was wrong, and a token follows it."""
    right = count_right(row.start, row.token_ids, tokens[:-1])
    return position < row.start + right


def _sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().data).hexdigest()
