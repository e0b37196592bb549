"""Starts one world of ranks as a child process, and waits for it.

A rank that refuses prints one line of JSON, as a rank of a server does (`run_rank`). Several ranks
may, so the world ends with the first that is a cause: a lost peer is none (`cause_of`).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tpdet.errors import PeerLostError, TpdetError
from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.life.lifecycle import print_fatal
from tpdet.tools.worlds.launchers import Launchers
from tpdet.tools.worlds.ways import USUAL, LaunchWay

_LOG_LINES = 120
_FATAL = '{"event": "fatal"'
_END_SECONDS = 15.0
"""Seconds for a launcher to end its ranks after a signal."""


def run_world(
    tp: int,
    module: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    way: LaunchWay | None = None,
    launchers: Launchers | None = None,
) -> None:
    """Run `module` as `tp` ranks (alone for one) and wait; its log goes to `folder`.

    environment: variables for the ranks besides those they inherit. way: how to start them, with
    one of `launchers`. A world that fails raises the TpdetError of the first rank that refused, or
    one with the end of the log.
    """
    command, variables = (launchers or Launchers()).start(
        tp, way or USUAL, ["-m", module], arguments, folder / "logs", environment
    )
    log = folder / f"tp{tp}.log"
    with log.open("wb") as file:
        code = _run(command, variables, file)
    if code == 0:
        return
    text, who = log.read_text(errors="replace"), f"the world of {tp} ranks ({way or USUAL})"
    if (cause := cause_of(text, who)) is not None:
        raise cause
    tail = "\n".join(text.splitlines()[-_LOG_LINES:])
    raise TpdetError(f"{who} ended with {code}:\n{tail}")


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


def run_rank(main: Callable[[list[str]], int]) -> int:
    """Run `main` on this process's arguments: its exit code, or that of the TpdetError it raises.

    Any other error is a mistake of ours and keeps its traceback.
    """
    try:
        return main(sys.argv[1:])
    except TpdetError as error:
        print_fatal(error.code, error.exit_code, message=str(error))
        return error.exit_code


def cause_of(log: str, who: str) -> TpdetError | None:
    """The error of the rank that ended first for a reason of its own; None if the log has none.

    who: the world, for the message.
    """
    for line in log.splitlines():
        if not line.startswith(_FATAL):
            continue
        try:
            said = json.loads(line)
            error = TpdetError(f"{who} ended with {said['exit']}: {said['message']}")
            error.exit_code, error.code = int(said["exit"]), str(said["code"])
        except (ValueError, KeyError, TypeError):
            continue  # a line that ranks wrote into each other
        if error.code != PeerLostError.code:
            return error
    return None
