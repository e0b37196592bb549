"""Sampling together on several GPUs, by shares of the rows and by columns: bits against one rank's.

torchrun --nproc-per-node 4 -m tests.gpu.sampling.shares
"""

import sys
from functools import partial

import torch

from tests.gpu.lib.ranks import attempt, check_carrier
from tests.gpu.sampling.bits import USUAL, params, rows
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


WAYS = (*USUAL.values(), {"temperature": 0.7, "top_k": 300}, {"temperature": 1.5, "min_p": 0.1})


def main():
    world = open_world("cuda", 120.0)
    sums, peer = opened(world)
    good = attempt(world, f"shares at TP {world.size}", check_bits, sums, peer)
    world.close()
    sys.exit(not good)


if __name__ == "__main__":
    main()
