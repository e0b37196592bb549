"""Calls whose prompts come in parts run from their first part to their last, whatever happens."""

from types import SimpleNamespace

import pytest

from tpdet.server.leader.bridge import Bridge
from tpdet.server.leader.open_calls import OpenCalls
from tpdet.server.wire.protocol import REFUSALS, CallPart


def begun(*names):
    calls = OpenCalls()
    for name in names:
        calls.accepted(CallPart(name, True, False))
    return calls


@pytest.mark.parametrize("state", ["draining", "reloading", "paused"])
def test_what_has_begun_goes_on_where_new_requests_are_refused(state):
    calls = begun("embed-a")
    assert calls and calls.refusal(CallPart("embed-a", False, False), state) is None
    for part in (None, CallPart("embed-b", True, False), CallPart("embed-b", True, True)):
        assert calls.refusal(part, state) == REFUSALS[state]
        assert calls.refusal(part, "accepting") is None
    calls.accepted(CallPart("embed-a", False, True))
    assert not calls, "its last part is in the engine"


@pytest.mark.parametrize("state", ["untrusted", "unusable", "damaged", "incomplete"])
def test_nothing_goes_on_where_no_answer_can_be_trusted(state):
    assert begun("embed-a").refusal(CallPart("embed-a", False, True), state) == REFUSALS[state]


def test_a_call_is_ended_by_its_id_or_its_requests_or_with_all():
    calls = begun("embed-a", "rerank-b", "score-c")
    assert calls.end({"embed-a", "b", "pool-c-0"}) == ["embed-a", "rerank-b"]
    assert calls.refusal(CallPart("embed-a", False, True), "accepting")[0] == "aborted"
    assert calls.refusal(CallPart("score-c", False, True), "accepting") is None
    assert calls.end() == ["score-c"] and not calls
    calls = begun("embed-a")
    calls.give_up("embed-a")
    assert not calls


def test_a_server_has_work_between_two_parts():
    bridge = SimpleNamespace(calls=begun("embed-a"))
    idle, busy = SimpleNamespace(has_work=False), SimpleNamespace(has_work=True)
    assert Bridge.has_work(bridge, idle)
    bridge.calls.end()
    assert not Bridge.has_work(bridge, idle) and Bridge.has_work(bridge, busy)
