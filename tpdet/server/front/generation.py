"""Answers one request for text: submits it, assembles its outputs, writes them or streams them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpdet.audit.replay import replay_digest_steps
from tpdet.requests.answer.choices import Json, envelope, usage
from tpdet.requests.answer.json_pieces import json_pieces, json_text
from tpdet.requests.answer.prompt_scores import PromptPart, PromptScores
from tpdet.requests.answer.whole_answer import WholeAnswer, origin, receipt
from tpdet.requests.body.cursor import MOST_CHOICES, StreamProgress, cursor_head
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError, internal_error
from tpdet.requests.body.resume import check_origin
from tpdet.requests.body.resumption import Resumption
from tpdet.requests.engine_facts import EngineFacts
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.events import Event, EventWriter
from tpdet.server.front.middleware import ClientGone
from tpdet.server.front.pace import Turns
from tpdet.server.front.response_handle import Output, ResponseHandle
from tpdet.server.http1.request_order import PartWriter
from tpdet.text.outputs import TextDelta
from tpdet.text.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer

_log = logging.getLogger("tpdet.server")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """An ASGI response that is the whole life of a call in the engine.

    While a stream runs, each step's events are written as they come, without its task. The task
    begins and ends the answer, and goes on where the reader is behind or the prompt is repeated.
    """

    _handle: ResponseHandle
    _connection: PartWriter

    def __init__(
        self,
        call: Call,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        facts: EngineFacts,
        gone: asyncio.Future[None],
        pace: Turns,
        cursors: bool = False,
        reasoning: ReasoningParser | None = None,
    ) -> None:
        """cursors: whether a stream's events say where it can be continued. reasoning: of chats."""
        super().__init__()
        self._call, self._client, self._gone = call, client, gone
        self._facts, self._pace = facts, pace
        self._resumption = Resumption(call)
        self._begun: set[tuple[str, int]] = {*self._resumption.choices}
        self._progress = _progress_of(call) if cursors else None
        self._shown: list[Event] = []  # that are not written yet
        self._seen_tokens = 0
        self._approximate = False
        self._whole_answer = WholeAnswer(call, tokenizer, reasoning)
        self._assemblers = self._whole_answer.assemblers
        self._writers, self._prompts = self._whole_answer.writers, self._whole_answer.prompts
        self._unfinished = len(self._writers)
        if call.stream:
            for key in self._begun:
                self._writers[key].begun = True
        chunk = envelope(call, 0, facts.system_fingerprint, stream=True)
        self._events = EventWriter(call, chunk, self._writers, self._prompts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError before the first byte, ClientGone when nobody reads."""
        outcome = "aborted"
        try:
            self._connection = scope["tpdet_writer"]
            handle = self._client.submit(self._call.requests, self._call.group_id, self)
            self._handle = handle
            with handle:
                self._gone.add_done_callback(lambda _: handle.fail(ClientGone()))
                seed = await handle.accepted
                # Not those that the call was checked against: weights may have been reloaded since.
                self._facts = handle.facts or self._facts
                if self._call.resume is not None:
                    check_origin(self._call.resume, self._facts)
                prompt_tokens = usage(self._call, 0)["prompt_tokens"]
                self._client.metrics.tally.add("prompt_tokens", prompt_tokens)
                if self._call.stream:
                    while self._resumption.pending:
                        await handle.changed()
                    scope["tpdet_probe"] = b":\n\n"  # a comment
                    outcome = await self._stream(handle, seed, send)
                else:
                    outcome = await self._whole(handle, seed, scope, send)
        except ApiError:
            outcome = "failed"
            raise
        finally:
            self._client.metrics.outcome(outcome)
            counts = self._whole_answer.usage()
            scope["tpdet"].tokens = counts["prompt_tokens"], counts["completion_tokens"]

    async def _whole(self, handle: ResponseHandle, seed: int, scope: Scope, send: Send) -> str:
        """Send the answer, in one part if it is small or for HTTP/1.0; the outcome."""
        while self._unfinished:
            await handle.changed()
        body = self._whole_answer.body(seed, self._fingerprint, await self._receipt(seed))
        chunks = self._pace.chunks(json_pieces(body))
        if scope["http_version"] == "1.0":
            chunks = _together(chunks)
        first, second = await anext(chunks), await anext(chunks, None)
        headers = [(b"content-type", b"application/json")]
        if second is None:
            headers.append((b"content-length", str(len(first)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while second is not None:
            if self._gone.done():
                return "aborted"
            await _send_part(send, first)
            first, second = second, await anext(chunks, None)
        await send({"type": "http.response.body", "body": first, "more_body": False})
        return "completed"

    async def _stream(self, handle: ResponseHandle, seed: int, send: Send) -> str:
        """Send the events; the outcome: "failed" if an error event was the last one."""
        facts, events = self._facts, self._events
        events.chunk["tpdet"] = {"seed": seed}
        events.set_fingerprint(self._fingerprint)
        events.cursor_head = cursor_head(facts.contract, facts.model_digest, seed)
        if self._call.token_ids and not self._approximate:
            events.origin = self._origin
        if self._shown:  # while the client's tokens were compared
            handle.wake()
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            held: list[Event] = []
            while not held:
                await handle.changed()
                held = [] if self._unfinished else self._shown[-1:]
                await self._send_all(self._written(held), send)
            await self._send_all(self._end(held[0], await self._receipt(seed)), send)
            last = self._events.id_line(self._cursor) + b"data: [DONE]\n\n"
            outcome = "completed"
        except ClientGone:
            return "aborted"  # the answer has begun: there is nothing to raise towards
        except ApiError as problem:
            last, outcome = b"data: " + problem.body() + b"\n\n", "failed"
        except Exception:
            _log.exception("stream %s failed", self._call.group_id)
            last, outcome = b"data: " + internal_error().body() + b"\n\n", "failed"
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return outcome

    async def _send_all(self, pieces: Iterator[str], send: Send) -> None:
        async for chunk in self._pace.chunks(pieces):
            self._check_reader()
            await _send_part(send, chunk)

    def _check_reader(self) -> None:
        if self._gone.done():
            raise ClientGone

    def take(self, output: Output) -> None:
        """Feed an output to its assembler; stop a choice in the engine that a stop string ended."""
        if isinstance(output, PromptPart):
            self._prompts.setdefault(output.request_id, PromptScores()).add(output)
            return
        delta = self._assemblers[output.request_id].push_token(output)
        key, call = (output.request_id, output.choice), self._call
        self._seen_tokens += len(delta.token_ids)
        if self._progress is not None and delta.token_ids:
            self._progress.add(self._writers[key].index, output.token_id, output.logprob)
        shown: TextDelta | None = delta
        if self._resumption.pending:
            try:
                shown = self._resumption.take(self._writers[key].index, output, delta)
            except ApiError as problem:
                self._handle.fail(problem)
                return
            if not self._resumption.pending:
                self._handle.wake()
        if delta.abort:
            self._handle.stop(output.request_id, output.choice)
        if delta.finish_reason is not None:
            self._unfinished -= 1
        if output.approximate and not self._approximate:
            self._approximate = True
            self._events.set_fingerprint(self._fingerprint)
        if not call.stream:
            return
        if shown is None:
            self._writers[key].pass_over(delta)
            return
        tokens = shown.token_ids and (call.logprobs is not None or call.token_ids)
        text = shown.text or shown.reasoning
        if text or shown.finish_reason or tokens or key not in self._begun:
            self._begun.add(key)
            self._shown.append(Event(key, shown, self._seen_tokens, self._cursor))

    def flush(self) -> None:
        """Write a step's events, or leave them to the task."""
        if not self._unfinished:
            self._handle.wake()
        elif self._shown:
            shown, events = self._shown, self._events
            if self._handle.waiting and self._connection.ready and events.small(shown):
                self._shown = []
                self._connection.write(b"".join([events.data(event) for event in shown]))
            else:
                self._handle.wake()

    def _written(self, held: list[Event]) -> Iterator[str]:
        """All events so far but for the one held, which waits for the receipt."""
        shown, self._shown = self._shown, []
        for event in shown[: len(shown) - len(held)]:
            yield from self._events.pieces(event)

    def _end(self, last: Event, own_fields: Json) -> Iterator[str]:
        """The last event, and the usage's if it is asked for; the receipt is in the later one."""
        if not self._call.include_usage:
            yield from self._events.pieces(last, tpdet=own_fields)
            return
        yield from self._events.pieces(last)
        content = self._events.chunk | {
            "tpdet": own_fields,
            "choices": [],
            "usage": self._whole_answer.usage(),
        }
        yield f"{self._events.id_line(self._cursor).decode()}data: {json_text(content)}\n\n"

    @property
    def _cursor(self) -> bytes | None:
        """The tail of the cursor behind all tokens so far; empty once they are approximate."""
        if self._progress is None:
            return None
        return b"" if self._approximate else self._progress.tail()

    @property
    def _origin(self) -> Json:
        return origin(self._call, self._facts.contract, self._facts.model_digest)

    @property
    def _fingerprint(self) -> str:
        """The fingerprint of the answer so far."""
        facts = self._facts
        return facts.approximate_fingerprint if self._approximate else facts.system_fingerprint

    async def _receipt(self, seed: int) -> Json:
        """The seed that replays the answer, and the digest that a replay must have.

        An answer that is approximate, even in part, says so and has no digest.
        """
        if self._approximate:
            return {"seed": seed, "replay_digest": None, "approximate": True}
        facts, call = self._facts, self._call
        steps = replay_digest_steps(
            call.requests,
            self._whole_answer.tokens(),
            seed,
            facts.contract,
            facts.model_digest,
            call.replay_version,
        )
        digest = await self._pace.last(steps)
        assert digest is not None
        return receipt(self._origin if call.token_ids else {}, seed, digest, call.replay_version)


def _progress_of(call: Call) -> StreamProgress | None:
    """Counts the tokens of a stream for its cursors; None where these would be too long."""
    choices = len(call.requests) * call.choices
    return StreamProgress(choices) if call.stream and choices <= MOST_CHOICES else None


async def _together(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield b"".join([chunk async for chunk in chunks])


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
