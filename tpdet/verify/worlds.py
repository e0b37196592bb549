"""Starting one world of ranks as a child process and reading what it leaves."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpdet.errors import TpdetError
from tpdet.launch.torchrun import rank_environment, torchrun_command

_LOG_LINES = 120


def run_world(
    tp: int,
    module: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `module` as `tp` ranks (no torchrun for one) and wait; its log goes to `folder`.

    environment: set for the ranks besides what they inherit.

    Raises TpdetError with the end of the log when it fails.
    """
    program = ["-m", module]
    command = (
        torchrun_command(tp, program, arguments, folder / "logs")
        if tp > 1
        else [sys.executable, *program, *arguments]
    )
    log = folder / f"tp{tp}.log"
    with log.open("wb") as file:
        found = {**rank_environment(tp), **(environment or {})}
        done = subprocess.run(command, stdout=file, stderr=file, env=found)
    if done.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        raise TpdetError(
            f"the world of {tp} ranks ended with {done.returncode}:\n"
            + "\n".join(lines[-_LOG_LINES:])
        )
