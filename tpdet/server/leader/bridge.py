"""Rank 0's side of the bridge: the HTTP processes' requests go in, the engine's outputs go out.

Everything here is called from rank 0's loop, between steps, and never waits for an HTTP process.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from tpdet.errors import (
    AuditUnavailableError,
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
from tpdet.requests.answer.prompt_scores import messages_of
from tpdet.requests.body.limits import MAX_MESSAGE_BYTES, MAX_ROUTED_BYTES
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import PooledOutput, PromptOutput, RequestFailed, TokenOutput, with_seed
from tpdet.server.leader.http_child import HttpProcess
from tpdet.server.leader.open_calls import OpenCalls
from tpdet.server.wire import load_bounds, protocol
from tpdet.server.wire.protocol import process_of

if TYPE_CHECKING:
    from tpdet.engine import Engine

STATUS_SECONDS = 0.5
DEATH_SECONDS = 2.0
FLUSH_SECONDS = 6.0
Output = TokenOutput | PromptOutput | RequestFailed | PooledOutput
Message = TypeVar("Message", bound=msgspec.Struct)


class EngineSocket:
    """The bound end of the PAIR socket; `key` (32 bytes) seals what passes."""

    def __init__(self, run_dir: str, key: bytes, process: int = 0) -> None:
        self._end = protocol.EngineEnd(key)
        self.address = protocol.socket_address(run_dir, process)
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

    def watch(self, other: "int | EngineSocket") -> None:
        """Let `receive` return early when this descriptor or socket becomes readable."""
        found = other._socket if isinstance(other, EngineSocket) else other
        self._poller.register(found, zmq.POLLIN)

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


class HttpLink:
    """One HTTP process and the socket to it; `heard` is when it last said something.

    `news` is the number of the last news that it goes by.
    """

    def __init__(self, socket: EngineSocket, process: HttpProcess) -> None:
        self.socket, self.process = socket, process
        self.heard = time.monotonic()
        self.news = 0
        self.early: list[protocol.ToEngine] = []

    def receive(self, seconds: float) -> list[protocol.ToEngine]:
        """Its messages, after waiting up to `seconds` for the first."""
        messages, self.early = self.early + self.socket.receive(seconds), []
        if messages:
            self.heard = time.monotonic()
        return messages

    def check(self, patience: float) -> None:
        """Raise PeerLostError if the process has ended, or has been silent for too long."""
        code = self.process.exit_code
        if code is not None:
            raise PeerLostError(f"the HTTP process (pid {self.process.pid}) ended with {code}")
        silent = time.monotonic() - self.heard
        if silent > patience:
            raise PeerLostError(f"the HTTP process has been silent for {silent:.1f} s")

    def wait_for(self, kind: type[Message], patience: float, tick: Callable[[], None]) -> Message:
        """The next message of a kind; others are kept. Raises what a failed start means."""
        deadline = time.monotonic() + max(patience, 60.0)
        while True:
            if self.process.exit_code is not None:
                raise start_failure(self.process.exit_code)
            messages = self.early + self.socket.receive(0.05)
            self.early = [m for m in messages if not isinstance(m, kind)]
            self.heard = time.monotonic()
            for message in messages:
                if isinstance(message, kind):
                    return message
            if time.monotonic() > deadline:
                raise PeerLostError(f"the HTTP process did not say {kind.__name__} in time")
            tick()


class Bridge:
    """The conversation with the HTTP processes. Raises PeerLostError if one ends or goes silent.

    `wake`: a descriptor that ends a wait when it becomes readable.
    """

    def __init__(self, links: Sequence[HttpLink], patience: float, wake: int | None = None) -> None:
        self._links, self._patience = tuple(links), patience
        self._first = self._links[0]
        for link in self._links[1:]:
            self._first.socket.watch(link.socket)
        if wake is not None:
            self._first.socket.watch(wake)
        self._reported = 0.0
        self._last = protocol.Status("", 0, 0, {})
        # The first of either ends the server: as long as it can be asked there was none.
        self._more: dict[str, float] = {"plan_digest_mismatches": 0, "page_version_conflicts": 0}
        self.state = "accepting"
        self.calls = OpenCalls()
        self._news = 0
        self._calls: list[tuple[HttpLink, protocol.Control]] = []

    def open(
        self, start: EngineFacts, listen: Callable[[], None], tick: Callable[[], None]
    ) -> None:
        """Open the port once the HTTP processes are able to serve, and wait until they do.

        `tick` is called all the while, so that idle ranks hear from rank 0.
        """
        for link in self._links:
            link.wait_for(protocol.Hello, self._patience, tick)
        listen()
        self._send_all(start)
        for link in self._links:
            link.wait_for(protocol.Serving, self._patience, tick)

    def announce(self, start: EngineFacts) -> None:
        """Tell what is served from now on. The HTTP processes were not listened to meanwhile."""
        self._send_all(start)
        self._news += 1
        self.listen_again()

    def listen_again(self) -> None:
        """Count the HTTP processes' silence from now: rank 0 was busy and read nothing."""
        for link in self._links:
            link.heard = time.monotonic()

    def receive(self, engine: "Engine", seconds: float) -> bool:
        """Take the HTTP processes' messages, waiting up to `seconds`; False if none came."""
        found = [
            (link, message)
            for link in self._links
            for message in link.receive(seconds if link is self._first else 0.0)
        ]
        # Only now: what came while a step took long, or waited for a peer, was no silence.
        for link in self._links:
            link.check(self._patience)
        for link, message in found:
            if isinstance(message, protocol.Submit):
                self._submit(engine, link, message)
            elif isinstance(message, protocol.Abort):
                engine.abort(message.request_id, message.choice)
            elif isinstance(message, protocol.GiveUp):
                self.calls.give_up(message.call_id)
            elif isinstance(message, protocol.Control):
                self._calls.append((link, message))
            elif isinstance(message, protocol.NewsHeard):
                link.news = message.news
        unasked = protocol.NewsHeard, protocol.Ping
        return any(not isinstance(message, unasked) for _, message in found)

    def has_work(self, engine: "Engine") -> bool:
        """Whether requests run or wait, or more parts come of a call that has begun."""
        return engine.has_work or bool(self.calls)

    def reached(self, besides: HttpLink | None = None) -> bool:
        """Whether all HTTP processes go by the state and the facts that were last reported.

        besides: one that need not say so, since what it is sent next comes behind the report.
        """
        return all(link is besides or link.news == self._last.news for link in self._links)

    def take_calls(self) -> list[tuple[HttpLink, protocol.Control]]:
        """The control calls that came since the last time, each with whom to answer."""
        calls, self._calls = self._calls, []
        return calls

    def deliver(self, outputs: Iterable[Output], step_seconds: float) -> None:
        """Send the outputs that a step committed, to each HTTP process those of its requests."""
        if len(self._links) == 1:
            send_step(self._first, tuple(outputs), step_seconds)
            return
        found: list[list[Output]] = [[] for _ in self._links]
        for output in outputs:
            found[process_of(output.request_id)].append(output)
        for link, own in zip(self._links, found, strict=True):
            if link is self._first:
                send_step(link, own, step_seconds)
            elif own:
                send_step(link, own, None)

    def report(self, engine: "Engine", unasked: bool = False, **more: float) -> None:
        """Send the engine's state: every half second, and when what clients wait for changes.

        unasked: whatever runs now is a request that no client sent, and counts as none. `more` are
        counters of the server's own, which later reports repeat.
        """
        self._more |= more
        found = engine.statistics()
        if unasked:
            none = {"requests_running": 0, "requests_waiting": 0, "sequences_running": 0}
            found = msgspec.structs.replace(found, **none)
        self._news += self.state != self._last.state
        key = (self.state, found.requests_running, found.requests_waiting, self._news)
        now, before = time.monotonic(), self._last
        last = (before.state, before.running, before.waiting, before.news)
        if key == last and now - self._reported < STATUS_SECONDS:
            return
        self._last = protocol.Status(*key[:3], counters_of(found) | self._more, self._news)
        self._reported = now
        self._send_all(self._last)

    def stop(self) -> None:
        """Every request is finished: let the answers reach their readers, and end the processes."""
        self._send_all(protocol.Stop())
        self._end(FLUSH_SECONDS)
        for link in self._links:
            link.socket.close()

    def die(self, error: BaseException) -> None:
        """End every open answer with an error, and the processes, within two seconds."""
        for link in self._links:
            if link.process.exit_code is None:
                with suppress(zmq.ZMQError, PeerLostError):
                    link.socket.send(last_message(error))
        self._end(DEATH_SECONDS)

    def _end(self, seconds: float) -> None:
        """Give the processes `seconds` in all to end, then kill them."""
        deadline = time.monotonic() + seconds
        for link in self._links:
            link.process.wait(max(0.0, deadline - time.monotonic()))
        for link in self._links:
            link.process.kill()

    def _send_all(self, message: protocol.ToHttp) -> None:
        for link in self._links:
            link.socket.send(message)

    def _submit(self, engine: "Engine", link: HttpLink, message: protocol.Submit) -> None:
        refusal = self.calls.refusal(message.part, self.state)
        if refusal is not None:
            _refuse(link, message, *refusal)
            return
        queued: list[str] = []
        seed: int | None = None
        try:
            for request in message.requests:
                if seed is not None and request.params.seed is None:
                    request = with_seed(request, seed)
                used = engine.submit(request)
                seed = used if seed is None else seed
                queued.append(request.request_id)
        except (RequestError, OverloadedError) as error:
            for request_id in queued:
                engine.abort(request_id)
            param = error.param if isinstance(error, RequestError) else None
            _refuse(link, message, error.code, str(error), param)
            return
        self.calls.accepted(message.part)
        # The status first: where the group is counted as accepted, it is counted as waiting.
        self.report(engine)
        assert seed is not None
        link.socket.send(protocol.Accepted(message.group_id, seed))


def _refuse(
    link: HttpLink, message: protocol.Submit, code: str, text: str, param: str | None = None
) -> None:
    link.socket.send(protocol.Refused(message.group_id, code, text, param))


def send_step(link: HttpLink, outputs: Sequence[Output], step_seconds: float | None) -> None:
    """One step's outputs, as one message; more where prompts have scores or experts are many."""
    tokens = tuple([output for output in outputs if type(output) is TokenOutput])
    failed: tuple[RequestFailed, ...] = ()
    pooled: tuple[PooledOutput, ...] = ()
    if len(tokens) < len(outputs):
        failed = tuple([output for output in outputs if isinstance(output, RequestFailed)])
        pooled = tuple([output for output in outputs if isinstance(output, PooledOutput)])
        prompts = [output for output in outputs if isinstance(output, PromptOutput)]
        for parts in messages_of(prompts):
            link.socket.send(protocol.Prompts(parts))
    if len(tokens) > 1 and any(output.routed_experts for output in tokens):
        *first, tokens = _by_size(tokens)
        for part in first:
            link.socket.send(protocol.Outputs(None, part, ()))
    link.socket.send(protocol.Outputs(step_seconds, tokens, failed, pooled))


def _by_size(tokens: tuple[TokenOutput, ...]) -> list[tuple[TokenOutput, ...]]:
    """Outputs in their order, in parts whose experts fill MAX_ROUTED_BYTES, or one output more."""
    parts: list[list[TokenOutput]] = [[]]
    size = 0
    for output in tokens:
        if size > MAX_ROUTED_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(output)
        size += len(output.routed_experts)
    return [tuple(part) for part in parts]


def counters_of(found: msgspec.Struct) -> dict[str, float]:
    """The scheduler's gauges and totals by name; `totals` have no name, other parts their own."""
    numbers: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(found).items():
        if isinstance(value, msgspec.Struct):
            numbers |= counters_of(value)
        elif isinstance(value, dict):
            for part, counts in value.items():
                more = {f"{part}.{key}": number for key, number in counters_of(counts).items()}
                numbers |= more
        elif isinstance(value, list):
            numbers |= {f"{name}.{place}": float(number) for place, number in enumerate(value)}
        elif value is not None:
            numbers[name] = float(value)
    return numbers


def start_failure(exit_code: int) -> TpdetError:
    """The HTTP process could not start: its exit code says why, exit.json in its words."""
    kinds = (
        UsageError, CheckpointError, NotFoundError, ResourceError, AuditUnavailableError,
        NotPermittedError,
    )  # fmt: skip
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
    """The last message to clients: a lost rank's node and step; other details go to the log."""
    code, detail = getattr(error, "code", TpdetError.code), getattr(error, "public", "")
    more = f": {detail}" if detail else ""
    if code == "drain_timeout":
        return protocol.Dead(
            "draining", f"the server shut down before the answer was finished{more}"
        )
    if code == "integrity_error":
        return protocol.Dead(code, f"the engine found its state damaged and stopped{more}")
    return protocol.Dead("engine_dead", f"the engine has stopped{more}")
