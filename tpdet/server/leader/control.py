"""Control calls in rank 0's loop: pauses, aborts, resets, names of weights, by a table of verbs.

A verb's handler answers at once, or is asked again each round until it answers, so that no call
holds up the loop. Calls are asked in the order in which they came.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from tpdet.errors import ReloadError
from tpdet.requests.body.problems import MESSAGE_CHARACTERS, ApiError, from_code
from tpdet.server.leader.bridge import Bridge, HttpLink
from tpdet.server.leader.canary import Canary
from tpdet.server.leader.pause import Pause
from tpdet.server.wire import control_verbs as verbs
from tpdet.server.wire.protocol import REFUSALS, Control, Controlled

if TYPE_CHECKING:
    from tpdet.engine import Engine

SGLANG_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}

_log = logging.getLogger("tpdet.server")


@dataclass
class ControlCall:
    """One call: `fields` are those of its verb, `began` when it came (monotonic seconds).

    `begun`: its handler was asked before. `notes` are the handler's own, for the next time.
    """

    verb: str
    fields: verbs.ControlFields
    began: float
    begun: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


class ControlAnswer(NamedTuple):
    """What a call is answered: the content of its JSON, and HTTP's status."""

    content: dict[str, Any]
    status: int = 200


Handler = Callable[[ControlCall], ControlAnswer | None]
"""Answers a call, or None: to be asked again in the next round. Raises ApiError."""


class ControlPlane:
    """The verbs and the calls that are open. `announce` publishes names of weights that changed."""

    def __init__(
        self, engine: "Engine", bridge: Bridge, canary: Canary, announce: Callable[[], None]
    ) -> None:
        self._engine, self._bridge, self._canary = engine, bridge, canary
        self._announce = announce
        self._open: list[tuple[HttpLink, int, ControlCall]] = []
        self._answers: list[tuple[HttpLink, Controlled]] = []
        self._published = engine.versions.number, engine.versions.version
        self.pause = Pause(engine)
        self._handlers: dict[str, Handler] = {
            "pause": self._pause,
            "resume": self._resume,
            "is_paused": lambda call: ControlAnswer({"is_paused": self.pause.mode is not None}),
            "abort_requests": self._abort_requests,
            "reset_prefix_cache": self._reset_prefix_cache,
            "weight_info": self._weight_info,
            "update_weight_version": self._update_weight_version,
            "weight_checker": self._weight_checker,
            "pause_generation": self._pause_generation,
            "continue_generation": self._continue_generation,
            "abort_request": self._abort_request,
            "flush_cache": self._flush_cache,
        }

    def add(self, handlers: dict[str, Handler]) -> None:
        """Know more verbs, whose fields stand in `FIELDS`."""
        self._handlers |= handlers

    @property
    def gauges(self) -> dict[str, float]:
        """Whether the server is paused, and how many updates of its weights there were."""
        paused = float(self.pause.mode is not None)
        return {"paused": paused, "weight_updates": float(self._engine.versions.number)}

    @property
    def busy(self) -> bool:
        """Whether a call has no answer yet."""
        return bool(self._open or self._answers)

    def go_on(self, draining: bool = False) -> None:
        """Take the calls that came, and ask the handlers of all that are open. Called each round.

        draining: the pause ends, so that kept requests can; pauses are refused.
        """
        if draining and self.pause.mode is not None:
            _log.info("the pause ends: the server is shutting down")
            self.pause.end()
        for link, message in self._bridge.take_calls():
            self._accept(link, message)
        self._open = [it for it in self._open if not self._ask(*it)]

    def _accept(self, link: HttpLink, message: Control) -> None:
        try:
            fields = verbs.read_fields(message.verb, message.body)
        except ApiError as problem:
            self._refuse(link, message.call_id, problem)
            return
        call = ControlCall(message.verb, fields, time.monotonic())
        self._open.append((link, message.call_id, call))

    def tell(self, ending: bool = False) -> None:
        """Send each answer once every HTTP process goes by what its call has changed.

        The process that asked hears of it before the answer, on the same connection. ending: the
        server is about to end, and waits for none.
        """
        waiting = []
        for link, answer in self._answers:
            if ending or self._bridge.reached(besides=link):
                link.socket.send(answer)
            else:
                waiting.append((link, answer))
        self._answers = waiting

    def _ask(self, link: HttpLink, call_id: int, call: ControlCall) -> bool:
        """Whether the call's handler has answered it."""
        try:
            answer = self._handlers[call.verb](call)
        except ApiError as problem:
            _log.warning("%s: refused: %s", call.verb, problem.message[:MESSAGE_CHARACTERS])
            self._refuse(link, call_id, problem)
            return True
        call.begun = True
        if answer is None:
            return False
        body = msgspec.json.encode(answer.content)
        self._answers.append((link, Controlled(call_id, answer.status, body)))
        return True

    def _refuse(self, link: HttpLink, call_id: int, problem: ApiError) -> None:
        self._answers.append((link, Controlled(call_id, problem.status, problem.body())))

    def publish(self) -> None:
        """Tell the HTTP processes of other weights, or another name, before any token of them."""
        names = self._engine.versions.number, self._engine.versions.version
        if names != self._published:
            self._published = names
            self._announce()

    def settle(self) -> None:
        """End the steps that were launched, and deliver what they gave: nothing is pending then."""
        began = time.monotonic()
        outputs = self._canary.take(self._engine.interventions.settle())
        self.publish()
        if outputs:
            self._bridge.deliver(outputs, time.monotonic() - began)

    def _pause(self, call: ControlCall) -> ControlAnswer | None:
        fields = cast(verbs.PauseFields, call.fields)
        if fields.keep_kv and fields.mode != "keep":
            raise ApiError(
                400, "keep_kv is for mode=keep: no other keeps requests", param="keep_kv"
            )
        if not call.begun:
            if fields.mode == "wait" and self._bridge.has_work(self._engine):
                self._refuse_incomplete()  # no request would end
            self._begin_pause(call, fields.mode, fields.keep_kv)
        return self._paused(call, fields.mode, fields.clear_cache, {"status": "paused"})

    def _pause_generation(self, call: ControlCall) -> ControlAnswer | None:
        mode = cast(verbs.PauseGenerationFields, call.fields).mode
        if not call.begun:
            self._begin_pause(call, SGLANG_MODES[mode])
            if mode == "retract":
                self._engine.interventions.recompute()
        message = {"message": "Generation paused successfully.", "status": "ok"}
        return self._paused(call, SGLANG_MODES[mode], mode == "abort", message)

    def _begin_pause(self, call: ControlCall, mode: str, keep_keys: bool = False) -> None:
        if self._bridge.state == "draining":
            raise from_code(*REFUSALS["draining"])
        _log.info("pause (%s): new requests %s", mode, "wait" if mode == "keep" else "are refused")
        self.pause.begin(mode, keep_keys)
        self.settle()
        if mode == "abort":
            self._abort(None)

    def _paused(
        self, call: ControlCall, mode: str, clear_cache: bool, content: dict[str, Any]
    ) -> ControlAnswer | None:
        """The answer, once the engine is quiet in its mode."""
        if self.pause.mode != mode:
            raise _conflict("the server was resumed, or paused in another mode, meanwhile")
        if mode == "wait" and self._bridge.has_work(self._engine):
            return None
        if mode != "keep" and clear_cache:
            self._engine.interventions.forget_prefixes()
        _log.info("paused after %.3f s", time.monotonic() - call.began)
        return ControlAnswer(content)

    def _resume(self, call: ControlCall) -> ControlAnswer:
        if self.pause.mode is not None:
            _log.info("resumed")
        self.pause.end()
        return ControlAnswer({"status": "resumed"})

    def _continue_generation(self, call: ControlCall) -> ControlAnswer:
        self._resume(call)
        content = {"message": "Generation continued successfully.", "status": "ok"}
        return ControlAnswer(content)

    def _abort_requests(self, call: ControlCall) -> ControlAnswer:
        count = self._abort(cast(verbs.AbortFields, call.fields).request_ids)
        return ControlAnswer({"status": "aborted", "aborted": count})

    def _abort_request(self, call: ControlCall) -> ControlAnswer:
        fields = cast(verbs.AbortOneFields, call.fields)
        if not fields.rid and not fields.abort_all:
            raise ApiError(400, "name a request as rid, or all with abort_all true", param="rid")
        self._abort(None if fields.abort_all else (fields.rid,))
        return ControlAnswer({})

    def _abort(self, names: Iterable[str] | None) -> int:
        """End requests for their readers; how many they were. None: all of clients'."""
        self._canary.abandon()
        self.settle()
        asked = None if names is None else {*names}
        ids = [
            request_id
            for request_id in self._engine.interventions.request_ids()
            if asked is None or not asked.isdisjoint(_names_of(request_id))
        ]
        outputs = [
            output for request_id in ids for output in self._engine.interventions.end(request_id)
        ]
        self._bridge.deliver(outputs, 0.0)
        live = {_names_of(request_id)[2] for request_id in ids}
        between = [call for call in self._bridge.calls.end(asked) if _http_of(call) not in live]
        count = len(ids) + len(between)
        _log.info("%d requests were aborted", count)
        return count

    def abort_all(self) -> None:
        """End all of clients' requests for their readers."""
        self._abort(None)

    def _reset_prefix_cache(self, call: ControlCall) -> ControlAnswer:
        fields = cast(verbs.ResetFields, call.fields)
        return ControlAnswer({"success": self._reset(fields.reset_running_requests)})

    def _flush_cache(self, call: ControlCall) -> ControlAnswer:
        count = len(self._engine.interventions.request_ids())
        self._reset(running=True)
        more = f" {count} running requests are computed again." if count else ""
        return ControlAnswer({"success": True, "message": f"Cache flushed.{more}"})

    def _reset(self, running: bool) -> bool:
        """Forget every cached page; running requests are computed again, if `running`.

        False if pages of requests that run are still there.
        """
        self._canary.abandon()
        self.settle()
        if self._engine.has_work and not running:
            self._engine.interventions.forget_prefixes()
            return False
        self._engine.interventions.recompute()
        return True

    def _weight_info(self, call: ControlCall) -> ControlAnswer:
        weights = self._engine.weights
        named: dict[str, Any] = {"weight_version": weights.version, "weights": weights.digest}
        if not weights.usable:  # no name is theirs
            named = dict.fromkeys(named) | {"missing": weights.missing}
        return ControlAnswer({**named, "state": weights.state})

    def _refuse_incomplete(self) -> None:
        """Raise ApiError (503) where the weights are not those that their digest names."""
        if not self._engine.weights.usable:
            raise from_code(*REFUSALS["incomplete"])

    def _update_weight_version(self, call: ControlCall) -> ControlAnswer:
        fields = cast(verbs.VersionFields, call.fields)
        self._refuse_incomplete()
        try:
            self._engine.versions.rename(fields.new_version)
        except ReloadError as error:
            raise _conflict(str(error)) from None
        if fields.abort_all_requests:
            self._abort(None)
        self.publish()
        return ControlAnswer({"success": True, "new_version": fields.new_version})

    def _weight_checker(self, call: ControlCall) -> ControlAnswer:
        fields = cast(verbs.CheckFields, call.fields)
        if fields.action == "reset":
            raise ApiError(
                400,
                "action reset would serve weights that nobody sent: use checksum or compare",
                param="action",
                code="not_supported",
            )
        self._refuse_incomplete()
        checksums = {"model": self._engine.versions.digest} | self._engine.runner.tensor_digests
        if fields.action == "checksum":
            return ControlAnswer({"checksums": checksums})
        names = sorted({*checksums, *fields.baseline})
        differing = [name for name in names if checksums.get(name) != fields.baseline.get(name)]
        return ControlAnswer({"match": not differing, "mismatches": differing})


def _names_of(request_id: str) -> tuple[str, str, str]:
    """What clients call one of the engine's requests: itself, its answer, its HTTP request."""
    answer = request_id.rpartition("-")[0]
    return request_id, answer, _http_of(answer)


def _http_of(answer: str) -> str:
    """The HTTP request of an answer."""
    return answer.rpartition("-")[2]


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")
