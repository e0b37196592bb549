"""The response handle: what the handler of one HTTP request holds while the engine works for it.

It gathers the outputs of a group of requests. Closing it aborts what is unfinished.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Protocol

from tpdet.request import Request, TokenOutput
from tpdet.server.front.metrics import Clock
from tpdet.server.wire.prompt_scores import PromptPart
from tpdet.server.wire.protocol import Start

Output = PromptPart | TokenOutput


class Connection(Protocol):
    """The part of the engine client that a handle uses."""

    def close(self, handle: "ResponseHandle") -> None:
        """Forget the group and abort its unfinished requests."""
        ...

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request, or one choice of it."""
        ...


class ResponseHandle:
    """The outputs of one group. Use as a context manager: its end aborts unfinished requests.

    `facts`: those of the engine, once it has accepted the group.
    """

    facts: Start | None = None

    def __init__(
        self,
        connection: Connection,
        group_id: str,
        requests: tuple[Request, ...],
        clock: Clock,
    ) -> None:
        self.group_id = group_id
        self.pending = True
        self.request_ids = tuple(request.request_id for request in requests)
        self.accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._open = {request.request_id: set(range(request.params.n)) for request in requests}
        self._outputs: deque[Output] = deque()
        self._failure: Exception | None = None
        self._wake = asyncio.Event()
        self._clock = clock

    def __enter__(self) -> "ResponseHandle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close(self)

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that still run in the engine, in the order of the prompts."""
        return tuple(name for name, choices in self._open.items() if choices)

    def put(self, output: Output) -> None:
        """Take one output of the engine; wakes the reader."""
        if isinstance(output, TokenOutput):
            choices = self._open[output.request_id]
            if output.choice not in choices:
                return
            self._clock.token(output)
            if output.finish_reason is not None:
                choices.discard(output.choice)
        self._outputs.append(output)
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
            self._clock.finished(request_id, choice, "stop")
            self._connection.abort(request_id, choice)

    async def outputs(self) -> list[Output]:
        """The outputs since the last call, at least one. Raises the error that ended the group."""
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            self._wake.clear()
            await self._wake.wait()
        found = list(self._outputs)
        self._outputs.clear()
        return found
