"""Experts whose weights are codes and scales, on a GPU: bits of every form and tile, and times.

    python -m tests.gpu.experts.packed [int4] [fp8] ...      times of those forms: Qwen3-30B-A3B's

Sums of a layer are held against those of the same numbers. A row of times has the microseconds of
both products by each tile, of the dense ones, and of a layer by the tiles that are chosen.
"""

import sys
from functools import partial

import torch

from tests.gpu.experts.bits import routes
from tests.gpu.experts.times import CHOSEN, EXPERTS, HIDDEN, LANES, WIDTH, compile_first
from tests.gpu.gemm.packed import FORMS, form_of, wide_weight
from tests.gpu.lib.checks import Differences, draw, gives, same
from tests.gpu.lib.graph_times import interleaved_medians
from tests.gpu.lib.suite import Check, run_parts
from tpdet.kernels.cuda.experts.gather import rows_in_blocks
from tpdet.kernels.cuda.experts.packed_admission import failing_experts
from tpdet.kernels.cuda.experts.packed_tiles import PackedLayerTiles, packed_tiles
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.sorted_tokens import sort_tokens
from tpdet.kernels.cuda.experts.sums import expert_rows, expert_sums, sums_of_rows
from tpdet.kernels.cuda.experts.tiles import layer_tiles
from tpdet.kernels.cuda.gemm.packed.admission import drawn_weight
from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.cuda.gemm.packed.product import in_scratch
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.inputs.experts import ExpertLayer, Lanes
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import fold_tree

CANDIDATES = (
    PackedTile(8, 1, 64, 6), PackedTile(8, 1, 128, 4), PackedTile(8, 2, 64, 6),
    PackedTile(16, 1, 64, 6), PackedTile(16, 1, 128, 4), PackedTile(16, 2, 64, 12, True),
    PackedTile(32, 1, 64, 4), PackedTile(32, 2, 64, 10, True),
    PackedTile(64, 1, 64, 4), PackedTile(64, 2, 64, 4), PackedTile(64, 2, 64, 8, True),
    PackedTile(128, 1, 64, 4), PackedTile(128, 2, 64, 4), PackedTile(128, 2, 64, 6, True),
)  # fmt: skip
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GPU = torch.device("cuda", 0)


def fold_of(experts):
    return Lanes(range(experts), experts, LANES, (fold_tree("tree", LANES),))


def tile_fits(tile, *weights):
    return all(weight.shape[2] % tile.depth == 0 for weight in weights)


def sums_are_the_dense_ones(name, hidden, width, activation, biased):
    """A layer's sums by every candidate, at few and many tokens, rows of padding among them."""
    count, found = 16, Differences()
    gate_up, up_numbers = drawn_weight(form_of(name, (count, 2 * width, hidden)), GPU)
    down, down_numbers = drawn_weight(form_of(name, (count, hidden, width)), GPU)
    biases = (None, None)
    if biased:
        biases = draw(count, 2 * width, seed=2), draw(count, hidden, seed=3)
    for tokens in (1, 3, 8, 13, 16, 40, 200, 600):
        x, ids = draw(tokens, hidden), routes(tokens, 4, count, tokens)
        ids[tokens - tokens // 3 :] = -1
        weights = torch.rand(tokens, 4, device="cuda")
        rest = biases, fold_of(count), None, activation
        wanted = expert_sums(x, ids, weights, up_numbers, down_numbers, *rest).values
        for tile in CANDIDATES:
            if tile_fits(tile, gate_up, down):
                for by_token in {False, tokens <= tile.rows}:
                    tiles = PackedLayerTiles(tile, tile, by_token)
                    run = partial(_sums, x, ids, weights, gate_up, down, *rest, tiles)
                    found.keep(gives, run, wanted, f"{tokens} tokens {tile} {by_token}")
    return found.finish()


def _sums(*told):
    return expert_sums(*told).values


def experts_that_are_cut_are_the_dense_ones(name):
    """Both calls of experts that are cut over their outputs."""
    count = 8
    gate_up, up_numbers = drawn_weight(form_of(name, (count, 256, 512)), GPU)
    down, down_numbers = drawn_weight(form_of(name, (count, 256, 256)), GPU)
    for tokens in (5, 100):
        x, mixed, ids = draw(tokens, 512), draw(tokens, 4, 256, seed=1), routes(tokens, 4, count)
        weights, held = torch.rand(tokens, 4, device="cuda"), (range(count), count)
        wanted = expert_rows(x, ids, up_numbers, None, *held)
        same(expert_rows(x, ids, gate_up, None, *held), wanted, f"{tokens} rows")
        rest = None, fold_of(count)
        wanted = sums_of_rows(mixed, ids, weights, down_numbers, *rest).values
        same(sums_of_rows(mixed, ids, weights, down, *rest).values, wanted, f"{tokens} sums")


def a_start_admits_experts():
    shapes = (1536, 2048), (2048, 768), (5760, 2880), (2880, 2880)
    products = [Product("gated" if n > k else "column", n, k) for n, k in shapes]
    forms = [form_of(name, (8, *shape)) for name in ("fp8", "int4") for shape in shapes[:2]]
    forms += [form_of("mxfp4", (8, *shape)) for shape in shapes]
    tried, failed = failing_experts(forms, products, GPU)
    if failed:
        raise AssertionError("; ".join(failed[:4]))
    return f"{tried} admitted"


def packed_expert_checks():
    """The suite's checks of packed experts."""
    return [
        *(
            Check(f"packed experts of {name}", sums_are_the_dense_ones, (name, *case))
            for name in FORMS
            for case in ((512, 256, "silu", False),)
        ),
        Check(
            "packed experts with biases",
            sums_are_the_dense_ones,
            ("mxfp4", 320, 192, "clamped", True),
        ),
        Check("packed experts that are cut", experts_that_are_cut_are_the_dense_ones, ("int4",)),
        Check("admission of packed experts", a_start_admits_experts),
    ]


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
    return run_parts("experts.packed", {n: partial(times_of, n) for n in FORMS}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
