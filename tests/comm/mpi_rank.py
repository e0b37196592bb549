"""One rank of the world that tests/comm/test_mpi.py starts by mpirun: bits, parts, a lost rank.

Argument: the folder for its reports, RANK.json and, once a rank was lost, RANK.lost.json.
"""

import json
import sys
import time
from pathlib import Path

import torch

from tests.comm.cases import CASES
from tests.comm.node_cases import folds_as_one_level
from tests.comm.rank import loss_seen, outcome_of
from tpdet.comm.device import open_world
from tpdet.comm.world.mpi_carrier import MpiCarrier
from tpdet.errors import PeerLostError

LOST = 1.0


def counted(seen: dict[str, int]) -> None:
    """Count what MPI carries."""

    def counting(name, run):
        def carry(self, *arguments):
            seen[name] = seen.get(name, 0) + 1
            return run(self, *arguments)

        return carry

    for name in ("all_gather", "all_to_all"):
        setattr(MpiCarrier, name, counting(name, getattr(MpiCarrier, name)))


def agreed(world) -> list[str]:
    """What a carrier is called where every rank's MPI takes GPU memory, and where rank 0's not."""
    carrier, names = world._carrier.part([range(world.size)]), []
    for mine in (True, world.rank != 0):
        carrier.agree_on_cuda(mine, 60.0)
        names.append(carrier.name)
    return names


def main() -> None:
    folder, seen = Path(sys.argv[1]), {}
    counted(seen)
    torch.set_num_threads(1)
    world = open_world("cpu", 60.0, transport="mpi")
    cases = {case.__name__: outcome_of(world, case) for case in CASES}
    nodes = outcome_of(world, lambda world: folds_as_one_level(world, 2, 8))
    report = {"cases": cases, "nodes": nodes, "carried": dict(seen)}
    report |= {"by": world.by_mpi, "agreed": agreed(world)}
    (folder / f"{world.rank}.json").write_text(json.dumps(report))
    world.barrier()
    if len(sys.argv) == 2:
        world.close()
        return
    world.set_timeout(LOST)
    if world.rank == world.size - 1:
        time.sleep(4 * LOST)  # neither dead nor there: MPI itself would wait for ever
        return
    began = time.monotonic()
    try:
        world.all_gather(torch.ones(1 << 20))
        report = {"message": "nothing was noticed"}
    except PeerLostError as error:
        report = {"message": str(error), "seconds": time.monotonic() - began}
    report["again"] = loss_seen(world)["message"]
    (folder / f"{world.rank}.lost.json").write_text(json.dumps(report))
    world.close()
    time.sleep(2 * LOST)  # mpirun ends the others when one goes without MPI_Finalize


if __name__ == "__main__":
    main()
