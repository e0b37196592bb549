"""Sampling together on several GPUs: bits against one rank's, times of each way.

torchrun --nproc-per-node 4 -m tests.gpu.sampling.shares

Columns, microseconds a step of the slowest rank, in CUDA graphs whose replays take turns: `shares`
(rows exchanged over peer memory, each rank samples its own), `shares by gather` (the same by NCCL),
`columns` (each rank samples over its part of the vocabulary; filtered rows are gathered whole) and
`whole` (logits gathered, one rank samples all rows, ids gathered). `exchange` is the exchange of
rows alone; the floor is its bytes over 450 GB/s and a rank's rows three times over 4.5 TB/s.
"""

import sys
from contextlib import contextmanager
from functools import partial

import torch

from tests.gpu.lib.ranks import attempt, check_carrier, repeated, slowest_medians
from tests.gpu.sampling.bits import params, rows
from tests.gpu.sampling.times import TIMED
from tpdet.comm.device import open_world
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_memory import open_peer_memory
from tpdet.comm.exchange.rows import GatherRows, open_row_exchange
from tpdet.kernels import order
from tpdet.kernels.cuda.sampling import launch
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.sampling import sampler

VOCABULARY = 151_936
ROWS = 256


def opened(world):
    plan = order.fold_plan("pairs", 8, world.size)
    sums = PeerExchange(plan, open_peer_memory(world), 64, 4096, torch.bfloat16)
    return sums, open_row_exchange(sums.carrier, VOCABULARY // world.size, ROWS)


def columns_of(whole, world):
    return whole.chunk(world.size, dim=1)[world.rank].contiguous()


def shared(logits, how, counts, exchange, world, processed=False):
    of = how, counts, exchange, world.rank, world.size, VOCABULARY
    return sampler.sample_shared(logits, *of, processed)


def check_bits(world, sums, peer):
    """Random, tied and poisoned rows of any number, with and without tops: by shares over both
    transports, and by columns."""
    wrong = []  # told at the end: no rank leaves the others waiting
    for kind in ("random", "tied", "poisoned"):
        for count in (1, 3, 17, 64, 256):
            whole, how = rows(kind, count, VOCABULARY, seed=count), params(count, WAYS)
            mine = columns_of(whole, world)
            for counts in ([0] * count, [i % 3 * 2 for i in range(count)]):
                expected = launch.sample_rows(whole, how, Shard(0, VOCABULARY))
                alone = sampler.finish(
                    sampler._pending(
                        whole, expected, counts, sampler._ranks(how, counts), Shard(0, VOCABULARY)
                    )
                )
                shard = Shard(world.rank * mine.shape[1], VOCABULARY, sums.carrier.all_gather)
                by_columns = partial(sampler.sample_columns, mine, how, counts, shard)
                works = {"columns": by_columns}
                for exchange in (peer, GatherRows(world, ROWS)):
                    works[type(exchange).__name__] = partial(
                        shared, mine, how, counts, exchange, world
                    )
                for name, work in works.items():
                    sampled = work()
                    same = torch.equal(sampled.fit, expected.fit)
                    same &= torch.equal(sampled.tokens[sampled.fit], expected.tokens[sampled.fit])
                    if not same or repr(sampler.finish(sampled)) != repr(alone):
                        wrong.append((kind, count, name))
                    found = sampler.finish(work(processed=True))
                    if repr(found) != repr(sampler.sample(whole, how, counts, processed=True)):
                        wrong.append((kind, count, name, "processed"))
    check_carrier(sums.carrier)
    assert not wrong, wrong


WAYS = (*TIMED.values(), {"temperature": 0.7, "top_k": 300}, {"temperature": 1.5, "min_p": 0.1})


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


def print_times(world, sums, peer):
    gather = GatherRows(world, ROWS)
    for name, way in TIMED.items():
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


def main():
    world = open_world("cuda", 120.0)
    sums, peer = opened(world)
    good = attempt(world, f"shares at TP {world.size}", check_bits, sums, peer)
    good &= attempt(world, "times", print_times, sums, peer)
    world.close()
    sys.exit(not good)


if __name__ == "__main__":
    main()
