"""Errors as clients see them: one exception, one serialiser, used by every route.

`{"error": {"message", "type", "param", "code"}}`, at most 4 KiB, without paths, addresses or
tracebacks.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpdet.errors import RequestError
from tpdet.requests.body.limits import MAX_ERROR_BYTES, RETRY_AFTER_SECONDS

# Longest message and field name put on the wire, in characters: even if JSON escapes each of them
# to six bytes, the body stays under MAX_ERROR_BYTES.
MESSAGE_CHARACTERS = 560
PARAM_CHARACTERS = 64

RETRYABLE = (
    "engine_overloaded", "draining", "engine_dead", "paused", "weights_incomplete",
    "audit_unavailable", "aborted",
)  # fmt: skip
IN_VAIN = ("conflict", "resume_mismatch", "numerical_error")
"""Codes of statuses that clients send again by themselves, where the answer would be the same."""
SERVER_FAULTS = ("numerical_error", "integrity_error", "internal_error")
CODES = (
    RequestError.code, "authentication_error", "invalid_api_key", "method_not_allowed", "not_found",
    "conflict", "foreign_origin", "not_permitted", "sender_lost", "model_not_found",
    "not_supported", "resume_mismatch", "unknown_field", *RETRYABLE, *SERVER_FAULTS,
)  # fmt: skip
"""Every code, or type where there is no code, that an ApiError has."""
_ABOUT_RETRIES = {
    **dict.fromkeys(RETRYABLE, (("retry-after", str(RETRY_AFTER_SECONDS)),)),
    **dict.fromkeys(IN_VAIN, (("x-should-retry", "false"),)),
}
"""Headers by code. OpenAI's and Anthropic's clients send 408, 409, 429 and all from 500 again."""
_TEI_TYPES = {
    **dict.fromkeys(RETRYABLE, "unhealthy"),
    **dict.fromkeys((*SERVER_FAULTS, "not_supported"), "backend"),
    "engine_overloaded": "overloaded",
}


class ApiError(Exception):
    """An answer other than 200: HTTP status, wire type, code and the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        tei: bool = False,
    ) -> None:
        """headers: its own; without any, those that tell a client whether to send it again.

        tei: it is told in the form of text-embeddings-inference, whichever path was asked.
        """
        super().__init__(message)
        assert (code or kind) in CODES, "metrics count errors by the codes in CODES"
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.tei = param, code, tei
        self.headers = headers or _ABOUT_RETRIES.get(code or kind, ())

    def reworded(self, message: str, param: str | None) -> "ApiError":
        """The same refusal in other words, about a field by another name."""
        return ApiError(**vars(self) | {"message": message, "param": param})

    def body(self) -> bytes:
        """The JSON body, at most MAX_ERROR_BYTES."""
        error = {
            "message": _shorten(self.message, MESSAGE_CHARACTERS),
            "type": self.kind,
            "param": None if self.param is None else _shorten(self.param, PARAM_CHARACTERS),
            "code": self.code,
        }
        data = json.dumps({"error": error}, separators=(",", ":")).encode("ascii")
        assert len(data) <= MAX_ERROR_BYTES
        return data

    def tei_body(self) -> bytes:
        """The same in the form of text-embeddings-inference."""
        kind = _TEI_TYPES.get(self.code or self.kind, "validation")
        error = {"error": _shorten(self.message, MESSAGE_CHARACTERS), "error_type": kind}
        return json.dumps(error, separators=(",", ":")).encode("ascii")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 about one field."""
    return ApiError(400, message, param=param, code=code)


@contextmanager
def request_errors_as_problems(
    renamed: Callable[[ApiError], ApiError] = lambda error: error,
) -> Iterator[None]:
    """While it is entered, a RequestError becomes the ApiError that a client gets.

    renamed: words it, and what ApiError is raised, by the client's own names of fields.
    """
    try:
        yield
    except RequestError as error:
        raise renamed(bad_request(str(error), error.param)) from None
    except ApiError as error:
        raise renamed(error) from None


def from_code(code: str, message: str, param: str | None = None) -> ApiError:
    """The answer for a wire code of `tpdet.errors`, as the engine process reports it."""
    if code == RequestError.code:
        return bad_request(message, param)
    if code in RETRYABLE:
        return ApiError(503, message, kind=code, code=code)
    kind = code if code in SERVER_FAULTS else "internal_error"
    return ApiError(500, message, kind=kind, code=kind)


def internal_error() -> ApiError:
    """The answer for a fault of ours, whose details go to the log only."""
    return from_code("internal_error", "internal error; the server's log has the details")


def _shorten(text: str, limit: int) -> str:
    """The text without its middle where it is too long: a message ends with its remedy."""
    end = limit // 3
    return text if len(text) <= limit else f"{text[: limit - end - 3]}...{text[-end:]}"
