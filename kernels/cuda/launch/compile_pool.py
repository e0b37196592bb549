"""Many kernels compiled side by side on threads: the compiler lets go of Python's lock.

Results go to Triton's cache on disk, file by file with an atomic rename, so processes may compile
the same kernel at once, to this process's table of kernels and, where there is one, to the GPU.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from triton import knobs
from triton.runtime import cache as triton_cache

from tpdet.kernels.cuda.launch.recording import Specialization, has_gpu

_hashing = Lock()
MAX_THREADS = 16
"""A sixteenth of a compilation, the translation of the source, holds Python's lock."""


def compile_all(
    specializations: Iterable[Specialization],
    threads: int,
    each_done: Callable[[], object] = lambda: None,
) -> list[str]:
    """Compile each, at most `threads` at once; what could not be, as lines with name and reason.

    What fails beside others is tried once more alone: threads share the compiler's state.
    Kernels are loaded to the calling thread's GPU. each_done: called on this thread after each.
    """
    # The longest source first: a long compilation that begins last is waited for alone.
    ordered = sorted(specializations, key=lambda each: (-each.size, each.digest))
    if not ordered:
        return []
    hash_triton()
    enter = partial(torch.cuda.set_device, torch.cuda.current_device()) if has_gpu() else None
    with ThreadPoolExecutor(max(1, min(threads, MAX_THREADS, len(ordered))), "", enter) as pool:
        failed = []
        running = {pool.submit(_compile, each): each for each in ordered}
        for done in as_completed(running):
            if done.result():
                failed.append(running[done])
            each_done()
    return sorted(said for each in failed if (said := _compile(each)))


def hash_triton() -> None:
    """Have Triton's own files hashed, 400 MB: a part of every key, which Triton keeps.

    By one thread: Triton would let each of a pool's threads do it. Python's lock is free meanwhile.
    """
    with _hashing:
        triton_cache.triton_key()


def _compile(each: Specialization) -> str:
    try:
        each.compile()
    except Exception as error:  # a launch compiles it again and says so where it matters
        return f"{each.name}: {type(error).__name__}: {str(error)[:200]}"
    return ""


@contextmanager
def watching_compilations(tell: Callable[[str], object]) -> Iterator[None]:
    """Tell the name of each kernel compiled anew meanwhile, on any thread, not those found on disk.

    Tells nothing where another listener to Triton's compiler is there already.
    """

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            tell(str(src.name))

    before = knobs.compilation.listener
    if before is None:
        knobs.compilation.listener = listen
    try:
        yield
    finally:
        if knobs.compilation.listener is listen:
            knobs.compilation.listener = before
