"""Processes that compile kernels beside this one: the compiler holds a lock of its process.

    helpers = Helpers(processes=3, threads=4)
    helpers.start()                        # early: what they import takes them seconds
    helpers.compile(missing, compile_here, each_done)
    helpers.close()

Each kernel goes to whoever is free, this process's threads included; what was compiled lies in
Triton's cache on disk. A helper that fails, hangs or has ended costs time and nothing else: what it
did not compile is left to the caller. Helpers end with this process (`helper_process`).
"""

import json
import os
import subprocess
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from tpdet.kernels.cuda.compile.plain_form import to_plain
from tpdet.kernels.cuda.compile.recording import Specialization
from tpdet.launch.host.interpreter import python_command, python_environment

PATIENCE = 60.0
"""Seconds without any news, after which helpers that owe a kernel are given up."""

MOST_THREADS = 4
"""Threads of a helper: more gain little, and a pipe nobody reads must hold what it is sent."""

_MODULE = "tpdet.kernels.cuda.compile.helper_process"


@dataclass(frozen=True)
class _CompileJob:
    """A kernel to compile, and its key in Triton's cache."""

    each: Specialization
    key: str
    plain: list[Any]


class Helpers:
    """Some processes, started when they are first needed. One thread at a time uses them."""

    def __init__(self, processes: int, threads: int) -> None:
        """threads: of each process, and of this one while they help."""
        self.processes, self.threads = processes, min(threads, MOST_THREADS)
        self.problems: list[str] = []
        """What went wrong, a line each."""
        self._news: SimpleQueue[tuple[_Helper | None, Any]] = SimpleQueue()
        self._running: list[_Helper] = []
        self._started = False
        self._end = weakref.finalize(self, _end, self._running)  # where no one calls `close`

    def start(self) -> None:
        """Start them, unless they have been, and do not wait for them."""
        if self._started:
            return
        self._started = True
        try:
            for _ in range(self.processes):
                self._running.append(_Helper(self.threads, self._news))
        except OSError as error:
            self.problems.append(f"no process could be started ({error.strerror})")

    def close(self) -> None:
        """End them. A second time is harmless."""
        self._end()

    def compile(
        self,
        missing: Sequence[tuple[Specialization, str]],
        compile_here: Callable[[Specialization], object],
        each_done: Callable[[Specialization], object],
        threads: int,
    ) -> None:
        """Have kernels compiled, here or by a helper, from the first on; some may be left out.

        missing: with their keys in Triton's cache; compile_here: raises nothing; each_done: called
        on this thread for each that was tried here or lies on disk now; threads: where no helper
        is left.
        """
        self.start()
        waiting = deque(job for each, key in missing if (job := self._job(each, key)))
        left = len(waiting)

        def compile_what_waits() -> None:
            with suppress(IndexError):
                while True:
                    each = waiting.popleft().each
                    compile_here(each)
                    self._news.put((None, each))

        with ThreadPoolExecutor(max(threads, self.threads)) as pool:
            here = 0
            try:
                while left:
                    helped = any(helper.usable for helper in self._running)
                    for _ in range(here, here := self.threads if helped else threads):
                        pool.submit(compile_what_waits)
                    for helper in self._running:
                        helper.take(waiting)
                    done, settled = self._hear()
                    left -= settled
                    if done is not None:
                        each_done(done)
            finally:
                waiting.clear()

    def _job(self, each: Specialization, key: str) -> _CompileJob | None:
        """What a helper is sent; None for a kernel that cannot be sent."""
        try:
            return _CompileJob(each, key, to_plain(each))
        except TypeError as error:
            self.problems.append(f"{each.name} is compiled by no helper: {error}")
            return None

    def _hear(self) -> tuple[Specialization | None, int]:
        """Wait for news: a kernel that is done, if one is, and how many are settled by them."""
        try:
            helper, news = self._news.get(timeout=PATIENCE)
        except Empty:
            for each in self._running:
                if each.owed:
                    each.give_up(f"a helper answered nothing for {PATIENCE:.0f} s")
            return None, 0
        if helper is None:
            return news, 1
        if news is None:
            self._running.remove(helper)
            helper.end()
            self.problems.append(helper.reason)
            return None, len(helper.owed)
        number, problem = news
        job = helper.answered(number, not problem)
        if problem:
            self.problems.append(problem)
        return (None if problem or job is None else job.each), int(job is not None)


class _Helper:
    """One process. A thread reads its answers to `news`, with None after the last."""

    def __init__(self, threads: int, news: "SimpleQueue[tuple[_Helper | None, Any]]") -> None:
        self.owed: dict[int, _CompileJob] = {}
        """What it compiles, by number."""
        self.reason = ""
        """Why it has ended."""
        self.usable = True
        """Whether it has answered no problem so far: one that has is sent no more kernels."""
        self._room, self._count, self._threads = 0, 0, threads
        self._process = subprocess.Popen(
            python_command("-m", _MODULE, str(threads)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # No GPU; a terminal's Ctrl-C does not reach it.
            env=python_environment() | {"CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # one that is stopped reads nothing
        Thread(target=self._read, args=(news,), name="helper's answers", daemon=True).start()

    def _read(self, news: "SimpleQueue[tuple[_Helper | None, Any]]") -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            try:
                for line in answers:
                    number, problem = json.loads(line)
                    news.put((self, (int(number), str(problem))))
            except ValueError:
                self.give_up(f"a helper answered {line[:40]!r}")
        code = self._process.wait()
        self.reason = self.reason or f"a helper ended with code {code}"
        news.put((self, None))

    def take(self, waiting: "deque[_CompileJob]") -> None:
        """Send what there is room for."""
        assert self._process.stdin is not None
        while len(self.owed) < self._room and waiting:
            try:
                job = waiting.popleft()
            except IndexError:  # this process's threads take from there too
                return
            self._count += 1
            self.owed[self._count] = job
            line = json.dumps([self._count, job.key, job.plain]) + "\n"
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except BlockingIOError:
                self.give_up("a helper reads nothing")
            except OSError:  # it has ended, as `_read` is about to say
                return

    def answered(self, number: int, well: bool) -> _CompileJob | None:
        """Note an answer: the job that it is about, None for the first one."""
        self.usable = self.usable and well
        self._room = self._threads if self.usable else 0
        return self.owed.pop(number, None)

    def give_up(self, reason: str) -> None:
        """Kill it."""
        self.reason = reason
        self._process.kill()

    def end(self) -> None:
        """Kill it, and collect it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


def _end(helpers: list[_Helper]) -> None:
    for helper in helpers:
        helper.end()
    helpers.clear()
