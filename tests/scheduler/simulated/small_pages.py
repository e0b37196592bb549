"""Pages and chunks of a few positions, so that short prompts cross many of them.

Modules take PAGE_TOKENS and CHUNK_TOKENS by name when they are imported; here every one that has
them gets others.
For what runs without kernels only: theirs is compiled in.
"""

import contextlib
import sys
from collections.abc import Iterator

import tests.scheduler.simulated.simulation  # noqa: F401  (it and all it imports have the constant)

_NAMES = ("tpdet.cache.", "tpdet.scheduler.", "tests.scheduler.")


@contextlib.contextmanager
def small_pages(size: int) -> Iterator[None]:
    """Let a page have `size` positions in the scheduler, the page tables and the fake ranks.

    A page has two chunks then.
    """
    modules = [
        (module, constant)
        for name, module in sorted(sys.modules.items())
        for constant in ("PAGE_TOKENS", "CHUNK_TOKENS")
        if name.startswith(_NAMES) and hasattr(module, constant)
    ]
    assert len(modules) >= 10, "a constant is taken from elsewhere"
    before = [getattr(module, constant) for module, constant in modules]
    for module, constant in modules:
        setattr(module, constant, size if constant == "PAGE_TOKENS" else size // 2)
    try:
        yield
    finally:
        for (module, constant), value in zip(modules, before, strict=True):
            setattr(module, constant, value)
