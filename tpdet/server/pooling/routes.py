"""The routes that answer with numbers: vectors, labels, scores and rankings of documents."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tpdet.requests.answer.json_pieces import to_json
from tpdet.requests.body import limits
from tpdet.requests.body.json_body import parse_object
from tpdet.requests.body.pooling_body import PooledCall, PooledRoute, pooled_call
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.problems import ApiError
from tpdet.requests.request import PooledOutput
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.middleware import ClientGone, HttpExchange
from tpdet.server.front.response_handle import Output

if TYPE_CHECKING:
    from tpdet.server.front.app import Services

PATHS: dict[str, PooledRoute] = {
    "/v1/embeddings": "embeddings",
    "/classify": "classify",
    "/pooling": "pooling",
    "/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
}
AT_ONCE = 256
"""Prompts of one request that are in the engine's queue at a time."""


class _PooledAnswers:
    """Takes the outputs of a part of a call's prompts."""

    def __init__(self, call: PooledCall, count: int, wake: Callable[[], None]) -> None:
        self._call, self._left, self._wake = call, count, wake

    def take(self, output: Output) -> None:
        """The next output."""
        if isinstance(output, PooledOutput):
            self._call.outputs[output.request_id] = output
            self._left -= 1

    def flush(self) -> None:
        """All outputs of a step have been taken."""
        if not self._left:
            self._wake()


def add_pooling_routes(app: FastAPI, services: "Services") -> None:
    """Add them; on a server that generates they say how to start one that pools."""

    async def answer(request: Request, route: PooledRoute) -> Response:
        exchange: HttpExchange = request.scope["tpdet"]
        services.client.check_open()
        preparer = replace(services.preparer, tenant_salt=exchange.tenant_salt)
        work = partial(_work, route, preparer, exchange)
        small = len(exchange.data) <= limits.THREAD_BODY_BYTES
        call = work() if small else await asyncio.to_thread(work)
        exchange.release()
        outcome = "aborted"
        try:
            for first in range(0, len(call.requests), AT_ONCE):
                await _run(call, first, services.client, exchange.gone)
            outcome = "completed"
        except ApiError:
            outcome = "failed"
            raise
        finally:
            services.client.metrics.outcome(outcome)
            exchange.tokens = call.prompt_tokens, 0
        content = call.answer(services.client.facts_of)
        return Response(to_json(content), media_type="application/json")

    def handler(route: PooledRoute) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            return await answer(request, route)

        return handle

    for path, route in PATHS.items():
        app.post(path)(handler(route))


def _work(route: PooledRoute, preparer: Preparer, exchange: HttpExchange) -> PooledCall:
    """Read the body, of which the middleware has parsed a small one. Raises ApiError."""
    fields = exchange.body
    if len(exchange.data) > limits.LARGE_BODY_BYTES:
        fields = parse_object(exchange.data)
    return pooled_call(route, preparer, fields, exchange.request_id)


async def _run(
    call: PooledCall, first: int, client: EngineClient, gone: "asyncio.Future[None]"
) -> None:
    """Have the engine answer a part of the prompts. Raises ApiError, or ClientGone."""
    part = call.requests[first : first + AT_ONCE]
    reader = _PooledAnswers(call, len(part), lambda: handle.wake())
    handle = client.submit(part, f"{call.identifier}-{first}", reader)
    with handle:
        gone.add_done_callback(lambda _: handle.fail(ClientGone()))
        await handle.accepted
        count = sum(len(request.prompt_token_ids) for request in part)
        client.metrics.tally.add("prompt_tokens", count)
        while not all(request.request_id in call.outputs for request in part):
            await handle.changed()
