"""Every error that tpdet raises on purpose, with the exit code and the code that clients rely on.

A message names the refused value and the remedy. `exit_code` is the exit code of a process that
the error ends; `code` is the stable machine-readable name in JSON errors.
"""

import re

MOST_CHARACTERS = 500
"""The most characters of a refusal's message.

A longer one loses its middle: names stand first, the remedy last.
"""

_SHOWN_LAST = 120
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")  # line breaks and escapes of terminals


class TpdetError(Exception):
    """Base of all deliberate errors; raised itself, it is an internal error.

    Clients may read `code` and `public`; the latter names no path and no address.
    """

    exit_code = 70
    code = "internal_error"
    public = ""


class Refusal(TpdetError):
    """Base of errors that quote input: the message is one line of at most `MOST_CHARACTERS`."""

    def __init__(self, *message: str) -> None:
        super().__init__(*map(_one_line, message))


def _one_line(message: str) -> str:
    line = _CONTROL.sub(" ", message)
    if len(line) <= MOST_CHARACTERS:
        return line
    return f"{line[: MOST_CHARACTERS - _SHOWN_LAST - 5]} ... {line[-_SHOWN_LAST:]}"


class UsageError(Refusal, ValueError):
    """A flag, argument or combination of them that cannot be used."""

    exit_code = 2
    code = "usage"


class RequestError(Refusal, ValueError):
    """A request that is refused before it is queued; `param` names the field."""

    exit_code = 2
    code = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CheckpointError(Refusal, ValueError):
    """A checkpoint, configuration file or log that is damaged or not supported."""

    exit_code = 65
    code = "bad_checkpoint"


class AuditError(Refusal, ValueError):
    """A receipt, checkpoint or audit log that is forged or damaged; names the first wrong part."""

    exit_code = 65
    code = "bad_audit"


class AuditUnavailableError(Refusal):
    """The audit log is locked by another process, read-only or full: nothing is recorded."""

    exit_code = 74
    code = "audit_unavailable"
    public = "the audit log cannot be written, and no answer is given without a receipt"


class NotFoundError(Refusal, FileNotFoundError):
    """A model, file or directory that does not exist."""

    exit_code = 66
    code = "not_found"


class ResourceError(Refusal):
    """Not enough memory, or a port that is taken."""

    exit_code = 71
    code = "no_resource"


class PeerLostError(TpdetError):
    """A rank (or the HTTP process) died, stopped answering or diverged."""

    exit_code = 75
    code = "engine_dead"

    def explained(
        self, public: str, exit_code: int = 75, code: str = "engine_dead"
    ) -> "PeerLostError":
        """This error, with what clients may read of it, once the lost peer is known.

        exit_code, code: those of the error that ended the peer, where it reported one.
        """
        self.public, self.exit_code, self.code = public, exit_code, code
        return self


class NotPermittedError(Refusal):
    """The operating system or a policy does not allow it."""

    exit_code = 77
    code = "not_permitted"


class DisagreementError(Refusal):
    """Ranks disagree on configuration, fingerprint or a digest; names the field and both values."""

    exit_code = 78
    code = "disagreement"


class ReloadError(Refusal):
    """A refused reload: the old weights stay in use. `code` and `exit_code` say why."""

    def __init__(self, message: str, exit_code: int = 65, code: str = "bad_checkpoint") -> None:
        super().__init__(message)
        self.exit_code, self.code = exit_code, code


class WeightUpdateError(Refusal):
    """A step of a weight update that is refused or failed.

    `status` is HTTP's, `missing` the names of tensors that did not arrive.
    """

    exit_code = 65
    code = "weight_update"

    def __init__(self, message: str, status: int = 400, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.status, self.missing = status, missing
        if status == 502:
            self.code = "sender_lost"


class NumericalError(TpdetError):
    """NaN or infinity in one request's logits: that request fails, no other does."""

    code = "numerical_error"


class IntegrityError(TpdetError):
    """A page, plan or table in a state that must not occur; the step is refused."""

    exit_code = 75
    code = "integrity_error"

    @classmethod
    def in_public(cls, message: str) -> "IntegrityError":
        """An error whose whole message clients may read: it must name no path and no address."""
        error = cls(message)
        error.public = message
        return error


class OverloadedError(TpdetError):
    """The queue is full; try again later."""

    code = "engine_overloaded"


class DrainTimeoutError(TpdetError):
    """A drain ended while requests still ran; each of them got an error."""

    exit_code = 143
    code = "drain_timeout"
