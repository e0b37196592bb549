"""`/v1/files` and `/v1/batches`, as the openai client drives them; only with --batch-dir."""

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpdet.requests.answer.json_pieces import to_json
from tpdet.requests.body import limits
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.problems import (
    ApiError,
    bad_request,
    from_code,
    request_errors_as_problems,
)
from tpdet.requests.body.schema import Body
from tpdet.requests.routes import RECORDED
from tpdet.server.batches.forward import Forwarded
from tpdet.server.batches.record import Batch, BatchFile, new_id
from tpdet.server.batches.runner import Batches
from tpdet.server.batches.store import StoreUnavailableError
from tpdet.server.batches.upload import PURPOSE, Upload, too_large
from tpdet.server.front.door import header, owner_of

Json = dict[str, Any]
Listed = TypeVar("Listed", Batch, BatchFile)
_PORTION_BYTES = 256 << 10
_FORM_BYTES = 64 << 10  # of a form around its file
_MOST_LISTED = {"file": 10_000, "batch": 100}
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchBody(Body):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


def add_batch_routes(app: FastAPI, batches: Batches | str) -> None:
    """Add the routes of files and batches, or send all on to the socket at the path `batches`."""

    async def sent_on(request: Request) -> Response:
        return Forwarded(str(batches))

    for (method, path), handler in _HANDLERS.items():
        here = partial(handler, batches) if isinstance(batches, Batches) else None
        app.add_api_route(
            path, here or sent_on, methods=[method], name=handler.__name__.lstrip("_")
        )


async def _owned_file(batches: Batches, request: Request) -> BatchFile:
    name, owner = request.path_params["file_id"], owner_of(request.scope)
    file = await batches.use(batches.store.file, name, owner)
    if file is None:
        raise _missing("file", name)
    return file


async def _upload(batches: Batches, request: Request) -> Response:
    return _json((await _received(request, batches)).shown())


async def _files(batches: Batches, request: Request) -> Response:
    purpose = request.query_params.get("purpose")
    known = await batches.use(batches.store.files, owner_of(request.scope))
    shown = [file for file in known if purpose in (None, file.shown()["purpose"])]
    return _json(_page(shown, request, "file"))


async def _file(batches: Batches, request: Request) -> Response:
    return _json((await _owned_file(batches, request)).shown())


async def _content(batches: Batches, request: Request) -> Response:
    return _Content(batches, await _owned_file(batches, request))


async def _delete(batches: Batches, request: Request) -> Response:
    known = await _owned_file(batches, request)
    if not await batches.use(batches.store.remove_unused, known):
        raise ApiError(
            409, "a batch reads this file: cancel the batch, or wait for it", code="conflict"
        )
    return _json({"id": known.id, "object": "file", "deleted": True})


async def _owned_batch(batches: Batches, request: Request) -> Batch:
    name, owner = request.path_params["batch_id"], owner_of(request.scope)
    batch = await batches.use(batches.store.batch, name, owner)
    if batch is None:
        raise _missing("batch", name)
    return batches.now(batch)


async def _create(batches: Batches, request: Request) -> Response:
    with request_errors_as_problems():
        body = parse_body(BatchBody, request.scope["tpdet"].body)
    if body.endpoint not in RECORDED:
        raise bad_request(
            f"endpoint {body.endpoint!r} has no batches: use {', '.join(RECORDED)}", "endpoint"
        )
    owner = owner_of(request.scope)
    if batches.open_count >= limits.MAX_OPEN_BATCHES:
        most = limits.MAX_OPEN_BATCHES
        raise from_code("engine_overloaded", f"{most} batches are worked on: try again later")
    batch = Batch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=int(time.time()),
        metadata=body.metadata,
    )
    if not await batches.use(batches.store.begin, batch):
        raise bad_request(
            f"input_file_id {body.input_file_id!r} is no file of purpose {PURPOSE}: send one "
            "to /v1/files",
            "input_file_id",
        )
    batches.add(batch)
    return _json(batch.shown())


async def _listed(batches: Batches, request: Request) -> Response:
    known = await batches.use(batches.store.batches, owner_of(request.scope))
    return _json(_page([*map(batches.now, known)], request, "batch"))


async def _retrieve(batches: Batches, request: Request) -> Response:
    return _json((await _owned_batch(batches, request)).shown())


async def _cancel(batches: Batches, request: Request) -> Response:
    return _json((await batches.cancel(await _owned_batch(batches, request))).shown())


_HANDLERS = {
    ("POST", "/v1/files"): _upload,
    ("GET", "/v1/files"): _files,
    ("GET", "/v1/files/{file_id}"): _file,
    ("GET", "/v1/files/{file_id}/content"): _content,
    ("DELETE", "/v1/files/{file_id}"): _delete,
    ("POST", "/v1/batches"): _create,
    ("GET", "/v1/batches"): _listed,
    ("GET", "/v1/batches/{batch_id}"): _retrieve,
    ("POST", "/v1/batches/{batch_id}/cancel"): _cancel,
}


async def _received(request: Request, batches: Batches) -> BatchFile:
    """The file that a request sends, kept. Raises ApiError; nothing of it is left then."""
    exchange = request.scope["tpdet"]
    length = header(request.scope, b"content-length") or b""
    if length.isdigit() and int(length) > limits.MAX_FILE_BYTES + _FORM_BYTES:
        raise too_large()
    await _check_room(batches, int(length) if length.isdigit() else 0)
    if exchange.hold is not None:
        exchange.hold.release()  # what comes goes to the disk
    name, kind = new_id("file-"), header(request.scope, b"content-type") or b""
    try:
        with batches.store.new_content(name) as target:
            upload = Upload(kind, target)
            async for part in exchange.parts:
                await upload.feed(part)
            filename = upload.finish()
            await _check_room(batches, upload.bytes)  # it may have come in chunks, or beside others
    except StoreUnavailableError as error:
        raise from_code(
            "engine_overloaded", "the server's disk does not take the file: try again later"
        ) from error
    file = BatchFile(
        id=name,
        owner=owner_of(request.scope),
        created=int(time.time()),
        filename=filename,
        bytes=upload.bytes,
    )
    await batches.use(batches.store.put, file)
    return file


async def _check_room(batches: Batches, size: int) -> None:
    """Refuse (ApiError) a file of a size for which there is no room."""
    count, total = await batches.use(batches.store.size)
    if count >= limits.MAX_FILES or total + size > batches.most_bytes:
        raise ApiError(
            413, "this server keeps no more files: delete some (DELETE /v1/files/ID)", param="file"
        )


class _Content(Response):
    """A file's bytes, a portion at a time."""

    def __init__(self, batches: Batches, file: BatchFile) -> None:
        super().__init__()
        self._batches, self._file = batches, file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it; ends early where nobody reads."""
        file = self._file
        portions = self._sent() if file.batch is None else self._rendered(file.batch)
        first = await anext(portions, b"")
        headers = [(b"content-type", b"application/jsonl")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for portion in portions:
            if scope["tpdet"].gone.done():
                return
            await send({"type": "http.response.body", "body": portion, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _sent(self) -> AsyncIterator[bytes]:
        with await self._batches.use(self._batches.store.open_content, self._file.id) as file:
            while portion := await self._batches.use(file.read, _PORTION_BYTES):
                yield portion

    async def _rendered(self, batch_id: str) -> AsyncIterator[bytes]:
        rendered, after = self._batches.store.rendered, -1
        while rows := await self._batches.use(rendered, batch_id, self._file.failed, after):
            yield b"".join(row.output + b"\n" for row in rows)
            after = rows[-1].line


def _page(known: Sequence[Listed], request: Request, kind: str) -> Json:
    """A page of a list, the newest first, as `limit`, `after` and `order` ask for."""
    asked, most = request.query_params, _MOST_LISTED[kind]
    limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
    number = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
    if not 1 <= number <= most:
        raise bad_request(f"limit {limit[:20]!r} is no number of 1 to {most}", "limit")
    if order not in ("asc", "desc"):
        raise bad_request("order is asc or desc", "order")
    known = known if order == "desc" else known[::-1]
    if after is not None:
        names = [one.id for one in known]
        if after not in names:
            raise bad_request(f"after {after[:80]!r} names no {kind}: leave it out", "after")
        known = known[names.index(after) + 1 :]
    shown = [one.shown() for one in known[:number]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(known) > len(shown),
    }


def _missing(kind: str, name: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {name[:80]!r} under this key", code="not_found")


def _json(content: Json) -> Response:
    return Response(to_json(content), media_type="application/json")
