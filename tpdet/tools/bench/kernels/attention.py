"""`tpdet bench attention`: prefill beside cuDNN's attention, decode beside its bytes' floor.

Graphs over rotating pages, in turn. cuDNN's attention is torch's `scaled_dot_product_attention`
pinned to that backend, with keys and values repeated to the query heads.
"""

import argparse
import random
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tpdet.errors import UsageError
from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, PAGE_TOKENS
from tpdet.layers.partition import Partition
from tpdet.tools.bench.kernels.gpu import gpu_only, random_values, this_gpu
from tpdet.tools.measurement.floor import CaseWork, print_floor
from tpdet.tools.measurement.graph_times import times_us
from tpdet.tools.measurement.rows import BenchRow, finish, kernel_row
from tpdet.tools.worlds.lists import parse_sizes
from tpdet.tools.worlds.shapes import shards

COLD_BYTES = 256 << 20
_PREFILL_COPIES = 2


def attention_command(options: argparse.Namespace) -> int:
    """Every decode and prefill case at the heads of the named models' shards."""
    gpu_only("attention")
    rows: list[BenchRow] = []
    decode, prefill = parse_pairs(options.decode), parse_pairs(options.prefill)
    seen = set()
    names = options.model_shape.split(",")
    for name, partition in shards(names, parse_sizes(options.tp), DEFAULT_FOLD_ORDER):
        heads = _heads(partition)
        if heads in seen:
            continue  # another model's shard is the same
        seen.add(heads)
        for kind, cases in (("decode", decode), ("prefill", prefill)):
            for count, length in cases:
                rows.append(_case(kind, name, partition, count, length, options.repeats))
                torch.cuda.empty_cache()
    return finish("attention", this_gpu(), rows, options.output, as_json=options.json)


def parse_pairs(text: str) -> list[tuple[int, int]]:
    """ "1:4096,2:128" as pairs of numbers. Raises UsageError."""
    pairs = []
    for part in text.split(",") if text else ():
        sizes = part.split(":")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise UsageError(f"{text!r} is not a list of pairs such as 1:4096,16:8192")
        pairs.append((int(sizes[0]), int(sizes[1])))
    return pairs


class _Heads(NamedTuple):
    """A rank's query and key heads, and their size."""

    queries: int
    keys: int
    size: int


def _case(
    kind: str, name: str, partition: Partition, count: int, length: int, repeats: int
) -> BenchRow:
    heads, ranks, is_prefill = _heads(partition), partition.world.size, kind == "prefill"
    rows = length if is_prefill else 1
    pairs = count * (length * (length + 1) / 2 if is_prefill else length)
    moved = 2 * heads.keys * length + 2 * heads.queries * rows
    work = CaseWork(4.0 * heads.queries * heads.size * pairs, 2.0 * count * heads.size * moved)
    floor = print_floor(f"{name} {kind}, TP {ranks}, {count} x {length}", work)
    ours, other = (_prefill_times if is_prefill else _decode_times)(heads, count, length, repeats)
    peer = ("cuDNN", other) if other else None
    case = {"model": name, "tp": ranks, "batch": count, "context": length}
    return kernel_row(f"attention {kind}", ours, floor, peer, work, **case)


def _heads(partition: Partition) -> _Heads:
    queries, keys = len(partition.query_heads), len(partition.key_heads)
    return _Heads(queries, keys, partition.config.head_dim)


def _pages(count: int, length: int) -> list[tuple[int, ...]]:
    """Each sequence's pages, in no order."""
    pages = -(-length // PAGE_TOKENS)
    order = random.Random(0).sample(range(count * pages), count * pages)
    return [tuple(order[i * pages : (i + 1) * pages]) for i in range(count)]


def _pools(heads: _Heads, pages: int, copies: int) -> list[list[torch.Tensor]]:
    shape = pages, heads.keys, PAGE_TOKENS, heads.size
    return [[random_values(*shape, seed=2 * i + part) for part in (0, 1)] for i in range(copies)]


def _decode_times(
    heads: _Heads, count: int, length: int, repeats: int
) -> tuple[float, float | None]:
    pages = _pages(count, length)
    total = sum(map(len, pages))
    copies = max(2, -(-COLD_BYTES // (4 * total * heads.keys * PAGE_TOKENS * heads.size)))
    q = random_values(count, heads.queries, heads.size, seed=99)
    sequences = [PagedSequence(i, 1, length - 1, own) for i, own in enumerate(pages)]
    batch = make_batch(tuple(sequences), q.device)
    (ours,) = times_us(
        [lambda pool: ops.paged_attention(q, pool[0], pool[1], batch)],
        _pools(heads, total, copies),
        repeats,
    )
    return ours, None


def _prefill_times(
    heads: _Heads, count: int, length: int, repeats: int
) -> tuple[float, float | None]:
    pages = _pages(count, length)
    q = random_values(count * length, heads.queries, heads.size, seed=99)
    sequences = [PagedSequence(i * length, length, 0, own) for i, own in enumerate(pages)]
    batch = make_batch(tuple(sequences), q.device)
    pools = _pools(heads, sum(map(len, pages)), _PREFILL_COPIES)
    shape = count, heads.queries, length, heads.size
    dense = [
        [random_values(*shape, seed=3 * copy + part) for part in (0, 1, 2)]
        for copy in range(_PREFILL_COPIES)
    ]

    def ours(copy: int) -> object:
        return ops.paged_attention(q, pools[copy][0], pools[copy][1], batch)

    def peer(copy: int) -> object:
        queries, keys, values = dense[copy]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return scaled_dot_product_attention(queries, keys, values, is_causal=True)

    first, second = times_us([ours, peer], range(_PREFILL_COPIES), repeats)
    return first, second
