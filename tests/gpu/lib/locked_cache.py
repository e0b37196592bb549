"""Triton's cache where processes compile at once: each kernel is compiled by one of them.

knobs.cache.manager_class = LockedCache     # in each of the processes
"""

import fcntl
import os
import time
import weakref

from triton.runtime.cache import FileCacheManager

LONGEST_WAIT = 120.0
"""Seconds to wait for another's compilation, after which a kernel is compiled here as well."""


class LockedCache(FileCacheManager):
    """Triton's own cache manager, but what is missing on disk is locked while this object lives.

    Triton makes one for each compilation and drops it at the end, or with the exception: the lock
    is free then, and when the process ends, however it does.
    """

    _lock: int | None = None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files by name; None where it is to be compiled."""
        return self._once(super().get_group, filename)

    def get_file(self, filename: str) -> str | None:
        """The path of a C module, for one; None where it is to be compiled."""
        return self._once(super().get_file, filename)

    def _once(self, look_up, filename):
        """What `look_up` finds, now or after others have compiled it; the lock where it is None."""
        deadline = time.monotonic() + LONGEST_WAIT
        while not (paths := look_up(filename)):
            if self._locks() or time.monotonic() > deadline:
                return look_up(filename)  # who had the lock may have written it since
            time.sleep(0.02)
        return paths

    def _locks(self) -> bool:
        """Whether this object has the lock now, or needs none: only caches that are written do."""
        if self.lock_path is None:
            return True
        if self._lock is None:
            self._lock = os.open(self.lock_path, os.O_CREAT | os.O_RDWR)
            weakref.finalize(self, os.close, self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
