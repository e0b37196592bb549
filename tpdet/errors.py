"""Every error tpdet raises on purpose, each with the exit code and the wire code clients rely on.

A message names the value that was refused and the remedy. `exit_code` is what a process ends with
when the error stops it; `code` is the stable machine-readable name in JSON errors.
"""


class TpdetError(Exception):
    """Base of all deliberate errors; on its own it is an internal error.

    `public` is what clients may be told of it besides its code: no paths, no addresses.
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

    def told(self, public: str, exit_code: int = 75, code: str = "engine_dead") -> "PeerLostError":
        """This error, once it is known whom it is about.

        Of a peer that told why it gave up, exit code and code are those of its own error.
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
    """A reload of weights that was refused; the old ones serve on. Code and exit code say why."""

    def __init__(self, message: str, exit_code: int = 65, code: str = "bad_checkpoint") -> None:
        super().__init__(message)
        self.exit_code, self.code = exit_code, code


class NumericalError(TpdetError):
    """NaN or infinity in one request's logits: that request fails, nobody else's."""

    code = "numerical_error"


class IntegrityError(TpdetError):
    """A page, plan or table that is not what it must be; the step is refused."""

    exit_code = 75
    code = "integrity_error"

    @classmethod
    def in_public(cls, message: str) -> "IntegrityError":
        """An error whose whole message clients may read: it names no path and no address."""
        error = cls(message)
        error.public = message
        return error


class OverloadedError(TpdetError):
    """The queue is full; try again later."""

    code = "engine_overloaded"


class DrainTimeoutError(TpdetError):
    """Stopped, and requests still ran when the drain timeout was over: they got an error."""

    exit_code = 143
    code = "drain_timeout"
