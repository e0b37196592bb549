"""Starting one world of ranks as a child process and reading what it leaves."""

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
"""What a launcher gets, once told to, to end its ranks."""


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

    environment: set for the ranks besides what they inherit. way: who starts them, found among
    `launchers`.

    Raises TpdetError with the end of the log when it fails.
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
    """Wait for a launcher; it is told to end its ranks when this process is told to end."""
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
        if process.poll() is None:  # killed at once, srun and mpirun would leave ranks behind
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
