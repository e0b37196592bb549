"""The ranks that an `LLM` starts itself: child processes that follow this process, which is rank 0.

A follower is `python -m tpdet.llm.follower`. Its standard input is its leash: the first line is its
start, each further line lets it run plans until rank 0 says stop. `END`, or the end of the input,
which also comes when this process ends in any way, closes it. The ranks meet at a file in a private
folder.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tpdet.checkpoint.checks import check_checkpoint
from tpdet.config import EngineConfig
from tpdet.errors import PeerLostError, ResourceError, UsageError
from tpdet.launch.host.interpreter import python_command, python_environment
from tpdet.launch.life.run_secret import given_secret, new_secret
from tpdet.launch.ranks.environment import STORE_FILE, STORE_VARIABLE, TORCHRUN_NAMES
from tpdet.launch.ranks.rank_environment import RankEnvironment
from tpdet.launch.start.local_ranks import describe_end

if TYPE_CHECKING:
    from tpdet.engine import Engine

END = b"end\n"
"""Said at the end: forks of this process may hold a follower's input open."""
_PROGRAM = ("-m", "tpdet.llm.follower")
_END_SECONDS = 10.0
"""How long followers may take to end once they are let go."""
_NOTICE_SECONDS = 1.0
"""How long the end of a follower is waited for when rank 0 has lost it."""


class FollowerStart(msgspec.Struct, frozen=True):
    """What a follower reads first: the engine's settings, the run secret as hex, and its parent."""

    settings: dict[str, Any]
    secret: str
    parent: int


class Followers:
    """The processes of ranks 1 to N - 1, in rank order.

    A thread of its own starts them and lives as long as they do: the kernel ends them with the
    thread that started them, however this process ends.
    """

    def __init__(self, config: EngineConfig, ranks: int) -> None:
        """Start them. Raises what can be refused before: model, files, GPUs, a group in use."""
        _check(config, ranks)
        self.secret = given_secret() or new_secret()
        self._owner = os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._met = False
        try:
            self._folder = tempfile.TemporaryDirectory(
                prefix="tpdet-ranks-", ignore_cleanup_errors=True
            )
        except OSError as error:
            raise ResourceError(
                f"ranks meet in a folder below {tempfile.gettempdir()}, which cannot be made "
                f"({error.strerror}): set TMPDIR"
            ) from error
        store = Path(self._folder.name, STORE_FILE)
        store.touch(mode=0o600)
        self.environment = RankEnvironment(
            0, ranks, 0, ranks, launched=True, launcher="tpdet", store=str(store)
        )
        start = FollowerStart(config.model_dump(), self.secret.hex(), self._owner)
        self._line = msgspec.json.encode(start) + b"\n"
        self._over, started = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        thread = threading.Thread(
            target=self._run, args=(started,), name="tpdet ranks", daemon=True
        )
        try:
            thread.start()
            started.wait()
            if self._error is not None:
                raise self._error
        except BaseException:
            self.kill()
            raise

    @property
    def ours(self) -> bool:
        """Whether this process started them; a fork of that process leaves them alone."""
        return os.getpid() == self._owner

    def check(self) -> None:
        """Raise PeerLostError if one has ended."""
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                early = "" if self._met else " before all ranks had met"
                raise PeerLostError(f"{describe_end(rank, code)}{early}")

    def met(self) -> None:
        """Note that the world is open: what a follower raises from now on, rank 0 hears."""
        self._met = True

    def go(self) -> None:
        """Let them run plans, until `Engine.stop_workers`. Raises PeerLostError for a lost one."""
        self.check()
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                process.wait(_NOTICE_SECONDS)
                self.check()

    def explained(self, error: BaseException) -> BaseException:
        """`error`, or how a follower was ended if that is what rank 0 noticed."""
        if not isinstance(error, PeerLostError) or not self.ours:
            return error
        deadline = time.monotonic() + _NOTICE_SECONDS
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes, 1):
                if (process.poll() or 0) < 0:
                    said = describe_end(rank, process.returncode)
                    return error if said in str(error) else PeerLostError(said)
            time.sleep(0.02)
        return error

    def release(self) -> None:
        """Let them leave the world, which rank 0 does at the same time; then call `end`."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                if not process.stdin.closed:
                    process.stdin.write(END)
                process.stdin.close()

    def end(self) -> None:
        """Wait until they have ended, and tidy up; a second time is harmless."""
        self.release()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End them at once, and tidy up; a second time is harmless."""
        if not self.ours:
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self.release()
        self._folder.cleanup()
        self._over.set()

    def _run(self, started: threading.Event) -> None:
        try:
            for rank in range(1, self.environment.size):
                self._start(rank)
        except BaseException as error:
            self._error = error
        finally:
            started.set()
        self._over.wait()

    def _start(self, rank: int) -> None:
        process = subprocess.Popen(
            python_command(*_PROGRAM),
            env=_environment(self.environment, rank),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is rank 0's
        )
        self._processes.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # `check` says how it ended
            process.stdin.write(self._line)
            process.stdin.flush()


def close_engine(engine: "Engine", followers: Followers | None) -> None:
    """Leave the world and let go of the model, on this rank and on those that follow it."""
    if followers is None:
        engine.close()
    elif followers.ours:
        followers.release()
        engine.close()
        followers.end()


def _environment(place: RankEnvironment, rank: int) -> Mapping[str, str]:
    """This process's environment with the rank's numbers."""
    numbers = map(str, (rank, place.size, rank, place.local_size))
    named = dict(zip(TORCHRUN_NAMES, numbers, strict=True))
    return {**python_environment(), **named, STORE_VARIABLE: place.store}


def _check(config: EngineConfig, ranks: int) -> None:
    """Raise what would stop the ranks, as far as one process knows it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise UsageError(
            f"tensor_parallel_size {ranks}: this process is in a group of torch.distributed "
            "already, of its own or of another LLM with several ranks: close that one first"
        )
    check_checkpoint(config, ranks)
    if config.device != "cpu":
        from tpdet.comm.device import resolve_ranks_device

        place = RankEnvironment(0, ranks, 0, ranks, launched=True)
        resolve_ranks_device(config.device, place)
