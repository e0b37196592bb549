"""Continues an answer: what its client says of the tokens that it has, checked against the server.

A body names them as `tpdet.resume`, by their ids; a `Last-Event-ID` header names a place in the
stream of the same body.
"""

from typing import NamedTuple

import msgspec

from tpdet.audit.replay import request_seed
from tpdet.requests.body.cursor import read_cursor
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.body.schema import GenerationBody, Resume
from tpdet.requests.engine_facts import AnswerOrigin, EngineFacts
from tpdet.requests.request import Request, with_seed
from tpdet.requests.resumed import (
    ResumeMismatch,
    check_resume_fields,
    check_resume_origin,
    check_resumed_counts,
)

FIELD, HEADER = "tpdet.resume", "last-event-id"


class ResumePoint(NamedTuple):
    """What computed the tokens that a client has; how many they are stands in `Request.resumed`.

    `checksum` is a cursor's; ids need none. `place` names the field or header.
    """

    place: str
    origin: AnswerOrigin
    checksum: int | None = None


def resume_of(body: GenerationBody) -> Resume | None:
    """A body's resume. Raises RequestError where another field contradicts it."""
    if body.tpdet is None or body.tpdet.resume is None:
        return None
    found = body.tpdet.resume
    check_resume_fields(found.seed, body.seed, body.tpdet.drafts is not None, FIELD)
    return found


def check_origin(point: ResumePoint, facts: EngineFacts) -> None:
    """Refuse (ApiError 409) to go on with what something else computed."""
    try:
        check_resume_origin(point.origin, facts.origin)
    except ResumeMismatch as error:
        raise mismatch(point, error) from None


def mismatch(point: ResumePoint, error: ResumeMismatch) -> ApiError:
    """The 409 for a token or an origin that is not the client's."""
    param = f"{FIELD}.{error.field}" if point.place == FIELD else point.place
    return ApiError(409, str(error), param=param, code="resume_mismatch")


def resumed_by_cursor(
    requests: tuple[Request, ...], text: str, facts: EngineFacts
) -> tuple[tuple[Request, ...], ResumePoint]:
    """The requests of a stream that goes on behind the cursor `text`.

    Raises ApiError, and RequestError for more tokens than an answer may have.
    """
    try:
        cursor = read_cursor(text)
    except ValueError as error:
        raise bad_request(
            f"Last-Event-ID {text[:80]!r}: {error}: send the id of the last event, or leave the "
            "header out",
            HEADER,
        ) from None
    point = ResumePoint(HEADER, cursor.origin, cursor.checksum)
    check_origin(point, facts)
    if requests[0].params.seed not in (None, cursor.seed):
        raise bad_request(
            f"the seed of Last-Event-ID is {cursor.seed}, the body's {requests[0].params.seed}: "
            "send the request that the stream began with",
            HEADER,
        )
    choices = requests[0].params.n
    if len(cursor.counts) != choices * len(requests):
        raise bad_request(
            f"Last-Event-ID is of {len(cursor.counts)} choices, the body of "
            f"{choices * len(requests)}: send the request that the stream began with",
            HEADER,
        )
    # The seed is the first prompt's. If the prompt gave it, the others gave theirs too.
    by_itself = len(requests) > 1 and request_seed(requests[0]) == cursor.seed
    resumed = []
    for place, request in enumerate(requests):
        counts = cursor.counts[place * choices : (place + 1) * choices]
        if request.params.seed is None:
            seed = request_seed(request) if by_itself else cursor.seed
            request = with_seed(request, seed)
        request = msgspec.structs.replace(request, resumed=counts)
        check_resumed_counts(request, HEADER)
        resumed.append(request)
    return tuple(resumed), point
