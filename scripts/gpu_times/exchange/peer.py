"""Times of the exchange over peer memory, in graphs of chained exchanges, beside its peers.

    torchrun --nproc-per-node 4 -m scripts.gpu_times.exchange.peer    # or 2

Columns, microseconds an exchange with residual and norm: ours one-shot and two-shot by warps of a
program, the gathered form, NCCL's bf16 all-reduce with the norm kernel, and that all-reduce alone.
The first figure is the floor: bytes that leave a GPU over 450 GB/s, for the cheaper of our two.
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from scripts.gpu_times.graphs import slowest_medians
from scripts.gpu_times.parts import on_ranks
from tests.gpu.lib.checks import draw
from tests.gpu.lib.ranks import check_carrier
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_memory import open_peer_memory
from tpdet.kernels import ops, order
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums

HIDDEN, EPS, LINK = 4096, 1e-6, 450e9
KILOBYTES = (8, 32, 128, 256, 512, 1024, 2048, 8192, 32768, 131072)
ONE_SHOT_MOST = 256


def print_times(world):
    """Print a line for each size; a note on the memory that it took."""
    plan = order.fold_plan("pairs", 8, world.size)
    most = KILOBYTES[-1] * 1024 // 2 // HIDDEN
    memory = open_peer_memory(world)
    one, two = (
        PeerExchange(plan, memory, rows, HIDDEN, torch.bfloat16, one_shot_rows=limit)
        for rows, limit in ((ONE_SHOT_MOST, ONE_SHOT_MOST), (most, 0))
    )
    weight = draw(HIDDEN, seed=1)
    for kilobytes in KILOBYTES:
        rows = kilobytes * 1024 // 2 // HIDDEN
        roots = len(plan.roots[world.rank])
        sums = PartialSums(draw(roots, rows, HIDDEN, dtype=torch.float32), tuple(range(roots)))
        residual = draw(rows, HIDDEN, dtype=torch.float32, seed=2)
        runs = _candidates(world, plan, one, two, sums, weight, rows)
        repeats = 60 if rows <= 64 else 20 if rows <= 1024 else 4
        taken = slowest_medians(one.carrier, runs, residual, repeats)
        if world.rank == 0:
            best = min(taken[name] for name in taken if "shot" in name)
            print(_line(world, plan, kilobytes, rows, taken, best), flush=True)
    check_carrier(one.carrier)
    check_carrier(two.carrier)
    bound = one.layout.bytes / 2**20, two.layout.bytes / 2**20
    return f"shared memory {bound[0]:.0f} and {bound[1]:.0f} MiB a rank"


def _candidates(world, plan, one, two, sums, weight, rows):
    """Name -> function of the residual stream that returns the next."""

    def ours(exchange, warps, spread=0):
        def run(residual):
            exchange.spread_rows = spread
            exchange._one = replace(exchange._one, warps=warps)
            exchange._two = replace(exchange._two, warps=warps)
            return exchange.fold_and_norm(sums, Finish(residual, Norm(weight, EPS)))[0]

        return run

    reduced = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def library(residual):
        dist.all_reduce(reduced, group=world.process_group)
        total = PartialSums(whole, (0,))
        return ops.fold_and_norm(total, Finish(residual, Norm(weight, EPS)))[0]

    def alone(residual):
        dist.all_reduce(reduced, group=world.process_group)
        return residual

    whole = sums.values[:1]
    runs = {}
    if rows <= ONE_SHOT_MOST:
        runs |= {f"one-shot {warps}w": ours(one, warps) for warps in (16, 32)}
    if not two.takes_one_shot(rows):
        runs |= {f"two-shot {warps}w": ours(two, warps) for warps in (8, 16)}
        if rows <= 1024:
            runs |= {f"two-shot spread {w}w": ours(two, w, spread=rows) for w in (16, 32)}
    gather = GatherExchange(plan, world)
    if rows <= 8192:
        runs["gather"] = lambda residual: gather.fold_and_norm(
            sums, Finish(residual, Norm(weight, EPS))
        )[0]
    return runs | {"nccl + norm": library, "nccl": alone}


def _line(world, plan, kilobytes, rows, taken, best):
    ranks, sent = world.size, max(len(roots) for roots in plan.roots)
    one = rows * HIDDEN * 4 * sent * (ranks - 1)
    two = rows * HIDDEN * (4 * sent + 2) * (ranks - 1) / ranks
    figures = " ".join(f"{name} {value:.1f}" for name, value in taken.items())
    ratios = best / taken["nccl"], best / taken["nccl + norm"]
    return (
        f"{kilobytes:7d} KB {rows:6d} rows: floor {min(one, two) / LINK * 1e6:.1f} | {figures} | "
        f"best/nccl {ratios[0]:.2f}, best/(nccl + norm) {ratios[1]:.2f}"
    )


def main(arguments):
    """Print all times."""
    return on_ranks("exchange.peer", print_times, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
