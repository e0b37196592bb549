"""One rank of the gloo world that tests/comm/test_comm.py starts: all cases, then two disasters.

Writes what it saw as JSON to the file named by its argument.
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from tests.comm.cases import CASES
from tpdet.comm.world.distributed import DistributedWorld
from tpdet.comm.world.world import World
from tpdet.errors import PeerLostError
from tpdet.launch.ranks.environment import read_environment

STOP_TIMEOUT = 1.5


def outcome_of(world: World, case) -> str:
    try:
        case(world)
    except Exception:
        return traceback.format_exc()
    return "passed"


def loss_seen(world: World) -> dict:
    """The first PeerLostError, the seconds to it, and whether the world stays broken."""
    began = time.monotonic()
    try:
        world.gather_bytes(b"anybody there?")
        return {"message": "nothing was noticed", "seconds": 0.0}
    except PeerLostError as error:
        seconds = time.monotonic() - began
        try:
            world.barrier()
            again = ""
        except PeerLostError as second:
            again = str(second)
        return {"message": str(error), "seconds": seconds, "again": again}


def main() -> None:
    environment = read_environment()
    results: dict = {}
    world = DistributedWorld(timeout=60.0)
    results["cases"] = {case.__name__: outcome_of(world, case) for case in CASES}
    world.close()
    results["group left behind"] = dist.is_initialized()

    world = DistributedWorld(timeout=60.0)  # a second world in the same processes
    world.barrier()
    world.set_timeout(STOP_TIMEOUT)
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    results["stopped"] = loss_seen(world)
    world.close()

    size = environment.size - 1
    fewer = replace(environment, size=size, local_size=size)
    world = DistributedWorld(timeout=60.0, environment=fewer)
    world.barrier()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    results["killed"] = loss_seen(world)
    world.close()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
