"""Runs a command and prints at least every five seconds what it is doing, and for how long.

    python scripts/progress.py [--pip] "installing PyTorch" COMMAND ...

With --pip the command is pip. Its output is shown as a phase: finding packages, downloading or
installing. One warning of each kind is shown, and the last lines of the output when pip fails. The
exit code is the command's. Standard library only, because it runs before anything is installed.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, deque

LINE_SECONDS = 4.5  # so that a line comes within five seconds on a busy machine too
PIP_PHASES = (
    (re.compile(r"\s*Downloading (?P<what>\S+(?: \([^)]*\))?)"), "downloading"),
    (re.compile(r"Installing collected packages"), "installing"),
    (re.compile(r"(Collecting|Requirement already satisfied:) (?P<what>[\w.\-]+)"), "finding"),
    (re.compile(r"Processing (?:\S*/)?(?P<what>\S+)"), "finding"),
    (re.compile(r"\s*Using cached (?P<what>\S+)"), "finding"),
    (re.compile(r"Building|\s+Preparing|\s+Getting requirements"), "building"),
)
KEPT_LINES = 60


class Pip:
    """The state that pip's output shows: its phase, the seconds of each phase, its warnings."""

    def __init__(self) -> None:
        self.phase, self.what = "finding", ""
        self.seconds: dict[str, float] = {}
        self.warnings: Counter[str] = Counter()
        self._last = time.monotonic()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def hear(self, line: str) -> None:
        """One line of output."""
        self._lines.append(line)
        if line.startswith(("WARNING:", "DEPRECATION:", "ERROR:")):
            # Warnings that differ only in names, paths and numbers are one kind.
            kind = re.sub(r"'[^']*'|\S*/\S*|\d+", "*", line)
            self.warnings[kind] += 1
            if self.warnings[kind] == 1:
                say(f"  pip: {line}")
        for pattern, phase in PIP_PHASES:
            found = pattern.match(line)
            if found is not None:
                self._count()
                self.phase, self.what = phase, found.groupdict().get("what") or ""

    def _count(self) -> None:
        now = time.monotonic()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._last
        self._last = now

    def doing(self) -> str:
        """The phase and the package it works on, for a line of progress."""
        return f", {self.phase} {self.what}".rstrip()

    def finish(self, code: int) -> str:
        """Seconds by phase, once pip has ended; after a failure its last lines are printed."""
        self._count()
        repeated = sum(self.warnings.values()) - len(self.warnings)
        if repeated:
            say(f"  pip: {repeated} more warnings of these kinds")
        if code:
            print(*self._lines, sep="\n", file=sys.stderr, flush=True)
        return f" ({', '.join(f'{phase} {s:.1f} s' for phase, s in self.seconds.items())})"


def main(arguments: list[str]) -> int:
    """Run the command; its exit code, or 130 after Ctrl-C."""
    pip = Pip() if arguments[0] == "--pip" else None
    text, *command = arguments[1:] if pip else arguments
    say(text)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if pip else None,
        stderr=subprocess.STDOUT if pip else None,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    ended = threading.Event()
    threading.Thread(target=read, args=(process, pip, ended), daemon=True).start()
    try:
        while not ended.wait(LINE_SECONDS):
            say(f"  {time.monotonic() - began:.0f} s{pip.doing() if pip else ''}")
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        return 130
    phases = pip.finish(code) if pip else ""
    if code == 0:
        say(f"  done in {time.monotonic() - began:.1f} s{phases}")
    return code if code >= 0 else 128 - code


def read(process: "subprocess.Popen[str]", pip: Pip | None, ended: threading.Event) -> None:
    """Follow the command until it ends."""
    if pip is not None and process.stdout is not None:
        for line in process.stdout:
            pip.hear(line.rstrip())
    process.wait()
    ended.set()


def say(text: str) -> None:
    """A line of progress."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
