"""`AsyncLLM`: answers many requests at a time in an event loop, each as it grows."""

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tpdet.audit.recorded import ChangedPart, Difference, RecordedAnswer
from tpdet.errors import RequestError, UsageError
from tpdet.grammar import trial
from tpdet.llm.async_pooling import AsyncPoolingCalls
from tpdet.llm.engine_thread import EngineThread
from tpdet.llm.model import OfflineModel, open_engine
from tpdet.llm.predictions import read_drafts, read_resume
from tpdet.llm.prompts import Predictions, Prompt, read_params
from tpdet.llm.recorded import CHECKED_AT_ONCE, difference_of
from tpdet.llm.results import CompletionOutput, RequestOutput
from tpdet.llm.stream import Stream
from tpdet.llm.vllm_keywords import refuse_what_asks
from tpdet.requests.engine_facts import AnswerOrigin
from tpdet.requests.output_kind import RequestOutputKind
from tpdet.requests.request import Request, SamplingParams

if TYPE_CHECKING:
    from tpdet.engine import Engine


class AsyncRequest(NamedTuple):
    """A request by its user's name; `text` is the prompt's, if it was text."""

    name: str
    text: str | None
    request: Request


class AsyncLLM(AsyncPoolingCalls, OfflineModel):
    """A model that answers many requests at a time; its settings are those of `LLM`.

    The engine runs in its own thread. Requests may be made from any event loop. A request's bits
    are those of `LLM.generate`, whatever else runs. Under torchrun rank 0 makes the requests, and
    the others await `follow()` until rank 0 closes:

        async with AsyncLLM(model) as llm:
            if llm.rank > 0:
                await llm.follow()
            else:
                ...
    """

    def _start(self) -> "Engine":
        config, followers = self.config, self._followers
        self._thread = EngineThread(
            lambda: open_engine(config, streams=True, followers=followers), followers
        )
        self._streams: dict[str, Stream] = {}
        self._names = threading.Lock()  # guards self._streams
        self._numbers = itertools.count()
        # The process must not end in the middle of a step either.
        self._finalizer = weakref.finalize(self, self._thread.stop_at_exit)
        return self._thread.engine

    def _stop(self) -> None:
        self._finalizer()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        drafts: Sequence[Any] | None = None,
        prediction: str | Sequence[int] | None = None,
        resume: RequestOutput | Mapping[str, Any] | None = None,
        **of_vllm: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answer so far each time it has grown; `finished` is True on the last one.

        With `SamplingParams(output_kind=RequestOutputKind.DELTA)` an output has only what is new,
        with FINAL_ONLY there is the last one alone.

        prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: None for vLLM's defaults: temperature 1, at most 16 tokens.
        request_id: a name for `abort`, unique among running requests; generated if None.
        drafts: token ids that the output may begin with, or such ids for each choice. Right ones
            save steps; none changes a bit.
        prediction: text or token ids that large parts of the output may equal.
        resume: an answer that was cut off, as its last output or as HTTP's `tpdet.resume`. The
            other arguments are those of its request. Its tokens are computed again and compared;
            the first output comes when all are right, and holds them.

        A request waits while `max_queue` requests wait already. A consumer that stops reading, or
        is cancelled, drops the request and frees its pages. Raises RequestError for a request that
        cannot run, NumericalError when the model gave NaN, DisagreementError for a resumed token
        that is not this model's, UsageError when closed or not on rank 0, and PeerLostError when
        the engine has ended.
        """
        refuse_what_asks("generate", of_vllm, ("drafts", "prediction", "resume"))
        asked = self._asked(prompt, sampling_params, request_id, drafts, prediction, resume)
        async with aclosing(self._answers(asked)) as outputs:
            async for output in outputs:
                yield output

    async def check(
        self, answers: Sequence[RecordedAnswer]
    ) -> list[Difference | ChangedPart | None]:
        """As `LLM.check`, beside the requests that run: the first difference of each answer."""
        self._refuse_asking()
        asked = []
        for prompt, params, expected in self._recorded(answers):
            name = f"async-{next(self._numbers)}"
            asked.append((name, self._request(prompt, params, expected, name)))
        waiting = iter(zip(answers, asked, strict=True))
        found: dict[str, Difference | ChangedPart | None] = {}

        async def work() -> None:
            for answer, (name, request) in waiting:
                async for output in self._answer(name, None, request):
                    last = output
                found[name] = difference_of(answer, last, self._reader.eos_token_ids)

        most = max((answer.params.n for answer in answers), default=1)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, CHECKED_AT_ONCE // most)):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [found[name] for name, _ in asked]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests, whose last output has the finish reason "abort"; others are ignored."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        with self._names:
            streams = [self._streams[name] for name in names if name in self._streams]
        for stream in streams:
            stream.request_abort()

    async def check_health(self) -> None:
        """Return if requests are answered. Raises as `generate` where they are not."""
        self._refuse_asking()

    async def follow(self) -> None:
        """On ranks above 0: wait until rank 0 closes. Raises the error that ended the engine."""
        if self.rank == 0:
            raise UsageError("rank 0 makes the requests: only ranks above 0 follow")
        await asyncio.to_thread(self._thread.join)
        if self._thread.error is not None:
            raise self._thread.error

    @property
    def closed(self) -> bool:
        """Whether it no longer answers requests."""
        return not self._thread.alive

    async def close(self) -> None:
        """End open requests with an error and close, all ranks together.

        A second time is harmless. A rank above 0 waits for rank 0 to close.
        """
        await asyncio.to_thread(self.shutdown)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def shutdown(self) -> None:
        """As `close`, without an event loop; waits for the engine's end."""
        if self.rank == 0:
            self._thread.stop()
        self._thread.join()
        self._finalizer.detach()

    def _asked(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        drafts: Sequence[Any] | None = None,
        prediction: str | Sequence[int] | None = None,
        resume: RequestOutput | Mapping[str, Any] | None = None,
    ) -> "AsyncRequest":
        """The checked request of `generate`; raises as that."""
        self._refuse_asking()
        params = read_params(sampling_params, 1)[0]
        number = next(self._numbers)
        name = f"async-{number}" if request_id is None else request_id
        if not isinstance(name, str):
            raise RequestError(f"request_id must be text, not {name!r}", "request_id")
        read = self._reader.prompt(prompt)
        params, expected = self._predicted(params, drafts, prediction, resume)
        # The engine gets another id: users may repeat theirs before the engine has dropped it.
        request = self._request(read, params, expected, f"async-{number}")
        return AsyncRequest(name, read.text, request)

    async def _answers(self, asked: "AsyncRequest") -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, of the kind that it asks for."""
        kind = asked.request.params.output_kind
        async with (
            aclosing(self._answer(*asked)) as outputs,
            aclosing(of_kind(kind, outputs)) as shown,
        ):
            async for output in shown:
                yield output

    def _refuse_asking(self) -> None:
        if self.rank > 0:
            raise UsageError(f"rank {self.rank} follows rank 0: call `await llm.follow()` here")
        if self.closed:
            raise self._thread.refusal()

    def _predicted(
        self, params: SamplingParams, drafts: object, prediction: object, resume: object
    ) -> tuple[SamplingParams, Predictions]:
        """The parameters and predictions of a request; a resume's seed is its answer's."""
        ids = self._reader.prediction(prediction)
        if resume is None:
            return params, Predictions(read_drafts(drafts, params.n), ids)
        runner = self.engine.runner
        mode = self.engine.config.logprobs_mode
        here = AnswerOrigin(runner.contracts.strict, runner.model_digest, mode)
        choices, seed = read_resume(resume, params, drafts is not None, here)
        params = msgspec.structs.replace(params, seed=seed)
        return params, Predictions(choices, ids, tuple(map(len, choices)))

    async def _answer(
        self, name: str, text: str | None, request: Request
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer so far, each time it has grown; `text` is the prompt's, if it was text."""
        if request.params.form is not None:
            await asyncio.to_thread(trial.check, request.params.form)
        stream = Stream(name, text, request, self.tokenizer, self._writer, self._thread.drop)
        with self._names:
            if name in self._streams:
                raise RequestError(
                    f"request id {name!r} is in use: give each request its own", "request_id"
                )
            self._streams[name] = stream
        self._thread.submit(stream)
        try:
            while not stream.ended:
                yield await stream.next()
        finally:
            stream.leave()
            with self._names:
                self._streams.pop(stream.name, None)


async def of_kind(
    kind: RequestOutputKind, outputs: AsyncIterator[RequestOutput]
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one request, each of which holds everything so far, as `kind` says."""
    last: RequestOutput | None = None
    async for output in outputs:
        if kind == RequestOutputKind.CUMULATIVE or (
            kind == RequestOutputKind.FINAL_ONLY and output.finished
        ):
            yield output
        elif kind == RequestOutputKind.DELTA:
            new, last = _since(last, output), output
            if new.outputs or new.finished:
                yield new


def _since(last: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """What `output` adds to `last`: of each choice that grew or ended its new tokens and text."""
    if last is None:
        return output
    choices = [
        _grown(old, new)
        for old, new in zip(last.outputs, output.outputs, strict=True)
        if len(new.token_ids) > len(old.token_ids)
        or new.text != old.text
        or new.finish_reason != old.finish_reason
    ]
    return replace(output, outputs=choices, prompt_logprobs=None, prompt_routed_experts=None)


def _grown(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    begin = len(old.token_ids)
    return replace(
        new,
        text=new.text[len(old.text) :],
        token_ids=new.token_ids[begin:],
        logprobs=None if new.logprobs is None else new.logprobs[begin:],
        logprob_bits=new.logprob_bits[begin:],
    )
