"""Lines of OpenAI's batch format: a request of the input, and the line of its answer.

One code for whoever answers them: `tpdet run-batch` by a model or a server, and `/v1/batches`.
An input line is {"custom_id", "method": "POST", "url", "body"}, an output line {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import blake3

from tpdet.requests.body import limits
from tpdet.requests.body.json_body import parse_object
from tpdet.requests.body.problems import ApiError
from tpdet.requests.routes import RECORDED

Json = dict[str, Any]

_KEYS = frozenset({"custom_id", "method", "url", "body"})
_SEED_DOMAIN, _LINE_DOMAIN = b"tpdet-batch-seed-1\n", b"tpdet-batch-line-1\n"
_OUTPUT_DOMAIN = b"tpdet-batch-output-1\n"
_SEED_BITS = 53  # a number in the JSON of every language

VARYING = (
    "id", "request", "response.request_id", "response.body.id", "response.body.created",
    "response.body.created_at", "response.body.completed_at", "response.body.request_id",
    "response.body.usage.prompt_tokens_details", "response.body.usage.input_tokens",
    "response.body.usage.cache_read_input_tokens",
    "response.body.usage.input_tokens_details",
    "response.body.usage.completion_tokens_details.accepted_prediction_tokens",
    "response.body.usage.completion_tokens_details.rejected_prediction_tokens",
)  # fmt: skip
"""Parts of an output line that are no function of its request: an output's digest leaves them out.

`request` stands beside an answer that `run-batch --record` keeps.
"""


class BatchLineError(ValueError):
    """A line that is no request of a batch; `param` names the key that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BatchRequest(NamedTuple):
    """A request of a batch. `custom_id` names it, and no other of its file."""

    custom_id: str
    url: str
    body: Json

    @property
    def seeded_body(self) -> Json:
        """The body, with a seed that is a function of `custom_id` where it has none.

        So the answer depends neither on its place nor on what ran before, and equal bodies under
        other names have other answers.
        """
        digest = blake3.blake3(_SEED_DOMAIN + self.custom_id.encode()).digest(8)
        return with_seed(self.body, int.from_bytes(digest, "little") >> (64 - _SEED_BITS))


def with_seed(body: Json, seed: int) -> Json:
    """A body with a seed, which is this one where it has none."""
    own = body.get("tpdet")
    has_seeds = isinstance(own, dict) and own.get("seeds") is not None
    return {**body, "seed": seed} if body.get("seed") is None and not has_seeds else body


class BatchLines:
    """Reads the lines of one file, in their order. `url`: where all must go; None for any."""

    def __init__(self, url: str | None = None) -> None:
        self._urls = (*RECORDED,) if url is None else (url,)
        self._numbers: dict[str, int] = {}

    def read(self, number: int, data: bytes) -> BatchRequest:
        """The request in a line. Raises BatchLineError; the messages do not name the line."""
        if len(data) > limits.MAX_BODY_BYTES:
            raise BatchLineError(f"it is over {limits.MAX_BODY_BYTES} bytes: send less")
        try:
            fields = parse_object(data, "it")
        except ApiError as error:
            raise BatchLineError(error.message, error.param) from None
        if not _KEYS - {"method"} <= fields.keys() <= _KEYS:
            raise BatchLineError("it does not have the keys custom_id, method, url and body")
        custom_id, url, body = fields["custom_id"], fields["url"], fields["body"]
        if fields.get("method", "POST") != "POST":
            raise BatchLineError("use method POST", "method")
        if url not in self._urls:
            raise BatchLineError(f"use url {' or '.join(self._urls)}", "url")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= limits.MAX_NAME_CHARACTERS:
            most = limits.MAX_NAME_CHARACTERS
            raise BatchLineError(f"custom_id is text of 1 to {most} characters", "custom_id")
        if not isinstance(body, dict):
            raise BatchLineError("body is an object", "body")
        if body.get("stream"):
            raise BatchLineError("a batch has no streams: leave stream out", "body.stream")
        first = self._numbers.setdefault(custom_id, number)
        if first != number:
            raise BatchLineError(
                f"line {first} has the same custom_id: each answer is found by its own", "custom_id"
            )
        return BatchRequest(custom_id, url, body)


def answered_line(name: str, custom_id: str, request_id: str | None, body: Json) -> Json:
    """The output line of an answer. name: its own id."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": None}


def failed_line(name: str, custom_id: str, code: str, message: str) -> Json:
    """The output line of a request that nobody answered."""
    error = {"code": code, "message": message}
    return {"id": name, "custom_id": custom_id, "response": None, "error": error}


def refused_line(name: str, custom_id: str, request_id: str | None, status: int, body: Any) -> Json:
    """The output line of a request that was refused; body: what was answered, an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {"message": str(body)}
    shown = {"code": error.get("code") or error.get("type"), "message": error.get("message")}
    return {"id": name, "custom_id": custom_id, "response": response, "error": shown}


def line_digest(line: Mapping[str, Any]) -> bytes:
    """The digest of an output line without what is VARYING; 32 bytes."""
    text = json.dumps(_stable(line), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return blake3.blake3(_LINE_DOMAIN + text.encode("utf-8", "surrogatepass")).digest()


def output_digest(lines: Iterable[bytes]) -> str:
    """The digest of an output of these line digests, whatever their order; 64 hex digits."""
    return blake3.blake3(_OUTPUT_DOMAIN + b"".join(sorted(lines))).hexdigest()


def _stable(value: Any, path: str = "") -> Any:
    """The same without what is VARYING, which lies in objects alone."""
    if not isinstance(value, Mapping):
        return value
    parts = ((key, f"{path}.{key}" if path else key) for key in value)
    return {key: _stable(value[key], inner) for key, inner in parts if inner not in VARYING}
