"""One rank of the pretended nodes that tests/comm/test_nodes.py starts over gloo.

Arguments: the file for its report (JSON), the number of nodes, and of leaves.
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.comm.node_cases import folds_as_one_level
from tpdet.comm.device import open_world
from tpdet.comm.exchange.open import open_exchange
from tpdet.comm.world.nodes import open_nodes
from tpdet.errors import PeerLostError
from tpdet.kernels import order


def main() -> None:
    nodes, leaves = int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    world = open_world("cpu", 60.0)
    plan = order.fold_plan("pairs", leaves, world.size)
    exchange = open_exchange("auto", plan, world, 8, 16, torch.float32, torch.device("cpu"))
    folds_as_one_level(world, nodes, leaves)
    report = {"exchange": type(exchange).__name__, "bits": "same", "lost": ""}
    parts = open_nodes(world)
    world.barrier()
    if parts is not None and world.rank < world.size - 1:  # the last one goes: its part breaks
        try:
            parts.inside.barrier()
            world.barrier()
        except PeerLostError as error:
            report["lost"] = str(error)
    Path(sys.argv[1]).write_text(json.dumps(report))
    if world.rank == world.size - 1:
        os._exit(0)  # as a rank that is lost: at its worlds' end gloo's threads may abort it


if __name__ == "__main__":
    main()
