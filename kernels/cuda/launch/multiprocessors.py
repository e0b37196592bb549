"""How many multiprocessors the kernels with one program a multiprocessor may fill.

While an exchange runs beside products it holds some; a product that counted on all of them would
wait for those, a whole wave long. Bits do not depend on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from tpdet.kernels.cuda import hardware

_left: ContextVar[int] = ContextVar("left", default=0)  # of this thread: engines have their own


@contextmanager
def leaving(count: int) -> Iterator[None]:
    """Leave `count` multiprocessors free in everything launched inside."""
    token = _left.set(count)
    try:
        yield
    finally:
        _left.reset(token)


def all_free() -> bool:
    """Whether nothing is to be left free: a library's product fills every multiprocessor."""
    return not _left.get()


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, less those to be left free."""
    return max(1, hardware.gpu_of(device).multiprocessors - _left.get())
