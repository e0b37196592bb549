"""The application: a handler for each path; the request middleware does what all have in common."""

import asyncio
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import tpdet
from tpdet.config import APPROXIMATE
from tpdet.errors import AuditUnavailableError
from tpdet.requests.answer.json_pieces import to_json
from tpdet.requests.answer.messages import problem_body
from tpdet.requests.body import limits
from tpdet.requests.body.prepare import Call, Preparer
from tpdet.requests.body.problems import (
    ApiError,
    bad_request,
    from_code,
    internal_error,
    request_errors_as_problems,
)
from tpdet.requests.body.responses_body import ResponsesForm, by_response_names
from tpdet.requests.body.resume import FIELD, HEADER, resumed_by_cursor
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.routes import CALL_PATHS, TEXT_PATHS, Route
from tpdet.requests.sampling_params import RANGES
from tpdet.server.about.page import Page
from tpdet.server.answers.cache import AnswerCache
from tpdet.server.answers.routes import add_answer_routes
from tpdet.server.batches.room import BatchRoom
from tpdet.server.batches.routes import add_batch_routes
from tpdet.server.batches.runner import BatchAnswer, Batches
from tpdet.server.front.control_routes import add_control_routes
from tpdet.server.front.door import owner_of
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.generation import GenerationResponse
from tpdet.server.front.large_bodies import LargeBodies, worked_on
from tpdet.server.front.middleware import ClientGone, HttpExchange, send_problem
from tpdet.server.front.openapi import describe
from tpdet.server.front.pace import Turns
from tpdet.server.front.receipts import Receipts
from tpdet.server.front.schema_trials import SchemaTrials
from tpdet.server.pooling.routes import add_pooling_routes
from tpdet.server.wire.protocol import REFUSALS
from tpdet.text.parsing.calls import CallParser
from tpdet.text.parsing.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer

EVENTS = "text/event-stream"

_log = logging.getLogger("tpdet.server")


@dataclass
class Services:
    """Shared by all handlers.

    `progress_timeout` is in seconds; `created` is a Unix time; `guarded`: keys are asked for.
    `reasoning` splits the answers of chats, `calls` reads the calls of tools in them.
    `weight_senders`: weights may come from trainers.
    `receipts`: None where none are made.
    `answers` has those that were computed before; `batches`: None where none are taken, the path
    of a socket where another process has them.
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
    calls: CallParser | None = None
    weight_senders: bool = False
    receipts: Receipts | None = None
    answers: AnswerCache | None = None
    batches: Batches | str | None = None

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
        request_id = scope["tpdet"].request_id
        await send_problem(
            self._problem, problem_body(self._problem, scope["path"], request_id), send
        )


def make_app(services: Services, control: bool = False) -> FastAPI:
    """All routes, with `control` those too; nothing else answers, no page of FastAPI's."""
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
    add_pooling_routes(app, services)
    _add_receipts(app, services)
    add_answer_routes(app, services.answers)
    if services.batches is not None:
        add_batch_routes(app, services.batches)
    if control:
        add_control_routes(app, services.client)

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
    @app.get("/health_generate")
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

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return JsonResponse(_model_info(services))

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        return JsonResponse(_server_info(services))

    @app.get("/v1/loads")
    async def loads() -> Response:
        return JsonResponse(_loads(services))

    @app.get("/get_world_size")
    async def world_size() -> Response:  # one data-parallel replica, with include_dp or without
        return JsonResponse({"world_size": services.preparer.facts.tp})


def _model_info(services: Services) -> dict[str, Any]:
    """The model as SGLang's servers tell of it."""
    name, tokenizer = services.served_name, services.tokenizer
    return {
        "model_path": name,
        "served_model_name": name,
        "tokenizer_path": None if tokenizer is None else name,
        "is_generation": services.preparer.facts.pooling is None,
        "preferred_sampling_params": None,
        "weight_version": services.preparer.facts.weight_version,
        "reasoning_parser": services.reasoning.name if services.reasoning else None,
        "tool_call_parser": services.calls.family.name if services.calls else None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _loads(services: Services) -> dict[str, Any]:
    """How many requests run and wait, as SGLang's servers tell of it; slime waits for none."""
    status, pending = services.client.status, services.client.metrics.tally.total("pending")
    waiting = status.waiting + int(pending)
    load = {
        "dp_rank": 0,
        "num_running_reqs": status.running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": status.running + waiting,
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": tpdet.__version__,
        "num_accelerators": services.preparer.facts.tp,
        "loads": [load],
    }


def _server_info(services: Services) -> dict[str, Any]:
    """What this server is, with the keys that clients of vLLM's and SGLang's servers read."""
    facts = services.preparer.facts
    return {
        "version": tpdet.__version__,
        "model": services.served_name,
        "system_fingerprint": services.client.system_fingerprint,
        "contract": facts.contract,
        "weights": facts.model_digest,
        "arithmetic": _arithmetic(services.client),
        "logprobs_mode": facts.logprobs_mode,
        "max_model_len": facts.max_model_len,
        "vocab_size": facts.vocab_size,
        "eos_token_ids": list(facts.eos_token_ids),
        "tp": facts.tp,
        "reasoning_parser": services.reasoning.name if services.reasoning else "off",
        "tool_call_parser": services.calls.family.name if services.calls else "off",
        "state": services.client.state,
        "limits": limits.all_limits(),
        "vllm_config": {
            "model_config": {
                "model": services.served_name,
                "max_model_len": facts.max_model_len,
                "dtype": f"torch.{facts.dtype}",
                "logprobs_mode": facts.logprobs_mode,
                "max_logprobs": RANGES["logprobs"].high,
            },
            "parallel_config": {
                "tensor_parallel_size": facts.tp,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "world_size": facts.tp,
            },
            "lora_config": None,
            "weight_transfer_config": {"backend": "nccl"} if services.weight_senders else None,
        },
        "tp_size": facts.tp,
        "pp_size": 1,
        "dp_size": 1,
        "num_gpus": facts.tp,
        "disaggregation_mode": "null",
        "dtype": facts.dtype,
        "enable_memory_saver": False,
        "enable_return_routed_experts": facts.experts_shape != (0, 0),
    }


def _add_generation(app: FastAPI, services: Services) -> None:
    pace = Turns()

    async def generate(route: Route, request: Request) -> Response:
        exchange: HttpExchange = request.scope["tpdet"]
        services.client.check_open()
        event_id = request.headers.get(HEADER)
        call = await _called(services, exchange, route, event_id)
        owner, directives = owner_of(request.scope), request.headers.get("cache-control", "")
        cursors = event_id is not None or EVENTS in request.headers.get("accept", "")
        return await _answering(services, exchange, call, owner, pace, directives, cursors)

    for path, route in CALL_PATHS.items():
        app.add_api_route(path, partial(generate, route), methods=["POST"], name="answer")


async def _called(
    services: Services, exchange: HttpExchange, route: Route, event_id: str | None = None
) -> Call:
    """The call of a body, checked, with all that this server decides of it. Raises ApiError."""
    call = await worked_on(services, exchange, route)
    exchange.release()
    assert isinstance(call, Call)
    call = _as_served(call, event_id, services)
    if call.form is not None and call.form.dropped:
        _log.info("request %s: left out %s", exchange.request_id, ", ".join(call.form.dropped))
    form = call.requests[0].params.form
    if form is not None:
        try:
            await services.schema_trials.check(form)
        except ApiError as error:
            if isinstance(call.form, ResponsesForm):
                raise by_response_names(error) from None
            raise
    return call


async def _answering(
    services: Services,
    exchange: HttpExchange,
    call: Call,
    owner: str,
    pace: Turns,
    directives: str = "",
    cursors: bool = False,
) -> GenerationResponse:
    """What answers a call; directives: of Cache-Control, cursors: of a stream's events."""
    cached = None
    if services.answers is not None:
        cached = await services.answers.asked(call, owner, directives, pace)
    return GenerationResponse(
        call,
        services.client,
        services.tokenizer,
        services.preparer.facts,
        exchange.gone,
        pace,
        cursors=cursors,
        reasoning=services.reasoning,
        calls=services.calls,
        receipt=None
        if services.receipts is None
        else services.receipts.begin(exchange.request_id, owner),
        cached=cached,
    )


def batch_answers(services: Services) -> BatchAnswer:
    """Has the calls of batches answered as those that come over HTTP, at the lowest priority."""
    pace = Turns()

    async def answer(exchange: HttpExchange, route: Route, owner: str, room: BatchRoom) -> bytes:
        call = await _called(services, exchange, route)
        async with room.place(call, exchange.gone):
            response = await _answering(services, exchange, call, owner, pace)
            parts: list[bytes] = []

            async def send(message: Message) -> None:
                parts.append(message.get("body", b""))

            scope = {"type": "http", "http_version": "1.1", "tpdet": exchange, "tpdet_writer": None}
            await response(scope, _nothing, send)
        if exchange.gone.done():
            raise ClientGone
        return b"".join(parts)

    return answer


async def _nothing() -> Message:
    """Nothing more is received."""
    return {"type": "http.disconnect"}


def _add_tokenizer(app: FastAPI, services: Services) -> None:
    async def worked(route: Route, request: Request) -> Response:
        content = await worked_on(services, request.scope["tpdet"], route)
        return Response(content, media_type="application/json")

    for path, route in TEXT_PATHS.items():
        app.add_api_route(path, partial(worked, route), methods=["POST"], name="answer")

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if services.tokenizer is None:
            raise ApiError(404, "this server runs without a tokenizer", code="not_found")
        return JsonResponse(services.tokenizer.info())


def _add_receipts(app: FastAPI, services: Services) -> None:
    @app.get("/v1/receipts/{receipt_id}")
    async def receipt(request: Request) -> Response:
        receipts = services.receipts
        if receipts is None:
            raise ApiError(404, "no receipts are made here: --audit-dir does", code="not_found")
        name, owner = request.path_params["receipt_id"], owner_of(request.scope)
        try:
            bundle = await asyncio.to_thread(receipts.bundle, name, owner)
        except AuditUnavailableError as error:
            raise from_code(error.code, error.public) from error
        if bundle is None:
            raise ApiError(404, "there is no receipt with this id", code="not_found")
        return Response(bundle, media_type="application/json")


def _as_served(call: Call, event_id: str | None, services: Services) -> Call:
    """The call by this server's settings, and behind the event `event_id`. Raises ApiError."""
    if not call.include_reasoning and services.reasoning is None:
        raise bad_request(
            "include_reasoning false: reasoning is part of the content here: start the server "
            "with --reasoning-parser auto",
            "include_reasoning",
            "not_supported",
        )
    with request_errors_as_problems():
        call = call.calling(services.calls)
    if services.reasoning is not None:
        vocab_size = services.preparer.facts.vocab_size
        call = call.reasoning_first(services.reasoning, vocab_size)
    if event_id:
        call = _continued(call, event_id, services.preparer.facts)
    if services.preparer.facts.seed_policy == "request":
        call = call.seeded_by_requests()
    return call


def _continued(call: Call, cursor: str, facts: EngineFacts) -> Call:
    """The call that goes on behind a cursor of its stream. Raises ApiError."""
    if call.form is not None:
        raise bad_request("Last-Event-ID is for completions and chats: ask again", HEADER)
    if not call.stream:
        raise bad_request("Last-Event-ID is for streams: set stream to true", HEADER)
    if call.resume is not None:
        raise bad_request(f"Last-Event-ID and {FIELD} are given: send one of the two", HEADER)
    with request_errors_as_problems():
        requests, point = resumed_by_cursor(call.requests, cursor, facts)
    return replace(call, requests=requests, resume=point)


def _arithmetic(client: EngineClient) -> str:
    return APPROXIMATE if client.approximate else "strict"
