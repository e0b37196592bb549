"""Times of experts whose weights are codes and scales: of Qwen3-30B-A3B's shape.

    python -m scripts.gpu_times.kernels.packed_experts [int4] [fp8] ...

A row has the microseconds of both products by each tile, of the dense ones, and of a layer by the
tiles that are chosen.
"""

import sys
from functools import partial

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.kernels.experts import CHOSEN, EXPERTS, HIDDEN, WIDTH, compile_first
from scripts.gpu_times.kernels.packed import wide_weight
from scripts.gpu_times.parts import run_parts
from tests.gpu.experts.bits import routes
from tests.gpu.experts.packed import CANDIDATES, GPU, fold_of
from tests.gpu.gemm.packed import FORMS
from tests.gpu.lib.checks import draw
from tpdet.kernels.cuda.experts.gather import rows_in_blocks
from tpdet.kernels.cuda.experts.packed_tiles import packed_tiles
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.sorted_tokens import sort_tokens
from tpdet.kernels.cuda.experts.sums import expert_sums
from tpdet.kernels.cuda.experts.tiles import layer_tiles
from tpdet.kernels.cuda.gemm.packed.product import in_scratch
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.inputs.experts import ExpertLayer

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def products_of(weights, x, ids, tile, by_token):
    """What both products of a step read, and functions that run them."""
    gate_up, down = weights
    found, sms = sort_tokens(ids, range(EXPERTS), tile.rows, by_token), multiprocessors(x.device)
    rows = x if by_token else rows_in_blocks(x, found)
    up = partial(grouped_product, rows, gate_up, None, found, tile, sms, "silu", by_token)
    return up, partial(grouped_product, up(), down, None, found, tile, sms)


def times_of(name):
    """Both products by every tile at each number of tokens, and whole layers."""
    weights = [
        wide_weight(name, (EXPERTS, 2 * WIDTH, HIDDEN)),
        wide_weight(name, (EXPERTS, HIDDEN, WIDTH)),
    ]
    numbers = [in_scratch(weight).clone() for weight in weights]
    for tokens in TOKENS:
        times_at(name, weights, numbers, tokens)


def times_at(name, weights, numbers, tokens):
    """The same of one number of tokens."""
    count = 16 if tokens <= 16 else 6 if tokens <= 256 else 3
    steps = [
        (draw(tokens, HIDDEN, seed=i), routes(tokens, CHOSEN, EXPERTS, i)) for i in range(count)
    ]
    layer = ExpertLayer(HIDDEN, WIDTH, EXPERTS, EXPERTS, CHOSEN)
    mean, shares = layer.mean_rows(tokens), torch.full((tokens, CHOSEN), 0.125, device="cuda")

    def whole(pair, step):
        return expert_sums(*step, shares, *pair, (None, None), fold_of(EXPERTS))

    tiles = [tile for tile in CANDIDATES if mean <= tile.rows <= max(16, 8 * mean)]
    cases = [(tile, tokens <= 16) for tile in tiles if tokens > 16 or tokens <= tile.rows]
    compile_first(
        [
            *(partial(_both, weights, steps[0], *case) for case in cases),
            partial(whole, weights, steps[0]),
            partial(whole, numbers, steps[0]),
        ]
    )
    taken = interleaved_medians([partial(whole, numbers), partial(whole, weights)], steps, 5)
    old = layer_tiles(layer, tokens, 2, GPU)
    for text, of, tile in (("gate_up", 0, old.gate_up), ("down", 1, old.down)):
        dense = _median([products_of(numbers, *step, tile, old.by_token)[of] for step in steps])
        line = [f"{name} {tokens:5} tokens {text:8} dense {dense:.1f}"]
        for case in cases:
            us = _median([products_of(weights, *step, *case)[of] for step in steps])
            mark = "*" * (case[0] == packed_tiles(layer, tokens)[of])
            line.append(f"{mark}{tuple(case[0])[:4]}{'W' * case[0].specialised} {us:.1f}")
        print("  ".join(line), flush=True)
    print(
        f"{name} {tokens:5} tokens, layer: dense {taken[0]:.1f} packed {taken[1]:.1f}", flush=True
    )


def _both(weights, step, tile, by_token):
    for run in products_of(weights, *step, tile, by_token):
        run()


def _median(runs):
    return interleaved_medians([lambda run: run()], runs, 5)[0]


def main(arguments):
    """Print the parts that are named, else all."""
    return run_parts("kernels.packed_experts", {n: partial(times_of, n) for n in FORMS}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
