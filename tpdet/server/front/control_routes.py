"""The control routes: each hands its fields to a verb of the engine's, and its answer back."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tpdet.requests.body.json_body import parse_object
from tpdet.requests.body.limits import LARGE_BODY_BYTES
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.server.about.operations import CONTROL_OPERATIONS
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.middleware import ClientGone, HttpExchange
from tpdet.server.wire.control_verbs import fields_of
from tpdet.server.wire.protocol import Controlled

_READ = ("/is_paused", "/weight_info", "/get_weight_version")  # by GET alone
_BOTH = ("/flush_cache",)
_VERBS = {"/get_weight_version": "weight_info", "/weights_checker": "weight_checker"}
"""Paths whose verb has another name than they."""


def add_control_routes(app: FastAPI, client: EngineClient) -> None:
    """Add a route for each of CONTROL_OPERATIONS."""
    for path in CONTROL_OPERATIONS:
        verb = _VERBS.get(path, path[1:])
        methods = ["GET"] if path in _READ else ["POST"]
        methods = ["GET", "POST"] if path in _BOTH else methods
        for method in methods:
            app.add_api_route(path, _handler(client, verb), methods=[method], name=verb)


def _handler(client: EngineClient, verb: str) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        exchange: HttpExchange = request.scope["tpdet"]
        fields = fields_of(verb, await _body(exchange), _query(request))
        exchange.release()
        answer = await _answer(client, verb, fields, exchange.gone)
        if answer.status >= 400:
            raise _problem(answer)
        return Response(answer.body, answer.status, media_type="application/json")

    return handle


async def _answer(
    client: EngineClient, verb: str, fields: bytes, gone: asyncio.Future[None]
) -> Controlled:
    """What the engine answers. Raises ClientGone when nobody waits any more; the call goes on."""
    call = asyncio.ensure_future(client.control(verb, fields))
    await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
    if not call.done():
        call.cancel()
        raise ClientGone
    return call.result()


async def _body(exchange: HttpExchange) -> dict[str, Any]:
    if len(exchange.data) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(parse_object, exchange.data)
    return exchange.body


def _query(request: Request) -> dict[str, str]:
    """The query's parameters. Raises ApiError where one is given twice."""
    query = request.query_params
    for name in query:
        if len(query.getlist(name)) > 1:
            raise bad_request(f"{name} is given more than once in the query: give one", name)
    return dict(query)


def _problem(answer: Controlled) -> ApiError:
    """The engine's refusal."""
    error = json.loads(answer.body)["error"]
    return ApiError(answer.status, kind=error.pop("type"), **error)
