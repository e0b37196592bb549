"""Rank 0's end of the bridge: whose silence counts."""

import time

import pytest

from tpdet.errors import PeerLostError
from tpdet.server.leader.bridge import Bridge, HttpLink
from tpdet.server.wire import protocol

PATIENCE = 0.1


class Inbox:
    """A socket with what has come meanwhile."""

    def __init__(self):
        self.messages = []

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
