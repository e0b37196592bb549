"""The thread that owns the engine of an `AsyncLLM`: everything that touches it runs here."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tpdet.errors import PeerLostError, RequestError, UsageError
from tpdet.llm.ranks import give_up_world
from tpdet.llm.stream import EngineOutput, Stream
from tpdet.request import RequestFailed, TokenOutput

if TYPE_CHECKING:
    from tpdet.engine import Engine

_EXIT_SECONDS = 30.0  # a step that runs when the process ends gets so long
CLOSED = "this AsyncLLM is closed: make a new one"


class _Drop(NamedTuple):
    stream: Stream
    choice: int | None


class _Close(NamedTuple):
    pass


class EngineThread:
    """Runs the engine until it is told to stop, or fails.

    On rank 0 it takes requests and steps; the other ranks run the plans of rank 0.
    """

    def __init__(self, make: "Callable[[], Engine]") -> None:
        """Return when the engine is made; raises what `make` raises."""
        self.error: BaseException | None = None
        self.engine: Engine
        self._make = make
        self._commands: queue.SimpleQueue[Stream | _Drop | _Close] = queue.SimpleQueue()
        self._made, self._ended = threading.Event(), threading.Event()
        self._arrivals: deque[Stream] = deque()  # not in the engine yet, in their order
        self._streams: dict[str, Stream] = {}  # in the engine, by the engine's request id
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tpdet engine", daemon=True)
        self._thread.start()
        self._made.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        return not self._closing

    def submit(self, stream: Stream) -> None:
        """Answer a request; what comes of it, errors too, is told to the stream."""
        self._commands.put(stream)
        if self._ended.is_set():
            self._refuse_the_rest()

    def drop(self, stream: Stream, choice: int | None) -> None:
        """A request, or one choice of it, is wanted no more."""
        self._commands.put(_Drop(stream, choice))

    def stop(self) -> None:
        """Begin to close; returns at once."""
        self._commands.put(_Close())

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended."""
        self._thread.join(seconds)

    def stop_at_exit(self) -> None:
        """For the end of the process, which must not find the engine in the middle of a step."""
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
            if self.engine.world.rank > 0:
                self.engine.worker_loop()
            else:
                self._lead()
                self.engine.stop_workers()
            self.engine.close()
        except BaseException as error:
            self.error = error
            with suppress(Exception):
                give_up_world(self.engine, error)
        finally:
            self._closing = True
            self._ended.set()
            self._refuse_the_rest()

    def _lead(self) -> None:
        """Rank 0's loop: take in, step, hand out; idle ranks hear from it before they give up."""
        alone = self.engine.world.size == 1
        interval = None if alone else self.engine.config.step_timeout / 4
        last = time.monotonic()
        while True:
            self._listen(None if interval is None else last + interval - time.monotonic())
            if self._closing:
                for name in self._streams:
                    self.engine.abort(name)
                return
            self._admit()
            if self.engine.has_work:
                self._hand_out(self.engine.step())
                last = time.monotonic()
            elif interval is not None and time.monotonic() - last >= interval:
                self.engine.heartbeat()
                last = time.monotonic()

    def _listen(self, seconds: float | None) -> None:
        """Take every command there is; without any work wait for one, so many seconds at most."""
        idle = not self.engine.has_work and not self._arrivals
        with suppress(queue.Empty):
            if idle:
                wait = None if seconds is None else max(0.0, seconds)
                self._obey(self._commands.get(timeout=wait))
            while not self._closing:
                self._obey(self._commands.get_nowait())

    def _obey(self, command: Stream | _Drop | _Close) -> None:
        if isinstance(command, _Close):
            self._closing = True
        elif isinstance(command, Stream):
            self._arrivals.append(command)
        else:
            name = command.stream.request.request_id
            self.engine.abort(name, command.choice)
            self._let_go(command.stream, command.choice)

    def _admit(self) -> None:
        """Let arrivals into the engine's queue while it has room, in their order."""
        room = self.engine.config.max_queue
        while self._arrivals and self.engine.statistics().requests_waiting < room:
            stream = self._arrivals.popleft()
            try:
                stream.seed = self.engine.submit(stream.request)
            except RequestError as error:
                stream.tell([], error)
                continue
            self._streams[stream.request.request_id] = stream

    def _hand_out(self, outputs: list[EngineOutput]) -> None:
        told: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            told.setdefault(output.request_id, []).append(output)
        for name, mine in told.items():
            stream = self._streams.get(name)
            if stream is None:
                continue
            if not stream.tell(mine):
                self.engine.abort(name)
                self._let_go(stream, None)
            for output in mine:
                if isinstance(output, RequestFailed):
                    self._let_go(stream, None)
                elif isinstance(output, TokenOutput) and output.finish_reason is not None:
                    self._let_go(stream, output.choice)

    def _let_go(self, stream: Stream, choice: int | None) -> None:
        """The engine runs this choice no more, or none of the request (None)."""
        stream.in_engine -= {choice} if choice is not None else stream.in_engine
        if not stream.in_engine:
            self._streams.pop(stream.request.request_id, None)
            with suppress(ValueError):
                self._arrivals.remove(stream)

    def _refuse_the_rest(self) -> None:
        """End what is open, and what arrives, with an error of its own for each."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, Stream):
                self._arrivals.append(command)
        for stream in [*self._streams.values(), *self._arrivals]:
            stream.tell([], self.refusal())
        self._streams.clear()
        self._arrivals.clear()

    def refusal(self) -> Exception:
        """Why a request is not answered any more."""
        if self.error is None:
            return UsageError(CLOSED)
        found = PeerLostError(f"the engine has ended by {type(self.error).__name__}: {self.error}")
        found.__cause__ = self.error
        return found
