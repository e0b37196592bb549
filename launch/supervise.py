"""What `tpdet serve --tp N` and `tpdet stop` run: start the ranks, signal them, outlive them.

The supervisor starts torchrun's agent, which starts the ranks. Signals go to the ranks, whose
pids are in the run directory, because the agent would kill them 30 s after a signal. Nothing
stays behind: the agent dies with the supervisor, the ranks with the agent, and the supervisor
adopts and ends whatever is left.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tpdet.errors import DrainTimeoutError, NotFoundError, PeerLostError
from tpdet.launch.lifecycle import kill_local_ranks, print_fatal
from tpdet.launch.processes import (
    adopt_orphans,
    children_of,
    die_with_parent,
    living_process,
    process_status,
    send_signal,
)
from tpdet.launch.run_directory import SESSION_VARIABLE, RankRecord, RunDirectory, new_session
from tpdet.launch.signals import StopSignals
from tpdet.launch.torchrun import rank_environment, torchrun_command

SERVER_PROGRAM = ("-m", "tpdet.serve")

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
"""What ranks get past the drain timeout, and the agent past its last rank, to end themselves."""
_ORPHAN_SECONDS = 2.0
"""What a child of a killed rank gets to end its streams with an error."""


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
    unless they hold it. The code is exit.json's; without one, 75 if ranks had registered and
    70 if not (0 after a stop signal that came before). Raises ResourceError if a server runs in
    `run_dir`, NotPermittedError or UsageError if it cannot be used. The ranks find the run secret
    and, where there is one, the digest of the API key in the run directory.
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
        self._stop_signals: list[int] = []
        self._sent: dict[int, int] = {}
        self._stop_deadline: float | None = None
        self._stopped_since: dict[int, float] = {}
        self._ranks_gone_since: float | None = None

    def run(self, arguments: Sequence[str], program: Sequence[str]) -> int:
        """Start, wait, clean up, and return the exit code."""
        inherited = {child.pid for child in children_of(os.getpid())}
        self._signals.install()
        adopt_orphans(True)
        agent = self._start_agent(arguments, program)
        try:
            while agent.poll() is None:
                self._forward(self._signals.wait(_POLL_SECONDS), agent)
                self._end_stopped_ranks()
                self._end_late_ranks()
                self._end_stuck_agent(agent)
        finally:
            agent.kill()
            agent.wait()
            kill_local_ranks(self._run)
            _end_orphans(inherited)
            adopt_orphans(False)
            shutil.rmtree(self._run.path / "torchrun", ignore_errors=True)
            self._run.clear_channels()
        return self._exit_code(agent.returncode)

    def _start_agent(
        self, arguments: Sequence[str], program: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        supervisor = os.getpid()

        def follow_supervisor() -> None:
            die_with_parent(signal.SIGKILL, expected_parent=supervisor)

        given = any(a == "--run-dir" or a.startswith("--run-dir=") for a in arguments)
        folder = [] if given else ["--run-dir", str(self._run.path)]
        environment = rank_environment(self._tp)
        environment[SESSION_VARIABLE] = self._run.session
        command = torchrun_command(
            self._tp, program, [*arguments, *folder], self._run.path / "torchrun"
        )
        # A session of its own: a terminal's Ctrl-C reaches the supervisor only, which forwards it.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=follow_supervisor,
        )

    def _forward(self, arrived: list[int], agent: subprocess.Popen[bytes]) -> None:
        """Send every stop signal once to every rank, also to those that register later."""
        records = self._run.records()
        for number in arrived:
            self._stop_signals.append(number)
            if self._stop_deadline is None:
                self._stop_deadline = time.monotonic() + self._drain_timeout + _GRACE_SECONDS
            if not records:
                agent.send_signal(number)
        for record in records:
            for number in self._stop_signals[self._sent.get(record.rank, 0) :]:
                send_signal(record.pid, record.start_time, number)
            self._sent[record.rank] = len(self._stop_signals)

    def _end_stopped_ranks(self) -> None:
        """A rank held stopped for the step timeout is hung; at TP 1 no peer would notice."""
        now = time.monotonic()
        for record in self._run.records():
            status = process_status(record.pid)
            if status is None or not status.stopped:
                self._stopped_since.pop(record.rank, None)
            elif now - self._stopped_since.setdefault(record.rank, now) > self._step_timeout:
                self._run.decide_exit(PeerLostError.exit_code, PeerLostError.code, record.rank)
                kill_local_ranks(self._run)

    def _end_late_ranks(self) -> None:
        """Rank 0 forces its own drain; this is for a rank 0 that cannot."""
        if self._stop_deadline is None or time.monotonic() < self._stop_deadline:
            return
        error = PeerLostError if self._stopped_since else DrainTimeoutError
        self._run.decide_exit(error.exit_code, error.code, min(self._stopped_since, default=0))
        kill_local_ranks(self._run)

    def _end_stuck_agent(self, agent: subprocess.Popen[bytes]) -> None:
        """An agent that outlives its ranks is stopped or hung itself."""
        now = time.monotonic()
        records = self._run.records()
        if len(records) < self._tp or _living(records):
            self._ranks_gone_since = None
        elif self._ranks_gone_since is None:
            self._ranks_gone_since = now
        elif now - self._ranks_gone_since > _GRACE_SECONDS:
            agent.kill()
        if self._stop_deadline is not None and now > self._stop_deadline + _GRACE_SECONDS:
            agent.kill()

    def _exit_code(self, agent_code: int) -> int:
        decision = self._run.exit_decision()
        if decision is not None:
            exit_code, code, rank = decision.exit, decision.code, decision.rank
        elif agent_code == 0:
            return 0
        elif self._run.records():
            exit_code, code, rank = PeerLostError.exit_code, PeerLostError.code, -1
        elif self._stop_signals:
            return 0
        else:
            exit_code, code, rank = 70, "internal_error", -1
        if exit_code != 0:
            print_fatal(code, exit_code, **({"rank": rank} if rank >= 0 else {}))
        return exit_code


def stop(run_dir: Path, timeout: float = 60.0) -> int:
    """Drain the server of a run directory, under any launcher; the code it ended with.

    Sends SIGTERM to rank 0, and waits until all its ranks on this host have ended. A server that
    had ended already gives its code again. Raises NotFoundError if none runs here, PeerLostError
    if it still runs after `timeout` seconds, or ended without deciding a code.
    """
    run = RunDirectory(run_dir.absolute(), session="")
    records = [record for record in run.records() if record.local]
    if not records:
        raise NotFoundError(f"no server of this host has registered in {run_dir}")
    running = _living(records)
    if run.exit_decision() is None and not running:
        raise NotFoundError(f"the server of {run_dir} has ended without an exit.json")
    for record in running:
        if record.rank == 0:
            send_signal(record.pid, record.start_time, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while running := _living(running):
        if time.monotonic() > deadline:
            names = ", ".join(f"rank {record.rank} (pid {record.pid})" for record in running)
            raise PeerLostError(f"{names} still run {timeout:g} s after SIGTERM to rank 0")
        time.sleep(_POLL_SECONDS / 4)
    decision = run.exit_decision()
    if decision is None:
        raise PeerLostError(f"the server of {run_dir} ended without an exit.json: it was killed")
    return decision.exit


def _living(records: Sequence[RankRecord]) -> list[RankRecord]:
    return [
        record for record in records if living_process(record.pid, record.start_time) is not None
    ]


def _end_orphans(inherited: set[int]) -> None:
    """End and collect every child that came up since `inherited` was noted."""
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
        if time.monotonic() > deadline + _GRACE_SECONDS:
            print(f"could not end: {[orphan.pid for orphan in orphans]}", file=sys.stderr)
            return
