"""A program of the tests in a fork of a process that has imported torch: 2 s less than a new one.

Forks of one process draw the same hashes of strings: what may depend on them starts new processes.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.lib.ports import free_port


def forking():
    """The context that forks a process of one thread; this one's threads may hold locks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tpdet.engine"])
    return context


def forked(
    module: str, *arguments, environment: Mapping[str, str], stderr: Path | None = None
) -> BaseProcess:
    """What `python -m module arguments` does with `environment` beside this process's, begun.

    A module may be a file, too.
    """
    words = [module, *map(str, arguments)]
    process = forking().Process(target=_run, args=(words, os.environ | environment, stderr))
    process.start()
    return process


def run_ranks(size: int, module: str, *arguments) -> None:
    """A program by `size` ranks in the environment that torchrun gives them, all to end with 0."""
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        forked(module, *arguments, environment=shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(size))
    ]
    try:
        assert exit_codes(ranks) == [0] * size
    finally:
        end(ranks)


def exit_codes(processes: list[BaseProcess], seconds: float = 240.0) -> list[int | None]:
    """How each ended; None for those that have not within a time, counted for each."""
    for process in processes:
        process.join(seconds)
    return [process.exitcode for process in processes]


def end(processes: list[BaseProcess]) -> None:
    """Kill those that are left, and wait for all."""
    for process in processes:
        process.kill()
        process.join()


def _run(words: list[str], environment: dict[str, str], stderr: Path | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if stderr is not None:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv[:] = words
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
