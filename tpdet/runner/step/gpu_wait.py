"""Waits for a GPU with a time limit: torch's synchronisation has none."""

import time

import torch

from tpdet.comm.world.world import World
from tpdet.errors import PeerLostError

_SPIN_SECONDS = 0.02  # a step of decoding is shorter; after that the processor is given away
_SLEEP_SECONDS = 0.0005


def wait_for_event(event: torch.cuda.Event, timeout: float) -> bool:
    """Wait until the GPU has passed `event`; False if `timeout` seconds pass first.

    A lost peer leaves a collective's kernel spinning: a plain synchronisation would never return.
    """
    began = time.monotonic()
    while not event.query():
        waited = time.monotonic() - began
        if waited > timeout:
            return False
        if waited > _SPIN_SECONDS:
            time.sleep(_SLEEP_SECONDS)
    return True


def wait_for_step(step: int, event: torch.cuda.Event, world: World) -> None:
    """Wait until a launched step is done, no longer than the world does for a peer.

    Raises PeerLostError.
    """
    if not wait_for_event(event, world.timeout):
        raise PeerLostError(
            f"step {step}: the GPU of rank {world.rank} did not finish in {world.timeout:g} s: "
            "a peer is lost or hangs"
        )
