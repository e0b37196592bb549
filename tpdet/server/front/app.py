"""The application: a handler for each path; the request middleware does what all have in common."""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import tpdet
from tpdet.config import APPROXIMATE
from tpdet.requests.answer.json_pieces import to_json
from tpdet.requests.body import limits
from tpdet.requests.body.prepare import Call, Preparer
from tpdet.requests.body.problems import (
    ApiError,
    bad_request,
    from_code,
    internal_error,
    request_errors_as_problems,
)
from tpdet.requests.body.resume import FIELD, HEADER, resumed_by_cursor
from tpdet.requests.body.work import Route, work_on
from tpdet.requests.engine_facts import EngineFacts
from tpdet.server.about.page import Page
from tpdet.server.body.job import Job
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.generation import GenerationResponse
from tpdet.server.front.large_bodies import LargeBodies
from tpdet.server.front.middleware import ClientGone, HttpExchange, send_problem
from tpdet.server.front.openapi import describe
from tpdet.server.front.pace import Turns
from tpdet.server.front.schema_trials import SchemaTrials
from tpdet.server.wire.protocol import REFUSALS
from tpdet.text.reasoning import ReasoningParser
from tpdet.text.template_meter import BeyondCount
from tpdet.text.tokenizer import Tokenizer

EVENTS = "text/event-stream"


@dataclass
class Services:
    """Shared by all handlers.

    `progress_timeout` is in seconds; `created` is a Unix time; `guarded`: keys are asked for.
    `reasoning` splits the answers of chats.
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    large_bodies: LargeBodies
    schema_trials: SchemaTrials
    served_name: str
    progress_timeout: float
    created: int
    guarded: bool
    reasoning: ReasoningParser | None = None

    @property
    def preparer(self) -> Preparer:
        """Checks bodies against the engine's facts. Raises ApiError before the engine started."""
        facts = self.client.facts
        if facts is None:
            raise from_code("engine_dead", "the engine is not ready")
        return Preparer(facts, self.served_name, self.tokenizer)


class JsonResponse(Response):
    """Compact JSON, floats in their shortest form."""

    media_type = "application/json"

    def __init__(self, content: object) -> None:
        super().__init__(to_json(content))


class ProblemResponse(Response):
    """An error, by the one serialiser."""

    def __init__(self, problem: ApiError) -> None:
        super().__init__()
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it."""
        await send_problem(self._problem, send)


def make_app(services: Services) -> FastAPI:
    """All routes. Nothing else answers: no redirects, no pages of FastAPI's."""
    app = FastAPI(
        title="tpdet",
        version=tpdet.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_public(app, services)
    _add_models(app, services)
    _add_generation(app, services)
    _add_tokenizer(app, services)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JsonResponse(describe(app, services.guarded))

    @app.get("/")
    @app.get("/docs")
    async def page(request: Request) -> Response:
        host, port = request.scope["server"]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        facts = {
            "model": services.served_name,
            "context": f"{services.preparer.facts.max_model_len:,} tokens",
            "arithmetic": _arithmetic(services.client),
            "keys": "sent as a bearer token" if services.guarded else "none are asked for",
            "version": tpdet.__version__,
        }
        return Page(services.served_name, url, services.guarded, facts)

    async def problem(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=499)
        known = error if isinstance(error, ApiError) else internal_error()
        services.client.metrics.rejected(known.code or known.kind)
        return ProblemResponse(known)

    for kind in (ApiError, ClientGone, Exception):
        app.add_exception_handler(kind, problem)
    return app


def _add_public(app: FastAPI, services: Services) -> None:
    client = services.client

    @app.get("/health")
    async def health() -> Response:
        if not client.alive(services.progress_timeout):
            raise from_code(*(client.dead or ("engine_dead", "the engine makes no progress")))
        return JsonResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if client.state != "accepting" or not client.alive(services.progress_timeout):
            fallback = ("engine_dead", "the server takes no requests now")
            raise from_code(*REFUSALS.get(client.state, fallback))
        return JsonResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(client.metrics.render(), media_type=kind)

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": tpdet.__version__, "arithmetic": _arithmetic(client)})


def _add_models(app: FastAPI, services: Services) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": services.served_name,
            "object": "model",
            "created": services.created,
            "owned_by": "tpdet",
            "root": services.served_name,
            "parent": None,
            "max_model_len": services.preparer.facts.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(request: Request) -> Response:
        services.preparer.check_model(request.path_params["model_id"])
        return JsonResponse(card())

    @app.get("/server_info")
    async def server_info() -> Response:
        facts = services.preparer.facts
        return JsonResponse(
            {
                "version": tpdet.__version__,
                "model": services.served_name,
                "system_fingerprint": services.client.system_fingerprint,
                "contract": facts.contract,
                "weights": facts.model_digest,
                "arithmetic": _arithmetic(services.client),
                "max_model_len": facts.max_model_len,
                "vocab_size": facts.vocab_size,
                "eos_token_ids": list(facts.eos_token_ids),
                "tp": facts.tp,
                "reasoning_parser": services.reasoning.name if services.reasoning else "off",
                "state": services.client.state,
                "limits": limits.all_limits(),
            }
        )


def _add_generation(app: FastAPI, services: Services) -> None:
    pace = Turns()

    async def generate(request: Request, route: Route) -> Response:
        exchange: HttpExchange = request.scope["tpdet"]
        services.client.check_open()
        call = await _worked_on(services, exchange, route)
        exchange.release()
        assert isinstance(call, Call)
        if not call.include_reasoning and services.reasoning is None:
            raise bad_request(
                "include_reasoning false: reasoning is part of the content here: start the server "
                "with --reasoning-parser auto",
                "include_reasoning",
                "not_supported",
            )
        if services.reasoning is not None:
            vocab_size = services.preparer.facts.vocab_size
            call = call.reasoning_first(services.reasoning, vocab_size)
        event_id = request.headers.get(HEADER)
        if event_id:
            call = _continued(call, event_id, services.preparer.facts)
        form = call.requests[0].params.form
        if form is not None:
            await services.schema_trials.check(form)
        return GenerationResponse(
            call,
            services.client,
            services.tokenizer,
            services.preparer.facts,
            exchange.gone,
            pace,
            cursors=event_id is not None or EVENTS in request.headers.get("accept", ""),
            reasoning=services.reasoning,
        )

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, "completion")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await generate(request, "chat")


def _add_tokenizer(app: FastAPI, services: Services) -> None:
    async def answer(request: Request, route: Route) -> Response:
        content = await _worked_on(services, request.scope["tpdet"], route)
        return Response(content, media_type="application/json")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(request, "tokenize")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(request, "detokenize")

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if services.tokenizer is None:
            raise ApiError(404, "this server runs without a tokenizer", code="not_found")
        return JsonResponse(services.tokenizer.info())


def _continued(call: Call, cursor: str, facts: EngineFacts) -> Call:
    """The call that goes on behind a cursor of its stream. Raises ApiError."""
    if not call.stream:
        raise bad_request("Last-Event-ID is for streams: set stream to true", HEADER)
    if call.resume is not None:
        raise bad_request(f"Last-Event-ID and {FIELD} are given: send one of the two", HEADER)
    with request_errors_as_problems():
        requests, point = resumed_by_cursor(call.requests, cursor, facts)
    return replace(call, requests=requests, resume=point)


def _arithmetic(client: EngineClient) -> str:
    return APPROXIMATE if client.approximate else "strict"


async def _worked_on(services: Services, exchange: HttpExchange, route: Route) -> Call | bytes:
    """Work on the body, here, in a thread, or in another process, by its size.

    A chat template that does more than a little work goes on in the other process too.
    """
    preparer = replace(services.preparer, tenant_salt=exchange.tenant_salt)
    job = Job(
        route, exchange.request_id, services.served_name, exchange.tenant_salt, preparer.facts
    )
    if len(exchange.data) > limits.LARGE_BODY_BYTES:
        return await services.large_bodies.work(job, exchange.data, exchange.gone)

    work = partial(work_on, route, preparer, exchange.body, exchange.request_id)
    try:
        if len(exchange.data) <= limits.THREAD_BODY_BYTES:
            return work()
        return await asyncio.to_thread(work)
    except BeyondCount:
        job = msgspec.structs.replace(job, cpu_seconds=limits.TEMPLATE_CPU_SECONDS)
        return await services.large_bodies.work(job, exchange.data, exchange.gone)
