"""Rank 0's side of the bridge: the HTTP process's requests go in, the engine's outputs go out.

Everything here is called from rank 0's loop, between steps, and never waits for the HTTP process.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from tpdet.errors import (
    CheckpointError,
    NotFoundError,
    NotPermittedError,
    OverloadedError,
    PeerLostError,
    RequestError,
    ResourceError,
    TpdetError,
    UsageError,
)
from tpdet.request import PromptOutput, RequestFailed, TokenOutput, with_seed
from tpdet.server.leader.http_child import HttpProcess
from tpdet.server.wire import load_bounds, protocol
from tpdet.server.wire.limits import MAX_MESSAGE_BYTES
from tpdet.server.wire.prompt_scores import messages_of

if TYPE_CHECKING:
    from tpdet.engine import Engine

STATUS_SECONDS = 0.5
DEATH_SECONDS = 2.0
FLUSH_SECONDS = 6.0
Message = TypeVar("Message", bound=msgspec.Struct)


class EngineSocket:
    """The bound end of the PAIR socket; `key` (32 bytes) seals what passes."""

    def __init__(self, run_dir: str, key: bytes) -> None:
        self._end = protocol.EngineEnd(key)
        self.address = protocol.socket_address(run_dir)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, int(DEATH_SECONDS * 1000))
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        before = os.umask(0o177)  # the socket is a file, of mode 0600
        try:
            self._socket.bind(self.address)
        finally:
            os.umask(before)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let `receive` return early when this descriptor becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, message: protocol.ToHttp) -> None:
        """Queue a message; never waits. Raises PeerLostError when nobody is connected any more."""
        try:
            self._socket.send(self._end.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:  # there is no bound on what is queued
            raise PeerLostError("the HTTP process has left the socket: it has ended") from error

    def receive(self, seconds: float) -> list[protocol.ToEngine]:
        """Every message that is there, after waiting up to `seconds` for the first."""
        self._poller.poll(int(seconds * 1000))
        found = []
        with suppress(zmq.Again):
            while True:
                found.append(self._end.decode(self._socket.recv(zmq.NOBLOCK)))
        return found

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


class Bridge:
    """The conversation with the HTTP process. Raises PeerLostError when it ends or goes silent."""

    def __init__(self, socket: EngineSocket, process: HttpProcess, patience: float) -> None:
        self._socket, self._process, self._patience = socket, process, patience
        self._heard = time.monotonic()
        self._reported = 0.0
        self._last = protocol.Status("", 0, 0, {})
        self._early: list[protocol.ToEngine] = []
        # The first of either ends the server: as long as it can be asked there was none.
        self._more: dict[str, float] = {"plan_digest_mismatches": 0, "page_version_conflicts": 0}
        self.state = "accepting"

    def open(
        self, start: protocol.Start, listen: Callable[[], None], tick: Callable[[], None]
    ) -> None:
        """Open the port once the HTTP process is able to serve, and wait until it does.

        `tick` is called all the while, so that idle ranks hear from rank 0.
        """
        self._wait_for(protocol.Hello, tick)
        listen()
        self._socket.send(start)
        self._wait_for(protocol.Serving, tick)

    def announce(self, start: protocol.Start) -> None:
        """Tell the HTTP process what is served from now on. It was not listened to meanwhile."""
        self._socket.send(start)
        self.listen_again()

    def listen_again(self) -> None:
        """Count the HTTP process's silence from now: rank 0 was busy and read nothing."""
        self._heard = time.monotonic()

    def receive(self, engine: "Engine", seconds: float) -> bool:
        """Take messages of the HTTP process, waiting up to `seconds`; False if none came."""
        messages, self._early = self._early + self._socket.receive(seconds), []
        if messages:
            self._heard = time.monotonic()
        # Only now: what came while a step took long, or waited for a peer, was no silence.
        self._check_process()
        for message in messages:
            if isinstance(message, protocol.Submit):
                self._submit(engine, message)
            elif isinstance(message, protocol.Abort):
                engine.abort(message.request_id, message.choice)
        return any(not isinstance(message, protocol.Ping) for message in messages)

    def deliver(
        self,
        outputs: Iterable[TokenOutput | PromptOutput | RequestFailed],
        step_seconds: float,
    ) -> None:
        """Send the outputs that a step committed."""
        found = tuple(outputs)
        prompts = [output for output in found if isinstance(output, PromptOutput)]
        for parts in messages_of(prompts):
            self._socket.send(protocol.Prompts(parts))
        self._socket.send(
            protocol.Outputs(
                step_seconds,
                tuple(output for output in found if isinstance(output, TokenOutput)),
                tuple(output for output in found if isinstance(output, RequestFailed)),
            )
        )

    def report(self, engine: "Engine", **more: float) -> None:
        """Send the engine's state: every half second, and when what clients wait for changes.

        `more` are counters of the server's own, which later reports repeat.
        """
        self._more |= more
        found = engine.statistics()
        key = (self.state, found.requests_running, found.requests_waiting)
        now = time.monotonic()
        last = (self._last.state, self._last.running, self._last.waiting)
        if key == last and now - self._reported < STATUS_SECONDS:
            return
        self._last, self._reported = protocol.Status(*key, _counters(found) | self._more), now
        self._socket.send(self._last)

    def stop(self) -> None:
        """Every request is finished: let the answers reach their readers, and end the process."""
        self._socket.send(protocol.Stop())
        if not self._process.wait(FLUSH_SECONDS):
            self._process.kill()
        self._socket.close()

    def die(self, error: BaseException) -> None:
        """End every open answer with an error, and the process, within two seconds."""
        if self._process.exit_code is None:
            with suppress(zmq.ZMQError, PeerLostError):
                self._socket.send(last_message(error))
            self._process.wait(DEATH_SECONDS)
        self._process.kill()

    def _submit(self, engine: "Engine", message: protocol.Submit) -> None:
        if self.state != "accepting":
            self._refuse(message, *protocol.REFUSALS[self.state])
            return
        queued: list[str] = []
        seed: int | None = None
        try:
            for request in message.requests:
                if seed is not None:
                    request = with_seed(request, seed)
                seed = engine.submit(request)
                queued.append(request.request_id)
        except (RequestError, OverloadedError) as error:
            for request_id in queued:
                engine.abort(request_id)
            param = error.param if isinstance(error, RequestError) else None
            self._refuse(message, error.code, str(error), param)
            return
        # The status first: where the group is counted as accepted, it is counted as waiting.
        self.report(engine)
        assert seed is not None
        self._socket.send(protocol.Accepted(message.group_id, seed))

    def _refuse(
        self, message: protocol.Submit, code: str, text: str, param: str | None = None
    ) -> None:
        self._socket.send(protocol.Refused(message.group_id, code, text, param))

    def _wait_for(self, kind: type[Message], tick: Callable[[], None]) -> Message:
        deadline = time.monotonic() + max(self._patience, 60.0)
        while True:
            if self._process.exit_code is not None:
                raise start_failure(self._process.exit_code)
            messages = self._early + self._socket.receive(0.05)
            self._early = [m for m in messages if not isinstance(m, kind)]
            self._heard = time.monotonic()
            for message in messages:
                if isinstance(message, kind):
                    return message
            if time.monotonic() > deadline:
                raise PeerLostError(f"the HTTP process did not say {kind.__name__} in time")
            tick()

    def _check_process(self) -> None:
        code = self._process.exit_code
        if code is not None:
            raise PeerLostError(f"the HTTP process (pid {self._process.pid}) ended with {code}")
        silent = time.monotonic() - self._heard
        if silent > self._patience:
            raise PeerLostError(f"the HTTP process has been silent for {silent:.1f} s")


def _counters(found: msgspec.Struct) -> dict[str, float]:
    """The scheduler's gauges and totals by name."""
    numbers: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(found).items():
        numbers |= _counters(value) if isinstance(value, msgspec.Struct) else {name: float(value)}
    return numbers


def start_failure(exit_code: int) -> TpdetError:
    """The HTTP process could not start: its exit code says why, exit.json in its words."""
    kinds = (UsageError, CheckpointError, NotFoundError, ResourceError, NotPermittedError)
    for kind in kinds:
        if kind.exit_code == exit_code:
            return kind("the HTTP process refused to start; the lines above say why")
    if exit_code in load_bounds.ENDINGS:
        return CheckpointError(
            "the tokenizer could not be loaded: it ended the process that loads it "
            f"({signal.Signals(-exit_code).name}), or took more than {load_bounds.CPU_SECONDS} s "
            f"or {load_bounds.MEMORY_BYTES >> 30} GiB; download tokenizer.json again"
        )
    return PeerLostError(f"the HTTP process ended with {exit_code} before it could serve")


def last_message(error: BaseException) -> protocol.Dead:
    """What clients are told: of a lost rank its node and step; other details go to the log."""
    code, detail = getattr(error, "code", TpdetError.code), getattr(error, "public", "")
    more = f": {detail}" if detail else ""
    if code == "drain_timeout":
        return protocol.Dead("draining", "the server shut down before the answer was finished")
    if code == "integrity_error":
        return protocol.Dead(code, f"the engine found its state damaged and stopped{more}")
    return protocol.Dead("engine_dead", f"the engine has stopped{more}")
