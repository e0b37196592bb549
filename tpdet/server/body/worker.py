"""Works on large bodies, one after the other: `python -m tpdet.server.body.worker`.

Only the HTTP process starts it. A thread would not do: the tokenizer and Python's JSON hold the
interpreter for up to seconds at a time; a text can crash the library (a Rust panic) or take for
ever; and a process can be killed when its client goes away.
"""

import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.life.signals import STOP_SIGNALS
from tpdet.requests.body.json_body import parse_object
from tpdet.requests.body.limits import BODY_MEMORY_BYTES
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.work import work_on
from tpdet.server.body.job import (
    LENGTH,
    Answered,
    Broken,
    Job,
    JobRefused,
    Reply,
    WorkerStart,
    frame,
    prepared,
    too_costly,
)
from tpdet.text.tokenizer import Tokenizer

_NICE = 5  # streaming goes first
_FIRST_TO_GO = "1000"  # of all processes, should the machine run out of memory


def main() -> None:
    """Serve until standard input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    start = msgspec.msgpack.decode(_read(source), type=WorkerStart)
    die_with_parent(expected_parent=start.parent_pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (BODY_MEMORY_BYTES, BODY_MEMORY_BYTES))
    os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    tokenizer = None if start.tokenizer is None else Tokenizer.from_files(start.tokenizer)
    while head := source.read(LENGTH.size):
        job = msgspec.msgpack.decode(_rest(source, head), type=Job)
        _limit_time(job.cpu_seconds)
        sink.write(frame(msgspec.msgpack.encode(work(job, _read(source), tokenizer))))
        sink.flush()


def work(job: Job, body: bytes, tokenizer: Tokenizer | None) -> Reply:
    """Work on one body. Never raises: a failure is a reply too."""
    preparer = Preparer(job.facts, job.served_name, tokenizer, job.tenant_salt)
    try:
        done = work_on(job.route, preparer, parse_object(body), job.request_id)
        return Answered(done) if isinstance(done, bytes) else prepared(done)
    except ApiError as error:
        return JobRefused.of(error)
    except MemoryError:
        return JobRefused.of(too_costly(job.cpu_seconds))
    except Exception as error:  # its message may hold the client's text
        places = traceback.format_tb(error.__traceback__)
        return Broken("\n".join([type(error).__name__, *places]))


def _limit_time(cpu_seconds: int) -> None:
    """End this process (SIGXCPU) when the coming job takes too long; earlier ones do not count."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _read(source: BinaryIO) -> bytes:
    return _rest(source, source.read(LENGTH.size))


def _rest(source: BinaryIO, head: bytes) -> bytes:
    """The frame that `head` begins; an end inside a frame means that the HTTP process has gone."""
    if len(head) == LENGTH.size:
        (size,) = LENGTH.unpack(head)
        data = source.read(size)
        if len(data) == size:
            return data
    sys.exit(0)


if __name__ == "__main__":
    main()
