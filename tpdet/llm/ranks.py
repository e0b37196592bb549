"""What the ranks of an `LLM` say to each other around a call: that they ask the same; the answers.

Alone, nothing is said.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import blake3
import msgspec

from tpdet.errors import (
    DisagreementError,
    IntegrityError,
    NumericalError,
    OverloadedError,
    RequestError,
    TpdetError,
    UsageError,
)
from tpdet.llm.results import RequestOutput
from tpdet.request import Request

if TYPE_CHECKING:
    from tpdet.engine import Engine

CALL_TIMEOUT = 1800.0  # seconds ranks may be apart between two calls, and while answers are written
PIECE_BYTES = 32 << 20  # answers travel in pieces: a message has a cap
_INTERRUPT = "interrupt"
_KINDS = {
    kind.code: kind
    for kind in (RequestError, NumericalError, IntegrityError, OverloadedError, UsageError)
}

Told = list[RequestOutput] | BaseException
"""What comes of a call: answers, or the error that ended it and left the engine as it was."""


class Asked(NamedTuple):
    """The requests of a call, and the texts of those prompts that were text."""

    requests: list[Request]
    texts: list[str | None]


class _Word(msgspec.Struct, frozen=True):
    """What a rank says before a call: a digest of what it asks, or why it refuses to."""

    digest: bytes = b""
    refusal: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    """An error of rank 0; `kind` is its code, or what it is called."""

    kind: str
    message: str
    param: str | None = None


class _Answers(msgspec.Struct, frozen=True):
    """All that rank 0 tells of a call."""

    outputs: list[RequestOutput] | None = None
    failure: _Failure | None = None


_words = msgspec.msgpack.Decoder(_Word)
_answers = msgspec.msgpack.Decoder(_Answers)


def agree_on_call(engine: "Engine", make: Callable[[], Asked]) -> Asked | BaseException:
    """What every rank asks, or why the call cannot be: this rank's own error, or a disagreement.

    Raises PeerLostError if a rank is lost.
    """
    refusal: BaseException | None = None
    asked = Asked([], [])
    try:
        asked = make()
    except Exception as error:
        refusal = error
    if engine.world.size > 1:
        digest = blake3.blake3(msgspec.msgpack.encode(asked.requests)).digest()
        word = _Word(digest, None if refusal is None else str(refusal))
        other = _first_disagreement(engine, word)
        refusal = refusal or other
    return asked if refusal is None else refusal


def share_answers(engine: "Engine", told: Told | None) -> Told:
    """What rank 0 tells of a call, on every rank; None from the others."""
    world = engine.world
    if world.size == 1 and told is not None:
        return told
    from tpdet.comm.world.exit_reasons import reporting_exit

    world.set_timeout(CALL_TIMEOUT)
    with reporting_exit(world, lambda: "the answers of a call"):
        if told is not None:
            data = msgspec.msgpack.encode(_encoded(told))
            pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
            engine.control.broadcast(str(len(pieces)).encode())
            for piece in pieces:
                engine.control.broadcast(piece)
        else:
            count = int(engine.control.broadcast(None))
            data = b"".join(engine.control.broadcast(None) for _ in range(count))
    world.set_timeout(engine.config.step_timeout)
    return _decoded(_answers.decode(data)) if told is None else told


def give_up_world(engine: "Engine", error: BaseException) -> None:
    """Tell the other ranks, where they wait for this one, why it goes on no more."""
    if engine.world.size > 1:
        from tpdet.comm.world.exit_reasons import give_up

        give_up(engine.world, error)


def _first_disagreement(engine: "Engine", word: _Word) -> DisagreementError | None:
    from tpdet.comm.world.exit_reasons import reporting_exit

    world = engine.world
    world.set_timeout(CALL_TIMEOUT)
    with reporting_exit(world, lambda: "a call"):
        words = [_words.decode(data) for data in world.gather_bytes(msgspec.msgpack.encode(word))]
    world.set_timeout(engine.config.step_timeout)
    for rank, other in enumerate(words):
        if other.refusal is not None:
            return DisagreementError(f"rank {rank} did not make this call: {other.refusal}")
        if other != words[0]:
            return DisagreementError(
                f"rank {rank} called with other prompts or parameters than rank 0: make the same "
                "call on every rank"
            )
    return None


def _encoded(told: Told) -> _Answers:
    if not isinstance(told, BaseException):
        return _Answers(outputs=told)
    if isinstance(told, KeyboardInterrupt):
        return _Answers(failure=_Failure(_INTERRUPT, ""))
    kind = told.code if type(told) in _KINDS.values() else type(told).__name__  # type: ignore[attr-defined]
    return _Answers(failure=_Failure(kind, str(told), getattr(told, "param", None)))


def _decoded(answers: _Answers) -> Told:
    failure = answers.failure
    if failure is None:
        return answers.outputs or []
    if failure.kind == _INTERRUPT:
        return KeyboardInterrupt()
    if failure.kind == RequestError.code:
        return RequestError(failure.message, failure.param)
    kind = _KINDS.get(failure.kind)
    if kind is not None:
        return kind(failure.message)
    return TpdetError(f"rank 0 ended this call by {failure.kind}: {failure.message}")
