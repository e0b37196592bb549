"""Warp-specialised GEMM on a GPU: bits against a pointer tile and leaves that are folded apart.

python -m tests.gpu.gemm.warp_specialised
"""

import sys
from dataclasses import replace

import torch

from tests.gpu.lib.checks import attempt, draw, ended, same
from tpdet.kernels import order
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.choice.leaf_choice import cut_roots
from tpdet.kernels.cuda.gemm.operands import run_chain
from tpdet.kernels.cuda.gemm.variants.root_form import root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands
from tpdet.kernels.cuda.gemm.variants.warp_specialised_launch import folds, run_gluon_fold
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.partial_sums import relative_roots

LEAVES = 8
KINDS = ("normal", "heavy", "cancelling", "tiny")
BIT_ROWS = (1, 37, 128, 500, 1000, 4097)
TILE = Tile(128, 128, 64, 4, 6, "descriptor")
STAGES = (5, 6, 7)
COLUMN_TILES = [
    Tile(128, columns, 64, 4, stages, "warp_specialised")
    for columns, stages in ((256, 3), (128, 5), (128, 6))
]
PLAIN = Tile(64, 64, 64, 4, 3)


def processors():
    return torch.cuda.get_device_properties(0).multi_processor_count


def rank_roots(name, ranks, rank):
    return relative_roots(order.fold_plan(name, LEAVES, ranks).roots[rank])


def forms(leaves, roots):
    """(cut, form, subtrees) of every cut that folds anything."""
    for cut in (2, 4, 8):
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        if form is not None:
            yield cut, form, parts[0]


def fitting(form):
    """Stages that leave room for what the form keeps."""
    return [n for n in STAGES if folds(form, 512, replace(TILE, stages=n), H200)]


def fold(x, w, form, stages):
    y = torch.full((form.roots, x.shape[0], w.shape[1]), torch.nan, device=x.device)
    run_gluon_fold(Operands(x, w, None, y), form, replace(TILE, stages=stages), processors())
    return y


def columns_have_the_bits_of_another_tile(kind):
    """Column products with and without bias, both tiles, against a pointer tile."""
    count = 0
    for n, k in ((6144, 4096), (1000, 192), (264, 64)):
        w, bias = draw(1, n, k, kind=kind, seed=1), draw(n, seed=2)
        for m in BIT_ROWS:
            x = draw(m, k, kind=kind)
            for shift in (None, bias):
                wanted = torch.full((1, m, n), torch.nan, device=x.device, dtype=x.dtype)
                run_chain(Operands(x, w, shift, wanted), PLAIN, processors())
                for tile in COLUMN_TILES:
                    y = torch.full_like(wanted, torch.nan)
                    run_chain(Operands(x, w, shift, y), tile, processors())
                    same(y, wanted, f"{n} x {k}, M={m} {tile} bias {shift is not None}")
                    count += 1
    return f"{count} cases"


def has_the_bits_of_leaves_folded_apart(kind, n, k):
    """Every order, rank, cut and stage count against leaves apart: a pointer tile, torch.add."""
    seen, w8 = {}, draw(LEAVES, n, k, kind=kind, seed=1)
    for name in order.FOLD_ORDERS:
        for ranks in (1, 2, 4):
            for rank in range(ranks):
                share = LEAVES // ranks
                for _, form, units in forms(share, rank_roots(name, ranks, rank)):
                    seen.setdefault((share, form), units)
    count = 0
    for m in BIT_ROWS:
        x8 = draw(m, LEAVES * k, kind=kind)
        apart = leaf_gemm.leaf_gemm(x8, w8, PLAIN)
        for (share, form), units in seen.items():
            x, w = x8[:, : share * k].contiguous(), w8[:share]
            wanted = [order.evaluate(unit, lambda i, p=apart: p[i], torch.add) for unit in units]
            wanted = torch.stack(wanted)
            for stages in fitting(form):
                for again in range(1 + 3 * (m == 1000)):
                    same(fold(x, w, form, stages), wanted, f"M={m} {form} s{stages} {again}")
                count += 1
    return f"{count} cases"


def runs_do_not_race(n, k, m):
    """The same bits 20 times at full size, with other work beside and other data in between."""
    x, w = draw(m, LEAVES * k, kind="heavy"), draw(LEAVES, n, k, kind="heavy", seed=1)
    for name in order.FOLD_ORDERS:
        form = root_form(0, LEAVES, rank_roots(name, 1, 0))
        for stages in fitting(form):
            first = fold(x, w, form, stages)
            for again in range(20):
                fold(draw(m, LEAVES * k, seed=again), w, form, stages)
                same(fold(x, w, form, stages), first, f"{name} s{stages}, run {again}")


def check_bits():
    for kind in KINDS:
        attempt(f"columns {kind}", columns_have_the_bits_of_another_tile, kind)
    for kind in KINDS:
        for n in (4096, 1024):
            for k in (128, 512, 1536):
                if n == 1024 or kind == "heavy" or k == 512:
                    what = f"gluon {kind} N={n} leaves of {k}"
                    attempt(what, has_the_bits_of_leaves_folded_apart, kind, n, k)
    attempt(
        "gluon, columns that end inside a tile",
        has_the_bits_of_leaves_folded_apart,
        "heavy",
        272,
        192,
    )
    attempt("gluon, no races", runs_do_not_race, 4096, 512, 2048)


def main(_):
    check_bits()
    return ended()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
