"""Many kernels compiled side by side on threads: the compiler lets go of Python's lock.

Results go to Triton's cache on disk, file by file with an atomic rename, so processes may compile
the same kernel at once, to this process's table of kernels and, where there is one, to the GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from triton import knobs
from triton.runtime import cache as triton_cache

from tpdet.kernels.cuda.compile.cache import looking_up, missing_key
from tpdet.kernels.cuda.compile.helpers import Helpers
from tpdet.kernels.cuda.compile.recording import Specialization, has_gpu

Result = TypeVar("Result")
_hashing = Lock()
MAX_THREADS = 16
"""More gain nothing: a part of a compilation holds a lock of the process."""

FEW = 32
"""Kernels that one process compiles before helpers have imported what they need."""


def compile_all(
    specializations: Iterable[Specialization],
    threads: int,
    each_done: Callable[[], object] = lambda: None,
    helpers: Helpers | None = None,
) -> list[str]:
    """Compile each, at most `threads` at once; what could not be, as lines with name and reason.

    What fails beside others is tried once more alone: threads share the compiler's state.
    Kernels are loaded to the calling thread's GPU. each_done: called on this thread after each.
    helpers: processes that share the work where more than FEW kernels are not on disk.
    """
    # The longest source first: a long compilation that begins last is waited for alone.
    ordered = sorted(specializations, key=lambda each: (-each.size, each.digest))
    if not ordered:
        return []
    hash_triton()
    counted: set[Specialization] = set()

    def count(each: Specialization) -> None:
        if each not in counted:
            counted.add(each)
            each_done()

    if helpers is not None and helpers.processes:
        ordered = _with_helpers(ordered, threads, count, helpers)
    failed = [each for each, problem in _side_by_side(_compile, ordered, threads, count) if problem]
    return sorted(said for each in failed if (said := _compile(each)))


def _with_helpers(
    ordered: Sequence[Specialization],
    threads: int,
    count: Callable[[Specialization], object],
    helpers: Helpers,
) -> list[Specialization]:
    """Load what is on disk; have the rest compiled to it where that is much.

    count: called for each that is loaded or compiled. Returns what is still to be loaded here.
    """
    missing: dict[Specialization, str] = {}
    with looking_up():
        for each, key in _side_by_side(_look_up, ordered, threads):
            if key is None:
                count(each)
            else:
                missing[each] = key
    rest = [each for each in ordered if each in missing]
    if len(rest) <= FEW:
        return rest
    here: set[Specialization] = set()
    enter = _entering()

    def compile_here(each: Specialization) -> None:
        enter()
        if not _compile(each):
            here.add(each)

    to_compile = [(each, missing[each]) for each in rest if missing[each]]
    helpers.compile(to_compile, compile_here, count, min(threads, MAX_THREADS))
    return [each for each in rest if each not in here]


def _side_by_side(
    work: Callable[[Specialization], Result],
    ordered: Sequence[Specialization],
    threads: int,
    each_done: Callable[[Specialization], object] = lambda _: None,
) -> list[tuple[Specialization, Result]]:
    """The results of `work`, which raises nothing, in the order in which they come."""
    if not ordered:
        return []
    most = max(1, min(threads, MAX_THREADS, len(ordered)))
    with ThreadPoolExecutor(most, "", _entering()) as pool:
        results = []
        running = {pool.submit(work, each): each for each in ordered}
        for done in as_completed(running):
            results.append((running[done], done.result()))
            each_done(running[done])
    return results


def _entering() -> Callable[[], object]:
    """What takes another thread to the GPU of this one, if there is one."""
    if not has_gpu():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


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


def _look_up(each: Specialization) -> str | None:
    """The key of what is to be compiled, None for what was loaded; empty if it cannot be."""
    try:
        return missing_key(each)
    except Exception:  # `_compile` meets it again and says so
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
