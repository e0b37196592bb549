"""A process that compiles kernels into Triton's cache for another one: the child of `helpers`.

    python -m tpdet.kernels.cuda.compile.helper_process THREADS

Reads a JSON line for each kernel: number, key in the cache, and `plain_form`. Answers a line each,
in any order: number, and what went wrong, or nothing. It touches no GPU, and ends at once when its
standard input does: with the process that started it, however that one ended.
"""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TextIO

from triton.runtime import driver

from tpdet.kernels.cuda.compile.cache import looking_up, missing_key
from tpdet.kernels.cuda.compile.plain_form import TargetDriver, from_plain, target_of
from tpdet.kernels.cuda.compile.pool import hash_triton
from tpdet.kernels.cuda.compile.recording import Specialization, check_triton, hash_callees_first

LONGEST = 600
"""Seconds without an answer that is owed, after which the system ends this process."""

READY = 0
"""The number of the first answer, which says that kernels may come; kernels count from 1."""


class AnswerLines:
    """Lines that several threads write; an alarm ends the process if one is owed for too long."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock, self._owed = file, Lock(), 0

    def owe(self) -> None:
        """Expect one more."""
        with self._lock:
            self._owed += 1
            signal.alarm(LONGEST)

    def give(self, number: int, problem: str = "") -> None:
        """Write one."""
        with self._lock:
            self._owed -= 1
            signal.alarm(LONGEST if self._owed else 0)
            self._file.write(json.dumps([number, problem]) + "\n")
            self._file.flush()


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers = AnswerLines(os.fdopen(os.dup(1), "w"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody else's line among the answers
    check_triton()
    hash_callees_first()
    hash_triton()
    with looking_up(), ThreadPoolExecutor(int(sys.argv[1])) as pool:
        answers.owe()
        answers.give(READY)
        for line in sys.stdin:
            answers.owe()
            pool.submit(_answer, line, answers)
        os._exit(0)  # not after what the threads are at: nobody waits for it


def _answer(line: str, answers: AnswerLines) -> None:
    number, key, plain = json.loads(line)
    try:
        problem = _compile(key, plain)
    except Exception as error:  # the other process compiles it again and says why
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    answers.give(number, problem)


def _compile(key: str, plain: list[Any]) -> str:
    """Compile one kernel; what keeps it from being the one that was asked for."""
    driver.set_active(TargetDriver(target_of(plain)))
    each: Specialization = from_plain(plain)
    key_here = missing_key(each)
    if key_here is not None and key_here != key:
        return f"{each.name} has another key here"
    each.compile()
    return ""


if __name__ == "__main__":
    main()
