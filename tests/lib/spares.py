"""Forks that a program makes before its first line, to be what it starts with `subprocess.Popen`.

Then they have no thread and no state of the program, and its modules are imported already. Each is
its child, as what it starts would be, and dies with it.
"""

import ctypes
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from typing import IO, NoReturn

from tpdet.launch.host.processes import die_with_parent

Tree = tuple["Tree", ...]
"""A child each, with its own."""

_FREE = 1000  # descriptors from here on are nobody's; those below are inherited, as by any fork


def run(words: Sequence[str], environment: Mapping[str, str], children: Tree = ()) -> NoReturn:
    """What `python -m words` does, or a file of this name, in this process, which then ends."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another
    spares = [_Spare(own) for own in children]

    class Popen(subprocess.Popen):
        """Modules subscript it."""

        def __new__(cls, command: Sequence[str], *arguments, **options):
            if spares and [*command[:3]] == [sys.executable, "-P", "-m"]:
                return _Child(spares.pop(0), command[3:], **options)
            return super().__new__(cls)

    if spares:
        subprocess.Popen = Popen
    sys.argv[:] = words
    code = 0
    try:
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            if not hasattr(sys.modules.get(words[0]), "__path__"):
                sys.modules.pop(words[0], None)  # what `python -m` runs nobody has imported
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # waits for threads, and calls what is to be called at the end


class _Spare:
    """A child that waits for what it is to be, and ends if it is to be nothing."""

    def __init__(self, children: Tree) -> None:
        self.door, inner = socket.socketpair()
        self.pid = os.fork()
        if self.pid:
            inner.close()
            return
        try:
            self.door.close()
            die_with_parent()
            _become(inner, children)
        finally:
            os._exit(70)


def _become(door: socket.socket, children: Tree) -> None:
    message, sent, _, _ = socket.recv_fds(door, 1 << 20, 32)
    if not message:
        os._exit(0)
    order = json.loads(message)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE) for fd in sent]
    for fd, number in zip(high, order["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = TextIOWrapper(BufferedReader(FileIO(0, closefd=False)))
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(order["folder"])
    if order["session"]:
        os.setsid()
    run(order["words"], order["environment"], children)


class _Child:
    """What `Popen` is of a command that starts Python's `-m`, of a spare."""

    def __init__(
        self,
        spare: _Spare,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        preexec_fn: object = None,
    ) -> None:
        """preexec_fn: to die with the parent, as all spares do."""
        self.pid, self.returncode, self.stdin = spare.pid, None, None
        given = os.open(os.devnull, os.O_RDONLY)
        if stdin == subprocess.PIPE:
            os.close(given)
            given, write = os.pipe()
            self.stdin = BufferedWriter(FileIO(write, "w"))
        numbers = [0, 1, 2, *pass_fds]
        order = {"words": [*words], "environment": dict(env), "numbers": numbers}
        order |= {"folder": os.getcwd(), "session": start_new_session}
        with spare.door as door:
            outputs = [1 if stdout is None else stdout.fileno()]
            outputs += [2 if stderr is None else stderr.fileno()]
            sent = [given, *outputs, *pass_fds]
            socket.send_fds(door, [json.dumps(order).encode()], sent)
        os.close(given)

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """timeout: for a child that was told to end, which needs no limit here."""
        return self._collect(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _collect(self, how: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, how)
            except ChildProcessError:  # collected by others, as Popen has it
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode
