"""One request for text: submitted, assembled from what comes back, answered whole or streamed."""

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpdet.outputs import RequestAssembler, TextDelta
from tpdet.replay import replay_digest
from tpdet.request import TokenOutput
from tpdet.server.answers import ChoiceWriter, Json, envelope, to_json, usage
from tpdet.server.engine_client import EngineClient, Ticket
from tpdet.server.gate import ClientGone
from tpdet.server.prepare import Call
from tpdet.server.problems import ApiError, internal_error
from tpdet.server.protocol import Start
from tpdet.tokenizer import Tokenizer

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
    ) -> None:
        super().__init__()
        self._call, self._client, self._gone = call, client, gone
        self._facts = facts
        self._assemblers = {
            request.request_id: RequestAssembler(request, tokenizer) for request in call.requests
        }
        self._writers = {
            (request.request_id, choice): ChoiceWriter(call, tokenizer, i * call.choices + choice)
            for i, request in enumerate(call.requests)
            for choice in range(call.choices)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError before the first byte, ClientGone when nobody reads."""
        outcome = "aborted"
        try:
            with self._client.submit(self._call.requests, self._call.group_id) as ticket:
                self._gone.add_done_callback(lambda _: ticket.fail(ClientGone()))
                seed = await ticket.accepted
                # Not those that the call was checked against: weights may have been reloaded since.
                self._facts = ticket.facts or self._facts
                self._client.metrics.prompt_tokens.count(usage(self._call, 0)["prompt_tokens"])
                if self._call.stream:
                    finished = await self._stream(ticket, seed, send)
                else:
                    await self._whole(ticket, seed, send)
                    finished = True
                outcome = "completed" if finished else "failed"
        except ApiError:
            outcome = "failed"
            raise
        finally:
            self._client.metrics.outcome(outcome)

    async def _whole(self, ticket: Ticket, seed: int, send: Send) -> None:
        while not self._finished:
            await self._take(ticket)
        body = to_json(self._answer(seed))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, ticket: Ticket, seed: int, send: Send) -> bool:
        """Send the events; False if an error event was the last one."""
        chunk = envelope(self._call, seed, self._fingerprint, stream=True)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            while not self._finished:
                deltas = await self._take(ticket)
                chunk["system_fingerprint"] = self._fingerprint
                pieces = [self._piece(output, delta) for output, delta in deltas]
                chunks = [self._chunk(chunk, [piece]) for piece in pieces if piece]
                if self._finished:
                    if self._call.include_usage:
                        chunks.append({**chunk, "choices": [], "usage": self._usage()})
                    chunks[-1]["tpdet"] = self._receipt(seed)
                if chunks:
                    await _send_part(send, b"".join(map(_event, chunks)))
            last = b"data: [DONE]\n\n"
        except ClientGone:
            raise
        except ApiError as problem:
            last = b"data: " + problem.body() + b"\n\n"
        except Exception:
            _log.exception("stream %s failed", self._call.group_id)
            last = b"data: " + internal_error().body() + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return last.startswith(b"data: [")

    async def _take(self, ticket: Ticket) -> list[tuple[TokenOutput, TextDelta]]:
        """Feed what has come to the assemblers; stop in the engine what a stop string ended."""
        found = []
        for output in await ticket.outputs():
            delta = self._assemblers[output.request_id].push(output)
            if delta is None or not isinstance(output, TokenOutput):
                continue
            if delta.abort:
                ticket.stop(output.request_id, output.choice)
            found.append((output, delta))
        return found

    @property
    def _approximate(self) -> bool:
        return any(assembler.approximate for assembler in self._assemblers.values())

    @property
    def _fingerprint(self) -> str:
        """Of what has come of the answer so far."""
        facts = self._facts
        return facts.approximate_fingerprint if self._approximate else facts.system_fingerprint

    @property
    def _finished(self) -> bool:
        return all(assembler.finished for assembler in self._assemblers.values())

    def _piece(self, output: TokenOutput, delta: TextDelta) -> Json | None:
        """A choice's next piece; None when a token shows nothing yet."""
        call = self._call
        writer = self._writers[output.request_id, output.choice]
        shown = (
            delta.text
            or delta.finish_reason
            or (delta.token_ids and (call.logprobs is not None or call.token_ids))
        )
        if not shown and writer.begun:
            return None
        return writer.piece(delta, self._assemblers[output.request_id].prompt)

    def _chunk(self, chunk: Json, choices: list[Json]) -> Json:
        extra = {"usage": None} if self._call.include_usage else {}
        return {**chunk, "choices": choices, **extra}

    def _answer(self, seed: int) -> Json:
        call, choices = self._call, []
        found = envelope(call, seed, self._fingerprint, stream=False)
        found["tpdet"] = self._receipt(seed)
        for request_id, assembler in self._assemblers.items():
            answer = assembler.answer()
            for choice in answer.choices:
                writer = self._writers[request_id, choice.index]
                choices.append(writer.whole(choice, answer.prompt))
            if call.kind == "chat" and call.prompt_logprobs is not None:
                writer = self._writers[request_id, 0]
                found["prompt_logprobs"] = writer.prompt_logprobs(answer.prompt)
        return {**found, "choices": choices, "usage": self._usage()}

    def _receipt(self, seed: int) -> Json:
        """What replays the answer, and the digest by which the replay is known to be the same.

        An answer that is approximate, even in part, says so and has no digest.
        """
        if self._approximate:
            return {"seed": seed, "replay_digest": None, "approximate": True}
        answers = [assembler.answer() for assembler in self._assemblers.values()]
        choices = [[choice.logprobs for choice in answer.choices] for answer in answers]
        facts = self._facts
        digest = replay_digest(
            self._call.requests, choices, seed, facts.contract, facts.model_digest
        )
        return {"seed": seed, "replay_digest": digest}

    def _usage(self) -> Json:
        answers = [assembler.answer() for assembler in self._assemblers.values()]
        count = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
        return usage(self._call, count)


def _event(content: Json) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
