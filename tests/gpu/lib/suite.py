"""Checks of the GPU suites: each runs in a process, several side by side.

Processes are forks of one that has imported what checks need, where `fork_from_imported` was called
before the first, and what several of them need compiled one compiles (`locked_cache`).
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from tests.gpu.lib.checks import outcome


@dataclass(frozen=True)
class Check:
    """One check by name: a function of a module, what it is called with, seconds it may take."""

    name: str
    function: Callable
    arguments: tuple = ()
    limit: float = 400.0


def fork_from_imported() -> None:
    """Have the checks' modules imported once, not by each check, by a process that starts now."""
    forkserver.set_forkserver_preload(["tests.gpu.lib.imported_checks"])
    forkserver.ensure_running()


def side_by_side(checks: Sequence[Check], threads: ThreadPoolExecutor) -> list[Future[dict]]:
    """The rows of all checks, in order: compiling takes most of the time, so they run at once."""
    return [threads.submit(_in_a_process, check) for check in checks]


def _in_a_process(check: Check) -> dict:
    """A check's row; a process that dies or hangs is a failed check and no other's concern."""
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(theirs, check))
    process.start()
    theirs.close()
    try:
        if not mine.poll(check.limit):
            raise TimeoutError(f"no answer in {check.limit:.0f} s")
        return mine.recv()
    except (EOFError, TimeoutError) as error:
        said = str(error) or "the process died"
        return {"case": check.name, "equal": False, "error": said}
    finally:
        process.kill()
        process.join()


def _send_outcome(pipe: Connection, check: Check) -> None:
    import torch
    from triton import knobs

    from tests.gpu.lib.locked_cache import LockedCache
    from tpdet.runner.start import compile_ahead

    knobs.cache.manager_class = LockedCache
    compile_ahead.PROCESSES = 1  # helpers lock nothing, and other checks keep the cores busy
    torch.set_num_threads(2)  # those of each for all cores would wait for one another
    pipe.send(outcome(check.name, check.function, *check.arguments))
