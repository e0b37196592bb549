"""The thread that owns the engine of an `AsyncLLM`; no other thread touches that engine."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tpdet.errors import PeerLostError, RequestError, UsageError
from tpdet.llm.followers import Followers, close_engine
from tpdet.llm.ranks import give_up_world
from tpdet.llm.stream import EngineOutput, EngineStream
from tpdet.requests.request import PooledOutput, RequestFailed, TokenOutput

if TYPE_CHECKING:
    from tpdet.engine import Engine

_EXIT_SECONDS = 30.0
"""How long the end of the process waits for a step that still runs."""
CLOSED = "this AsyncLLM is closed: make a new one"


class _Drop(NamedTuple):
    stream: EngineStream
    choice: int | None


class _Close(NamedTuple):
    pass


class EngineThread:
    """Runs the engine until `stop` or a failure; ranks above 0 run the plans of rank 0."""

    def __init__(self, make: "Callable[[], Engine]", followers: Followers | None = None) -> None:
        """Start the thread and return when it has made the engine; raises what `make` raises.

        followers: the ranks that this process started; the thread also ends them.
        """
        self.error: BaseException | None = None
        self.engine: Engine
        self._make, self._followers = make, followers
        self._commands: queue.SimpleQueue[EngineStream | _Drop | _Close] = queue.SimpleQueue()
        self._made, self._ended = threading.Event(), threading.Event()
        self._arrivals: deque[EngineStream] = deque()  # not in the engine yet, in their order
        self._streams: dict[str, EngineStream] = {}  # in the engine, by the engine's request id
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tpdet engine", daemon=True)
        self._thread.start()
        self._made.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    @property
    def alive(self) -> bool:
        """Whether it still answers requests."""
        return not self._closing

    def submit(self, stream: EngineStream) -> None:
        """Answer a request; the stream gets its outputs, or its error."""
        self._commands.put(stream)
        if self._ended.is_set():
            self._refuse_the_rest()

    def drop(self, stream: EngineStream, choice: int | None) -> None:
        """End a request (choice None), or one choice of it, whose reader has gone."""
        self._commands.put(_Drop(stream, choice))

    def stop(self) -> None:
        """Begin to close; returns at once."""
        self._commands.put(_Close())

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, at most `seconds`."""
        self._thread.join(seconds)

    def stop_at_exit(self) -> None:
        """Stop at the end of the process, which must not come in the middle of a step."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self.join(_EXIT_SECONDS)

    def _run(self) -> None:
        try:
            self.engine = self._make()
        except BaseException as error:
            self.error = error
            return
        finally:
            self._made.set()
        try:
            if self._followers is not None:
                self._followers.go()
            if self.engine.world.rank > 0:
                self.engine.worker_loop()
            else:
                self._run_rank_0()
                self.engine.stop_workers()
            close_engine(self.engine, self._followers)
        except BaseException as error:
            self.error = error if self._followers is None else self._followers.explained(error)
            with suppress(Exception):
                give_up_world(self.engine, error)
            if self._followers is not None:
                self._followers.kill()
        finally:
            self._closing = True
            self._ended.set()
            self._refuse_the_rest()

    def _run_rank_0(self) -> None:
        """Rank 0's loop: take commands, step, deliver; heartbeats keep idle ranks alive."""
        alone = self.engine.world.size == 1
        interval = None if alone else self.engine.config.step_timeout / 4
        last = time.monotonic()
        while True:
            self._take_commands(None if interval is None else last + interval - time.monotonic())
            if self._closing:
                for name in self._streams:
                    self.engine.abort(name)
                return
            self._admit()
            if self.engine.has_work:
                self._deliver(self.engine.step())
                last = time.monotonic()
            elif interval is not None and time.monotonic() - last >= interval:
                self.engine.heartbeat()
                last = time.monotonic()

    def _take_commands(self, seconds: float | None) -> None:
        """Take every command in the queue; without work wait for one, at most `seconds`."""
        idle = not self.engine.has_work and not self._arrivals
        with suppress(queue.Empty):
            if idle:
                wait = None if seconds is None else max(0.0, seconds)
                self._execute(self._commands.get(timeout=wait))
            while not self._closing:
                self._execute(self._commands.get_nowait())

    def _execute(self, command: EngineStream | _Drop | _Close) -> None:
        if isinstance(command, _Close):
            self._closing = True
        elif isinstance(command, EngineStream):
            self._arrivals.append(command)
        else:
            name = command.stream.request.request_id
            self.engine.abort(name, command.choice)
            self._forget(command.stream, command.choice)

    def _admit(self) -> None:
        """Move arrivals into the engine's queue, in order, while it has room."""
        room = self.engine.config.max_queue
        while self._arrivals and self.engine.statistics().requests_waiting < room:
            stream = self._arrivals.popleft()
            try:
                stream.seed = self.engine.submit(stream.request)
            except RequestError as error:
                stream.deliver([], error)
                continue
            self._streams[stream.request.request_id] = stream

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Give a step's outputs to their streams, and forget what has ended."""
        found: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EngineStream, list[EngineOutput]]]] = {}
        for name, own in found.items():
            stream = self._streams.get(name)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, own))
        for loop, step in by_loop.items():
            if not EngineStream.deliver_step(loop, step):
                for stream, _ in step:
                    self.engine.abort(stream.request.request_id)
                    self._forget(stream, None)
            for stream, own in step:
                for output in own:
                    if isinstance(output, RequestFailed | PooledOutput):
                        self._forget(stream, None)
                    elif isinstance(output, TokenOutput) and output.finish_reason is not None:
                        self._forget(stream, output.choice)

    def _forget(self, stream: EngineStream, choice: int | None) -> None:
        """Note that the engine no longer runs this choice, or any of the request (None)."""
        stream.in_engine -= {choice} if choice is not None else stream.in_engine
        if not stream.in_engine:
            self._streams.pop(stream.request.request_id, None)
            with suppress(ValueError):
                self._arrivals.remove(stream)

    def _refuse_the_rest(self) -> None:
        """End every open and every arriving request with an error."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, EngineStream):
                self._arrivals.append(command)
        for stream in [*self._streams.values(), *self._arrivals]:
            stream.deliver([], self.refusal())
        self._streams.clear()
        self._arrivals.clear()

    def refusal(self) -> Exception:
        """The error for a request that can no longer be answered."""
        if self.error is None:
            return UsageError(CLOSED)
        found = PeerLostError(f"the engine has ended by {type(self.error).__name__}: {self.error}")
        found.__cause__ = self.error
        return found
