"""One call of `LLM` on rank 0: fills the engine's queue, runs steps, and collects the answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from tpdet.audit.pooled import PooledAssembler
from tpdet.errors import OverloadedError, RequestError
from tpdet.llm.interrupts import Interrupts
from tpdet.llm.own_arithmetic import own_arithmetic
from tpdet.llm.ranks import CallRequests
from tpdet.llm.results import (
    PooledResult,
    RequestOutput,
    ResultWriter,
    error_of,
)
from tpdet.requests.request import PooledOutput, Request, RequestFailed, TokenOutput

if TYPE_CHECKING:
    from tpdet.engine import Engine


class ProgressBar(Protocol):
    """A progress bar with the interface of tqdm."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def update(self) -> Any:
        """One more prompt is answered."""
        ...


class LlmCall:
    """The requests of a call and their answers so far.

    `inside_engine` is True while the engine works: an error that is raised then may have left it
    in the middle of a step.
    """

    def __init__(self, engine: "Engine", given: CallRequests) -> None:
        self.inside_engine = False
        self._at_once, self._choices = given.at_once, 0  # in the engine
        self._engine, self._requests = engine, given.requests
        self._assemblers = {one.request.request_id: one for one in given.assemblers}
        self._seeds: dict[str, int] = {}
        self._finished = 0

    def run(self, bar: ProgressBar, interrupts: Interrupts) -> None:
        """Step until every request has ended. Raises KeyboardInterrupt between two steps."""
        with own_arithmetic():
            self._run(bar, interrupts)

    def _run(self, bar: ProgressBar, interrupts: Interrupts) -> None:
        waiting = list(reversed(self._requests))
        room = self._engine.config.max_queue
        while waiting or self._engine.has_work:
            interrupts.check()
            while waiting and len(self._seeds) - self._finished < room and self._has_room(waiting):
                self._submit(waiting.pop())
            self.inside_engine = True
            outputs = self._engine.step()
            self.inside_engine = False
            for output in outputs:
                assembler = self._assemblers[output.request_id]
                if assembler.finished:
                    continue
                if isinstance(assembler, PooledAssembler):
                    assert isinstance(output, PooledOutput | RequestFailed)
                    assembler.push(output)
                elif isinstance(output, TokenOutput):
                    delta = assembler.push_token(output)
                    if delta.finish_reason is None:
                        continue
                    if delta.abort:
                        self._engine.abort(output.request_id, output.choice)
                elif not isinstance(output, PooledOutput):
                    assembler.push(output)
                if assembler.finished:
                    self._finished += 1
                    self._choices -= assembler.request.params.n
                    bar.update()

    def outputs(
        self, writer: ResultWriter, texts: Sequence[str | None]
    ) -> list[RequestOutput] | list[PooledResult]:
        """The answers in the requests' order. Raises the error of the first request that failed."""
        for name, assembler in self._assemblers.items():
            if assembler.failure is not None:
                raise error_of(assembler.failure, name)
        assemblers = self._assemblers.values()
        pooled = [writer.pooled(one) for one in assemblers if isinstance(one, PooledAssembler)]
        return pooled or [
            writer.write(name, text, assembler.answer(), self._seeds[name])
            for text, (name, assembler) in zip(texts, self._assemblers.items(), strict=True)
            if not isinstance(assembler, PooledAssembler)
        ]

    def abandon(self) -> None:
        """Abort the requests that still run."""
        for request in self._requests:
            self._engine.abort(request.request_id)

    def _has_room(self, waiting: Sequence[Request]) -> bool:
        """Whether the next request may be among those in the engine; one of them always may."""
        more = self._choices + waiting[-1].params.n
        return self._at_once is None or not self._choices or more <= self._at_once

    def _submit(self, request: Request) -> None:
        self._choices += request.params.n
        self.inside_engine = True
        try:
            self._seeds[request.request_id] = self._engine.submit(request)
        except (RequestError, OverloadedError):
            self.inside_engine = False  # the request was refused, the engine is idle
            raise
        self.inside_engine = False
