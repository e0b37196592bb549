"""The HTTP process's log: lines to standard error that never hold up a request, nor a secret.

A thread writes them; when nobody reads standard error (a stalled pipe, a full disk) lines are
dropped and counted. Of an exception its type and place are shown, never its message: that may hold
part of a prompt.
"""

import logging
import os
import queue
import sys
import threading
import time
import traceback
from http import HTTPStatus
from types import TracebackType
from typing import Any

from starlette.types import Scope

MAX_LINES = 4096
MAX_PATH_CHARACTERS = 128
_ACCESS = "tpdet.access"

_access = logging.getLogger(_ACCESS)


class Log(logging.Handler):
    """Writes to `descriptor` from a thread of its own."""

    def __init__(self, descriptor: int, lines: int = MAX_LINES) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self.dropped = 0
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(lines)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; drop it if there are too many."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1

    def finish(self, seconds: float) -> None:
        """Wait until what was queued is written, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _write(self) -> None:
        told = 0
        while True:
            text = self._lines.get() + "\n"
            if self.dropped > told:
                told, missed = self.dropped, self.dropped - told
                text += f"WARNING: {missed} log lines were dropped, nobody read them\n"
            try:
                _write_all(self._descriptor, text.encode("utf-8", "backslashreplace"))
            except OSError:
                self.dropped += 1
            self._lines.task_done()


class LineFormatter(logging.Formatter):
    """Lines as users of `vllm serve` know them; access lines are uvicorn's."""

    def format(self, record: logging.LogRecord) -> str:
        """The whole text of a record."""
        text = record.getMessage()
        if record.name == _ACCESS:
            return f"{record.levelname}:     {text}"
        moment = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        text = f"{record.levelname} {moment} [{record.name}] {text}"
        if record.exc_info and record.exc_info[0] is not None:
            text += "\n" + self.formatException(record.exc_info)
        return text

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        """The places an exception came through, and its type."""
        frames = traceback.extract_tb(ei[2])
        places = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        return "\n".join([*places, ei[0].__name__ if ei[0] is not None else ""])


def open_log(access: bool) -> Log:
    """Send all of this process's log lines to standard error; without `access`, not each request.

    To be called once, before anything else logs.
    """
    log = Log(sys.stderr.fileno())
    root = logging.getLogger()
    root.addHandler(log)
    root.setLevel(logging.WARNING)
    logging.getLogger("tpdet").setLevel(logging.INFO)
    _access.setLevel(logging.INFO if access else logging.CRITICAL)
    # One line for each client that sends garbage would let it write our log.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return log


def log_access(scope: Scope, status: int) -> None:
    """One request's line. No query: it may hold what the client took for a key."""
    if not _access.isEnabledFor(logging.INFO):
        return
    host, port = scope.get("client") or ("-", 0)
    path = ascii(scope["path"][:MAX_PATH_CHARACTERS])[1:-1]
    _access.info(
        '%s:%d - "%s %s HTTP/%s" %d %s',
        host,
        port,
        scope["method"],
        path,
        scope.get("http_version", "1.1"),
        status,
        HTTPStatus(status).phrase if status in _KNOWN else "",
    )


def log_loop_problem(loop: Any, context: dict[str, Any]) -> None:
    """An event loop's exception handler that keeps to the rule above."""
    logging.getLogger("tpdet.server").error(
        "%s", context["message"], exc_info=context.get("exception")
    )


_KNOWN = frozenset(int(status) for status in HTTPStatus)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
