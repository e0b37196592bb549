"""Messages between the engine process (rank 0) and the HTTP process, as length-capped msgpack.

One zmq PAIR socket over `RUN_DIR/engine.sock` (mode 0600); the engine process binds, the HTTP
process connects. Further HTTP processes have theirs, `engine-1.sock` and so on. Every message is
sealed (seal.py) under a key that rank 0 makes for this start and process, and hands down on its
standard input; it is not the run secret, so that a process which faces clients knows nothing that
the ranks would obey.

Order of a life: Hello (HTTP is able to serve) -> EngineFacts (the engine is ready) -> Serving (the
port accepts) -> Submit, Abort, GiveUp, Control, NewsHeard, Ping against Accepted, Refused, Prompts,
Outputs, Controlled, Status -> Stop or Dead -> the HTTP process ends.
"""

import secrets
from typing import Generic, TypeVar

import msgspec

from tpdet.control.seal import OVERHEAD_BYTES, Opener, Sealer, derive
from tpdet.errors import IntegrityError, UsageError
from tpdet.requests.answer.prompt_scores import PromptPart
from tpdet.requests.body.limits import MAX_MESSAGE_BYTES
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import PooledOutput, Request, RequestFailed, TokenOutput

# sockaddr_un holds 108 bytes with the terminating zero.
MAX_SOCKET_PATH_BYTES = 107
_TO_HTTP, _TO_ENGINE = "tpdet engine to http", "tpdet http to engine"

# Wire code and message for new requests, by the states in which the engine takes none.
REFUSALS = {
    "draining": ("draining", "the server is shutting down and takes no new requests"),
    "untrusted": ("engine_dead", "the server's answers have changed: it takes no requests"),
    "unusable": ("engine_dead", "the model's weights cannot answer: it takes no requests"),
    "damaged": ("engine_dead", "the server's page tables are damaged: it takes no requests"),
    "reloading": ("draining", "the server is loading other weights: try again"),
    "incomplete": (
        "weights_incomplete",
        "the weights are incomplete: no answer until an update or a reload has brought all",
    ),
    "paused": ("paused", "the server is paused: try again once it is resumed"),
}


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """HTTP to engine: tokenizer and application are loaded."""

    pid: int


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """HTTP to engine: connections are being accepted."""


class CallPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of the prompts of one HTTP request: the engine counts the call as one that runs."""

    call_id: str
    first: bool
    last: bool


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """HTTP to engine: the prompts of one HTTP request, or a part, admitted together or not at all.

    If the first request's seed is None the engine chooses one, and all of the group without one
    use it.
    """

    group_id: str
    requests: tuple[Request, ...]
    part: CallPart | None = None


class GiveUp(msgspec.Struct, frozen=True, tag="give up"):
    """HTTP to engine: no more parts of this call come."""

    call_id: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """HTTP to engine: nobody reads this request any more, or this choice of it."""

    request_id: str
    choice: int | None = None


class Control(msgspec.Struct, frozen=True, tag="control"):
    """HTTP to engine: do what a control route asks for; `body` is JSON of the verb's fields."""

    call_id: int
    verb: str
    body: bytes


class NewsHeard(msgspec.Struct, frozen=True, tag="news heard"):
    """HTTP to engine: whoever asks this process from now on meets the state of Status `news`."""

    news: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """HTTP to engine, every second: the HTTP process is not stuck."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Engine to HTTP: the group is queued, its first request under this seed."""

    group_id: str
    seed: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Engine to HTTP: nothing of the group was queued; `code` is a wire code."""

    group_id: str
    code: str
    message: str
    param: str | None = None


class Prompts(msgspec.Struct, frozen=True, tag="prompts"):
    """Engine to HTTP: scores of prompts; those of a request precede its first token."""

    parts: tuple[PromptPart, ...]


class Outputs(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    """Engine to HTTP: tokens, failures and pooled answers of one step.

    Of several HTTP processes each gets those of its own requests, and the first hears of every
    step, with its `step_seconds`.
    """

    step_seconds: float | None
    tokens: tuple[TokenOutput, ...]
    failed: tuple[RequestFailed, ...]
    pooled: tuple[PooledOutput, ...] = ()


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Engine to HTTP, every half second and at changes: the engine makes progress.

    `state` is "accepting" or one of REFUSALS. `news` counts changes of it and of the facts that are
    served: the HTTP process answers each new number by NewsHeard.
    `counters` holds the engine's statistics by name; `tpdet.server.front.metrics` knows
    which it shows.
    """

    state: str
    running: int
    waiting: int
    counters: dict[str, float]
    news: int = 0


class Controlled(msgspec.Struct, frozen=True, tag="controlled"):
    """Engine to HTTP: a control call is done or refused; `status` is HTTP's, `body` JSON."""

    call_id: int
    status: int
    body: bytes


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Engine to HTTP: every request is finished; flush the answers and end with 0."""


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """Engine to HTTP: the engine ends now; end every stream with this error, then the process."""

    code: str
    message: str


ToEngine = Hello | Serving | Submit | Abort | GiveUp | Control | NewsHeard | Ping
ToHttp = EngineFacts | Accepted | Refused | Prompts | Outputs | Controlled | Status | Stop | Dead

_encoder = msgspec.msgpack.Encoder()
Sent = TypeVar("Sent")
Heard = TypeVar("Heard")


class _ChannelEnd(Generic[Sent, Heard]):
    """One process's end of the channel, under a key of 32 bytes."""

    _sends: str
    _hears: str
    _other: str
    _decoder: msgspec.msgpack.Decoder[Heard]

    def __init__(self, key: bytes) -> None:
        self._sealer = Sealer(derive(key, self._sends))
        self._opener = Opener(derive(key, self._hears))

    def encode(self, message: Sent) -> bytes:
        """Sealed bytes of the next message. Raises IntegrityError past the cap."""
        data = _encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES - OVERHEAD_BYTES:
            raise IntegrityError(
                f"a {type(message).__name__} message of {len(data)} bytes is over the cap of "
                f"{MAX_MESSAGE_BYTES - OVERHEAD_BYTES}"
            )
        return self._sealer.seal(data)

    def decode(self, data: bytes) -> Heard:
        """The other process's next message. Raises IntegrityError for a wrong seal or schema."""
        try:
            return self._decoder.decode(self._opener.open(data))
        except (msgspec.DecodeError, ValueError, IntegrityError) as error:
            message = f"a message of the {self._other} process is refused: {error}"
            raise IntegrityError(message) from error


class EngineEnd(_ChannelEnd[ToHttp, ToEngine]):
    """The engine process's end."""

    _sends, _hears, _other = _TO_HTTP, _TO_ENGINE, "HTTP"
    _decoder = msgspec.msgpack.Decoder(ToEngine)


class HttpEnd(_ChannelEnd[ToEngine, ToHttp]):
    """The HTTP process's end."""

    _sends, _hears, _other = _TO_ENGINE, _TO_HTTP, "engine"
    _decoder = msgspec.msgpack.Decoder(ToHttp)


def socket_address(run_dir: str, process: int = 0) -> str:
    """The zmq address of an HTTP process inside `run_dir`. Raises as `socket_path`."""
    name = f"engine-{process}.sock" if process else "engine.sock"
    return f"ipc://{socket_path(run_dir, name)}"


def socket_path(run_dir: str, name: str) -> str:
    """The path of a socket inside `run_dir`. Raises UsageError if it is too long for one."""
    path = f"{run_dir.rstrip('/')}/{name}"
    size = len(path.encode())
    if size > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"--run-dir makes a socket path of {size} bytes; the system allows "
            f"{MAX_SOCKET_PATH_BYTES}: use a shorter directory"
        )
    return path


def new_request_id(process: int = 0) -> str:
    """32 hex digits: 30 random ones, and the HTTP process's number (0 to 255)."""
    return f"{secrets.token_hex(15)}{process:02x}"


def process_of(request_id: str) -> int:
    """The HTTP process of an engine's request: KIND-ID-NUMBER, the ID as above."""
    return int(request_id[: request_id.rindex("-")][-2:], 16)
