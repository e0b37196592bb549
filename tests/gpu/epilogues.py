"""SiLU and the residual in epilogues of products: bits, then times, beside separate kernels.

    python -m tests.gpu.epilogues            all, under 60 seconds
    python -m tests.gpu.epilogues bits
    python -m tests.gpu.epilogues times

Times are medians in microseconds, in graphs over rotating weights, interleaved: what runs apart by
the committed shape table (product and SiLU; product and fold_and_norm) against one kernel (and the
norm). `gated_gemm.GATED_ELEMENTS = None` and `leaf_gemm.RESIDUAL_ROWS = None` turn them off.
"""

import sys
import time
from dataclasses import replace

import torch
import triton

from tests.gpu.checks import attempt, draw, failures, poisoned_workspaces, same, surrounded
from tests.gpu.times import interleaved_medians
from tpdet.kernels import order
from tpdet.kernels.cuda import activation, admission, gated_gemm, gemm, leaf_gemm, norm, shape_table
from tpdet.kernels.cuda.gemm_variants import Variant
from tpdet.kernels.cuda.leaf_variants import LeafChoice

KINDS = ("normal", "heavy", "cancelling")
ROWS = (1024, 4096, 8192)
HIDDEN, WIDTH, LEAVES, LAYERS = 4096, 12288, 8, 36  # Qwen3-8B
STAGES = (4, 3)
LEAF_WIDTHS = {"o": HIDDEN // LEAVES, "down": WIDTH // LEAVES}
GLUON = LeafChoice(LEAVES, "gluon", Variant(128, 128, 64, 4, 6, descriptor=True))
EPS = 1e-6


def stages_of(count):
    return replace(gated_gemm.GATED_TILE, stages=count)


def operands(kind, rows, shape):
    """x [rows, K] and a weight of a shape, the last dimension reduced, the first one's leaves too.

    The two products of a cancelling pair leave their last bits.
    """
    leaves = shape[0] if len(shape) == 3 else 1
    x, w = draw(rows, leaves * shape[-1], kind=kind), draw(*shape, kind=kind, seed=1)
    if kind == "cancelling":
        w[..., 1::2] = w[..., ::2]
    return x, w


def gated_has_the_bits_of_two_kernels(kind, width, k, rows):
    """Both rings, at full size and on rows and columns that end inside a tile."""
    x, w = (surrounded(part) for part in operands(kind, max(rows), (2 * width, k)))
    columns = gemm.column_gemm(x, w, None, x.dtype, admission.REFERENCE)
    wanted = activation.silu_and_multiply(columns)
    for m in rows:
        for count in STAGES:
            for again in range(3):
                with poisoned_workspaces():
                    got = gated_gemm.gated_gemm(x[:m], w, True, stages_of(count))
                same(got, wanted[:m], f"M={m} I={width} s{count}, run {again}")
    halves = activation.silu_and_multiply(columns.view(-1, 2, width).flip(1).flatten(1))
    if bool((halves.view(torch.int16) == wanted.view(torch.int16)).all()):
        raise AssertionError("gate and up changed places, and no bit says so")


def roots_of(name):
    return (order.fold_tree(name, LEAVES),)


def residual_has_the_bits_of_two_kernels(kind, name, n, k, rows):
    """Sums by the same kernel and by leaves apart, then `fold_and_norm`; residual rows apart."""
    x, w = operands(kind, max(rows), (LEAVES, n, k))
    wide, weight = draw(max(rows), n + 24, kind=kind, seed=2), draw(n, seed=3)
    roots, apart = roots_of(name), LeafChoice(1, "chain", Variant(64, 64, 64, 4, 3))
    for m in rows:
        residual = wide[:m, :n]
        with poisoned_workspaces():
            sums = leaf_gemm.leaf_sums(x[:m], w, roots, GLUON, residual)
            if not sums.added:
                raise AssertionError(f"{name}: the residual was not added")
            found = norm.fold_and_norm(sums, None, residual, weight, EPS)
        for choice in (GLUON, apart):
            sums = leaf_gemm.leaf_sums(x[:m], w, roots, choice)
            wanted = norm.fold_and_norm(sums, None, residual, weight, EPS)
            for what, got, want in zip(("h", "y"), found, wanted, strict=True):
                same(got, want, f"{what} M={m} beside {choice.kernel}")
        for again in range(5):
            sums = leaf_gemm.leaf_sums(x[:m], w, roots, GLUON, residual)
            same(sums.values[0], found[0], f"M={m}, run {again}")


def check_bits():
    for kind in KINDS:
        for ranks in (1, 2, 4):
            rows = (*ROWS, 1000, 1) if ranks == 4 else (8192, 1000)
            attempt(f"gated {kind} TP {ranks}", gated_has_the_bits_of_two_kernels, kind,
                    WIDTH // ranks, HIDDEN, rows)  # fmt: skip
        attempt(f"gated {kind} odd columns", gated_has_the_bits_of_two_kernels, kind, 1000, 192,
                (300, 129, 1))  # fmt: skip
        for layer, k in LEAF_WIDTHS.items():
            attempt(f"residual {kind} {layer}", residual_has_the_bits_of_two_kernels, kind,
                    "pairs", HIDDEN, k, (*ROWS, 1000, 1))  # fmt: skip
        for name in ("sequential", "pairs"):
            attempt(f"residual {kind} {name} odd columns", residual_has_the_bits_of_two_kernels,
                    kind, name, 272, 192, (300, 129, 1))  # fmt: skip


def gated_times(ranks, m, saved):
    width = WIDTH // ranks
    x = draw(m, HIDDEN)
    weights = [draw(2 * width, HIDDEN, seed=i) * 0.02 for i in range(1 + ranks)]
    runs = [lambda w: gated_gemm.gated_gemm(x, w, False)]
    runs += [lambda w, s=s: gated_gemm.gated_gemm(x, w, True, stages_of(s)) for s in STAGES]
    runs += [lambda w: gemm.column_gemm(x, w, None, x.dtype)]
    apart, *one, product = interleaved_medians(runs, weights, 9)
    each = " | ".join(
        f"one s{s} {t:.1f} ({apart - t:+.1f})" for s, t in zip(STAGES, one, strict=True)
    )
    used = "used" if gated_gemm.worth_fusing(x.new_empty(m, width)) else "not used"
    what = f"gate_up TP {ranks} M={m}"
    print(f"{what}: apart {apart:.1f} (product {product:.1f}) | {each} us, {used}")
    saved["gate_up", ranks, m] = apart - one[0]


def residual_times(layer, k, m, saved):
    x, residual, gain = draw(m, LEAVES * k), draw(m, HIDDEN), draw(HIDDEN)
    weights = [draw(LEAVES, HIDDEN, k, seed=i) * 0.02 for i in range(3)]
    roots = roots_of("pairs")

    def run(w, stream):
        sums = leaf_gemm.leaf_sums(x, w, roots, None, stream)
        return norm.fold_and_norm(sums, None, residual, gain, EPS)

    products = [lambda w: leaf_gemm.leaf_sums(x, w, roots, None, None),
                lambda w: leaf_gemm.leaf_sums(x, w, roots, None, residual)]  # fmt: skip
    runs = [lambda w: run(w, None), lambda w: run(w, residual), *products]
    apart, one, plain, adding = interleaved_medians(runs, weights, 9)
    print(
        f"{layer} TP 1 M={m}: apart {apart:.1f} (product {plain:.1f}) | added {one:.1f} "
        f"({apart - one:+.1f}; product {adding:.1f}) us"
    )
    saved[layer, 1, m] = apart - one


def check_times():
    table, saved = shape_table.load_table(torch.cuda.get_device_name()), {}
    if table is not None:
        shape_table.admit(table.products)
    for m in ROWS:
        for ranks in (1, 2, 4):
            attempt(f"times gate_up/{ranks} M={m}", gated_times, ranks, m, saved)
        for layer, k in LEAF_WIDTHS.items():
            attempt(f"times {layer} M={m}", residual_times, layer, k, m, saved)
    for m in ROWS:
        each = [LAYERS * saved.get((name, 1, m), 0.0) / 1e3 for name in ("gate_up", "o", "down")]
        words = " + ".join(f"{value:.2f}" for value in each)
        print(f"a step of {m} rows at TP 1 saves {words} = {sum(each):.2f} ms (gate_up, o, down)")
    print(f"without a table: {table is None}", flush=True)


def main(parts):
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(), flush=True)
    start = time.time()
    leaf_gemm.RESIDUAL_ROWS = 1
    for name, run in (("bits", check_bits), ("times", check_times)):
        if name in parts:
            run()
            print(f"{name}: {time.time() - start:.0f} s", flush=True)
    print(f"failed: {', '.join(failures) or 'nothing'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["bits", "times"]))
