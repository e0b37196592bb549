"""Gives memory that large requests have freed back to the operating system.

glibc keeps freed memory that lies between pieces still in use. After many large bodies and answers
that is several times what the HTTP process needs. Nothing leaks; the memory is only not returned.
"""

import asyncio
import ctypes
import os
from pathlib import Path

SECONDS = 5.0
GROWTH_BYTES = 1 << 20  # since the last time, below which nothing is done
_STATM = Path("/proc/self/statm")
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's malloc.h
_MAPPED_BYTES = 1 << 20  # larger pieces are mappings of their own, which return when freed
_ARENAS = 2


def limit_arenas() -> None:
    """Few arenas, and mappings for large pieces; before any thread begins."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_ARENA_MAX, _ARENAS)
        libc.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


async def give_back() -> None:
    """Return free memory whenever the process has grown; where malloc cannot, end."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    least = resident_bytes()
    while True:
        await asyncio.sleep(SECONDS)
        if resident_bytes() > least + GROWTH_BYTES:
            await asyncio.to_thread(trim, 0)  # without the interpreter's lock
            least = resident_bytes()
        least = min(least, resident_bytes())


def resident_bytes() -> int:
    """Memory of this process, in bytes."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
