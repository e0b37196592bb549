"""Waits for a GPU with a time limit: torch's synchronisation has none.

A wait never holds a core that another rank needs: between two looks at the event the thread sleeps,
or gives way to any other thread that is ready.
"""

import os
import time

import torch

from tpdet.comm.world.world import World
from tpdet.errors import PeerLostError

_LEAST_SLEEP, _MOST_SLEEP = 50e-6, 500e-6  # seconds
_SLEEP_SHARE = 1 / 64  # of what was waited
_GIVE_WAY_SECONDS = 0.02
"""How long a thread that the GPU waits for gives way between two looks; later it sleeps."""


def wait_for_event(event: torch.cuda.Event, timeout: float, urgent: bool = True) -> bool:
    """Wait until the GPU has passed `event`; False if `timeout` seconds pass first.

    urgent: the GPU has nothing to do afterwards. Where it goes on with a step that was launched,
    looking a little late costs nobody anything.

    A lost peer leaves a collective's kernel spinning: a plain synchronisation would never return.
    """
    began = time.monotonic()
    while not event.query():
        waited = time.monotonic() - began
        if waited > timeout:
            return False
        if urgent and waited < _GIVE_WAY_SECONDS:
            time.sleep(0.0)  # lets another thread of this process run
            os.sched_yield()
        else:
            time.sleep(min(max(_LEAST_SLEEP, waited * _SLEEP_SHARE), _MOST_SLEEP))
    return True


def wait_for_step(step: int, event: torch.cuda.Event, world: World, urgent: bool = True) -> None:
    """Wait until a launched step is done, no longer than the world does for a peer.

    urgent: as for `wait_for_event`. Raises PeerLostError.
    """
    if not wait_for_event(event, world.timeout, urgent):
        raise PeerLostError(
            f"step {step}: the GPU of rank {world.rank} did not finish in {world.timeout:g} s: "
            "a peer is lost or hangs"
        )
