"""Answers one request for text: submits it, assembles its outputs, writes them or streams them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpdet.audit.replay import replay_digest_steps
from tpdet.control.sampling_row import SampledToken
from tpdet.request import TokenOutput
from tpdet.server.body.prepare import Call
from tpdet.server.front.answers import ChoiceWriter, Json, envelope, usage
from tpdet.server.front.engine_client import EngineClient, ResponseHandle
from tpdet.server.front.middleware import ClientGone
from tpdet.server.front.pace import Pace
from tpdet.server.front.response_handle import Output
from tpdet.server.wire.json_pieces import json_pieces, json_text
from tpdet.server.wire.problems import ApiError, internal_error
from tpdet.server.wire.prompt_scores import PromptPart, PromptScores
from tpdet.server.wire.protocol import Start
from tpdet.text.outputs import RequestAssembler, TextDelta
from tpdet.text.tokenizer import Tokenizer

_Taken = tuple[TokenOutput, TextDelta]

_log = logging.getLogger("tpdet.server")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """An ASGI response that is the whole life of a call in the engine."""

    def __init__(
        self,
        call: Call,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        facts: Start,
        gone: asyncio.Future[None],
        pace: Pace,
    ) -> None:
        super().__init__()
        self._call, self._client, self._gone = call, client, gone
        self._facts, self._pace = facts, pace
        self._prompts: dict[str, PromptScores] = {}
        self._begun: set[tuple[str, int]] = set()
        self._held: tuple[TokenOutput, TextDelta, int] | None = None
        self._seen_tokens = 0
        names: dict[int, str] = {}
        self._assemblers = {
            request.request_id: RequestAssembler(request, tokenizer) for request in call.requests
        }
        self._writers = {
            (request.request_id, choice): ChoiceWriter(
                call, tokenizer, i * call.choices + choice, names
            )
            for i, request in enumerate(call.requests)
            for choice in range(call.choices)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError before the first byte, ClientGone when nobody reads."""
        outcome = "aborted"
        try:
            with self._client.submit(self._call.requests, self._call.group_id) as handle:
                self._gone.add_done_callback(lambda _: handle.fail(ClientGone()))
                seed = await handle.accepted
                # Not those that the call was checked against: weights may have been reloaded since.
                self._facts = handle.facts or self._facts
                self._client.metrics.prompt_tokens.count(usage(self._call, 0)["prompt_tokens"])
                if self._call.stream:
                    scope["tpdet_probe"] = b":\n\n"  # a comment
                    outcome = await self._stream(handle, seed, send)
                else:
                    outcome = await self._whole(handle, seed, scope, send)
        except ApiError:
            outcome = "failed"
            raise
        finally:
            self._client.metrics.outcome(outcome)
            counts = self._usage()
            scope["tpdet"].tokens = counts["prompt_tokens"], counts["completion_tokens"]

    async def _whole(self, handle: ResponseHandle, seed: int, scope: Scope, send: Send) -> str:
        """Send the answer, in one part if it is small or for HTTP/1.0; the outcome."""
        while not self._finished:
            async for _ in self._pace.slices(self._taken(handle, await handle.outputs())):
                pass
        receipt = await self._receipt(seed)
        chunks = self._pace.chunks(json_pieces(self._answer(seed, receipt)))
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
        chunk = envelope(self._call, seed, self._fingerprint, stream=True)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            while not self._finished:
                taken = self._taken(handle, await handle.outputs())
                await self._send_all(self._events(chunk, taken), send)
            chunk["tpdet"] = await self._receipt(seed)
            await self._send_all(self._last_event(chunk), send)
            last = b"data: [DONE]\n\n"
        except ClientGone:
            return "aborted"  # the answer has begun: there is nothing to raise towards
        except ApiError as problem:
            last = b"data: " + problem.body() + b"\n\n"
        except Exception:
            _log.exception("stream %s failed", self._call.group_id)
            last = b"data: " + internal_error().body() + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return "completed" if last.startswith(b"data: [") else "failed"

    async def _send_all(self, pieces: Iterator[str], send: Send) -> None:
        async for chunk in self._pace.chunks(pieces):
            self._check_reader()
            await _send_part(send, chunk)

    def _check_reader(self) -> None:
        if self._gone.done():
            raise ClientGone

    def _taken(self, handle: ResponseHandle, outputs: list[Output]) -> Iterator[_Taken | None]:
        """Feed outputs to the assemblers; stop choices in the engine that a stop string ended."""
        for output in outputs:
            if isinstance(output, PromptPart):
                self._prompts.setdefault(output.request_id, PromptScores()).add(output)
                yield None
                continue
            delta = self._assemblers[output.request_id].push(output)
            if delta is not None and delta.abort:
                handle.stop(output.request_id, output.choice)
            yield None if delta is None else (output, delta)

    def _events(self, chunk: Json, outputs: Iterator[_Taken | None]) -> Iterator[str]:
        """The events that these outputs make, but for the last event of all, which is held."""
        for taken in outputs:
            if taken is None:
                continue
            self._seen_tokens += len(taken[1].token_ids)
            if not self._is_shown(*taken):
                continue
            if self._held is not None:
                yield from self._event(chunk, *self._held)
            self._held = (*taken, self._seen_tokens)
        if self._held is not None and not self._finished:
            yield from self._event(chunk, *self._held)
            self._held = None

    def _last_event(self, chunk: Json) -> Iterator[str]:
        """The event with the receipt in `chunk`, which is the usage's where that is wanted."""
        receipt = chunk["tpdet"]
        if self._held is not None:
            if self._call.include_usage:
                chunk["tpdet"] = {"seed": receipt["seed"]}
            yield from self._event(chunk, *self._held)
        if self._call.include_usage:
            chunk |= {"tpdet": receipt, "choices": [], "usage": self._usage()}
            yield f"data: {json_text(chunk)}\n\n"

    def _is_shown(self, output: TokenOutput, delta: TextDelta) -> bool:
        """Whether a token shows something yet."""
        call, key = self._call, (output.request_id, output.choice)
        first = key not in self._begun
        self._begun.add(key)
        tokens = delta.token_ids and (call.logprobs is not None or call.token_ids)
        return bool(first or delta.text or delta.finish_reason or tokens)

    def _event(
        self, chunk: Json, output: TokenOutput, delta: TextDelta, tokens: int
    ) -> Iterator[str]:
        """A choice's next piece; the first may repeat the prompt, and is written bit by bit.

        tokens: of all choices, up to this piece.
        """
        writer = self._writers[output.request_id, output.choice]
        large = not writer.begun
        piece = writer.piece(delta, self._prompts.get(output.request_id))
        so_far = usage(self._call, tokens) if self._call.continuous_usage else None
        extra = {"usage": so_far} if self._call.include_usage else {}
        chunk["system_fingerprint"] = self._fingerprint
        content = {**chunk, "choices": [piece], **extra}
        yield "data: "
        yield from json_pieces(content) if large else (json_text(content),)
        yield "\n\n"

    @property
    def _approximate(self) -> bool:
        return any(assembler.approximate for assembler in self._assemblers.values())

    @property
    def _fingerprint(self) -> str:
        """The fingerprint of the answer so far."""
        facts = self._facts
        return facts.approximate_fingerprint if self._approximate else facts.system_fingerprint

    @property
    def _finished(self) -> bool:
        return all(assembler.finished for assembler in self._assemblers.values())

    def _answer(self, seed: int, receipt: Json) -> Json:
        call = self._call
        found = envelope(call, seed, self._fingerprint, stream=False) | {"tpdet": receipt}
        if call.kind == "chat" and call.prompt_logprobs is not None:
            request_id = call.requests[0].request_id
            writer = self._writers[request_id, 0]
            found["prompt_logprobs"] = writer.prompt_logprobs(self._prompts.get(request_id))
        return {**found, "choices": self._choices(), "usage": self._usage()}

    def _choices(self) -> Iterator[Json]:
        for (request_id, choice), writer in self._writers.items():
            answer = self._assemblers[request_id].choice(choice)
            yield writer.whole(answer, self._prompts.get(request_id))

    async def _receipt(self, seed: int) -> Json:
        """The seed that replays the answer, and the digest that a replay must have.

        An answer that is approximate, even in part, says so and has no digest.
        """
        if self._approximate:
            return {"seed": seed, "replay_digest": None, "approximate": True}
        facts, answers = self._facts, map(self._generated, self._assemblers.values())
        steps = replay_digest_steps(
            self._call.requests, answers, seed, facts.contract, facts.model_digest
        )
        return {"seed": seed, "replay_digest": await self._pace.last(steps)}

    def _generated(self, assembler: RequestAssembler) -> Iterator[tuple[SampledToken, ...]]:
        return (assembler.choice(index).logprobs for index in range(self._call.choices))

    def _usage(self) -> Json:
        found = self._assemblers.values()
        return usage(self._call, sum(assembler.generated_tokens for assembler in found))


async def _together(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield b"".join([chunk async for chunk in chunks])


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
