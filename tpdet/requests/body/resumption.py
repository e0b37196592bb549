"""What of an answer its client already has: it is computed again and compared, not sent again."""

from tpdet.requests.body.cursor import StreamProgress
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.body.resume import FIELD, mismatch
from tpdet.requests.request import TokenOutput
from tpdet.requests.resumed import ResumedTokens, ResumeMismatch
from tpdet.text.outputs import TextDelta


class Resumption:
    """A call's tokens that are still to be compared; nothing may be sent while `pending`."""

    def __init__(self, call: Call) -> None:
        self._point = call.resume
        by_ids = call.resume is not None and call.resume.place == FIELD
        counts = [0] * (len(call.requests) * call.choices)
        keys = set()
        for place, request in enumerate(call.requests):
            for choice, count in enumerate(request.resumed):
                counts[place * call.choices + choice] = count
                if count:
                    keys.add((request.request_id, choice))
        self._tokens = ResumedTokens(counts, call.requests[0].drafts if by_ids else ())
        self._progress = StreamProgress(len(counts))
        self.pending = self._tokens.pending
        self.choices = frozenset(keys)
        """The choices of which the client has tokens."""

    def take(self, index: int, output: TokenOutput, delta: TextDelta) -> TextDelta | None:
        """What of a token's delta is to be sent; `index` is its choice's place in the answer.

        None where the client has all of it. How a choice ended is sent once more, without its text.
        Raises ApiError for a token that is not the client's.
        """
        if self._point is None or not self._tokens.left(index):
            return delta
        if output.approximate:
            raise bad_request("an approximate answer cannot be resumed", self._point.place)
        ended = delta.finish_reason is not None
        try:
            self._tokens.take(index, output.token_id, ended)
        except ResumeMismatch as error:
            raise mismatch(self._point, error) from None
        self._progress.add(index, output.token_id, output.logprob)
        if not self._tokens.pending:
            self._check_sum()
            self.pending = False
        if self._tokens.left(index) or not ended:
            return None
        return TextDelta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

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
