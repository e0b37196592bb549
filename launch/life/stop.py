"""`tpdet stop`: drain the server of a run directory, and say how it ended."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from tpdet.errors import NotFoundError, PeerLostError
from tpdet.launch.life.run_directory import ExitDecision, RunDirectory

_POLL_SECONDS = 0.02


def stop(
    run_dir: Path, timeout: float = 60.0, say: Callable[[str], None] = lambda text: None
) -> int:
    """Drain the server of a run directory, under any launcher; the code it ended with.

    Sends SIGTERM to rank 0, and waits until all its ranks on this host have ended. A server that
    had ended already gives its code again. `say` gets one line about how it ended. Raises
    NotFoundError if none runs here, PeerLostError if it still runs after `timeout` seconds, or
    ended without deciding a code.
    """
    run = RunDirectory(run_dir.absolute(), session="")
    records = run.local_records()
    decision = run.exit_decision()
    if not records and decision is None:
        raise NotFoundError(f"no server of this host has registered in {run_dir}")
    running = [record for record in records if record.runs]
    if not running:
        if decision is None:
            raise NotFoundError(f"the server of {run_dir} has ended without an exit.json")
        say(f"the server of {run_dir} had ended already: {_how(decision)}")
        return decision.exit
    for record in running:
        if record.rank == 0:
            record.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while running := [record for record in running if record.runs]:
        # A temporary directory goes with its server.
        decision = run.exit_decision() or decision
        if time.monotonic() > deadline:
            names = ", ".join(f"rank {record.rank} (pid {record.pid})" for record in running)
            raise PeerLostError(f"{names} still run {timeout:g} s after SIGTERM to rank 0")
        time.sleep(_POLL_SECONDS)
    decision = run.exit_decision() or decision
    if decision is None:
        raise PeerLostError(f"the server of {run_dir} ended without an exit.json: it was killed")
    say(f"the server of {run_dir} has ended: {_how(decision)}")
    return decision.exit


def _how(decision: ExitDecision) -> str:
    why = f": {decision.message}" if decision.message else ""
    return f"{decision.code}, exit code {decision.exit}{why}"
