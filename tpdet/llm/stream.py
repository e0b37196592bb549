"""One request of `AsyncLLM`: from the engine's thread to the consumer's event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tpdet.llm.results import ABORTED, RequestOutput, ResultWriter, error_of
from tpdet.request import PromptOutput, Request, RequestFailed, TokenOutput
from tpdet.text.outputs import RequestAssembler
from tpdet.text.tokenizer import Tokenizer

EngineOutput = TokenOutput | PromptOutput | RequestFailed


class Stream:
    """What has come of a request.

    All methods but `tell` and `request_abort` run in the event loop that made it. `seed` and
    `in_engine`, the choices that the engine runs, are the engine thread's to set. drop: tells the
    engine that one choice, or the request (None), is wanted no more.
    """

    def __init__(
        self,
        name: str,
        text: str | None,
        request: Request,
        tokenizer: Tokenizer | None,
        writer: ResultWriter,
        drop: "Callable[[Stream, int | None], None]",
    ) -> None:
        self.name, self.request, self.seed = name, request, 0
        self.in_engine = set(range(request.params.n))
        self.ended = False  # nothing more will come, or be read
        self._text, self._writer, self._drop = text, writer, drop
        self._assembler = RequestAssembler(request, tokenizer)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._aborted = False

    def tell(self, outputs: list[EngineOutput], error: BaseException | None = None) -> bool:
        """From any thread: what came, then what ended it. False if nobody is there to hear it."""
        try:
            self._loop.call_soon_threadsafe(self._take, outputs, error)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def request_abort(self) -> None:
        """From any thread: `abort`."""
        with suppress(RuntimeError):  # the loop is closed: its reader is gone
            self._loop.call_soon_threadsafe(self.abort)

    async def next(self) -> RequestOutput:
        """All that has come so far, once there is news. Raises what ended the request."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            self.ended = True
            raise self._error
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
        """End it here: what came is the answer, whose running choices were aborted."""
        if not self._assembler.finished and self._error is None:
            self._aborted = True
            self._news.set()
            self._drop(self, None)

    def leave(self) -> None:
        """The consumer reads no more: the engine need not go on."""
        if not self.ended:
            self.ended = True
            self._drop(self, None)

    def _take(self, outputs: list[EngineOutput], error: BaseException | None) -> None:
        if self._aborted:
            return
        try:
            for output in outputs:
                delta = self._assembler.push(output)
                if delta is not None and delta.abort and isinstance(output, TokenOutput):
                    self._drop(self, output.choice)
        except Exception as wrong:  # of this request's text alone
            error = wrong
            self._drop(self, None)
        if self._assembler.failure is not None:
            error = error_of(self._assembler.failure, self.name)
        complete = self._assembler.finished and self._assembler.failure is None
        if error is not None and not complete:
            self._error = error
        self._news.set()
