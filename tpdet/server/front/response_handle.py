"""The response handle: what the handler of one HTTP request holds while the engine works for it.

Each output of its group of requests goes to the handler's reader at once, without a task. The
handler's task waits for what the reader leaves to it. Closing the handle aborts what is unfinished.
"""

import asyncio
import logging
import time
from typing import Protocol

from tpdet.requests.answer.prompt_scores import PromptPart
from tpdet.requests.body.problems import internal_error
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import PooledOutput, Request, TokenOutput

Output = PromptPart | TokenOutput | PooledOutput

_log = logging.getLogger("tpdet.server")


class Reader(Protocol):
    """What takes the outputs of a group. Neither method waits."""

    def take(self, output: Output) -> None:
        """The next output."""

    def flush(self) -> None:
        """All outputs of a step have been taken."""


class Source(Protocol):
    """Where the outputs of a group come from: the engine, as a rule."""

    def close(self, handle: "ResponseHandle") -> None:
        """The group has no reader any more."""

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """A request, or one choice of it, has no reader any more."""


class Timer(Protocol):
    """What times the outputs of a group; `now` is in monotonic seconds."""

    def token(self, output: TokenOutput, now: float) -> None:
        """An output arrived."""

    def finished(self, request_id: str, choice: int, reason: str, now: float) -> None:
        """A choice has ended."""


class ResponseHandle:
    """The outputs of one group. Use as a context manager: its end aborts unfinished requests.

    `facts`: those of the engine, once it has accepted the group. `waiting`: the handler's task has
    nothing to do.
    """

    facts: EngineFacts | None = None
    waiting = False

    def __init__(
        self,
        source: Source,
        group_id: str,
        requests: tuple[Request, ...],
        reader: Reader,
        clock: Timer,
    ) -> None:
        self.group_id = group_id
        self.pending = True
        self.request_ids = tuple(request.request_id for request in requests)
        self.accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._source = source
        self._open = {request.request_id: set(range(request.params.n)) for request in requests}
        self._reader = reader
        self._failure: Exception | None = None
        self._wake = asyncio.Event()
        self._clock = clock

    def __enter__(self) -> "ResponseHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self._source.close(self)

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that still run in the engine, in the order of the prompts."""
        return tuple(name for name, choices in self._open.items() if choices)

    def put(self, output: Output, now: float) -> None:
        """Hand on one output, which came at `now` (monotonic seconds)."""
        if self._failure is not None:
            return
        if isinstance(output, TokenOutput):
            choices = self._open[output.request_id]
            if output.choice not in choices:
                return
            self._clock.token(output, now)
            if output.finish_reason is not None:
                choices.discard(output.choice)
        elif isinstance(output, PooledOutput):
            self._open[output.request_id].clear()
            self._clock.finished(output.request_id, 0, "stop", now)
        try:
            self._reader.take(output)
        except Exception as error:
            self._broken(error)

    def flush(self) -> None:
        """All outputs of a step have been put."""
        try:
            self._reader.flush()
        except Exception as error:
            self._broken(error)

    def wake(self) -> None:
        """Let the handler's task go on."""
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the group with an error, behind the outputs that have come."""
        if self._failure is None:
            self._failure = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # the reader may be gone: not an error nobody saw
        self._wake.set()

    def failed_request(self, request_id: str, error: Exception) -> None:
        """End the group because one of its requests ended in the engine."""
        self._open[request_id].clear()
        self.fail(error)

    def stop(self, request_id: str, choice: int) -> None:
        """A stop string has ended this choice: the engine need not go on."""
        choices = self._open[request_id]
        if choice in choices:
            choices.discard(choice)
            self._clock.finished(request_id, choice, "stop", time.monotonic())
            self._source.abort(request_id, choice)

    async def changed(self) -> None:
        """Wait until the task is woken. Raises the error that ended the group, the time after."""
        if self._failure is not None and not self._wake.is_set():
            raise self._failure
        self.waiting = not self._wake.is_set()
        try:
            await self._wake.wait()
        finally:
            self.waiting = False
        self._wake.clear()

    def _broken(self, error: Exception) -> None:
        _log.error("group %s failed", self.group_id, exc_info=error)
        self.fail(internal_error())
