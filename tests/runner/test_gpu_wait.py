"""The wait for a GPU: bounded, and without a core of its own. The events are stand-ins."""

import time

import pytest

from tpdet.comm.world.world import SoloWorld
from tpdet.errors import PeerLostError
from tpdet.runner.step.gpu_wait import wait_for_event, wait_for_step


class Event:
    """Passed after some seconds."""

    def __init__(self, seconds):
        self.end, self.looks = time.monotonic() + seconds, 0

    def query(self):
        self.looks += 1
        return time.monotonic() >= self.end


def test_a_step_with_another_behind_it_is_awaited_asleep(monkeypatch):
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) or sleep(seconds))
    assert wait_for_event(Event(0.01), 10.0, urgent=False)
    assert slept and min(slept) >= 50e-6
    slept.clear()
    assert wait_for_event(Event(0.01), 10.0, urgent=True)
    assert slept and max(slept) == 0.0


@pytest.mark.parametrize("urgent", [True, False])
def test_a_wait_ends_with_its_time_limit_and_says_which_step(urgent):
    assert not wait_for_event(Event(60.0), 0.03, urgent)
    world = SoloWorld()
    world.set_timeout(0.01)
    with pytest.raises(PeerLostError, match=r"step 7: the GPU of rank 0 did not finish in 0.01 s"):
        wait_for_step(7, Event(60.0), world, urgent)
