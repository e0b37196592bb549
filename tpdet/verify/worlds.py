"""Starts one world of ranks as a child process, and waits for it."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tpdet.errors import TpdetError
from tpdet.launch.host.processes import die_with_parent
from tpdet.verify.launchers import Launchers
from tpdet.verify.ways import USUAL, Way

_LOG_LINES = 120
_END_SECONDS = 15.0
"""Seconds for a launcher to end its ranks after a signal."""


def run_world(
    tp: int,
    module: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    way: Way | None = None,
    launchers: Launchers | None = None,
) -> None:
    """Run `module` as `tp` ranks (alone for one) and wait; its log goes to `folder`.

    environment: variables for the ranks besides those they inherit. way: how to start them, with
    one of `launchers`. Raises TpdetError with the end of the log when the world fails.
    """
    command, found = (launchers or Launchers()).start(
        tp, way or USUAL, ["-m", module], arguments, folder / "logs", environment
    )
    log = folder / f"tp{tp}.log"
    with log.open("wb") as file:
        code = _run(command, found, file)
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()
        raise TpdetError(
            f"the world of {tp} ranks ({way or USUAL}) ended with {code}:\n"
            + "\n".join(lines[-_LOG_LINES:])
        )


def _run(command: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> int:
    """Run a launcher and wait; a signal to this process goes on to it, to end its ranks."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:  # srun and mpirun would leave ranks behind if killed at once
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
