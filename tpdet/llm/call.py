"""One call of `LLM` on rank 0: fills the engine's queue, runs steps, and collects the answers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from tpdet.audit.pooled import PooledAssembler
from tpdet.audit.replay import NamedCall
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
from tpdet.requests.request import (
    PooledOutput,
    PromptOutput,
    Request,
    RequestFailed,
    TokenOutput,
)

if TYPE_CHECKING:
    from tpdet.engine import Engine
    from tpdet.text.outputs import RequestAssembler

FIRST_STEPS = 2
"""Steps whose prompts are queued before the first one runs: it, and the one launched behind it."""


class ProgressBar(Protocol):
    """A progress bar with the interface of tqdm."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def update(self) -> Any:
        """One more prompt is answered."""
        ...


UseTqdm = bool | Callable[..., ProgressBar]
"""Whether a terminal shows a progress bar, or what to call in tqdm's place."""


class LlmCall:
    """The requests of a call and their answers so far.

    `inside_engine` is True while the engine works: an error that is raised then may have left it
    in the middle of a step.
    """

    def __init__(self, engine: "Engine", given: CallRequests, writer: ResultWriter) -> None:
        self.inside_engine = False
        self._at_once, self._choices = given.at_once, 0  # in the engine
        self._engine, self._writer, self._requests = engine, writer, given.requests
        self._assemblers = {one.request.request_id: one for one in given.assemblers}
        pairs = zip(given.requests, given.texts, strict=True)
        self._texts = {request.request_id: text for request, text in pairs}
        self._seeds: dict[str, int] = {}
        self._unnamed: list[Request] = []  # in the engine
        self._named: dict[str, NamedCall] = {}
        self._results: dict[str, Any] = {}

    def run(self, bar: ProgressBar, interrupts: Interrupts) -> None:
        """Step until every request has ended. Raises KeyboardInterrupt between two steps."""
        with own_arithmetic():
            self._run(bar, interrupts)

    def _run(self, bar: ProgressBar, interrupts: Interrupts) -> None:
        """On a GPU all but the first steps' requests are queued, and answers written, meanwhile."""
        waiting = list(reversed(self._requests))
        finished = 0
        while waiting or self._engine.has_work:
            interrupts.check()
            self._fill(waiting, self._engine.config.max_queue - len(self._seeds) + finished)
            self.inside_engine = True
            outputs = self._engine.step(self._name_calls)
            self.inside_engine = False
            for output in outputs:
                assembler = self._assemblers[output.request_id]
                if not assembler.finished and self._take(assembler, output):
                    finished += 1
                    self._choices -= assembler.request.params.n
                    if assembler.failure is None:
                        self._results[output.request_id] = self._written(assembler)
                    bar.update()

    def outputs(self) -> list[RequestOutput] | list[PooledResult]:
        """The answers in the requests' order. Raises the error of the first request that failed."""
        for name, assembler in self._assemblers.items():
            if assembler.failure is not None:
                raise error_of(assembler.failure, name)
        return [self._results[name] for name in self._assemblers]

    def abandon(self) -> None:
        """Abort the requests that still run."""
        for request in self._requests:
            self._engine.abort(request.request_id)

    def _fill(self, waiting: list[Request], room: int) -> None:
        """Submit waiting requests, of which the last one is next.

        At first so many that two steps are full, so that the first begins; later as many as run at
        a time, which is more than a step admits.
        """
        policy, begun = self._engine.scheduler.policy, bool(self._seeds)
        tokens, most = 0, FIRST_STEPS * policy.max_num_batched_tokens
        for count in range(min(room, len(waiting))):
            enough = count >= policy.max_num_seqs if begun else tokens >= most
            if enough or not self._has_room(waiting):
                break
            tokens += len(waiting[-1].prompt_token_ids)
            self._submit(waiting.pop())

    def _take(
        self,
        assembler: "RequestAssembler | PooledAssembler",
        output: TokenOutput | PromptOutput | PooledOutput | RequestFailed,
    ) -> bool:
        """Whether a request has ended with an output of the engine."""
        if isinstance(assembler, PooledAssembler):
            assert isinstance(output, PooledOutput | RequestFailed)
            assembler.push(output)
        elif isinstance(output, TokenOutput):
            delta = assembler.push_token(output)
            if delta.finish_reason is None:
                return False
            if delta.abort:
                self._engine.abort(output.request_id, output.choice)
        elif not isinstance(output, PooledOutput):
            assembler.push(output)
        return assembler.finished

    def _name_calls(self) -> None:
        """Digest the prompts of submitted requests, while a step runs."""
        for request in self._unnamed:
            name = request.request_id
            self._named[name] = self._writer.named(request, self._seeds[name])
        self._unnamed.clear()

    def _written(self, assembler: "RequestAssembler | PooledAssembler") -> Any:
        """The result of a request that has ended."""
        if isinstance(assembler, PooledAssembler):
            result = self._writer.pooled(assembler)
            _ = result.numbers  # made while the next step runs, not behind the last one
            return result
        name = assembler.request.request_id
        seed, named = self._seeds[name], self._named.pop(name, None)
        return self._writer.write(name, self._texts[name], assembler.answer(), seed, named)

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
        if request.pooling is None:
            self._unnamed.append(request)
