"""The log of every process of a server: one format of lines, written by a thread.

    2026-11-22 14:50:29.123 INFO    [rank 0] listening at http://127.0.0.1:8000

The time is the host's. The name in brackets is `serve` (the supervisor), `rank N` or `http`. The
process never waits for a line to be written. No line shows an exception's message, which may hold
part of a prompt.
"""

import logging
import os
import queue
import re
import sys
import time
import traceback
from logging.handlers import QueueHandler, QueueListener
from types import TracebackType

MAX_LINES = 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LEVEL_WIDTH = len("WARNING")
_FLUSH_SECONDS = 0.2


class Log(QueueHandler):
    """Writes to `descriptor` from a thread; when nobody reads, lines are dropped and counted."""

    queue: "queue.Queue[logging.LogRecord]"

    def __init__(self, descriptor: int, who: str, lines: int = MAX_LINES) -> None:
        super().__init__(queue.Queue(lines))
        self.setFormatter(LineFormatter(who))
        self.dropped = 0
        QueueListener(self.queue, _Writer(descriptor, self)).start()

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that cannot be queued; logging's own handler would write to stderr here."""
        self.dropped += 1

    def flush(self) -> None:
        """Wait a moment for the queued lines; to be called before a line that must come last."""
        self.finish(_FLUSH_SECONDS)

    def finish(self, seconds: float) -> None:
        """Wait until the queued lines are written, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)


class _Writer(logging.Handler):
    """The end of the queue: writes formatted lines, and how many were dropped before each."""

    def __init__(self, descriptor: int, log: Log) -> None:
        super().__init__()
        self._descriptor, self._log = descriptor, log
        self._reported = 0

    def handle(self, record: logging.LogRecord) -> bool:
        """Write one line without the handler's lock.

        The write may wait for its reader for ever, and logging takes the lock of every handler
        when the process exits.
        """
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; this may wait for the reader for ever."""
        text = f"{record.msg}\n"
        dropped = self._log.dropped
        if dropped > self._reported:
            lost = f"{dropped - self._reported} log lines were dropped, nobody read them"
            self._reported = dropped
            text += self._log.format(_warning(lost)) + "\n"
        try:
            _write_all(self._descriptor, text.encode("utf-8", "backslashreplace"))
        except OSError:
            self._log.dropped += 1


class LineFormatter(logging.Formatter):
    """Time, level, who, text. Lines of other packages name the logger too."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """The whole text of a record."""
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        moment = f"{seconds}.{int(record.msecs):03d}"
        text = record.getMessage()
        if record.name.split(".")[0] == "tpdet":  # which may name what a client sent
            text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
        else:
            text = f"{record.name}: {text}"
        text = f"{moment} {record.levelname:<{_LEVEL_WIDTH}} [{self._who}] {text}"
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


def open_log(who: str, level: int = logging.INFO) -> Log:
    """Log to standard error, once: own lines from `level`, others' warnings."""
    log = Log(sys.stderr.fileno(), who)
    root = logging.getLogger()
    root.addHandler(log)
    root.setLevel(logging.WARNING)
    logging.getLogger("tpdet").setLevel(level)
    logging.captureWarnings(True)
    return log


def flush_log() -> None:
    """Wait a moment for the log's queued lines, if this process has such a log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Log):
            handler.flush()


def _warning(text: str) -> logging.LogRecord:
    return logging.LogRecord("tpdet", logging.WARNING, "", 0, text, (), None)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
