"""An answer that goes on: what its client has of it is computed again and compared."""

from collections.abc import Sequence

from tpdet.errors import DisagreementError, RequestError
from tpdet.requests.engine_facts import AnswerOrigin
from tpdet.requests.request import Request


class ResumeMismatch(DisagreementError):
    """What a client has was computed by something else; `field` is its place in the resume."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ResumedTokens:
    """Tokens of choices that are still to be compared; nothing may be shown while `pending`."""

    def __init__(self, counts: Sequence[int], ids: Sequence[Sequence[int]] = ()) -> None:
        """counts: tokens of each choice that the client has; ids: they themselves, if it has."""
        self._left, self._position, self._ids = [*counts], [0] * len(counts), ids
        self.pending = any(counts)

    def left(self, choice: int) -> int:
        """Tokens of a choice that are still to come."""
        return self._left[choice] if choice < len(self._left) else 0

    def take(self, choice: int, token_id: int, ended: bool) -> None:
        """Compare the next token of a choice; `ended`: it is the choice's last one.

        Raises ResumeMismatch for a token that is not the client's.
        """
        position = self._position[choice]
        theirs = self._ids[choice][position] if choice < len(self._ids) else token_id
        if theirs != token_id:
            raise _mismatch(
                choice, position, f"the resumed token is {theirs}, and the one here is {token_id}"
            )
        if ended and self._left[choice] > 1:
            raise _mismatch(
                choice,
                position + 1,
                f"the resumed answer goes on, and the one here ends after {position + 1} tokens",
            )
        self._left[choice] -= 1
        self._position[choice] += 1
        self.pending = any(self._left)


def shown_digests(fingerprint: str) -> tuple[str, str] | None:
    """The first digits of contract id and model digest; None for an approximate answer.

    fingerprint: a system fingerprint, `tpdet-<contract>-<model>-<architecture>`.
    """
    _, contract, model, *_ = fingerprint.split("-")
    return None if contract == "approximate" else (contract, model)


def check_resume_origin(resumed: AnswerOrigin, here: AnswerOrigin, by: str = "a server") -> None:
    """Refuse (ResumeMismatch) what something else computed; by: whom to ask instead."""
    for name, theirs, ours in zip(AnswerOrigin._fields, resumed, here, strict=True):
        if not ours.startswith(theirs):
            verb = "are" if name == "weights" else "is"
            shown = ours if name == "logprobs_mode" else ours[: len(theirs)]
            raise ResumeMismatch(
                f"the {name} of the answer to resume {verb} {theirs}, and here {verb} {shown}: "
                f"ask {by} with the same {name}",
                name,
            )


def check_resumed_counts(request: Request, field: str) -> None:
    """Refuse (RequestError) more tokens than the answer may have."""
    for choice, count in enumerate(request.resumed):
        if count > request.max_tokens:
            raise RequestError(
                f"choice {choice} has {count} tokens already, over max_tokens {request.max_tokens}:"
                " send the request that the answer began with",
                field,
            )


def check_resume_fields(resumed_seed: int, seed: int | None, has_drafts: bool, field: str) -> None:
    """Refuse (RequestError) a resume beside drafts, or beside another seed."""
    if has_drafts:
        raise RequestError("resume and drafts are given: leave drafts out", field)
    if seed not in (None, resumed_seed):
        raise RequestError(
            f"seed {seed} is not the seed of the answer to resume, {resumed_seed}: send one",
            f"{field}.seed",
        )


def _mismatch(choice: int, position: int, what: str) -> ResumeMismatch:
    return ResumeMismatch(
        f"choice {choice}, position {position}: {what}: the request is not the one that the answer "
        "began with, or one of the two computed a wrong token",
        f"choices[{choice}][{position}]",
    )
