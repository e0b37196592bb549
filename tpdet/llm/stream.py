"""One request of `AsyncLLM`: from the engine's thread to the consumer's event loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from tpdet.audit.pooled import PooledAssembler
from tpdet.errors import RequestError
from tpdet.llm.results import PooledResult, RequestOutput, ResultWriter, error_of
from tpdet.requests.request import (
    ABORTED,
    PooledOutput,
    PromptOutput,
    Request,
    RequestFailed,
    TokenOutput,
)
from tpdet.requests.resumed import ResumedTokens
from tpdet.text.outputs import RequestAssembler
from tpdet.text.tokenizer import Tokenizer

EngineOutput = TokenOutput | PromptOutput | RequestFailed | PooledOutput


class EngineStream(ABC):
    """What takes the outputs of one request of an event loop.

    `deliver` may be called from any thread; all other methods run in the event loop that made the
    stream. Only the engine's thread sets `seed` and `in_engine`, the choices that the engine still
    runs.
    """

    def __init__(
        self,
        name: str,
        request: Request,
        writer: ResultWriter,
        drop: "Callable[[EngineStream, int | None], None]",
    ) -> None:
        """drop: ends one choice, or the whole request (None), in the engine."""
        self.name, self.request, self.seed = name, request, 0
        self.in_engine = set(range(request.params.n))
        self.ended = False  # no more output will come, or be read
        self._writer, self._drop = writer, drop
        self.loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def deliver(self, outputs: list[EngineOutput], error: BaseException | None = None) -> bool:
        """Add outputs, or the error that ended the request; False if its event loop is closed."""
        return _call_in(self.loop, lambda: self._take(outputs, error))

    @staticmethod
    def deliver_step(
        loop: asyncio.AbstractEventLoop, step: "list[tuple[EngineStream, list[EngineOutput]]]"
    ) -> bool:
        """Add a step's outputs to streams of one loop, woken once; False if it is closed."""

        def take() -> None:
            for stream, outputs in step:
                stream._take(outputs, None)

        return _call_in(loop, take)

    def leave(self) -> None:
        """End the request because its consumer stops reading."""
        if not self.ended:
            self.ended = True
            self._drop(self, None)

    @abstractmethod
    def _take(self, outputs: list[EngineOutput], error: BaseException | None) -> None: ...

    async def _wait(self) -> None:
        """Until there is something new. Raises the error that ended the request."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            self.ended = True
            raise self._error


class PooledStream(EngineStream):
    """The answer to a pooled prompt."""

    def __init__(
        self,
        request: Request,
        writer: ResultWriter,
        drop: "Callable[[EngineStream, int | None], None]",
    ) -> None:
        super().__init__(request.request_id, request, writer, drop)
        self._assembler = PooledAssembler(request)

    async def result(self) -> PooledResult:
        """The answer, once it is there. Raises the error that ended the request."""
        await self._wait()
        self.ended = True
        return self._writer.pooled(self._assembler)

    def _take(self, outputs: list[EngineOutput], error: BaseException | None) -> None:
        for output in outputs:
            assert isinstance(output, PooledOutput | RequestFailed)
            self._assembler.push(output)
        failure = self._assembler.failure
        self._error = error if failure is None else error_of(failure, self.name)
        self._changed.set()


class Stream(EngineStream):
    """The outputs of one request for text so far; `request_abort` may be called from any thread."""

    def __init__(
        self,
        name: str,
        text: str | None,
        request: Request,
        tokenizer: Tokenizer | None,
        writer: ResultWriter,
        drop: "Callable[[EngineStream, int | None], None]",
    ) -> None:
        super().__init__(name, request, writer, drop)
        self._text = text
        self._assembler = RequestAssembler(request, tokenizer)
        self._resumed = ResumedTokens(request.resumed, request.drafts)
        self._aborted = False

    def request_abort(self) -> None:
        """Call `abort` in the stream's event loop, unless that is closed: its reader is gone."""
        _call_in(self.loop, self.abort)

    async def next(self) -> RequestOutput:
        """The answer so far, once it has changed. Raises the error that ended the request."""
        await self._wait()
        answer = self._assembler.so_far()
        if self._aborted:
            choices = (
                replace(choice, finish_reason=choice.finish_reason or ABORTED)
                for choice in answer.choices
            )
            answer = replace(answer, choices=tuple(choices))
        output = self._writer.write(self.name, self._text, answer, self.seed)
        self.ended = output.finished
        return output

    def abort(self) -> None:
        """End the request: its answer so far is the last one, running choices are aborted."""
        if not self._assembler.finished and self._error is None:
            self._aborted = True
            self._changed.set()
            self._drop(self, None)

    def _take(self, outputs: list[EngineOutput], error: BaseException | None) -> None:
        if self._aborted:
            return
        try:
            for output in outputs:
                assert not isinstance(output, PooledOutput)
                delta = self._assembler.push(output)
                if delta is None or not isinstance(output, TokenOutput):
                    continue
                self._compare(output, delta.finish_reason is not None)
                if delta.abort:
                    self._drop(self, output.choice)
        except Exception as wrong:  # it concerns this request only
            error = wrong
            self._drop(self, None)
        if self._assembler.failure is not None:
            error = error_of(self._assembler.failure, self.name)
        complete = self._assembler.finished and self._assembler.failure is None
        if error is not None and not complete:
            self._error = error
        if error is not None or not self._resumed.pending:
            self._changed.set()

    def _compare(self, output: TokenOutput, ended: bool) -> None:
        """Compare a token that the reader has. Raises ResumeMismatch."""
        if not self._resumed.left(output.choice):
            return
        if output.approximate:
            raise RequestError("an approximate answer cannot be resumed", "resume")
        self._resumed.take(output.choice, output.token_id, ended)


def _call_in(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> bool:
    """Have an event loop call `action`; False if it is closed."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        return False
    return True
