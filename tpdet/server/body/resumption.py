"""What of an answer its client already has: it is computed again and compared, not sent again."""

from tpdet.request import TokenOutput
from tpdet.server.body.prepare import Call
from tpdet.server.body.resume import FIELD, ResumePoint
from tpdet.server.wire.cursor import Progress
from tpdet.server.wire.problems import ApiError, bad_request
from tpdet.text.outputs import TextDelta

ChoiceKey = tuple[str, int]  # request id, choice


class Resumption:
    """The tokens of a call's choices that are still to be compared.

    `pending`: some are, or one was wrong, so nothing may be sent yet.
    """

    def __init__(self, call: Call) -> None:
        self._point = call.resume
        by_ids = call.resume is not None and call.resume.place == FIELD
        self._ids = call.requests[0].drafts if by_ids else ()
        self._left: dict[ChoiceKey, int] = {
            (request.request_id, choice): count
            for request in call.requests
            for choice, count in enumerate(request.resumed)
            if count
        }
        self._progress = Progress(len(call.requests) * call.choices)
        self.pending = bool(self._left)
        self.choices = frozenset(self._left)
        """The choices of which the client has tokens."""

    def take(
        self, key: ChoiceKey, index: int, output: TokenOutput, delta: TextDelta
    ) -> TextDelta | None:
        """What of a token's delta is to be sent; `index` is its choice's place in the answer.

        None where the client has all of it. How a choice ended is told once more, without its text.
        Raises ApiError for a token that is not the client's.
        """
        left = self._left.get(key)
        if left is None or self._point is None:
            return delta
        if output.approximate:
            raise bad_request("an approximate answer cannot be resumed", self._point.place)
        position = self._progress.counts[index]
        self._compare(index, position, output.token_id)
        self._progress.add(index, output.token_id, output.logprob)
        if delta.finish_reason is not None and left > 1:
            raise _mismatch(
                self._point,
                index,
                position + 1,
                f"the resumed answer goes on, and this server's ends after {position + 1} tokens",
            )
        if left > 1:
            self._left[key] = left - 1
            return None
        del self._left[key]
        if not self._left:
            self._check_sum()
            self.pending = False
        if delta.finish_reason is None:
            return None
        return TextDelta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

    def _compare(self, choice: int, position: int, token_id: int) -> None:
        """Compare with the client's ids, if it sent them: with the drafts of its one prompt."""
        theirs = self._ids[choice][position] if choice < len(self._ids) else token_id
        if theirs != token_id:
            assert self._point is not None
            raise _mismatch(
                self._point,
                choice,
                position,
                f"the resumed token is {theirs}, and this server's is {token_id}",
            )

    def _check_sum(self) -> None:
        point = self._point
        if point is not None and point.checksum not in (None, self._progress.checksum):
            raise ApiError(
                409,
                "this server's tokens, up to the place of Last-Event-ID, are not those that the "
                "stream delivered: send the request that it began with",
                param=point.place,
                code="resume_mismatch",
            )


def _mismatch(point: ResumePoint, choice: int, position: int, what: str) -> ApiError:
    place = f"{FIELD}.choices[{choice}][{position}]" if point.place == FIELD else point.place
    return ApiError(
        409, f"choice {choice}, position {position}: {what}", param=place, code="resume_mismatch"
    )
