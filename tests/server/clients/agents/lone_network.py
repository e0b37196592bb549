"""A network of its own that has nothing but loopback: whoever runs in it can reach nobody else."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_CLONE_NEWNET = 0x40000000
Result = TypeVar("Result")


class NoNamespaceError(Exception):
    """No network namespace can be made here; the message says why."""


class LoneNetwork:
    """A network namespace, entered by one thread. It is gone with its last socket and process."""

    def __init__(self) -> None:
        """Raises NoNamespaceError."""
        self._thread = ThreadPoolExecutor(1)
        self.do(_enter)

    def do(self, work: Callable[..., Result], *values: Any, **named: Any) -> Result:
        """What a function gives in it; sockets and processes that it makes stay in it."""
        return self._thread.submit(work, *values, **named).result()


def _enter() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise NoNamespaceError(os.strerror(ctypes.get_errno()))
    up = ["ip", "link", "set", "lo", "up"]
    try:
        subprocess.run(up, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNamespaceError(f"{' '.join(up)}: {error}") from error
