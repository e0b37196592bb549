"""What programs of several ranks share: checks on all of them, a lost peer, the end.

A difference is kept until a check ends, so that no rank leaves the others waiting.
"""

import os
import sys
import time
import traceback

import torch

from tpdet.errors import PeerLostError


def attempt(world, name, check, *arguments, **limits):
    """Run a check on every rank; whether all passed."""
    start, note, failed = time.monotonic(), "", b""
    try:
        note = check(world, *arguments, **limits) or ""
    except Exception as error:
        where = [line.strip() for line in traceback.format_exc().splitlines() if "File" in line][-1]
        failed = f"rank {world.rank}: {str(error)[:400]} | {where}".encode()
    everyone = [said.decode() for said in world.gather_bytes(failed)]
    if world.rank == 0:
        first = next((said for said in everyone if said), "")
        word = "FAIL" if first else "ok  "
        print(f"{word} {name} {first or note} ({time.monotonic() - start:.1f} s)", flush=True)
    torch.cuda.empty_cache()
    return not any(everyone)


def check_carrier(carrier):
    """Raise what exchanges of a carrier ran into."""
    carrier.report()
    torch.cuda.synchronize()
    carrier.check()


def check_armed(carrier, words):
    """Raise where exchanges left anything in a rank's slots, or ran into anything."""
    torch.cuda.synchronize()
    carrier.world.barrier()
    assert bool((words == -1).all()), "slots were left behind"
    check_carrier(carrier)


def check_lost(carrier, graphs, replays):
    """The last rank stays away: the others end their graphs of exchanges in time, and name it."""
    world = carrier.world
    carrier.set_timeout(1.5)
    start, named = time.monotonic(), None
    if world.rank < world.size - 1:
        for graph in graphs:
            for _ in range(replays):
                graph.replay()
        torch.cuda.synchronize()
        try:
            check_carrier(carrier)
        except PeerLostError as error:
            named = str(error)
    taken = time.monotonic() - start
    world.barrier()
    if world.rank < world.size - 1:
        assert named and f"for rank {world.size - 1} " in named, f"named: {named}"
        assert 1.4 < taken < 6.0, f"it took {taken:.1f} s"
        return f"{len(graphs) * replays} replays ended in {taken:.1f} s: {named}"
    return ""


def end(world, good):
    """End the program after checks of which the last one lost a peer."""
    if world.rank == 0:
        print("all passed" if all(good) else f"{good.count(False)} FAILED", flush=True)
    sys.stdout.flush()
    os._exit(0 if all(good) else 1)  # the lost peer's exchange is broken: nothing to tidy
