"""No search for garbage while much is made that stays: it would look through all of it again."""

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
