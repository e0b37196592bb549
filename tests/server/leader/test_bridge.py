"""Rank 0's end of the bridge: whose silence counts, and who has heard of what."""

import time
from types import SimpleNamespace

import pytest

from tests.lib.server.fake_engine import FakeStatistics
from tpdet.errors import PeerLostError
from tpdet.server.leader.bridge import Bridge, HttpLink
from tpdet.server.wire import protocol

PATIENCE = 0.1


class Inbox:
    """A socket with what has come meanwhile, and what was sent."""

    def __init__(self):
        self.messages, self.sent = [], []
        self.send, self.watch = self.sent.append, lambda other: None

    def receive(self, seconds):
        found, self.messages = self.messages, []
        return found


class Running:
    """An HTTP process that has not ended."""

    exit_code, pid = None, 1


def test_what_came_while_a_step_waited_for_a_peer_is_no_silence():
    inbox = Inbox()
    bridge = Bridge([HttpLink(inbox, Running())], PATIENCE)
    inbox.messages = [protocol.Ping()]
    time.sleep(PATIENCE * 2)  # the step
    assert not bridge.receive(None, 0.0)
    time.sleep(PATIENCE * 2)
    with pytest.raises(PeerLostError, match="silent"):
        bridge.receive(None, 0.0)


def test_news_has_reached_whoever_said_so_and_nobody_before():
    boxes = [Inbox(), Inbox()]
    links = [HttpLink(box, Running()) for box in boxes]
    bridge = Bridge(links, PATIENCE * 100)
    engine = SimpleNamespace(statistics=lambda: FakeStatistics(*[0] * 9))
    for change in ("reloading", "accepting", None):  # None: other facts, the same state
        if change is None:
            bridge.announce("facts")
        else:
            bridge.state = change
        bridge.report(engine)
        assert not bridge.reached() and not bridge.reached(besides=links[0])
        for number, box in enumerate(boxes):
            box.messages = [protocol.NewsHeard(box.sent[-1].news)]
            assert not bridge.receive(engine, 0.0), "nobody asks for anything"
            assert bridge.reached() == (number == 1)
            assert bridge.reached(besides=links[1])
        bridge.report(engine)
        assert bridge.reached(), "nothing has changed since"
