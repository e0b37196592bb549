"""All live requests by id, from admission until the last choice ends."""

from collections import abc

from tpdet.errors import OverloadedError, RequestError
from tpdet.grammar.constraint import Constraint
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.request import Request
from tpdet.scheduler.limits import check_fits
from tpdet.scheduler.sequence import Sequence


class RequestTable:
    """Requests in the order of their admission; `max_queue` of them may wait for a first page."""

    def __init__(
        self,
        max_queue: int,
        max_model_len: int,
        constrain: abc.Callable[[AnswerForm], Constraint] | None = None,
    ) -> None:
        """constrain: makes a constraint of the form of an answer, or raises RequestError."""
        self._constrain = constrain
        self.max_queue, self.max_model_len = max_queue, max_model_len
        self._requests: dict[str, list[Sequence]] = {}
        self._unstarted: dict[str, None] = {}  # requests that never had a page, oldest first
        self._next_admission = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def waiting_count(self) -> int:
        """Requests that never had a page; `max_queue` bounds them."""
        return len(self._unstarted)

    @property
    def next_admission(self) -> int:
        """The admission number of the next request."""
        return self._next_admission

    def add(self, request: Request, num_pages: int) -> list[Sequence]:
        """Admit `request`: its `n` sequences, under the next admission number.

        num_pages: pages of the whole KV cache. Raises RequestError for a request that can never
        run, whose schema cannot be used or whose id is in use; OverloadedError when `max_queue`
        requests wait already.
        """
        name = request.request_id
        if name in self._requests:
            raise RequestError(
                f"request id {name!r} is in use: give each request its own", "request_id"
            )
        check_fits(request, num_pages, self.max_model_len)
        if len(self._unstarted) >= self.max_queue:
            raise OverloadedError(f"{self.max_queue} requests wait already: try again later")
        sequences = self._choices(request)
        self._next_admission += 1
        self._requests[name] = sequences
        self._unstarted[name] = None
        return sequences

    def started(self, sequences: abc.Iterable[Sequence]) -> None:
        """Note that sequences got pages: their requests never count as waiting again."""
        if self._unstarted:
            for sequence in sequences:
                self._unstarted.pop(sequence.request_id, None)

    def live(self, request_id: str, choice: int | None = None) -> list[Sequence]:
        """The unfinished choices of a request, or just `choice`; empty for an unknown id."""
        sequences = self._requests.get(request_id, ())
        return [s for s in sequences if not s.finished and choice in (None, s.choice)]

    def unfinished(self) -> abc.Iterator[Sequence]:
        """Every unfinished sequence, by admission number and choice."""
        for request_id in self._requests:
            yield from self.live(request_id)

    def drop_if_finished(self, request_id: str) -> None:
        """Drop a request whose choices have all finished."""
        if not self.live(request_id):
            del self._requests[request_id]
            self._unstarted.pop(request_id, None)

    def _choices(self, request: Request) -> list[Sequence]:
        """The `n` sequences of a request. Raises RequestError for a form that cannot be used."""
        form, constrain, admission = request.params.form, self._constrain, self._next_admission
        if form is not None and constrain is None:
            raise RequestError(f"{form.field} needs a tokenizer: none is loaded", form.field)
        return [
            Sequence.of(request, admission, choice, constrain(form) if form and constrain else None)
            for choice in range(request.params.n)
        ]
