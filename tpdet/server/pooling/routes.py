"""The routes that answer with numbers: vectors, labels, scores and rankings of documents."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import Response

import tpdet
from tpdet.requests.answer.json_pieces import to_json
from tpdet.requests.body import limits
from tpdet.requests.body.pooling.pooled_answers import TEI_FORMS
from tpdet.requests.body.pooling.pooling_body import PooledCall
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.pooling_params import NOT_POOLED
from tpdet.requests.request import PooledOutput
from tpdet.requests.routes import POOLED_PATHS, PooledRoute
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.large_bodies import worked_on
from tpdet.server.front.middleware import ClientGone, HttpExchange
from tpdet.server.front.response_handle import Output

if TYPE_CHECKING:
    from tpdet.server.front.app import Services

AT_ONCE = 256
"""Prompts of one request that are in the engine's queue at a time."""
_POOLINGS = {"last": "last_token", "mean": "mean", "cls": "cls"}
"""What text-embeddings-inference calls the rows."""


class _PooledAnswers:
    """Takes the outputs of `count` of a call's prompts, by their ids."""

    def __init__(
        self, outputs: dict[str, PooledOutput], count: int, wake: Callable[[], None]
    ) -> None:
        self._outputs, self._left, self._wake = outputs, count, wake

    def take(self, output: Output) -> None:
        """The next output."""
        if isinstance(output, PooledOutput):
            self._outputs[output.request_id] = output
            self._left -= 1

    def flush(self) -> None:
        """All outputs of a step have been taken."""
        if not self._left:
            self._wake()


def add_pooling_routes(app: FastAPI, services: "Services") -> None:
    """Add them; on a server that generates they say how to start one that pools."""

    async def answer(route: PooledRoute, request: Request) -> Response:
        exchange: HttpExchange = request.scope["tpdet"]
        services.client.check_open()
        call = await worked_on(services, exchange, route)
        exchange.release()
        assert isinstance(call, PooledCall)
        outputs: dict[str, PooledOutput] = {}
        outcome = "aborted"
        try:
            for first in range(0, len(call.requests), AT_ONCE):
                await _run(call, first, outputs, services.client, exchange.gone)
            outcome = "completed"
        except ApiError as error:
            outcome, error.tei = "failed", call.form in TEI_FORMS
            raise
        finally:
            services.client.metrics.outcome(outcome)
            exchange.tokens = call.prompt_tokens, 0
        content = call.answer(outputs, services.client.facts_of)
        counted = {"x-compute-tokens": str(call.prompt_tokens)} if call.form in TEI_FORMS else None
        return Response(to_json(content), headers=counted, media_type="application/json")

    for path, route in POOLED_PATHS.items():
        app.add_api_route(path, partial(answer, route), methods=["POST"], name="handle")

    @app.get("/info")
    async def info() -> Response:
        return Response(to_json(_info(services)), media_type="application/json")


def _info(services: "Services") -> dict[str, Any]:
    """The model as text-embeddings-inference tells of one. Raises ApiError where text is made."""
    facts = services.preparer.facts
    pooling = facts.pooling
    if pooling is None:
        raise bad_request(NOT_POOLED, None, "not_supported")
    labels = pooling.labels or ("yes",)
    kind: dict[str, Any] = {"embedding": {"pooling": _POOLINGS[pooling.row]}}
    if pooling.answers != "vector":
        names = {
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
        }
        kind = {"reranker" if pooling.width == 1 else "classifier": names}
    return {
        "model_id": services.served_name,
        "model_sha": None,
        "model_dtype": facts.dtype,
        "model_type": kind,
        "max_concurrent_requests": AT_ONCE,
        "max_input_length": facts.max_model_len,
        "max_batch_tokens": facts.max_model_len,
        "max_batch_requests": None,
        "max_client_batch_size": limits.MAX_POOLED_INPUTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": tpdet.__version__,
        "sha": None,
        "docker_label": None,
    }


async def _run(
    call: PooledCall,
    first: int,
    outputs: dict[str, PooledOutput],
    client: EngineClient,
    gone: "asyncio.Future[None]",
) -> None:
    """Have the engine answer a part of the prompts. Raises ApiError, or ClientGone."""
    part = call.requests[first : first + AT_ONCE]
    reader = _PooledAnswers(outputs, len(part), lambda: handle.wake())
    handle = client.submit(part, f"{call.identifier}-{first}", reader)
    with handle:
        gone.add_done_callback(lambda _: handle.fail(ClientGone()))
        await handle.accepted
        count = sum(len(request.prompt_token_ids) for request in part)
        client.metrics.tally.add("prompt_tokens", count)
        while not all(request.request_id in outputs for request in part):
            await handle.changed()
