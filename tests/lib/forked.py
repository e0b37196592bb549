"""A program of the tests in a fork of a process that has imported torch: 2 s less than a new one.

Forks of one process draw the same hashes of strings: what may depend on them starts new processes.
A program's own children can be forks as well, made before its first line runs (`spares`).
"""

import multiprocessing
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.lib import spares
from tests.lib.ports import free_port
from tests.lib.tree import ROOT


def forking():
    """The context that forks a process of one thread; this one's threads may hold locks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lib.imported_programs"])
    return context


def forked(
    module: str,
    *arguments,
    environment: Mapping[str, str],
    outputs: Sequence[Path] = (),
    children: spares.Tree = (),
) -> BaseProcess:
    """What `python -m module arguments` does with `environment` beside this process's, begun.

    A module may be a file, too. outputs: files of its standard output and error, which may be one.
    children: those of its own that are forks.
    """
    words = [module, *map(str, arguments)]
    everything = os.environ | environment
    process = forking().Process(target=_run, args=(words, everything, outputs, children))
    process.start()
    return process


def run_forked(
    *words, environment: Mapping[str, str] | None = None, children: spares.Tree = (), seconds=280.0
) -> subprocess.CompletedProcess[str]:
    """`forked`, once it has ended: its exit code and what it wrote, as of `subprocess.run`."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        began = forked(*words, environment=environment or {}, outputs=outputs, children=children)
        try:
            (code,) = exit_codes([began], seconds)
            if code is None:
                raise subprocess.TimeoutExpired([*map(str, words)], seconds)
            return subprocess.CompletedProcess(words, code, *(path.read_text() for path in outputs))
        finally:
            end([began])


class ForkedProgram:
    """`forked` with its standard error and output in a file, and the methods of a `Popen`."""

    def __init__(self, *words, environment: Mapping[str, str], log: Path, children: spares.Tree):
        files = (log, log)
        self._process = forked(*words, environment=environment, outputs=files, children=children)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


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


def _run(
    words: list[str], environment: dict[str, str], outputs: Sequence[Path], children: spares.Tree
) -> None:
    os.chdir(ROOT)
    multiprocessing.set_start_method(None, force=True)  # not the one that made this fork
    torch.set_num_threads(1)
    for number, path in enumerate(outputs, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    spares.run(words, environment, children)
