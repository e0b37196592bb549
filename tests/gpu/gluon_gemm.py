"""Leaves folded by warps of several trades: bits, then times beside today's choice and cuBLAS.

    python -m tests.gpu.gluon_gemm            all, under 60 seconds
    python -m tests.gpu.gluon_gemm bits
    python -m tests.gpu.gluon_gemm times

Times are microseconds of the product alone, in a graph with rotating weights, interleaved; a ratio
is cuBLAS's time (bf16 output) by ours: 1 is its speed. At a cut below the whole root the reader's
work is not in the time: `gluon cut 2` is to be held against today's choice of the same cut.
"""

import sys
import time

import torch
import triton

from tests.gpu.checks import attempt, draw, failures, same
from tests.gpu.times import interleaved_medians
from tpdet.kernels import order
from tpdet.kernels.cuda import leaf_gemm
from tpdet.kernels.cuda.gemm_variants import Variant
from tpdet.kernels.cuda.gluon_leaf_gemm import gluon_fits, run_gluon_fold
from tpdet.kernels.cuda.leaf_variants import cut_roots, leaf_choice
from tpdet.kernels.cuda.root_form import root_form
from tpdet.kernels.partial_sums import relative_roots

LEAVES = 8
KINDS = ("normal", "heavy", "cancelling", "tiny")
BIT_ROWS = (1, 37, 128, 500, 1000, 4097)
TILES = {
    "128x128 s6": Variant(128, 128, 64, 4, 6),
    "128x256 s3": Variant(128, 256, 64, 4, 3),
    "128x256x32 s6": Variant(128, 256, 32, 4, 6),
    "128x256 s4": Variant(128, 256, 64, 4, 4),
}
PLAIN = Variant(64, 64, 64, 4, 3)
ROWS = (512, 1024, 2048, 4096, 8192)
SHAPES = {"o": (4096, 512), "down": (4096, 1536)}  # name: N, K of a leaf
BUDGET = 30.0  # seconds of timing


def processors():
    return torch.cuda.get_device_properties(0).multi_processor_count


def rank_roots(name, ranks, rank):
    share = LEAVES // ranks
    return relative_roots(order.fold_plan(name, LEAVES, ranks).roots[rank], rank * share)


def fits(label, form, n, k):
    """Whether a tile of TILES runs this form: a leaf that waits takes the fourth stage's place."""
    return gluon_fits(form, n, k, TILES[label]) and not (label == "128x256 s4" and form.pair == 2)


def forms(leaves, roots):
    """(cut, form) of every cut that folds anything."""
    for cut in (2, 4, 8):
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        if form is not None:
            yield cut, form, parts[0]


def fold(x, w, form, label):
    y = torch.full((form.roots, x.shape[0], w.shape[1]), torch.nan, device=x.device)
    run_gluon_fold(x, w, y, form, TILES[label], processors())
    return y


def has_the_bits_of_leaves_folded_apart(kind, n, k):
    """Every order, rank, cut and tile against leaves apart by one pointer tile and torch.add."""
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
            for label in TILES:
                if fits(label, form, n, k):
                    for again in range(1 + 3 * (m == 1000)):
                        same(fold(x, w, form, label), wanted, f"M={m} {form} {label} {again}")
                    count += 1
    return f"{count} cases"


def runs_do_not_race(n, k, m):
    """The same bits 20 times at full size, with other work beside and other data in between."""
    x, w = draw(m, LEAVES * k, kind="heavy"), draw(LEAVES, n, k, kind="heavy", seed=1)
    for name in order.FOLD_ORDERS:
        form = root_form(0, LEAVES, rank_roots(name, 1, 0))
        for label in TILES:
            if fits(label, form, n, k):
                first = fold(x, w, form, label)
                for again in range(20):
                    fold(draw(m, LEAVES * k, seed=again), w, form, label)
                    same(fold(x, w, form, label), first, f"{name} {label}, run {again}")


def check_bits():
    for kind in KINDS:
        for n in (4096, 1024):
            for k in (128, 512, 1536):
                if n == 1024 or kind == "heavy" or k == 512:
                    what = f"gluon {kind} N={n} leaves of {k}"
                    attempt(what, has_the_bits_of_leaves_folded_apart, kind, n, k)
    attempt("gluon, columns that end inside a tile", has_the_bits_of_leaves_folded_apart,
            "heavy", 272, 192)  # fmt: skip
    attempt("gluon, no races", runs_do_not_race, 4096, 512, 2048)


def times_of(name, n, k, ranks, rank, m, order_name, deadline):
    leaves, roots = LEAVES // ranks, rank_roots(order_name, ranks, rank)
    weights = [draw(leaves, n, k, seed=i) * 0.02 for i in range(6 if m <= 1024 else 2)]
    x = draw(m, leaves * k)
    flat = [w.view(n, -1) for w in weights]
    pairs = list(zip(weights, flat, strict=True))
    labels, runs = ["cuBLAS"], [lambda w: torch.nn.functional.linear(x, w[1])]
    choice = leaf_choice(m, n, k, leaves, roots, float32=False, sms=processors())
    tile = choice.tile
    labels.append(f"today cut {choice.cut} {choice.kernel} {tile.rows}x{tile.columns}")
    runs.append(lambda w: leaf_gemm.leaf_sums(x, w[0], roots, choice))
    for cut, form, _ in forms(leaves, roots):
        y = torch.empty(form.roots, m, n, device="cuda")
        for label, variant in TILES.items():
            if fits(label, form, n, k) and (cut == 2 or form.roots == len(roots)):
                labels.append(f"gluon cut {cut} {label}")
                runs.append(
                    lambda w, y=y, form=form, variant=variant: run_gluon_fold(
                        x, w[0], y, form, variant, processors()
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
                attempt(f"times {name}/{ranks} M={m}", times_of, name, n, k, ranks, 0, m, "pairs",
                        deadline)  # fmt: skip
        attempt(f"times {name}/2 rank 1", times_of, name, n, k, 2, 1, 4096, "pairs", deadline)
        for other in ("sequential", "tree"):
            for m in (512, 8192):
                attempt(f"times {name} {other}", times_of, name, n, k, 1, 0, m, other, deadline)


def main(parts):
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(), flush=True)
    start = time.time()
    for name, run in (("bits", check_bits), ("times", check_times)):
        if name in parts:
            run()
            print(f"{name}: {time.time() - start:.0f} s", flush=True)
    print(f"failed: {', '.join(failures) or 'nothing'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["bits", "times"]))
