"""Bounds on time and memory while a process loads a checkpoint's files into a library."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CPU_SECONDS = 60
MEMORY_BYTES = 8 << 30
ENDINGS = frozenset((-signal.SIGABRT, -signal.SIGXCPU, -signal.SIGSEGV))
"""Exit codes of a process that its bounds, or the library, ended."""


@contextmanager
def bounded_load() -> Iterator[None]:
    """While it is entered this process ends itself past the bounds, or gets a MemoryError."""
    kinds = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_CORE)
    before = [resource.getrlimit(kind) for kind in kinds]
    used = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bounds = (
        int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS,
        pages * resource.getpagesize() + MEMORY_BYTES,
        0,
    )
    for kind, (soft, hard), most in zip(kinds, before, bounds, strict=True):
        lower = most if soft == resource.RLIM_INFINITY else min(soft, most)
        resource.setrlimit(kind, (lower, hard))
    try:
        yield
    finally:
        for kind, limits in zip(kinds, before, strict=True):
            resource.setrlimit(kind, limits)
