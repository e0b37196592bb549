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
from tpdet.requests.body.problems import ApiError, bad_request, from_code
from tpdet.requests.pooling_params import NOT_POOLED
from tpdet.requests.request import PooledOutput, TokenOutput
from tpdet.requests.request import Request as Prompt
from tpdet.requests.routes import POOLED_PATHS, PooledRoute
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.large_bodies import worked_on
from tpdet.server.front.middleware import ClientGone, HttpExchange
from tpdet.server.front.response_handle import Output
from tpdet.server.wire import protocol

if TYPE_CHECKING:
    from tpdet.server.front.app import Services

AT_ONCE = 256
"""Prompts of one request that are in the engine's queue at a time, at most."""
ROOM_SECONDS = 0.05
"""How often a call that has begun asks whether a full queue has room for its next prompts."""
_POOLINGS = {"last": "last_token", "mean": "mean", "cls": "cls"}
"""What text-embeddings-inference calls the rows."""


class _PooledAnswers:
    """Takes the outputs of `count` of a call's prompts, by their ids."""

    def __init__(
        self,
        outputs: dict[str, PooledOutput],
        count: int,
        wake: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._outputs, self._left, self._wake, self._fail = outputs, count, wake, fail

    def take(self, output: Output) -> None:
        """The next output. One of a token says that a control call has ended the prompt."""
        if isinstance(output, PooledOutput):
            self._outputs[output.request_id] = output
            self._left -= 1
        elif isinstance(output, TokenOutput) and output.finish_reason is not None:
            self._fail(from_code("aborted", "a control call has ended this request: ask again"))

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
        outcome = "aborted"
        try:
            outputs = await _answered(call, services.client, exchange.gone)
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


async def _answered(
    call: PooledCall, client: EngineClient, gone: "asyncio.Future[None]"
) -> dict[str, PooledOutput]:
    """The engine's output to each prompt of a call, all of the same weights.

    Prompts whose answers are of older weights than others' are asked again: vectors of two models
    cannot be compared. Raises ApiError, or ClientGone.
    """
    outputs: dict[str, PooledOutput] = {}
    requests, most = call.requests, min(AT_ONCE, client.max_queue)
    try:
        while requests:
            for first in range(0, len(requests), most):
                part = protocol.CallPart(call.identifier, first == 0, first + most >= len(requests))
                while not await _run(requests[first : first + most], part, outputs, client, gone):
                    await asyncio.wait((gone,), timeout=ROOM_SECONDS)
                    if gone.done():
                        raise ClientGone
            requests = _take_older(call.requests, outputs)
    except BaseException:
        client.give_up(call.identifier)
        raise
    return outputs


def _take_older(
    requests: tuple[Prompt, ...], outputs: dict[str, PooledOutput]
) -> tuple[Prompt, ...]:
    """The requests whose outputs are of older weights than others', and are taken away."""
    newest = max(output.weights for output in outputs.values())
    older = [one for one in requests if outputs[one.request_id].weights < newest]
    for request in older:
        del outputs[request.request_id]
    return tuple(older)


async def _run(
    requests: tuple[Prompt, ...],
    part: protocol.CallPart,
    outputs: dict[str, PooledOutput],
    client: EngineClient,
    gone: "asyncio.Future[None]",
) -> bool:
    """Have the engine answer a part of the prompts; False where it has no room for more of a call.

    Raises ApiError, or ClientGone.
    """
    reader = _PooledAnswers(
        outputs, len(requests), lambda: handle.wake(), lambda error: handle.fail(error)
    )
    try:
        handle = client.submit(requests, f"{part.call_id}-{len(outputs)}", reader, part)
        with handle:
            gone.add_done_callback(lambda _: handle.fail(ClientGone()))
            await handle.accepted
            count = sum(len(request.prompt_token_ids) for request in requests)
            client.metrics.tally.add("prompt_tokens", count)
            while not all(request.request_id in outputs for request in requests):
                await handle.changed()
    except ApiError as error:
        if error.code != "engine_overloaded" or not outputs:
            raise
        return False
    return True
