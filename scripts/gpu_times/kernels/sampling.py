"""Times of the sampler's kernels on a GPU, and how many rows fall through each method for a bound.

python -m scripts.gpu_times.kernels.sampling [times] [fallback_times] [philox_times]

Microseconds in a CUDA graph that begins with the table on the device (`graph`), and as `sample`
launches it, from the host's call to the last kernel (`call`); the floor reads the logits twice
(greedy) or three times (random) from HBM at 4.5 TB/s.
"""

import sys
import time
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.random import philox_impl

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.lib.checks import attempt
from tests.gpu.sampling.bits import USUAL, only, params, rows, sample_shard
from tpdet.kernels.cuda.sampling import launch, noise
from tpdet.kernels.cuda.sampling.table import ABOVE_ALL
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard

DATA = ("random", "peaked", "heavy", "flat", "tied", "zeros")


def fallen(x, way):
    """How many rows of x fall through the list, and how many through the window as well."""
    return f"{unanswered(x, way, ('list',))} and {unanswered(x, way, ('list', 'window'))}"


def unanswered(x, way, methods):
    """How many rows of x have no bound after some methods."""
    height, vocabulary = x.shape
    how, found = [RowParams(seed=i, position=1, **way) for i in range(height)], []
    find = launch.find_bounds

    def watch(*arguments, **named):
        found.append(find(*arguments, **named))
        return found[-1]

    launch.find_bounds = watch
    try:
        with only(methods):
            launch.sample_rows(x, how, Shard(0, vocabulary))
    finally:
        launch.find_bounds = find
    return int((found[-1].bounds[:, 0] == ABOVE_ALL.value).sum())


def times():
    """Print times by way and rows, by data, and how many rows fall through."""
    vocabulary = 151_936
    for name, way in USUAL.items():
        for count in (1, 16, 64, 256):
            for ranks in (1, 4):
                columns = vocabulary // ranks
                inputs = [rows("random", count, columns, seed) for seed in range(2)]
                how = params(count, (way,))
                shard = Shard(0, vocabulary, None if ranks == 1 else Copies(ranks))
                graph = graph_time(inputs, how, shard)
                call = call_time(inputs[0], how, shard)
                passes = 2 if way["temperature"] == 0.0 else 3
                floor = passes * count * columns * 4 / 4.5e6
                print(
                    f"  {name:8s} {count:4d} rows /{ranks} graph {graph:8.1f}  call {call:8.1f}  "
                    f"floor {floor:6.1f}  ratio {graph / floor:5.2f}",
                    flush=True,
                )
    data_times(vocabulary)
    for kind in DATA:
        x = rows(kind, 64, vocabulary)
        found = [f"{fallen(x, USUAL[n])} by {n}" for n in ("k50 p.9", "p.9")]
        print(f"  falling through the list and the window, {kind}: {', '.join(found)}", flush=True)


FALLBACKS = (
    ("list", "window", "digits"), ("list", "window"), ("list", "digits"), ("window",), ("digits",),
)  # fmt: skip
"""All methods; one fallback after the list (each falls through to nothing); each fallback alone."""


def fallback_times():
    """Each fallback for all rows that fall through, in a graph: is one of them enough?

    `unanswered` rows keep no bound: where there are any, that fallback cannot stand alone.
    """
    vocabulary = 151_936
    for kind in ("flat", "tied"):
        for count in (16, 64):
            inputs = [rows(kind, count, vocabulary, seed) for seed in range(2)]
            for name in ("p.9", "k50 p.9"):
                for methods in FALLBACKS:
                    bare = unanswered(inputs[0], USUAL[name], methods)
                    with only(methods):
                        taken = graph_time(
                            inputs, params(count, (USUAL[name],)), Shard(0, vocabulary)
                        )
                    print(
                        f"  {kind:7s} {count:3d} rows {name:8s} {'+'.join(methods):18s} "
                        f"graph {taken:8.1f} us  unanswered {bare}",
                        flush=True,
                    )


@triton.jit
def ours(words, position, BLOCK: tl.constexpr):
    """Store words of our Philox."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.full((), 0x12345678, tl.uint32)
    at_position = tl.zeros((), tl.uint32) + tl.load(position).to(tl.uint32)
    tl.store(words + at, noise.philox_of(at, (at_position, key, key, key)))


@triton.jit
def tritons(words, position, BLOCK: tl.constexpr):
    """Store words of Triton's Philox."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    key, zero = tl.full((), 0x12345678, tl.uint32), tl.zeros_like(at)
    at_position = zero + tl.load(position).to(tl.uint32)
    word, _, _, _ = philox_impl(at, at_position, zero + key, zero, key, key)
    tl.store(words + at, word)


def philox_times():
    """Our Philox and Triton's own, 2^28 words each, in turn: the same bits?, microseconds."""
    positions = [torch.tensor([p], device="cuda") for p in range(2)]
    words = [torch.empty(1 << 28, dtype=torch.int32, device="cuda") for _ in range(2)]

    def runs(kernel, out):
        def run(position):
            kernel[1 << 18,](out, position, 1024, num_warps=4)
            return out

        return run

    works = [runs(ours, words[0]), runs(tritons, words[1])]
    found = interleaved_medians(works, positions, repeats=7)
    for work in works:
        work(positions[1])
    same = torch.equal(*words)
    print(f"  philox: ours {found[0]:.1f} us, Triton's {found[1]:.1f} us, same bits: {same}")
    assert same


def data_times(vocabulary):
    """64 whole rows of each kind of data, by top-k and top-p and by top-p alone."""
    for kind in DATA:
        inputs = [rows(kind, 64, vocabulary, seed) for seed in range(2)]
        for name in ("k50 p.9", "p.9"):
            graph = graph_time(inputs, params(64, (USUAL[name],)), Shard(0, vocabulary))
            print(f"  64 rows, {kind:7s} {name:8s} graph {graph:8.1f}", flush=True)


class Copies:
    """A gather that shows a rank its own tensor `ranks` times: the kernels of one rank."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __call__(self, x):
        """The tensor, as often as there are ranks."""
        return x.expand(self.ranks, *x.shape).contiguous()


def graph_time(inputs, how, shard):
    """Microseconds in a graph: what comes from the host is put there before."""
    kept, original = {}, launch.to_device

    def once(values, dtype, device):
        key = (tuple(values), dtype)
        if key not in kept:
            kept[key] = original(values, dtype, device)
        return kept[key]

    launch.to_device = once
    try:
        return interleaved_medians([lambda x: sample_shard(how, x, shard)], inputs, repeats=7)[0]
    finally:
        launch.to_device = original


def call_time(x, how, shard, repeats=10):
    """Microseconds from the host's call to the last kernel, the median."""

    def work():
        return launch.sample_rows(x, how, shard)

    work()
    torch.cuda.synchronize()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2] * 1e6


def main(arguments):
    """Print the parts that are named, else all."""
    parts = {
        function.__name__: partial(attempt, function.__name__, function)
        for function in (times, fallback_times, philox_times)
    }
    return run_parts("kernels.sampling", parts, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
