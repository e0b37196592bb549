"""Times of two levels on GPUs of one host that pretend to be two nodes, beside one level's.

    export GLOO_SOCKET_IFNAME=lo
    MEET="--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29600 --nproc-per-node 2"
    CUDA_VISIBLE_DEVICES=0,1 NCCL_HOSTID=a torchrun $MEET -m scripts.gpu_times.exchange.nodes &
    CUDA_VISIBLE_DEVICES=2,3 NCCL_HOSTID=b torchrun $MEET -m scripts.gpu_times.exchange.nodes

Microseconds, the slowest rank's, eagerly, of exchanges with residual and norm; `inside` and
`across` are the collectives of the levels alone. `tests.gpu.exchange.nodes` has the bits.
"""

import statistics
import sys
import time
from functools import partial

import torch

from scripts.gpu_times.parts import no_parts
from tests.gpu.exchange.nodes import HIDDEN, Case
from tpdet.comm.exchange.fold import TWO_SHOT_ROWS


def runs_of(case, rows):
    """Name -> an exchange of so many rows."""
    sent, share = case.inputs(rows), -(-rows // case.nodes.inside.size)
    part = torch.zeros(rows if rows < TWO_SHOT_ROWS else share, HIDDEN, device=case.device)
    return {
        "one level": partial(case.one.fold_and_norm, *sent),
        "two levels": partial(case.two.fold_and_norm, *sent),
        "inside": partial(case.nodes.inside.all_gather, part),
        "across": partial(case.nodes.across.all_gather, part),
    }


def slowest(case, run, repeats=20):
    """Microseconds of the slowest rank: the median of seven turns."""
    taken = []
    for _ in range(7):
        case.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        case.synchronize()
        taken.append((time.perf_counter() - begin) / repeats * 1e6)
    return max(map(float, case.world.gather_bytes(f"{statistics.median(taken)}".encode())))


def main(arguments):
    """Print a line for each number of rows."""
    no_parts("exchange.nodes", arguments)
    case = Case("cuda")
    for rows in case.rows:
        found = {name: slowest(case, run) for name, run in runs_of(case, rows).items()}
        if case.world.rank == 0:
            figures = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"{rows:5d} rows | {rows * HIDDEN * 4 >> 10:6d} KB | {figures}", flush=True)
    case.world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
