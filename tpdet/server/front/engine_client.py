"""The HTTP process's side of the bridge: submits groups of requests, receives their outputs.

A group is one HTTP request: its prompts are admitted together. Its outputs go to the
reader of its `ResponseHandle`, and once a step's are there each reader of them is flushed.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from tpdet.errors import IntegrityError
from tpdet.requests.body.limits import MAX_MESSAGE_BYTES
from tpdet.requests.body.problems import bad_request, from_code
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Request
from tpdet.server.front.metrics import Metrics
from tpdet.server.front.pace import SLICE_SECONDS
from tpdet.server.front.response_handle import Output, Reader, ResponseHandle
from tpdet.server.wire import protocol

PING_SECONDS = 1.0
_LASTING: dict[str, tuple[str, ...]] = {
    "starting": (),
    "untrusted": ("draining",),
    "damaged": ("draining",),
    "draining": (),
    "dead": (),
}
"""States that are left for these alone, whatever the engine reports; others for any."""

_OF_ENGINE = ("paused", "incomplete", "unusable")
"""States in which the engine itself refuses: this process may not have heard of their end."""

_log = logging.getLogger("tpdet.server")


def next_state(state: str, reported: str) -> str:
    """An HTTP process's state once the engine has reported its own."""
    return reported if reported in _LASTING.get(state, (reported,)) else state


class EngineClient:
    """One connection to the engine process, for the life of the HTTP process."""

    def __init__(self, address: str, key: bytes, metrics: Metrics, max_queue: int) -> None:
        self._end = protocol.HttpEnd(key)
        self.metrics, self.max_queue = metrics, max_queue
        self.state = "starting"
        self.found_hung = False
        self.dead: tuple[str, str] | None = None
        self.facts: EngineFacts | None = None
        self._facts_of: dict[int, EngineFacts] = {}  # by the number of their weights
        self.status = protocol.Status("starting", 0, 0, {})
        self.heard = time.monotonic()
        self.started, self.stopped = asyncio.Event(), asyncio.Event()
        self._handles: dict[str, ResponseHandle] = {}
        self._owners: dict[str, ResponseHandle] = {}
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[protocol.Controlled]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(address)

    def alive(self, patience: float) -> bool:
        """Whether the engine has shown progress in the last `patience` seconds."""
        known = self.state == "accepting" or self.state in protocol.REFUSALS
        return known and time.monotonic() - self.heard <= patience

    def hung(self, patience: float) -> bool:
        """Whether requests are open and the engine has been silent for `patience` seconds."""
        return bool(self._handles) and time.monotonic() - self.heard > patience

    @property
    def approximate(self) -> bool:
        """Whether answers are approximate: from the start, or as the engine last said."""
        facts = self.facts
        always = facts is not None and facts.system_fingerprint == facts.approximate_fingerprint
        return always or self.status.counters.get("approximate", 0.0) > 0.0

    @property
    def system_fingerprint(self) -> str:
        """The fingerprint of answers which begin now; empty before the engine started."""
        if self.facts is None:
            return ""
        approximate = self.facts.approximate_fingerprint
        return approximate if self.approximate else self.facts.system_fingerprint

    def facts_of(self, number: int) -> EngineFacts:
        """The engine's facts under the weights of a number, of which an open answer has tokens."""
        return self._facts_of[number]

    def check_open(self, count: int = 1, begun: bool = False) -> None:
        """Refuse (503) `count` new requests when draining, dead, or over the queue's bound.

        The engine would refuse them too, but only between two steps. Its queue is known here: the
        requests it last reported waiting, and those that all HTTP processes sent since. Where a
        call has begun, the engine alone says whether it goes on.
        """
        if self.dead is not None:
            raise from_code(*self.dead)
        # The engine itself says whether it is paused: a client that resumed it may have been told
        # by another HTTP process, and this one has not heard of it yet.
        refused = self.state in protocol.REFUSALS and not begun
        if refused and self.state not in _OF_ENGINE:
            raise from_code(*protocol.REFUSALS[self.state])
        if self.state not in ("accepting", *protocol.REFUSALS):
            raise from_code("engine_dead", "the engine is not ready")
        if count > self.max_queue:
            raise bad_request(
                f"a call of {count:,} prompts, and {self.max_queue:,} may wait here "
                "(--max-queue): send fewer at a time"
            )
        if self.status.waiting + self.metrics.tally.total("pending") + count > self.max_queue:
            raise from_code(
                "engine_overloaded", f"{self.max_queue} requests wait already: try again later"
            )

    def submit(
        self,
        requests: tuple[Request, ...],
        group_id: str,
        reader: Reader,
        part: protocol.CallPart | None = None,
    ) -> ResponseHandle:
        """Send a group to the engine; the handle's `accepted` resolves when the engine answers.

        part: which one of a call it is, that comes in several.
        """
        self.check_open(len(requests), part is not None and not part.first)
        clock = self.metrics.clock(time.monotonic())
        handle = ResponseHandle(self, group_id, requests, reader, clock)
        self._handles[group_id] = handle
        for request in requests:
            self._owners[request.request_id] = handle
        self.metrics.tally.add("pending", len(requests))
        self._send(protocol.Submit(group_id, requests, part))
        return handle

    def close(self, handle: ResponseHandle) -> None:
        """Forget a group, and abort its unfinished requests in the engine."""
        if self._handles.pop(handle.group_id, None) is None:
            return
        self._answered(handle)
        for request_id in handle.request_ids:
            self._owners.pop(request_id, None)
        for request_id in handle.open_requests:
            self.abort(request_id)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Tell the engine that a request, or one choice of it, has no reader any more."""
        self._send(protocol.Abort(request_id, choice))

    def give_up(self, call_id: str) -> None:
        """Tell the engine that no more parts of a call come."""
        self._send(protocol.GiveUp(call_id))

    async def control(self, verb: str, body: bytes) -> protocol.Controlled:
        """What the engine answers to a control verb. Raises ApiError once the engine is gone."""
        if self.dead is not None:
            raise from_code(*self.dead)
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(protocol.Control(call_id, verb, body))
        try:
            return await answer
        finally:
            del self._calls[call_id]

    def _end_calls(self, code: str, message: str) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(from_code(code, message))

    def die(self, code: str, message: str) -> None:
        """The engine is gone: end every open request with this error, and refuse new ones."""
        if self.dead is not None:
            return
        self.dead, self.state = (code, message), "dead"
        for handle in list(self._handles.values()):
            handle.fail(from_code(code, message))
        self._end_calls(code, message)
        self.stopped.set()

    def say_hello(self) -> None:
        """Report that this process is able to serve."""
        self._send(protocol.Hello(os.getpid()))

    def say_serving(self) -> None:
        """Report that connections are accepted."""
        self.state = "accepting"
        self._send(protocol.Serving())

    async def ping(self) -> None:
        """Show the engine every second that this process is not stuck."""
        while True:
            self._send(protocol.Ping())
            await asyncio.sleep(PING_SECONDS)

    async def receive(self) -> None:
        """Take messages for ever. A damaged one ends the connection as a dead engine does."""
        yielded = time.monotonic()
        while True:
            data = await self._socket.recv()
            # A receive that finds a message does not yield by itself, and a fast engine always
            # has one: the readers and timers would never run.
            if time.monotonic() - yielded > SLICE_SECONDS:
                await asyncio.sleep(0)
                yielded = time.monotonic()
            try:
                self._take(self._end.decode(data))
            except IntegrityError as error:
                _log.error("%s", error)
                self.die("engine_dead", "the engine sent what cannot be read")

    def shut(self) -> None:
        """Close the socket; nothing can be sent after it."""
        self._context.destroy(linger=0)

    def _take(self, message: protocol.ToHttp) -> None:
        self.heard = time.monotonic()
        match message:
            case protocol.Prompts():
                self._put(message.parts)
            case protocol.Outputs():
                self._deliver(message)
            case protocol.Status():
                news, self.status = message.news != self.status.news, message
                self.state = next_state(self.state, message.state)
                if news:
                    self._send(protocol.NewsHeard(message.news))
            case protocol.Accepted():
                self._settle(message.group_id, seed=message.seed)
            case protocol.Refused():
                problem = from_code(message.code, message.message, message.param)
                self._settle(message.group_id, problem=problem)
            case protocol.Controlled():
                answer = self._calls.get(message.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case EngineFacts():
                self.facts = message
                if not self._handles:  # else an answer may have tokens of older ones
                    self._facts_of.clear()
                self._facts_of[message.weights_number] = message
                self.started.set()
            case protocol.Stop():
                for handle in list(self._handles.values()):
                    if handle.open_requests:
                        handle.fail(from_code("draining", "the server has shut down"))
                self._end_calls("draining", "the server has shut down")
                self.state = "draining"
                self.stopped.set()
            case protocol.Dead():
                self.die(message.code, message.message)

    def _settle(
        self, group_id: str, seed: int | None = None, problem: Exception | None = None
    ) -> None:
        handle = self._handles.get(group_id)
        if handle is None or handle.accepted.done():
            return
        self._answered(handle)
        if seed is not None:
            handle.facts = self.facts  # the weights it runs on: a reload waits until it is done
            handle.accepted.set_result(seed)
        elif problem is not None:
            for request_id in handle.request_ids:
                handle.failed_request(request_id, problem)

    def _answered(self, handle: ResponseHandle) -> None:
        """The engine's own count includes the group from now on, or it never will."""
        if handle.pending:
            handle.pending = False
            self.metrics.tally.add("pending", -len(handle.request_ids))

    def _deliver(self, message: protocol.Outputs) -> None:
        if message.step_seconds is not None:
            self.metrics.step(message.step_seconds)
        self._put(message.tokens)
        if message.pooled:
            self._put(message.pooled)
        for failed in message.failed:
            owner = self._owners.get(failed.request_id)
            if owner is not None:
                problem = from_code(failed.code, failed.message)
                owner.failed_request(failed.request_id, problem)

    def _put(self, outputs: Sequence[Output]) -> None:
        owners, now = self._owners, self.heard
        touched: dict[ResponseHandle, None] = {}
        for output in outputs:
            owner = owners.get(output.request_id)
            if owner is not None:
                owner.put(output, now)
                touched[owner] = None
        for owner in touched:
            owner.flush()

    def _send(self, message: protocol.ToEngine) -> None:
        if self.dead is not None:
            return
        # The high-water mark is off, so this never blocks; the engine drains between steps.
        self._socket.send(self._end.encode(message), zmq.NOBLOCK)
