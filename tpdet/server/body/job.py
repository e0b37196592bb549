"""Messages between the HTTP process and a body worker: frames of MessagePack over pipes.

A frame is its length (8 bytes, big-endian) and that many bytes. The first frame to a worker is its
WorkerStart; then each Job is followed by a frame with the body as the client sent it, and answered
by one frame with a Reply.
"""

import asyncio
import logging
import struct
from dataclasses import replace
from typing import Never

import msgspec

from tpdet.requests.body.limits import BODY_CPU_SECONDS, BODY_MEMORY_BYTES, TEMPLATE_CPU_SECONDS
from tpdet.requests.body.pooling.pooling_body import PooledCall
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError, bad_request, internal_error
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Request
from tpdet.requests.routes import Route
from tpdet.text.tokenizer import TokenizerFiles

LENGTH = struct.Struct(">Q")

_log = logging.getLogger("tpdet.server")


class WorkerStart(msgspec.Struct, frozen=True):
    """The tokenizer, as the HTTP process read it: the files may have changed since."""

    parent_pid: int
    tokenizer: TokenizerFiles | None


class Job(msgspec.Struct, frozen=True):
    """One body to work on, with the other facts that its answer depends on."""

    route: Route
    request_id: str
    served_name: str
    tenant_salt: str
    facts: EngineFacts
    cpu_seconds: int = BODY_CPU_SECONDS


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """A body for the engine: the call without its requests, and each of those by itself.

    Millions of token ids in one piece would keep the reader's event loop for half a second.
    """

    call: Call
    requests: tuple[bytes, ...]

    async def outcome(self) -> Call:
        """What the HTTP process goes on with; others have their turn between two requests."""
        return replace(self.call, requests=await _decoded(self.requests))


class PreparedPooled(msgspec.Struct, frozen=True, tag="pooled"):
    """The same of a call for numbers."""

    call: PooledCall
    requests: tuple[bytes, ...]

    async def outcome(self) -> PooledCall:
        """As of `Prepared`."""
        return replace(self.call, requests=await _decoded(self.requests))


def prepared(call: Call | PooledCall) -> Prepared | PreparedPooled:
    """The frame of a call."""
    requests = tuple(map(msgspec.msgpack.encode, call.requests))
    if isinstance(call, PooledCall):
        return PreparedPooled(replace(call, requests=()), requests)
    return Prepared(replace(call, requests=()), requests)


async def _decoded(requests: tuple[bytes, ...]) -> tuple[Request, ...]:
    decoded = []
    for data in requests:
        decoded.append(msgspec.msgpack.decode(data, type=Request))
        await asyncio.sleep(0)
    return tuple(decoded)


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The answer itself, as JSON."""

    content: bytes

    async def outcome(self) -> bytes:
        """What the HTTP process sends."""
        return self.content


class JobRefused(msgspec.Struct, frozen=True, tag="refused"):
    """An ApiError, field by field."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None
    headers: tuple[tuple[str, str], ...]
    tei: bool

    @classmethod
    def of(cls, error: ApiError) -> "JobRefused":
        """The frame of an error."""
        return cls(*(getattr(error, name) for name in cls.__struct_fields__))

    async def outcome(self) -> Never:
        """Raises the error of the frame."""
        raise ApiError(**msgspec.structs.asdict(self))


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """A fault of ours: where it was raised, for the log."""

    trace: str

    async def outcome(self) -> Never:
        """Logs the place; raises the error that a client may see."""
        _log.error("a large request failed: %s", self.trace)
        raise internal_error()


def too_costly(cpu_seconds: int = BODY_CPU_SECONDS) -> ApiError:
    """The answer for a body past the bounds on its worker."""
    bounds = f"{cpu_seconds} s or {BODY_MEMORY_BYTES >> 30} GiB"
    if cpu_seconds == TEMPLATE_CPU_SECONDS:
        return bad_request(
            f"the chat template took more than {bounds} for these messages: send other ones",
            "messages",
        )
    return bad_request(f"the body took more than {bounds} to work on: send less text")


Reply = Prepared | PreparedPooled | Answered | JobRefused | Broken


def frame(data: bytes) -> bytes:
    """`data` with its length."""
    return LENGTH.pack(len(data)) + data
