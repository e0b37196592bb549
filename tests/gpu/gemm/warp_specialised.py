"""Warp-specialised GEMM: bits, then times beside another kernel and cuBLAS.

    python -m tests.gpu.gemm.warp_specialised            all, under 60 seconds
    python -m tests.gpu.gemm.warp_specialised bits
    python -m tests.gpu.gemm.warp_specialised times

Times are microseconds of the product alone, in a graph with rotating weights, interleaved; a ratio
is cuBLAS's time (bf16 output) by ours: 1 is its speed. `other` is what `leaf_choice` takes where
this kernel cannot run. At a cut below the whole root the reader's work is not in the time: a cut is
to be held against the same cut.
"""

import sys
import time
from dataclasses import replace

import torch

from tests.gpu.lib.checks import attempt, draw, same
from tests.gpu.lib.graph_times import interleaved_medians
from tests.gpu.lib.suite import run_parts
from tpdet.kernels import order
from tpdet.kernels.cuda.cost.static import leaf_choice
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
ROWS = (512, 1024, 2048, 4096, 8192)
SHAPES = {"o": (4096, 512), "down": (4096, 1536)}  # name: N, K of a leaf
BUDGET = 30.0  # seconds of timing


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


def times_of(name, n, k, ranks, rank, m, order_name, deadline):
    leaves, roots = LEAVES // ranks, rank_roots(order_name, ranks, rank)
    weights = [draw(leaves, n, k, seed=i) * 0.02 for i in range(6 if m <= 1024 else 2)]
    x = draw(m, leaves * k)
    flat = [w.view(n, -1) for w in weights]
    pairs = list(zip(weights, flat, strict=True))
    labels, runs = ["cuBLAS"], [lambda w: torch.nn.functional.linear(x, w[1])]
    sms = processors()
    other = replace(H200, capability=(10, 0))
    choice = leaf_choice(m, n, k, leaves, roots, float32=False, sms=sms, gpu=other)
    tile = choice.tile
    labels.append(f"other cut {choice.cut} {choice.kernel} {tile.rows}x{tile.columns}")
    runs.append(lambda w: leaf_gemm.leaf_sums(x, w[0], roots, choice))
    for cut, form, _ in forms(leaves, roots):
        y = torch.empty(form.roots, m, n, device="cuda")
        for stages in fitting(form) if cut == 2 or form.roots == len(roots) else ():
            tile = replace(TILE, stages=stages)
            labels.append(f"gluon cut {cut} s{stages}")
            runs.append(
                lambda w, y=y, form=form, tile=tile: run_gluon_fold(
                    Operands(x, w[0], None, y), form, tile, sms
                )
            )
    repeats = 3 if time.time() < deadline else 1
    peer, *taken = interleaved_medians(runs, pairs, repeats)
    each = " | ".join(
        f"{label} {t:.1f} ({peer / t:.2f})" for label, t in zip(labels[1:], taken, strict=True)
    )
    print(
        f"{name:4s} {order_name} TP {ranks} rank {rank} M={m:4d} cuBLAS {peer:.1f} us "
        f"{2e-6 * m * n * k * leaves / peer:.0f} TFLOP/s | {each}",
        flush=True,
    )


def check_times():
    deadline = time.time() + BUDGET
    for name, (n, k) in SHAPES.items():
        for m in ROWS:
            for ranks in (1, 2, 4):
                attempt(
                    f"times {name}/{ranks} M={m}",
                    times_of,
                    name,
                    n,
                    k,
                    ranks,
                    0,
                    m,
                    "pairs",
                    deadline,
                )
        attempt(f"times {name}/2 rank 1", times_of, name, n, k, 2, 1, 4096, "pairs", deadline)
        for other in ("sequential", "tree"):
            for m in (512, 8192):
                attempt(f"times {name} {other}", times_of, name, n, k, 1, 0, m, other, deadline)


def main(arguments):
    parts = {"bits": check_bits, "times": check_times}
    return run_parts("gemm.warp_specialised", parts, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
