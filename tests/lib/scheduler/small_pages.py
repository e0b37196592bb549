"""Pages of a few positions, so that short prompts cross many of them.

Modules take PAGE_TOKENS by name when they are imported; here every one that has it gets another.
For what runs without kernels only: theirs is compiled in.
"""

import contextlib
import sys
from collections.abc import Iterator

import tests.lib.scheduler.simulation  # noqa: F401  (it and all it imports have the constant)

_NAMES = ("tpdet.cache.", "tpdet.scheduler.", "tests.lib.scheduler.", "tests.scheduler.")


@contextlib.contextmanager
def small_pages(size: int) -> Iterator[None]:
    """Let a page have `size` positions in the scheduler, the page tables and the fake ranks."""
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith(_NAMES) and hasattr(module, "PAGE_TOKENS")
    ]
    assert len(modules) >= 6, "the constant is taken from elsewhere"
    before = [module.PAGE_TOKENS for module in modules]
    for module in modules:
        module.PAGE_TOKENS = size
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.PAGE_TOKENS = value
