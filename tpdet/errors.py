"""Every error that tpdet raises on purpose, with the exit code and the code that clients rely on.

A message names the refused value and the remedy. `exit_code` is the exit code of a process that
the error ends; `code` is the stable machine-readable name in JSON errors.
"""


class TpdetError(Exception):
    """Base of all deliberate errors; raised itself, it is an internal error.

    Clients may read `code` and `public`; the latter names no path and no address.
    """

    exit_code = 70
    code = "internal_error"
    public = ""


class UsageError(TpdetError, ValueError):
    """A flag, argument or combination of them that cannot be used."""

    exit_code = 2
    code = "usage"


class RequestError(TpdetError, ValueError):
    """A request that is refused before it is queued; `param` names the field."""

    exit_code = 2
    code = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CheckpointError(TpdetError, ValueError):
    """A checkpoint, configuration file or log that is damaged or not supported."""

    exit_code = 65
    code = "bad_checkpoint"


class NotFoundError(TpdetError, FileNotFoundError):
    """A model, file or directory that does not exist."""

    exit_code = 66
    code = "not_found"


class ResourceError(TpdetError):
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


class NotPermittedError(TpdetError):
    """The operating system or a policy does not allow it."""

    exit_code = 77
    code = "not_permitted"


class DisagreementError(TpdetError):
    """Ranks disagree on configuration, fingerprint or a digest; names the field and both values."""

    exit_code = 78
    code = "disagreement"


class ReloadError(TpdetError):
    """A refused reload: the old weights stay in use. `code` and `exit_code` say why."""

    def __init__(self, message: str, exit_code: int = 65, code: str = "bad_checkpoint") -> None:
        super().__init__(message)
        self.exit_code, self.code = exit_code, code


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
    """The drain timeout ended while requests still ran; each of them got an error."""

    exit_code = 143
    code = "drain_timeout"
