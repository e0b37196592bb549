"""How a rank ends: looks for lost peers, decides the exit code once, ends the other ranks."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from tpdet.errors import PeerLostError, TpdetError
from tpdet.launch.host.processes import process_status
from tpdet.launch.host.resources import resource_error
from tpdet.launch.life.log_lines import flush_log
from tpdet.launch.life.run_directory import ExitDecision, RankRecord, RunDirectory, supervised
from tpdet.launch.ranks.node_name import this_node
from tpdet.launch.ranks.rank_environment import RankEnvironment

_MESSAGE_CHARACTERS = 2000
_WRITE_SECONDS = 1.0
_RANK_0_SECONDS = 2.0
"""How long rank 0 may take to learn why this rank ends, and to tell its clients."""


@dataclass(frozen=True)
class LostPeer:
    """A rank on this host that does not run any more; `reason` is gone, dead or stopped."""

    rank: int
    pid: int
    reason: str


def lost_local_peers(run: RunDirectory, rank: int) -> list[LostPeer]:
    """Registered ranks of this host, other than `rank`, that have ended or are stopped.

    Once the exit is decided (exit.json), ranks are free to leave, and none counts as lost.
    """
    if run.exit_decision() is not None:
        return []
    peers = [record for record in run.local_records() if record.rank != rank]
    return [
        LostPeer(peer.rank, peer.pid, reason)
        for peer in peers
        if (reason := _why_lost(peer)) is not None
    ]


def _why_lost(record: RankRecord) -> str | None:
    status = process_status(record.pid)
    if status is None or status.start_time != record.start_time:
        return "gone"
    if status.dead:
        return "dead"
    return "stopped" if status.stopped else None


def check_peers(run: RunDirectory, rank: int) -> None:
    """Raise PeerLostError naming every lost rank of this host; a stop signal is no drain then."""
    lost = lost_local_peers(run, rank)
    if lost:
        node = this_node(RankEnvironment()).name
        names = ", ".join(f"rank {peer.rank} (pid {peer.pid}) is {peer.reason}" for peer in lost)
        public = ", ".join(f"rank {peer.rank} on node {node} is {peer.reason}" for peer in lost)
        raise PeerLostError(f"{names} on node {node}: the server ends").explained(public)


def kill_local_ranks(run: RunDirectory, except_rank: int | None = None) -> None:
    """SIGKILL every registered rank of this host, stopped ones too, except one."""
    for record in run.local_records():
        if record.rank != except_rank:
            record.signal(signal.SIGKILL)


class StopRelay:
    """Sends every stop signal once to every rank of this host, also to those that come later."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        """The signals so far, in order."""
        self._sent: dict[int, int] = {}

    def forward(self, arrived: Sequence[int], records: Sequence[RankRecord]) -> None:
        """Take up signals that arrived; records: the ranks that have registered so far."""
        self.arrived += arrived
        for record in records:
            for number in self.arrived[self._sent.get(record.rank, 0) :]:
                record.signal(number)
            self._sent[record.rank] = len(self.arrived)


def end_process(
    run: RunDirectory | None,
    rank: int,
    error: BaseException,
    before_exit: Callable[[], None] | None = None,
) -> NoReturn:
    """End this rank, and with it the server on this host, because of `error`. From any thread.

    Writes exit.json unless a rank has decided before, and runs `before_exit`, whose failure is
    ignored. Prints what ended the server as the last line of standard error, unless the rank that
    decided or the supervisor does. Then SIGKILLs all other local ranks (rank 0 after two seconds,
    within which it may tell clients) and ends with the decided code. Without its run directory
    (`run` is None) a rank ends alone.
    """
    error = resource_error(error) or error
    exit_code, code = exit_of(error)
    message = str(error)[:_MESSAGE_CHARACTERS] or type(error).__name__
    decision, owned = ExitDecision(exit_code, code, rank, message), supervised()
    if (directory := run or owned) is not None:
        directory.decide_exit(exit_code, code, rank, message)
        decision = (directory.exit_decision() if directory.current else None) or decision
    if before_exit is not None:
        with suppress(Exception):
            before_exit()
    flush_log()
    if not isinstance(error, TpdetError):
        write_error("".join(traceback.format_exception(error)))
    if owned is None and decision.rank == rank:
        print_fatal(decision.code, decision.exit, rank=rank, message=decision.message)
    if run is not None and run.current:
        if rank != 0:
            _let_rank_0_speak(run)
        kill_local_ranks(run, except_rank=rank)
        run.clear_channels()
    os._exit(decision.exit)


def end_start(run: RunDirectory) -> NoReturn:
    """End rank 0, and with it a server that is not ready yet, at a stop signal; the code is 0.

    If a peer is lost, the code is that of PeerLostError. May be called from any thread.
    """
    try:
        check_peers(run, 0)
    except PeerLostError as error:
        end_process(run, 0, error)
    run.decide_exit(0, "drained", 0)
    decision = run.exit_decision()
    kill_local_ranks(run, except_rank=0)
    run.clear_channels()
    os._exit(decision.exit if decision is not None else 0)


def _let_rank_0_speak(run: RunDirectory) -> None:
    """Wait a little for rank 0 to end by itself: only it can tell clients which rank was lost."""
    deadline = time.monotonic() + _RANK_0_SECONDS
    leaders = [record for record in run.local_records() if record.rank == 0]
    while time.monotonic() < deadline and any(_why_lost(leader) is None for leader in leaders):
        time.sleep(0.02)


def exit_of(error: BaseException) -> tuple[int, str]:
    """Exit code and name for an error; an error of no class of ours is internal."""
    cause = resource_error(error) or error
    if isinstance(cause, TpdetError):
        return cause.exit_code, cause.code
    return TpdetError.exit_code, TpdetError.code


def print_fatal(code: str, exit_code: int, **details: object) -> None:
    """Print the last line of standard error: at a terminal the message among `details`.

    Elsewhere it is JSON of event, code, exit and `details`.
    """
    line = json.dumps({"event": "fatal", "code": code, "exit": exit_code, **details})
    if os.isatty(2):
        line = f"tpdet: {details.get('message') or code}"
    flush_log()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    write_error(line + "\n")


def write_error(text: str) -> None:
    """Write to standard error, for at most a second: an unread pipe or a full disk holds up no end.

    The write bypasses Python's buffers, whose lock a stuck thread would keep.
    """

    def write() -> None:
        data = text.encode("utf-8", "backslashreplace")
        with suppress(OSError):
            while data:
                data = data[os.write(2, data) :]

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITE_SECONDS)
