"""Experts whose weights are codes and scales, on a GPU: bits of every form and tile.

Sums of a layer are held against those of the same numbers.
"""

from functools import partial

import torch

from tests.gpu.experts.bits import routes
from tests.gpu.gemm.packed import FORMS, form_of
from tests.gpu.lib.checks import Differences, draw, gives, same
from tests.gpu.lib.suite import Check
from tpdet.kernels.cuda.experts.packed_admission import failing_experts
from tpdet.kernels.cuda.experts.packed_tiles import PackedLayerTiles
from tpdet.kernels.cuda.experts.sums import expert_rows, expert_sums, sums_of_rows
from tpdet.kernels.cuda.gemm.packed.admission import drawn_weight
from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.order import fold_tree

CANDIDATES = (
    PackedTile(8, 1, 64, 6), PackedTile(8, 1, 128, 4), PackedTile(8, 2, 64, 6),
    PackedTile(16, 1, 64, 6), PackedTile(16, 1, 128, 4), PackedTile(16, 2, 64, 12, True),
    PackedTile(32, 1, 64, 4), PackedTile(32, 2, 64, 10, True),
    PackedTile(64, 1, 64, 4), PackedTile(64, 2, 64, 4), PackedTile(64, 2, 64, 8, True),
    PackedTile(128, 1, 64, 4), PackedTile(128, 2, 64, 4), PackedTile(128, 2, 64, 6, True),
)  # fmt: skip
LANES = 8
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
