"""Processes on this host, read from /proc; a process is its pid together with its start time.

The kernel reuses pids; the start time (clock ticks since boot) tells a recycled one apart, so
nothing is ever signalled by its pid alone.
"""

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from tpdet.errors import PeerLostError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessStatus:
    """What /proc says: `state` is one letter (R S D running, T t stopped, Z X dead)."""

    pid: int
    state: str
    parent: int
    start_time: int

    @property
    def stopped(self) -> bool:
        """Held by SIGSTOP or a debugger."""
        return self.state in "Tt"

    @property
    def dead(self) -> bool:
        """Ended, and perhaps not collected by its parent yet."""
        return self.state in "ZX"


def process_status(pid: int) -> ProcessStatus | None:
    """The process's status now, or None if there is none with this pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return ProcessStatus(pid, state=fields[0], parent=int(fields[1]), start_time=int(fields[19]))


def process_name(pid: int) -> str:
    """The pid and the start time of a process, as a name that no later process has."""
    status = process_status(pid)
    return f"{pid}-{status.start_time if status else 0}"


def living_process(pid: int, start_time: int) -> ProcessStatus | None:
    """The status of that very process, or None if it has ended (a recycled pid is another one)."""
    status = process_status(pid)
    if status is None or status.start_time != start_time or status.dead:
        return None
    return status


def send_signal(pid: int, start_time: int, number: int) -> bool:
    """Signal that very process; False if it has ended."""
    if living_process(pid, start_time) is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def children_of(parent: int) -> list[ProcessStatus]:
    """The direct children of a process, ended ones included, in pid order."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    statuses = [process_status(pid) for pid in pids]
    return [status for status in statuses if status is not None and status.parent == parent]


def die_with_parent(number: int = signal.SIGKILL, expected_parent: int | None = None) -> None:
    """Have the kernel send this process `number` when the thread that started it ends.

    Call it first of all, before the heavy imports. Raises PeerLostError if the parent
    (`expected_parent`, where the caller knows its pid) is gone already: the signal would never
    come. Start children from a main thread: the kernel watches the thread, not the process.
    """
    parent = os.getppid() if expected_parent is None else expected_parent
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        raise PeerLostError(f"process {parent}, which started this one, has ended")


def adopt_orphans(adopt: bool) -> None:
    """Become (or stop being) the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
