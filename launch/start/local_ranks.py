"""Starts the ranks of a world on this host, as children of this process.

The ranks meet at a file in a private folder, so nothing listens on a port. torchrun's agent would
open a store on every address.

    python -m tpdet.launch.start.local_ranks 4 -m tpdet.tools.verify.rank FOLDER

runs a program as four ranks, and ends with the code of the first one that failed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tpdet.errors import UsageError
from tpdet.launch.host.interpreter import python_command
from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.life.signals import StopSignals
from tpdet.launch.ranks.environment import STORE_FILE, STORE_VARIABLE, TORCHRUN_NAMES
from tpdet.launch.ranks.pinned import fill

_POLL_SECONDS = 0.05
_END_SECONDS = 10.0
"""How long ranks may take to end once one of them has failed, or a stop signal came."""


class LocalRanks:
    """The processes of one start, in rank order. Call from the main thread: they die with it."""

    def __init__(
        self, ranks: int, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        """Start `command` as `ranks` ranks that meet in `folder`, of mode 0700.

        environment: the ranks', to which their numbers are added. Each rank leads a new session,
        so that a terminal's Ctrl-C does not reach it.
        """
        self._ended_first: int | None = None
        self._failed_at: float | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        store = folder / STORE_FILE
        store.unlink(missing_ok=True)
        store.touch(mode=0o600)
        follow = partial(die_with_parent, signal.SIGKILL, os.getpid())
        for rank in range(ranks):
            numbers = dict(zip(TORCHRUN_NAMES, map(str, (rank, ranks, rank, ranks)), strict=True))
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={**environment, **numbers, STORE_VARIABLE: str(store)},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=follow,
                )
            )

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each rank, as `Popen.returncode`; None while it runs."""
        codes = [process.poll() for process in self._processes]
        if self._ended_first is None:
            failed = (rank for rank, code in enumerate(codes) if code)
            self._ended_first = next(failed, None)
        return codes

    @property
    def running(self) -> bool:
        """Whether any of them runs."""
        return None in self.codes

    @property
    def failed(self) -> tuple[int, int] | None:
        """(rank, code) of the first failure that was seen; None while there is none."""
        codes = self.codes
        first = self._ended_first
        return None if first is None else (first, codes[first] or 0)

    def send(self, number: int) -> None:
        """Signal all that run."""
        for process in self._processes:
            process.send_signal(number)

    def end_after_failure(self, seconds: float = _END_SECONDS) -> None:
        """Once a rank has failed, send SIGTERM to the others; kill them after `seconds`."""
        if self.failed is None:
            return
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self.send(signal.SIGTERM)
        if time.monotonic() > self._failed_at + seconds:
            self.kill()

    def kill(self) -> None:
        """End all at once, and collect them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def describe_end(rank: int, code: int) -> str:
    """How a rank ended, for a message."""
    if code >= 0:
        return f"rank {rank} ended with {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else str(-code)
    hint = " (out of memory? see dmesg)" if -code == signal.SIGKILL else ""
    return f"rank {rank} was ended by {name}{hint}"


def local_ranks_command(ranks: int, program: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The command that runs `program` (e.g. ("-m", "tpdet.serve")) as `ranks` ranks."""
    return python_command("-m", __name__, str(ranks), *program, *arguments)


def main(arguments: Sequence[str]) -> int:
    """Run `arguments[1:]` by this interpreter as `arguments[0]` ranks; the first failure's code.

    A stop signal ends them all. Raises UsageError if `arguments[0]` is no number.
    """
    if len(arguments) < 2 or not (arguments[0].isascii() and arguments[0].isdigit()):
        raise UsageError(f"{' '.join(arguments)!r}: use a number of ranks and a program")
    count = int(arguments[0])
    environment = dict(os.environ)
    fill(environment, count, one_host=True)
    signals = StopSignals()
    signals.install()
    with tempfile.TemporaryDirectory(prefix="tpdet-ranks-") as folder:
        ranks = LocalRanks(count, python_command(*arguments[1:]), Path(folder), environment)
        try:
            deadline = float("inf")
            while ranks.running and time.monotonic() < deadline:
                for number in signals.wait(_POLL_SECONDS):
                    ranks.send(number)
                    deadline = min(deadline, time.monotonic() + _END_SECONDS)
                ranks.end_after_failure()
        finally:
            ranks.kill()
    if ranks.failed is not None:
        rank, code = ranks.failed
        print(describe_end(rank, code), file=sys.stderr)
        return code if code > 0 else 128 - code
    return 128 + signals.requested if signals.requested is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
