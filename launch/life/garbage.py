"""Searches for garbage: none while much is made that stays, and none through what was made then."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Look for no garbage inside, wherever the process looks for it outside."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


def keep_all() -> None:
    """Never look through what is there now: for a process of ours that ends with its engine.

    A search through a loaded engine takes tens of milliseconds, in which no step is launched.
    """
    gc.collect()
    gc.freeze()
