"""The run directory: where a running server says who it is, when it is ready and how it ended.

    lock              held while the server runs, so two servers cannot share a directory
    session.json      which start of which server the other files belong to
    ranks/<rank>.json pid, start time, host and device of each rank
    ready.json        written when the server takes requests, until it ends
    exit.json         {"exit", "code", "rank", "message"}: the first decision, never a later one
    reload.json, reload-done.json   `tpdet reload` and its answer (see reload_request.py)
    secret            the run secret of this host's ranks (run_secret.py), until the server ends
    keys              digest of the API key in the environment of `tpdet serve`, until the same end
    engine.sock       between rank 0 and the HTTP process, until the server ends; further HTTP
                      processes have engine-1.sock and so on
    store             where the ranks of `tpdet serve` meet, until the server ends

Every file is complete when its name appears. The owner of the lock clears the files of an earlier
server; the other processes wait until session.json names their session.
"""

import errno
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpdet.errors import NotPermittedError, PeerLostError, ResourceError, TpdetError, UsageError
from tpdet.launch.host.processes import living_process, process_name, process_status, send_signal
from tpdet.launch.host.resources import FULL_DISK
from tpdet.launch.host.whole_file import read_json, write_json, write_text
from tpdet.launch.life.run_secret import new_secret, read_secret_file
from tpdet.launch.ranks.environment import STORE_FILE, STORE_VARIABLE, RankEnvironment

SESSION_VARIABLE = "TPDET_SESSION"
"""Set by `tpdet serve`, which owns the lock for the ranks it starts."""

CHANNEL_FILES = ("ready.json", "secret", "keys", "engine.sock", "http.sock", STORE_FILE)
"""Files that exist only while the server runs."""
JOIN_TIMEOUT = 30.0
_POLL_SECONDS = 0.02
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_CHARACTERS = 2000
"""The longest message in exit.json."""


@dataclass(frozen=True)
class RankRecord:
    """A registered rank; `start_time` (clock ticks since boot) tells a recycled pid apart."""

    rank: int
    pid: int
    start_time: int
    host: str
    device: str

    @property
    def local(self) -> bool:
        """Whether it runs on this host, so that its pid means something here."""
        return self.host == socket.gethostname()

    @property
    def runs(self) -> bool:
        """Whether that very process has not ended; for a local one."""
        return living_process(self.pid, self.start_time) is not None

    def signal(self, number: int) -> None:
        """Signal that very process, unless it has ended; for a local one."""
        send_signal(self.pid, self.start_time, number)


@dataclass(frozen=True)
class ExitDecision:
    """How the server ended: exit code, its name, the rank that decided (-1: none), and why."""

    exit: int
    code: str
    rank: int
    message: str = ""


class RunDirectory:
    """One server's run directory. Make it with `own`, `join` or `open_run_directory`."""

    def __init__(self, path: Path, session: str) -> None:
        self.path = path
        self.session = session
        self._lock: int | None = None
        self.temporary = False
        """Whether it has a default name, and is removed when the server ends."""

    @classmethod
    def own(cls, path: Path, session: str, secret: bytes | None = None) -> "RunDirectory":
        """Create it (mode 0700), take the lock until the process ends, clear an earlier server.

        `secret` is the run's, a fresh one if none is given.
        Raises NotPermittedError for a directory of somebody else or one that others may write,
        ResourceError if a server runs in it, UsageError if the path is no directory.
        """
        run = cls(path.absolute(), session)
        _make_private(run.path)
        try:
            run._begin(secret)
        except OSError as error:
            run.release()
            raise _unusable(run.path, "written", error) from error
        return run

    def _begin(self, secret: bytes | None) -> None:
        """Take the lock, and put this start's files in the place of an earlier one's."""
        self._take_lock()
        stale = ("exit.json", "session.json", "reload.json", "reload-done.json")
        for name in stale:
            (self.path / name).unlink(missing_ok=True)
        ranks = self.path / "ranks"
        ranks.mkdir(mode=0o700, exist_ok=True)
        for record in sorted(ranks.iterdir()):
            record.unlink()
        self.clear_channels()
        write_text(self.path / "secret", (secret or new_secret()).hex() + "\n")
        write_json(self.path / "session.json", {"session": self.session})

    @classmethod
    def join(cls, path: Path, session: str, timeout: float = JOIN_TIMEOUT) -> "RunDirectory":
        """Wait for the owner to open it for this session. Raises PeerLostError after `timeout`."""
        run = cls(path.absolute(), session)
        deadline = time.monotonic() + timeout
        while not run.current:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"nobody opened the run directory {path} for this start within {timeout:g} s: "
                    "local rank 0 is lost, or another server uses the directory"
                )
            time.sleep(_POLL_SECONDS)
        return run

    @property
    def current(self) -> bool:
        """Whether the directory still belongs to this session."""
        content = read_json(self.path / "session.json")
        return content is not None and content.get("session") == self.session

    @property
    def owned(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None

    def _take_lock(self) -> None:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ResourceError(
                f"run directory {self.path} is in use by process {holder}: stop that server "
                f"(tpdet stop {self.path}) or choose another --run-dir"
            ) from error
        self._lock = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back (the end of the process does it too)."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def secret(self) -> bytes:
        """The run secret that the owner made. Raises as `run_secret.read_secret_file`."""
        return read_secret_file(str(self.path / "secret"), flag="the run directory's secret")

    def write_key_digest(self, digest: str) -> Path:
        """Write a key file that holds the digest (SHA-256, hex) of one API key; its path."""
        write_text(self.path / "keys", f"sha256:{digest}\n")
        return self.path / "keys"

    def clear_channels(self) -> None:
        """Remove the files of a running server, and the directory if the user did not name it."""
        more = (path.name for path in self.path.glob("engine-*.sock"))
        for name in (*CHANNEL_FILES, *more):
            with suppress(OSError):
                (self.path / name).unlink(missing_ok=True)
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def register(self, rank: int, device: str) -> RankRecord:
        """Write this process's rank record; from now on it is signalled and watched."""
        status = process_status(os.getpid())
        if status is None:
            raise ResourceError("/proc is not mounted: the ranks' start times cannot be read")
        record = RankRecord(rank, os.getpid(), status.start_time, socket.gethostname(), device)
        write_json(self.path / "ranks" / f"{rank}.json", asdict(record))
        return record

    def records(self) -> list[RankRecord]:
        """The registered ranks, in rank order."""
        folder = self.path / "ranks"
        if not folder.is_dir():
            return []
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        contents = [read_json(folder / name) for name in names]
        records = [RankRecord(**content) for content in contents if content is not None]
        return sorted(records, key=lambda record: record.rank)

    def local_records(self) -> list[RankRecord]:
        """The registered ranks of this host, in rank order."""
        return [record for record in self.records() if record.local]

    def write_ready(self, content: Mapping[str, Any]) -> None:
        """Write ready.json: the server takes requests."""
        write_json(self.path / "ready.json", content)

    def decide_exit(self, exit: int, code: str, rank: int, message: str = "") -> bool:
        """Write exit.json unless a rank has done so; True if this call decided.

        Nothing is written into a directory that has passed on to another session, nor on a full
        disk: a supervisor then goes by how the ranks ended.
        """
        if not self.current:
            return False
        content = {"exit": exit, "code": code, "rank": rank, "message": message[:_CHARACTERS]}
        try:
            return write_json(self.path / "exit.json", content, only_first=True)
        except OSError:
            return False

    def exit_decision(self) -> ExitDecision | None:
        """The content of exit.json, or None while no rank has decided."""
        content = read_json(self.path / "exit.json")
        if content is None:
            return None
        message = content.get("message", "")
        return ExitDecision(content["exit"], content["code"], content["rank"], message)


def open_run_directory(path: Path, environment: RankEnvironment) -> RunDirectory:
    """Own the run directory (local rank 0 without `tpdet serve`, or a rank alone), else join it.

    Raises as `RunDirectory.own` and `RunDirectory.join`.
    """
    session = current_session(environment)
    if SESSION_VARIABLE in os.environ or environment.local_rank != 0:
        return RunDirectory.join(path, session)
    return RunDirectory.own(path, session)


def supervised() -> RunDirectory | None:
    """The run directory that `tpdet serve` owns, in a rank that it started; else None.

    This is known before the rank has joined it. Its owner prints the last line.
    """
    session, store = os.environ.get(SESSION_VARIABLE), os.environ.get(STORE_VARIABLE)
    return RunDirectory(Path(store).parent, session) if session and store else None


def current_session(environment: RankEnvironment) -> str:
    """The name of this start, equal on all ranks of a host.

    `tpdet serve` passes one on, and Slurm's job, step and node make one. Otherwise it is the pid
    and start time of the launcher, whose agent starts all local ranks, or of a rank alone.
    """
    if session := os.environ.get(SESSION_VARIABLE):
        return session
    if environment.session:
        return environment.session
    return process_name(os.getppid() if environment.launched else os.getpid())


def new_session() -> str:
    """A fresh session name, for a supervisor to hand down."""
    return secrets.token_hex(16)


def default_path(session: str) -> Path:
    """Where the run directory is when --run-dir is not given: private, and one a start."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "tpdet") if base else Path(tempfile.gettempdir(), f"tpdet-{os.geteuid()}")
    return folder / session


def _unusable(path: Path, what: str, error: OSError) -> TpdetError:
    """What to raise for a run directory that cannot be made or written."""
    kind: type[TpdetError] = UsageError
    if error.errno in _FORBIDDEN or error.errno in FULL_DISK:
        kind = NotPermittedError if error.errno in _FORBIDDEN else ResourceError
    why = os.strerror(error.errno or 0)
    return kind(f"--run-dir {path} cannot be {what} ({why}): choose another")


def _make_private(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.stat()
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--run-dir {path} is not a directory: choose another") from error
    except OSError as error:
        raise _unusable(path, "made", error) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotPermittedError(
            f"--run-dir {path} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}"
            ": it must be yours and writable by nobody else (chmod 700), or choose another"
        )
