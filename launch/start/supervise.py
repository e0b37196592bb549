"""The supervisor of `tpdet serve --tp N`: it starts the ranks, signals them and outlives them.

Signals go to the ranks, whose pids are in the run directory. No process outlives the server: the
ranks die with the supervisor, which adopts and ends their orphans. Only the supervisor prints the
last line.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tpdet.errors import DrainTimeoutError, PeerLostError, TpdetError
from tpdet.launch.host.interpreter import python_command
from tpdet.launch.host.processes import adopt_orphans, children_of, process_status, send_signal
from tpdet.launch.life.lifecycle import StopRelay, kill_local_ranks, print_fatal
from tpdet.launch.life.run_directory import (
    SESSION_VARIABLE,
    ExitDecision,
    RunDirectory,
    new_session,
)
from tpdet.launch.life.signals import StopSignals
from tpdet.launch.ranks.pinned import fill
from tpdet.launch.start.local_ranks import LocalRanks, describe_end

SERVER_PROGRAM = ("-m", "tpdet.serve")

_log = logging.getLogger("tpdet.launch")

_POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0
"""How long ranks may take past the drain timeout to end by themselves."""
_DECIDED_SECONDS = 3.0
"""How long ranks may take once the server's end is decided and one of them has ended."""
_START_SECONDS = 5.0
"""How long ranks may take to end when a stop signal comes before the server is ready."""
_ORPHAN_SECONDS = 2.0
"""How long a child of a killed rank may take to end its streams with an error."""


def serve(
    tp: int,
    arguments: Sequence[str],
    run_dir: Path,
    program: Sequence[str] = SERVER_PROGRAM,
    step_timeout: float = 60.0,
    drain_timeout: float = 20.0,
    secret: bytes | None = None,
    key_digest: str | None = None,
) -> int:
    """Run `program arguments` as `tp` ranks until it ends; the exit code of docs/server.md.

    Takes over the process's stop signals; main thread only. `--run-dir` is added to the arguments
    unless they hold it. The code is exit.json's. If no rank wrote that file, the code is 75 if
    ranks had registered or one was killed, 0 if a stop signal came before any registered, else 70.
    The last line on standard error explains any code but 0. The ranks find the run secret and, if
    there is one, the digest of the API key in the run directory. Raises ResourceError if a server
    runs in `run_dir`, NotPermittedError or UsageError if it cannot be used.
    """
    run = RunDirectory.own(run_dir, new_session(), secret)
    try:
        if key_digest is not None:
            arguments = [*arguments, f"--api-key-file={run.write_key_digest(key_digest)}"]
        return _Supervisor(run, tp, step_timeout, drain_timeout).run(arguments, program)
    finally:
        run.release()


class _Supervisor:
    """One start of one server; both timeouts in seconds."""

    def __init__(
        self, run: RunDirectory, tp: int, step_timeout: float, drain_timeout: float
    ) -> None:
        self._run = run
        self._tp = tp
        self._step_timeout = step_timeout
        self._drain_timeout = drain_timeout
        self._signals = StopSignals()
        self._relay = StopRelay()
        self._stopped_at: float | None = None
        self._was_ready = False
        self._held_since: dict[int, float] = {}

    def run(self, arguments: Sequence[str], program: Sequence[str]) -> int:
        """Start, wait, clean up, and return the exit code."""
        inherited = {child.pid for child in children_of(os.getpid())}
        self._signals.install()
        adopt_orphans(True)
        ranks_text = "1 rank" if self._tp == 1 else f"{self._tp} ranks"
        _log.info("starting %s, run directory %s", ranks_text, self._run.path)
        ranks = self._start(arguments, program)
        try:
            while ranks.running:
                self._forward(self._signals.wait(_POLL_SECONDS), ranks)
                self._end_held_ranks()
                self._end_late_ranks(ranks)
                decided = self._run.exit_decision() is not None
                ranks.end_after_failure(_DECIDED_SECONDS if decided else GRACE_SECONDS)
        finally:
            ranks.kill()
            _end_orphans(inherited)
            adopt_orphans(False)
            decision = self._decision(ranks)
            self._run.clear_channels()
        if self._stopped_at is not None and not self._was_ready and decision.exit == 0:
            _log.info("the start was stopped")
        if decision.exit != 0:
            details = {"rank": decision.rank} if decision.rank >= 0 else {}
            print_fatal(decision.code, decision.exit, **details, message=decision.message)
        return decision.exit

    def _start(self, arguments: Sequence[str], program: Sequence[str]) -> LocalRanks:
        is_named = any(a == "--run-dir" or a.startswith("--run-dir=") for a in arguments)
        folder = [] if is_named else ["--run-dir", str(self._run.path)]
        environment = {**os.environ, SESSION_VARIABLE: self._run.session}
        fill(environment, self._tp, one_host=True)
        command = python_command(*program, *arguments, *folder)
        return LocalRanks(self._tp, command, self._run.path, environment)

    def _forward(self, arrived: list[int], ranks: LocalRanks) -> None:
        """Pass stop signals on to the ranks: by their records, or by pid before there are any."""
        records = self._run.records()
        if arrived and self._stopped_at is None:
            self._stopped_at = time.monotonic()
        for number in arrived if not records else ():
            # To a rank that still imports SIGINT would be an exception, with its traceback.
            ranks.send(signal.SIGTERM if number == signal.SIGINT else number)
        self._relay.forward(arrived, records)

    def _end_held_ranks(self) -> None:
        """A rank held stopped for the step timeout is hung; at TP 1 no peer would notice."""
        now = time.monotonic()
        for record in self._run.records():
            status = process_status(record.pid)
            if status is None or not status.stopped:
                self._held_since.pop(record.rank, None)
            elif now - self._held_since.setdefault(record.rank, now) > self._step_timeout:
                message = f"rank {record.rank} (pid {record.pid}) is stopped: the server ends"
                self._decide(PeerLostError(message), record.rank)
                kill_local_ranks(self._run)

    def _end_late_ranks(self, ranks: LocalRanks) -> None:
        """End ranks that are late after a stop signal, for a rank 0 that did not do so itself."""
        self._was_ready = self._was_ready or (self._run.path / "ready.json").exists()
        if self._stopped_at is None:
            return
        waited = time.monotonic() - self._stopped_at
        if not self._was_ready:
            if waited > _START_SECONDS or (waited > 1.0 and ranks.codes[0] is not None):
                self._run.decide_exit(0, "drained", 0)
                ranks.kill()
        elif waited > self._drain_timeout + GRACE_SECONDS:
            late = f"ranks still run {waited:.0f} s after the stop signal"
            lost = PeerLostError(f"{late}, and some are stopped")
            self._decide(
                lost if self._held_since else DrainTimeoutError(f"{late}: see --drain-timeout"),
                min(self._held_since, default=0),
            )
            ranks.kill()

    def _decide(self, error: TpdetError, rank: int) -> None:
        self._run.decide_exit(error.exit_code, error.code, rank, str(error))

    def _decision(self, ranks: LocalRanks) -> ExitDecision:
        """How the server ended; if no rank decided, the supervisor decides by their exit codes."""
        if (decision := self._run.exit_decision()) is not None:
            return decision
        failed = ranks.failed
        if failed is None or (self._relay.arrived and not self._run.records()):
            decision = ExitDecision(0, "drained", 0)
        elif self._run.records() or failed[1] < 0:
            message = f"{describe_end(*failed)}: the server ends"
            decision = ExitDecision(PeerLostError.exit_code, PeerLostError.code, failed[0], message)
        else:
            message = f"{describe_end(*failed)} before it had begun: the lines above say why"
            decision = ExitDecision(TpdetError.exit_code, TpdetError.code, failed[0], message)
        self._run.decide_exit(decision.exit, decision.code, decision.rank, decision.message)
        return decision


def _end_orphans(inherited: set[int]) -> None:
    """End and collect every child process that is not among `inherited`."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while True:
        orphans = [child for child in children_of(os.getpid()) if child.pid not in inherited]
        if not orphans:
            return
        for orphan in orphans:
            if time.monotonic() > deadline:
                send_signal(orphan.pid, orphan.start_time, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(orphan.pid, os.WNOHANG)
        time.sleep(0.02)
        if time.monotonic() > deadline + GRACE_SECONDS:
            print(f"could not end: {[orphan.pid for orphan in orphans]}", file=sys.stderr)
            return
