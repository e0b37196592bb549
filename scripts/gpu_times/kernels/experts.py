"""Times of the kernels of experts on a GPU.

    python -m scripts.gpu_times.kernels.experts [part ..]

Microseconds in CUDA graphs that rotate over steps with other routes, beside the time in which the
weights of the touched experts are read at 4.5 TB/s. Shapes are those of Qwen3-30B-A3B.
"""

import sys
from functools import cache

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.experts.bits import fitted, routes, spans_of
from tests.gpu.lib.checks import attempt, draw
from tpdet.kernels.cuda.compile.pool import compile_all
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.experts.candidates import CANDIDATES
from tpdet.kernels.cuda.experts.gather import rows_in_blocks
from tpdet.kernels.cuda.experts.lanes import fold_lanes
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.router import route
from tpdet.kernels.cuda.experts.sorted_tokens import sort_tokens
from tpdet.kernels.cuda.experts.sums import Lanes, expert_sums
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.inputs.experts import Routing
from tpdet.kernels.order import fold_tree
from tpdet.tools.bench.kernels.experts import skewed_logits

HIDDEN, WIDTH, EXPERTS, CHOSEN, LANES = 2048, 768, 128, 8, 8
FLOOR_BYTES = 4.5e12
FLOOR_FLOPS = 0.65e15
TOKENS = {1: 8, 4: 8, 16: 16, 64: 64, 256: 256, 2048: 2048, 8192: 8192}
"""Tokens of a step, and the bucket of tiles that is measured at it."""


SMALL = (
    (1, 8, True), (16, 16, True), (64, 16, False), (256, 32, False), (2048, 128, False),
    (8192, 128, False),
)  # fmt: skip
"""Tokens, rows of a block, whether blocks are by token."""


class Layer:
    """Weights of one layer, and steps of so many tokens with routes of their own."""

    def __init__(self):
        self.gate_up = draw(EXPERTS, 2 * WIDTH, HIDDEN, seed=1) * 0.02
        self.down = draw(EXPERTS, HIDDEN, WIDTH, seed=2) * 0.02

    def steps(self, tokens):
        """Rows and routes of some steps."""
        count = 16 if tokens <= 16 else 6 if tokens <= 256 else 2
        return [
            (draw(tokens, HIDDEN, seed=i), routes(tokens, CHOSEN, EXPERTS, i)) for i in range(count)
        ]


def touched(steps):
    """Mean number of experts that a step reads."""
    return sum(ids.unique().numel() for _, ids in steps) / len(steps)


def products(layer, x, ids, tile, by_token):
    """Both products, from the step's rows on."""
    found = sort_tokens(ids, range(EXPERTS), tile.rows, by_token)
    rows = x if by_token else rows_in_blocks(x, found)
    return down(layer, gate_up(layer, rows, found, tile), found, tile), found


def gate_up(layer, rows, found, tile):
    """The first product, by a tile."""
    sms, weight, by_token = multiprocessors(rows.device), layer.gate_up, found.by_token
    fit = fitted(tile, weight, True)
    return grouped_product(rows, weight, None, found, fit, sms, "silu", by_token)


def down(layer, mixed, found, tile):
    """The second product, by a tile."""
    sms, weight = multiprocessors(mixed.device), layer.down
    return grouped_product(mixed, weight, None, found, fitted(tile, weight, False), sms)


def lanes(y, found, ids):
    """Sums of the chosen experts' rows in lanes."""
    weights = torch.full(ids.shape, 0.125, device=ids.device)
    fold = Lanes(range(EXPERTS), EXPERTS, LANES, (fold_tree("tree", LANES),))
    return fold_lanes(y, ids, weights, found, fold)


def compile_first(runs):
    """Compile what the runs launch side by side."""
    with recording() as asked:
        for run in runs:
            run()
    for line in compile_all(asked.values(), 16):
        print(line, flush=True)


def tile_times(layer, tokens, bucket_tokens):
    """Each candidate's gate/up and down alone, and all of a layer by it."""
    steps = layer.steps(tokens)
    experts = touched(steps)
    sizes = [experts * rows * k * 2 for rows, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    flops = [2 * tokens * CHOSEN * rows * k for rows, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    floors = [
        max(size / FLOOR_BYTES, work / FLOOR_FLOPS) * 1e6
        for size, work in zip(sizes, flops, strict=True)
    ]
    print(
        f"--- {tokens} tokens: {experts:.1f} experts touched, floors {floors[0]:.1f} and "
        f"{floors[1]:.1f} us",
        flush=True,
    )
    cases = [
        (tile, bucket.by_token)
        for bucket in CANDIDATES
        if bucket.tokens == bucket_tokens
        for tile in bucket.tiles
        if not (bucket.by_token and tokens > tile.rows)
    ]
    x, ids = steps[0]
    compile_first([lambda t=t, s=s: products(layer, x, ids, t, s) for t, s in cases])
    for tile, by_token in cases:
        label = (
            f"{tile.rows}x{tile.columns}x{tile.depth} s{tile.stages} c{tile.ctas} {tile.variant}"
        )
        try:
            ready = []
            for x, ids in steps:
                found = sort_tokens(ids, range(EXPERTS), tile.rows, by_token)
                rows = x if by_token else rows_in_blocks(x, found)
                ready.append((x, ids, rows, gate_up(layer, rows, found, tile), found))
            up = lambda r, t=tile: gate_up(layer, r[2], r[4], t)
            below = lambda r, t=tile: down(layer, r[3], r[4], t)
            whole = lambda r, t=tile, s=by_token: products(layer, r[0], r[1], t, s)
            repeats = 5 if tokens > 256 else 7
            times = interleaved_medians((up, below, whole), ready, repeats)
        except Exception as error:
            print(f"{label}: {type(error).__name__} {str(error)[:150]}", flush=True)
            torch.cuda.synchronize()
            continue
        shares = [floor / time for floor, time in zip(floors, times, strict=False)]
        share = sum(floors) / (times[0] + times[1])
        print(
            f"{label:45s} by_token {by_token:d} gate/up {times[0]:7.1f} ({shares[0]:.2f}) down "
            f"{times[1]:7.1f} ({shares[1]:.2f}) both {share:.2f} | with sorting {times[2]:7.1f}",
            flush=True,
        )


def small_kernels(layer):
    """Sorting, gathering and lanes."""
    for tokens, height, by_token in SMALL:
        steps = layer.steps(tokens)
        ready = []
        for x, ids in steps:
            found = sort_tokens(ids, range(EXPERTS), height, by_token)
            ready.append((x, ids, found, draw(found.rows, HIDDEN)))
        runs = (
            lambda r, h=height, s=by_token: sort_tokens(r[1], range(EXPERTS), h, s),
            lambda r: rows_in_blocks(r[0], r[2]),
            lambda r: lanes(r[3], r[2], r[1]),
        )
        times = interleaved_medians(runs, ready, 5)
        print(
            f"{tokens:5d} tokens: sorting {times[0]:6.1f} gather {times[1]:6.1f} lanes (with a "
            f"fill) {times[2]:6.1f} us",
            flush=True,
        )


def routed(x, routes, weights, fold):
    """The sums of one layer."""
    return expert_sums(
        x, routes.ids, routes.weights, *weights, fold, sorted_tokens=routes.sorted_tokens
    )


def layer_times(layer, skew=0.0):
    """A layer from its router's logits to the root of its lanes, by the tiles that are chosen.

    skew: the odds of expert i fall as (1 + i) ** -skew.
    """
    fold = Lanes(range(EXPERTS), EXPERTS, LANES, (fold_tree("tree", LANES),))
    weights = layer.gate_up, layer.down, (None, None)
    for tokens in TOKENS:
        steps, spans = layer.steps(tokens), spans_of(tokens)
        ready = [
            (x, skewed_logits(draw(tokens, EXPERTS, dtype=torch.float32, seed=seed), skew))
            for seed, (x, _) in enumerate(steps)
        ]
        chosen = lambda r, spans=spans: route(
            r[1], None, spans, Routing(EXPERTS, CHOSEN), range(EXPERTS)
        )
        run = lambda r, chosen=chosen: routed(r[0], chosen(r), weights, fold)
        times = interleaved_medians((chosen, run), ready, 5)
        experts = sum(chosen(r).ids.unique().numel() for r in ready) / len(ready)
        size = experts * 3 * WIDTH * HIDDEN * 2
        floor = max(size / FLOOR_BYTES, 6 * tokens * CHOSEN * WIDTH * HIDDEN / FLOOR_FLOPS) * 1e6
        fullest = sum((chosen(r).ids < EXPERTS // 8).float().mean().item() for r in ready)
        print(
            f"{tokens:5d} tokens, skew {skew:g}, {experts:.1f} experts, the first of 8 ranks takes "
            f"{fullest / len(ready):.2f} of the choices: choice {times[0]:6.1f}, layer "
            f"{times[1]:7.1f} us, products' floor {floor:7.1f}",
            flush=True,
        )


def main(arguments):
    """Print the parts that are named, else all."""
    layer = cache(Layer)
    parts = {
        f"tiles{tokens}": lambda tokens=tokens, bucket=bucket: attempt(
            f"tiles at {tokens}", tile_times, layer(), tokens, bucket
        )
        for tokens, bucket in TOKENS.items()
    }
    parts["layers"] = lambda: attempt("layers", layer_times, layer())
    for skew in (1.0, 2.0):
        parts[f"skewed{skew:g}"] = lambda skew=skew: attempt("layers", layer_times, layer(), skew)
    parts["small"] = lambda: attempt("small kernels", small_kernels, layer())
    return run_parts("kernels.experts", parts, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
