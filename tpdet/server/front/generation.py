"""Answers one request for text: submits it, assembles its outputs, writes them or streams them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpdet.audit.receipts.statement import Outcome
from tpdet.audit.replay import DigestOrigin, NamedCall, answer_digest_steps, named_call_steps
from tpdet.requests.answer.calls import parts_of
from tpdet.requests.answer.choices import Json, envelope, usage
from tpdet.requests.answer.json_pieces import json_pieces
from tpdet.requests.answer.prompt_scores import PromptPart, PromptScores
from tpdet.requests.answer.whole_answer import DIGESTS, WholeAnswer, origin, receipt
from tpdet.requests.body.cursor import MOST_CHOICES, StreamProgress, cursor_head
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError, internal_error
from tpdet.requests.body.resume import check_origin
from tpdet.requests.body.resumption import Resumption
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import ABORTED, TokenOutput
from tpdet.server.answers.cache import CachedCall
from tpdet.server.front.answer_weights import AnswerWeights
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.events import ChoiceKey, Event, EventWriter, FormEvents
from tpdet.server.front.middleware import ClientGone
from tpdet.server.front.pace import Turns
from tpdet.server.front.receipts import AnswerReceipt
from tpdet.server.front.response_handle import Output, ResponseHandle
from tpdet.server.http1.request_order import PartWriter
from tpdet.text.outputs import TextDelta
from tpdet.text.parsing.calls import CallParser
from tpdet.text.parsing.reasoning import ReasoningParser
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
        calls: CallParser | None = None,
        receipt: AnswerReceipt | None = None,
        cached: CachedCall | None = None,
    ) -> None:
        """cursors: whether a stream's events say where it can be continued. reasoning, calls: of
        chats.

        receipt: what is written of the answer before its end is sent; None for nothing. cached: the
        call in the cache of answers, which may have its outputs in the engine's place.
        """
        super().__init__()
        self._audit = receipt
        self._call, self._client, self._gone = call, client, gone
        self._cached, self._stored = cached, None if cached is None else cached.source
        if receipt is not None:
            receipt.cached = self._stored is not None
        self._weights = AnswerWeights(facts, (self._stored or client).facts_of)
        self._pace = pace
        self._resumption = Resumption(call)
        self._begun: set[tuple[str, int]] = {*self._resumption.choices}
        self._progress = _progress_of(call) if cursors and call.form is None else None
        self._shown: list[Event] = []  # that are not written yet
        self._seen_tokens = 0
        self._approximate = self._aborted = False
        self._seed: int | None = None
        self._named: NamedCall | None = None
        self._whole_answer = WholeAnswer(call, tokenizer, reasoning, calls)
        self._assemblers = self._whole_answer.assemblers
        self._writers, self._prompts = self._whole_answer.writers, self._whole_answer.prompts
        self._unfinished = len(self._writers)
        if call.stream:
            for key in self._begun:
                self._writers[key].begun = True
        chunk = envelope(call, 0, facts.system_fingerprint, stream=True)
        self._form = self._whole_answer.form
        self._events = (
            EventWriter(call, chunk, self._writers, self._prompts)
            if self._form is None
            else FormEvents(self._form, call, chunk)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError before the first byte, ClientGone when nobody reads."""
        outcome = "aborted"
        try:
            self._connection = scope["tpdet_writer"]
            source = self._stored or self._client
            handle = source.submit(self._call.requests, self._call.group_id, self)
            self._handle = handle
            with handle:
                self._gone.add_done_callback(lambda _: handle.fail(ClientGone()))
                seed = await handle.accepted
                if self._audit is not None:
                    self._audit.seed = seed
                # Not those that the call was checked against: weights may have been reloaded since.
                if handle.facts is not None and self._weights.number < 0:
                    self._weights.facts = handle.facts
                self._name_version()
                if self._call.resume is not None:
                    check_origin(self._call.resume, self._weights.facts)
                if self._stored is None:
                    prompt_tokens = usage(self._call, 0)["prompt_tokens"]
                    self._client.metrics.tally.add("prompt_tokens", prompt_tokens)
                if self._call.tools is not None or self._form is not None:
                    await self._show_ids(seed)
                if self._call.stream:
                    while self._resumption.pending:
                        await handle.changed()
                    scope["tpdet_probe"] = b":\n\n"  # a comment
                    outcome = await self._stream(handle, seed, scope, send)
                else:
                    outcome = await self._whole(handle, seed, scope, send)
        except ApiError as problem:
            outcome = "failed"
            raise await self._failed(problem, scope) from problem
        except ClientGone:
            await self._left()
            raise
        finally:
            if self._stored is None:
                self._client.metrics.outcome(outcome)
            counts = self._whole_answer.usage()
            scope["tpdet"].tokens = counts["prompt_tokens"], counts["completion_tokens"]

    async def _show_ids(self, seed: int) -> None:
        """Have the answer show ids that are functions of the request."""
        self._named = await self._pace.last(named_call_steps(self._call.requests, self._of(seed)))
        assert self._named is not None
        self._whole_answer.show_ids(self._named.digest)

    def _of(self, seed: int) -> DigestOrigin:
        """What the answer's digests cover beside the call and the answer."""
        facts = self._weights.facts
        names = facts.contract, facts.model_digest
        return DigestOrigin(seed, *names, self._call.replay_version, facts.logprobs_mode)

    async def _whole(self, handle: ResponseHandle, seed: int, scope: Scope, send: Send) -> str:
        """Send the answer, in one part if it is small or for HTTP/1.0; the outcome."""
        while self._unfinished:
            await handle.changed()
        spans = self._weights.spans if self._shows_versions else None
        receipt = await self._receipt(seed)
        scope["tpdet"].receipt = await self._record(self._ending, None, receipt)
        body = self._whole_answer.body(seed, self._fingerprint, receipt, spans)
        chunks = self._pace.chunks(json_pieces(body))
        if scope["http_version"] == "1.0":
            chunks = _together(chunks)
        first, second = await anext(chunks), await anext(chunks, None)
        headers = [(b"content-type", b"application/json"), *self._more_headers]
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

    async def _stream(self, handle: ResponseHandle, seed: int, scope: Scope, send: Send) -> str:
        """Send the events; the outcome: "failed" if an error event was the last one."""
        self._seed = seed
        scope["tpdet"].receipt = self._audit is not None
        self._events.chunk["tpdet"] = self._call.seeds(seed)
        self._name_weights()
        if self._shown:  # while the client's tokens were compared
            handle.wake()
        headers = [*_STREAM_HEADERS, *self._more_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send_all(self._events.opening(self._whole_answer.ids), send)
            held: list[Event] = []
            while not held:
                await handle.changed()
                held = [] if self._unfinished else self._shown[-1:]
                await self._send_all(self._written(held), send)
            receipt = await self._receipt(seed)
            await self._record(self._ending, None, receipt)
            counts = self._whole_answer.usage()
            end = self._events.ending(held[0], receipt, counts, self._cursor)
            await self._send_all(end, send)
            last = self._events.mark(self._cursor)
            outcome = "completed"
        except ClientGone:
            await self._left()
            return "aborted"  # the answer has begun: there is nothing to raise towards
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.exception("stream %s failed", self._call.group_id)
            problem = error if isinstance(error, ApiError) else internal_error()
            problem = await self._failed(problem, scope)
            last, outcome = self._events.failure(problem), "failed"
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return outcome

    async def _send_all(self, pieces: Iterator[str], send: Send) -> None:
        async for chunk in self._pace.chunks(pieces):
            if self._gone.done():
                raise ClientGone
            await _send_part(send, chunk)

    def take(self, output: Output) -> None:
        """Feed an output to its assembler; stop a choice in the engine that a stop string ended."""
        if output.weights != self._weights.number and not self._note(output):
            return
        if not isinstance(output, TokenOutput):
            assert isinstance(output, PromptPart)
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
            self._aborted = self._aborted or delta.finish_reason == ABORTED
        if output.approximate and not self._approximate:
            self._approximate = True
            self._name_weights()
        if not call.stream:
            return
        if shown is None:
            self._writers[key].pass_over(delta)
            return
        tokens = shown.token_ids and call.shows_tokens
        text = shown.text or shown.reasoning
        if text or shown.finish_reason or tokens or shown.events or key not in self._begun:
            self._begun.add(key)
            if call.tools is None or self._form is not None:
                self._shown.append(self._event(key, shown))
                return
            *parts, last = parts_of(shown)
            self._shown += [self._event(key, part)._replace(cursor=None) for part in parts]
            self._shown.append(self._event(key, last))

    def _note(self, output: Output) -> bool:
        """Note that other weights computed this output than the ones before; False: it is refused.

        What an answer is resumed with was computed by the weights that its cursor names.
        """
        if isinstance(output, TokenOutput) and output.finish_reason == ABORTED:
            return True  # nothing was computed
        self._weights.note(output.weights)
        self._name_version()
        if self._resumption.pending and self._call.resume is not None:
            try:
                check_origin(self._call.resume, self._weights.facts_of(output.weights))
            except ApiError as problem:
                self._handle.fail(problem)
                return False
        if self._seed is not None and not self._weights.mixed:
            self._name_weights()
        return True

    def _name_version(self) -> None:
        """Have the choices name the latest weights."""
        weights = self._weights
        for writer in self._writers.values():
            writer.weight_version = weights.facts_of(weights.latest).weight_version

    def _name_weights(self) -> None:
        """Have the events of a stream name what computes it."""
        facts, events = self._weights.facts, self._events
        events.weights = facts.weights_number
        events.fingerprint_of = partial(self._weights.fingerprint, approximate=self._approximate)
        events.set_fingerprint(events.fingerprint_of(events.weights))
        events.cursor_head = cursor_head(facts.origin, self._seed or 0)
        if self._call.token_ids and not self._approximate:
            events.origin = self._origin | {"logprobs_mode": facts.logprobs_mode}

    def _event(self, key: ChoiceKey, delta: TextDelta) -> Event:
        """The event of what a token adds; the last one of a choice may have its spans."""
        weights, choice = self._weights.latest, self._assemblers[key[0]].choices[key[1]]
        versions = None
        if delta.finish_reason is not None and self._shows_versions:
            versions = self._weights.spans(choice.weight_spans)
        position = 0 if self._audit is None else choice.token_count
        return Event(key, delta, self._seen_tokens, self._cursor, weights, versions, position)

    @property
    def _shows_versions(self) -> bool:
        return self._call.weight_versions or self._weights.mixed

    def flush(self) -> None:
        """Write a step's events, or leave them to the task."""
        if not self._unfinished:
            self._handle.wake()
        elif self._shown:
            shown, events = self._shown, self._events
            if self._handle.waiting and self._connection.ready and events.small(shown):
                self._shown = []
                data = b"".join([events.data(event) for event in shown])
                if data:  # an empty part would be the last one
                    self._connection.write(data)
                if self._audit is not None:
                    self._audit.sent(shown)
            else:
                self._handle.wake()

    def _written(self, held: list[Event]) -> Iterator[str]:
        """All events so far but for the one held, which waits for the receipt."""
        shown, self._shown = self._shown, []
        for event in self._events.latest(shown[: len(shown) - len(held)]):
            yield from self._events.pieces(event)
            if self._audit is not None:
                self._audit.sent([event])

    @property
    def _cursor(self) -> bytes | None:
        """The tail of the cursor behind all tokens so far; empty once they are approximate."""
        if self._progress is None:
            return None
        ended = self._approximate or self._weights.mixed
        return b"" if ended else self._progress.tail()

    @property
    def _origin(self) -> Json:
        facts = self._weights.facts
        return origin(self._call, facts.contract, facts.model_digest)

    @property
    def _fingerprint(self) -> str | None:
        """The fingerprint of the answer so far; None where several weights computed it."""
        weights = self._weights
        number = weights.facts.weights_number
        return None if weights.mixed else weights.fingerprint(number, self._approximate)

    @property
    def _ending(self) -> Outcome:
        """How an answer ends that its reader gets whole."""
        return "aborted" if self._aborted else "completed"

    async def _record(
        self, outcome: Outcome, reason: str | None = None, marks: Json | None = None
    ) -> bool:
        """Make the answer's receipt durable; False where there is none. Raises ApiError.

        marks: what the answer says of its replay, once it has ended.
        """
        if self._audit is None:
            return False
        marks = marks or {"approximate": self._approximate}
        return await self._audit.write(outcome, reason, self._whole_answer, self._weights, marks)

    async def _failed(self, problem: ApiError, scope: Scope) -> ApiError:
        """The error that ends the answer, once its receipt is durable."""
        try:
            written = await self._record("failed", problem.code or problem.kind)
        except ApiError as unavailable:
            return unavailable
        scope["tpdet"].receipt = scope["tpdet"].receipt or written
        return problem

    async def _left(self) -> None:
        """Record that the client is gone."""
        with suppress(ApiError):
            await self._record("client_gone")

    @property
    def _more_headers(self) -> list[tuple[bytes, bytes]]:
        form = self._call.form
        cached = [] if self._cached is None else [(b"cache-status", self._cached.status)]
        return cached if form is None else [*cached, *form.headers]

    async def _receipt(self, seed: int) -> Json:
        """The seed that replays the answer, and the digests that a replay must have.

        An answer that is approximate, even in part, that several weights computed or that somebody
        ended says so and has none. Any other is kept, where there is a cache of answers.
        """
        facts, call = self._weights.facts, self._call
        mode = facts.logprobs_mode
        marks = {
            "approximate": self._approximate,
            "mixed_weights": self._weights.mixed,
            "aborted": self._aborted,
        }
        if any(marks.values()):
            why = {name: True for name, holds in marks.items() if holds}
            if self._weights.old_keys:
                why["reproducible"] = False
            none = dict.fromkeys(DIGESTS)
            return {**call.seeds(seed), **none, **why, "logprobs_mode": mode}
        tokens = self._whole_answer.tokens()
        steps = answer_digest_steps(call.requests, tokens, self._of(seed), self._named)
        digests = await self._pace.last(steps)
        assert digests is not None
        if self._cached is not None:
            await self._cached.keep(self._whole_answer, digests, seed, facts)
        named = self._origin if call.token_ids else {}
        return receipt(named, call.seeds(seed), digests, call.replay_version, mode)


def _progress_of(call: Call) -> StreamProgress | None:
    """Counts the tokens of a stream for its cursors; None where these would be too long."""
    choices = len(call.requests) * call.choices
    return StreamProgress(choices) if call.stream and choices <= MOST_CHOICES else None


async def _together(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield b"".join([chunk async for chunk in chunks])


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
