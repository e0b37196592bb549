"""Times of sampling together on several GPUs, by each way.

    torchrun --nproc-per-node 4 -m scripts.gpu_times.exchange.samples

Columns, microseconds a step of the slowest rank, in CUDA graphs whose replays take turns: `shares`
(rows exchanged over peer memory, each rank samples its own), `shares by gather` (the same by NCCL),
`columns` (each rank samples over its part of the vocabulary; filtered rows are gathered whole) and
`whole` (logits gathered, one rank samples all rows, ids gathered). `exchange` is the exchange of
rows alone; the floor is its bytes over 450 GB/s and a rank's rows three times over 4.5 TB/s.
"""

import sys
from contextlib import contextmanager

import torch

from scripts.gpu_times.graphs import repeated, slowest_medians
from scripts.gpu_times.parts import on_ranks
from tests.gpu.lib.ranks import check_carrier
from tests.gpu.sampling.bits import USUAL, params, rows
from tests.gpu.sampling.shares import ROWS, VOCABULARY, columns_of, opened, shared
from tpdet.comm.exchange.rows import GatherRows
from tpdet.kernels.cuda.sampling import launch
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.sampling import sampler


@contextmanager
def kept_on_the_device():
    """What comes from the host is put there once, and answers stay: so that graphs can hold it."""
    kept, homes = {}, []

    def once_of(original):
        def once(values, *rest):
            key = (original.__name__, tuple(values), *map(str, rest))
            if key not in kept:
                kept[key] = original(values, *rest)
            return kept[key]

        return once

    for module, name in ((launch, "to_device"), (sampler, "to_device")):
        homes.append((module, name, getattr(module, name)))
        setattr(module, name, once_of(getattr(module, name)))
    homes.append((sampler, "to_host", sampler.to_host))
    sampler.to_host = lambda answers: (answers, None)
    try:
        yield
    finally:
        for module, name, original in homes:
            setattr(module, name, original)


def print_times(world):
    """Print a line for each way to sample and number of rows."""
    sums, peer = opened(world)
    gather = GatherRows(world, ROWS)
    for name, way in USUAL.items():
        for count in (1, 16, 32, 64, 256):
            mine = columns_of(rows("random", count, VOCABULARY), world)
            how, none = params(count, (way,)), [0] * count
            shard = Shard(world.rank * mine.shape[1], VOCABULARY, sums.carrier.all_gather)

            def whole(mine=mine, how=how):
                everyone = world.all_gather(mine).permute(1, 0, 2).reshape(len(mine), -1)
                found = launch.sample_rows(everyone, how, Shard(0, VOCABULARY))
                return world.all_gather(found.tokens)

            works = {
                "shares": lambda m=mine, h=how, n=none: shared(m, h, n, peer, world),
                "shares by gather": lambda m=mine, h=how, n=none: shared(m, h, n, gather, world),
                "columns": lambda m=mine, h=how, s=shard: launch.sample_rows(m, h, s),
                "whole": whole,
                "exchange": lambda m=mine: peer.whole_rows(m),
            }
            runs = {title: repeated(work) for title, work in works.items()}
            with kept_on_the_device():
                for work in works.values():
                    work()
                taken = slowest_medians(sums.carrier, runs, torch.zeros(1, 8, device="cuda"), 10)
            if world.rank == 0:
                share = -(-count // world.size)
                sent = share * (world.size - 1) * mine.shape[1] * 4
                floor = sent / 450e3 + 3 * share * VOCABULARY * 4 / 4.5e6
                times = "  ".join(f"{title} {value:7.1f}" for title, value in taken.items())
                print(
                    f"  {name:8s} {count:4d} rows /{world.size}  {times}  floor {floor:6.1f}",
                    flush=True,
                )
    check_carrier(sums.carrier)


def main(arguments):
    """Print all times."""
    return on_ranks("exchange.samples", print_times, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
