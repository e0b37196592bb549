"""What the ranks of an `LLM` exchange around a call: first a digest of its requests, then answers.

A single rank exchanges nothing, and neither does one with followers, which make no calls.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import blake3
import msgspec

from tpdet.audit.pooled import PooledAssembler
from tpdet.errors import (
    DisagreementError,
    IntegrityError,
    NumericalError,
    OverloadedError,
    RequestError,
    TpdetError,
    UsageError,
)
from tpdet.llm.results import PooledResult, RequestOutput
from tpdet.requests.request import Request
from tpdet.text.outputs import RequestAssembler

if TYPE_CHECKING:
    from tpdet.engine import Engine

CALL_TIMEOUT = 1800.0
"""Seconds that a rank may be behind the others between two calls, and while answers are written."""
PIECE_BYTES = 32 << 20
"""Answers travel in pieces of this size, below the cap of a message."""
_INTERRUPT = "interrupt"
_KINDS = {
    kind.code: kind
    for kind in (RequestError, NumericalError, IntegrityError, OverloadedError, UsageError)
}

CallResult = list[RequestOutput] | list[PooledResult] | BaseException
"""The outcome of a call: its answers, or the error that ended it and left the engine usable."""


class CallRequests(NamedTuple):
    """What takes the outputs of each request of a call, and each prompt's text if it was text.

    `at_once`: choices in the engine at a time, at most; None for as many as it takes.
    """

    assemblers: Sequence[RequestAssembler | PooledAssembler]
    texts: list[str | None]
    at_once: int | None = None

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order of the prompts."""
        return [assembler.request for assembler in self.assemblers]


class _CallDigest(msgspec.Struct, frozen=True):
    """What a rank sends before a call: a digest of its requests, or why it refuses the call."""

    digest: bytes = b""
    refusal: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    """An error of rank 0; `kind` is its wire code, or the name of its class."""

    kind: str
    message: str
    param: str | None = None


class _Answers(msgspec.Struct, frozen=True):
    """What rank 0 sends after a call."""

    outputs: list[RequestOutput] | None = None
    pooled: list[PooledResult] | None = None
    failure: _Failure | None = None


_digests = msgspec.msgpack.Decoder(_CallDigest)
_answers = msgspec.msgpack.Decoder(_Answers)


def agree_on_call(
    engine: "Engine", make: Callable[[], CallRequests], shared: bool
) -> CallRequests | BaseException:
    """The call's requests, or why it cannot run: this rank's own error, or a DisagreementError.

    make: checks and makes the requests; may raise. shared: whether other ranks make the same call.
    Raises PeerLostError if a rank is lost.
    """
    refusal: BaseException | None = None
    given = CallRequests([], [])
    try:
        given = make()
    except Exception as error:
        refusal = error
    if shared:
        digest = blake3.blake3(msgspec.msgpack.encode(given.requests)).digest()
        own = _CallDigest(digest, None if refusal is None else str(refusal))
        other = _first_disagreement(engine, own)
        refusal = refusal or other
    return given if refusal is None else refusal


def share_answers(engine: "Engine", result: CallResult | None) -> CallResult:
    """Rank 0's `result` of a call, on every rank that made it; the other ranks pass None."""
    world = engine.world
    from tpdet.comm.world.exit_reasons import reporting_exit

    world.set_timeout(CALL_TIMEOUT)
    with reporting_exit(world, lambda: "the answers of a call"):
        if result is not None:
            data = msgspec.msgpack.encode(_encoded(result))
            pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
            engine.control.broadcast(str(len(pieces)).encode())
            for piece in pieces:
                engine.control.broadcast(piece)
        else:
            count = int(engine.control.broadcast(None))
            data = b"".join(engine.control.broadcast(None) for _ in range(count))
    world.set_timeout(engine.config.step_timeout)
    return _decoded(_answers.decode(data)) if result is None else result


def give_up_world(engine: "Engine", error: BaseException) -> None:
    """Report to the other ranks, which wait for this one, why it ends."""
    if engine.world.size > 1:
        from tpdet.comm.world.exit_reasons import give_up

        give_up(engine.world, error)


def _first_disagreement(engine: "Engine", own: _CallDigest) -> DisagreementError | None:
    from tpdet.comm.world.exit_reasons import reporting_exit

    world = engine.world
    world.set_timeout(CALL_TIMEOUT)
    with reporting_exit(world, lambda: "a call"):
        found = [_digests.decode(data) for data in world.gather_bytes(msgspec.msgpack.encode(own))]
    world.set_timeout(engine.config.step_timeout)
    for rank, other in enumerate(found):
        if other.refusal is not None:
            return DisagreementError(f"rank {rank} did not make this call: {other.refusal}")
        if other != found[0]:
            return DisagreementError(
                f"rank {rank} called with other prompts or parameters than rank 0: make the same "
                "call on every rank"
            )
    return None


def _encoded(result: CallResult) -> _Answers:
    if not isinstance(result, BaseException):
        pooled = [one for one in result if isinstance(one, PooledResult)]
        texts = [one for one in result if isinstance(one, RequestOutput)]
        return _Answers(outputs=texts or None, pooled=pooled or None)
    if isinstance(result, KeyboardInterrupt):
        return _Answers(failure=_Failure(_INTERRUPT, ""))
    kind = type(result).__name__
    if isinstance(result, TpdetError) and type(result) in _KINDS.values():
        kind = result.code
    return _Answers(failure=_Failure(kind, str(result), getattr(result, "param", None)))


def _decoded(answers: _Answers) -> CallResult:
    failure = answers.failure
    if failure is None:
        return answers.outputs or answers.pooled or []
    if failure.kind == _INTERRUPT:
        return KeyboardInterrupt()
    if failure.kind == RequestError.code:
        return RequestError(failure.message, failure.param)
    kind = _KINDS.get(failure.kind)
    if kind is not None:
        return kind(failure.message)
    return TpdetError(f"rank 0 ended this call by {failure.kind}: {failure.message}")
