"""Runs the user's command with the proxy's address in its environment."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tpdet.client.address import Address
from tpdet.errors import NotFoundError, UsageError
from tpdet.tools.tape.fork import Fork
from tpdet.tools.tape.ids import IdsTask
from tpdet.tools.tape.proxy import Proxy, Replay
from tpdet.tools.tape.tape_file import Ids, TapeWriter, Turn

LOOPBACK = "127.0.0.1"
_FORWARDED = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_NO_KEY = "none"
_STOP_SECONDS = 10.0
_LAST_SECONDS = 2.0


def check_command(command: Sequence[str]) -> None:
    """Raise UsageError without a command, NotFoundError for one that cannot be run."""
    if not command:
        raise UsageError("give a command behind --, such as tpdet tape record -- python agent.py")
    if shutil.which(command[0]) is None:
        raise NotFoundError(f"there is no command {command[0]!r}: give one behind --")


def child_environment(environment: Mapping[str, str], port: int, key: str | None) -> dict[str, str]:
    """A command's environment: clients talk to the proxy, by no key of another service."""
    address = f"http://{LOOPBACK}:{port}"
    own = {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "ANTHROPIC_BASE_URL": address,
        "TPDET_URL": address,
    }
    own |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN"), key or _NO_KEY)
    own |= {} if key is None else {"TPDET_API_KEY": key}
    for name in ("NO_PROXY", "no_proxy"):
        others = environment.get(name)
        own[name] = f"{others},{LOOPBACK}" if others else LOOPBACK
    kept = {name: value for name, value in environment.items() if name != "ANTHROPIC_API_KEY"}
    return kept | own


class RecordedRun:
    """One run of a command. tape: where it is recorded, if anywhere; replay: what a tape says."""

    def __init__(
        self,
        address: Address,
        key: str | None,
        date: str | None,
        tape: TapeWriter | None,
        replay: Replay,
    ) -> None:
        self._address, self._key, self._date = address, key, date
        self._tape, self._replay = tape, replay
        self._reported = False

    def run(self, command: Sequence[str]) -> int:
        """The command's exit code. Raises the TpdetError that ended it."""
        kept = {number: signal.getsignal(number) for number in _FORWARDED}
        try:
            return asyncio.run(self._run(command))
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    async def _run(self, command: Sequence[str]) -> int:
        ids = IdsTask(self._address, self._key, self._date, self._write)
        proxy = Proxy(self._address, self._replay, partial(self._keep, ids))
        server = await asyncio.start_server(proxy.serve, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        environment = child_environment(os.environ, port, self._key)
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in _FORWARDED:
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        try:
            child = await asyncio.create_subprocess_exec(*command, env=environment)
        except OSError as error:
            await ids.finish()
            reason = f"{command[0]!r:.200} cannot be run ({error.strerror})"
            raise NotFoundError(f"{reason}: give a program, or sh and its script") from None
        forwarding = asyncio.create_task(_forward(signals, child, ids))
        ended = asyncio.create_task(child.wait())
        until: set[asyncio.Future[Any]] = {ended, proxy.stopped}
        await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        if not ended.done():
            await _end(child, ended)
        await proxy.close(_LAST_SECONDS)
        await self._last_ids(ids)
        forwarding.cancel()
        if proxy.stopped.done():
            proxy.stopped.result()
        code = child.returncode or 0
        return code if code >= 0 else 128 - code

    async def _last_ids(self, ids: IdsTask) -> None:
        if ids.waiting:
            print(f"tpdet: asking for the ids of {ids.waiting} answers", file=sys.stderr)
        try:
            await ids.finish()
        except asyncio.CancelledError:
            print("tpdet: stopped before all ids had come", file=sys.stderr)

    def _keep(self, ids: IdsTask, turn: Turn) -> None:
        """A turn has ended."""
        self._write(turn)
        if turn.source == "tape" and isinstance(self._replay, Fork):
            if turn.turn in self._replay.replayed:
                self._write(self._replay.replayed[turn.turn])
        elif turn.source == "server" and turn.is_answer and self._tape is not None:
            ids.add(turn)

    def _write(self, line: Turn | Ids) -> None:
        if self._tape is None:
            return
        self._tape.add(line)
        if self._tape.failure is not None and not self._reported:
            self._reported = True
            print(f"tpdet: {self._tape.failure}; the command goes on", file=sys.stderr, flush=True)


async def _end(child: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    """End a command that may answer no signal."""
    child.terminate()
    await asyncio.wait({ended}, timeout=_STOP_SECONDS)
    if not ended.done():
        child.kill()
        await ended


async def _forward(
    signals: "asyncio.Queue[int]", child: asyncio.subprocess.Process, ids: IdsTask
) -> None:
    """Pass signals on, but for the keyboard's, which its whole group has; then stop by them."""
    while True:
        number = await signals.get()
        if child.returncode is not None:
            ids.stop()
        elif number != signal.SIGINT or not _from_keyboard():
            child.send_signal(number)


def _from_keyboard() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def tape_path(name: str | None) -> Path:
    """Where a run is recorded. Raises UsageError for a folder that is not there."""
    path = Path(name or "run.tape")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path
