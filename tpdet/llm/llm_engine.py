"""`LLMEngine`: requests are added one by one, and steps give what is new of them."""

import asyncio
import queue
import threading
import weakref
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

from tpdet.errors import RequestError
from tpdet.llm.async_llm import AsyncLLM, AsyncRequest
from tpdet.llm.model import keywords_of
from tpdet.llm.prompts import Prompt
from tpdet.llm.results import RequestOutput
from tpdet.llm.vllm_keywords import refuse_what_asks
from tpdet.requests.request import SamplingParams

_Event = tuple[str, RequestOutput | BaseException]
"""A request's id, and its next output, or the error that ended it."""


class LLMEngine:
    """An `AsyncLLM` for programs without an event loop; its settings are those of `LLM`.

    The model runs in a thread, also between two steps. A request's bits are those of `LLM`.
    """

    def __init__(self, *settings: Any, **named: Any) -> None:
        """Settings and errors as of `LLM`."""
        self.model = AsyncLLM(*settings, **named)
        self._loop = asyncio.new_event_loop()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._open: dict[str, None] = {}  # the names of requests that have more to give
        threading.Thread(target=self._loop.run_forever, name="LLMEngine", daemon=True).start()
        self._finalizer = weakref.finalize(self, _end, self._loop, self.model)

    @classmethod
    def from_engine_args(cls, engine_args: Any, **of_vllm: Any) -> "LLMEngine":
        """As `LLM.from_engine_args`."""
        return cls(**keywords_of(engine_args, of_vllm))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **of_vllm: Any,
    ) -> None:
        """Begin to answer a prompt; `request_id` is unique meanwhile. Raises RequestError."""
        refuse_what_asks("add_request", of_vllm, ("request_id", "prompt", "params"))
        if request_id in self._open:
            raise RequestError(f"request id {request_id!r} is in use: give each its own")
        asked = self.model._asked(prompt, params, request_id)
        self._open[request_id] = None
        asyncio.run_coroutine_threadsafe(self._pump(asked), self._loop)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` would give more."""
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        """How many requests have not given their last output."""
        return len(self._open)

    def step(self) -> list[RequestOutput]:
        """Wait for what is new, in order; [] without open requests. Raises a request's error."""
        found: list[RequestOutput] = []
        while self._open and (not found or not self._events.empty()):
            name, event = self._events.get()
            if isinstance(event, BaseException):
                self._open.pop(name, None)
                raise event
            found.append(event)
            if event.finished:
                self._open.pop(name, None)
        return found

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; unknown ids are ignored."""
        asyncio.run_coroutine_threadsafe(self.model.abort(request_id), self._loop).result()

    def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self.model.get_tokenizer()

    def shutdown(self) -> None:
        """Close the model; a second time is harmless."""
        self._finalizer()

    async def _pump(self, asked: AsyncRequest) -> None:
        try:
            async with aclosing(self.model._answers(asked)) as outputs:
                async for output in outputs:
                    self._events.put((asked.name, output))
        except BaseException as error:
            self._events.put((asked.name, error))


def _end(loop: asyncio.AbstractEventLoop, model: AsyncLLM) -> None:
    model.shutdown()
    loop.call_soon_threadsafe(loop.stop)
