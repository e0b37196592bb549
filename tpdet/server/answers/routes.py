"""`GET /v1/answers/{request_digest}`: a stored answer, to whoever made it and knows its salt."""

import base64
import hashlib

from fastapi import FastAPI, Request
from starlette.responses import Response

from tpdet.requests.body.problems import ApiError
from tpdet.server.answers.cache import AnswerCache
from tpdet.server.answers.files import AnswerName
from tpdet.server.front.door import header, owner_of

SALT_HEADER = "tpdet-cache-salt"
_DIGITS = frozenset("0123456789abcdef")


def add_answer_routes(app: FastAPI, cache: AnswerCache | None) -> None:
    """Add the route; cache: None where no answers are kept."""

    @app.get("/v1/answers/{request_digest}")
    async def answer(request: Request) -> Response:
        if cache is None:
            raise ApiError(
                404, "no answers are kept here: --answer-cache DIR keeps them", code="not_found"
            )
        digest = request.path_params["request_digest"]
        salt = (header(request.scope, SALT_HEADER.encode()) or b"").decode("utf-8", "replace")
        stored = None
        if len(digest) == 64 and {*digest} <= _DIGITS:
            stored = await cache.read(AnswerName(digest, salt, owner_of(request.scope)))
        if stored is None:
            raise ApiError(
                404,
                "there is no stored answer of this request digest under this key and cache salt "
                f"(header {SALT_HEADER}): send the request again",
                code="not_found",
            )
        entry, content = stored
        tag = f'"{entry.replay_digest}"'
        headers = {
            "etag": tag,
            "cache-control": "private, immutable",
            "vary": f"authorization, x-api-key, {SALT_HEADER}",
        }
        if _matches(request.headers.get("if-none-match", ""), tag):
            return Response(status_code=304, headers=headers)
        digested = base64.b64encode(hashlib.sha256(content).digest()).decode()
        headers["repr-digest"] = f"sha-256=:{digested}:"
        return Response(content, media_type="application/json", headers=headers)


def _matches(condition: str, tag: str) -> bool:
    """Whether an If-None-Match names the tag; by weak comparison, as RFC 9110 says."""
    tags = [one.strip().removeprefix("W/") for one in condition.split(",")]
    return condition.strip() == "*" or tag in tags
