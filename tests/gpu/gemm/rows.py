"""Row products with the kernel that folds and norms, against what an engine without leaves runs.

    python -m tests.gpu.gemm.rows            bits, then the table, then times: about 85 seconds
    python -m tests.gpu.gemm.rows bits
    python -m tests.gpu.gemm.rows table      start-up with this GPU's committed table
    python -m tests.gpu.gemm.rows times      every choice, best first; the chosen one beside it (the
                                             table's after `table`, else the static one)
    python -m tests.gpu.gemm.rows norm       warps of fold_and_norm

Times are microseconds of `leaf_sums` and `fold_and_norm` (at TP 2 and 4 of rank 0's roots, as if
they were all), in a graph with rotating weights, interleaved with `linear` and
the same over its bf16 result.
"""

import math
import multiprocessing
import sys
import time
from functools import cache

import torch

from tests.gpu.gemm.row_table import another_order_is_found, the_table_is_admitted
from tests.gpu.lib.checks import attempt, draw, same
from tests.gpu.lib.graph_times import interleaved_medians
from tests.gpu.lib.suite import run_parts
from tpdet.kernels import order
from tpdet.kernels.cuda.cost.static import leaf_choice, leaf_tile
from tpdet.kernels.cuda.gemm import admission
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.choice import shape_table
from tpdet.kernels.cuda.gemm.choice.candidates import leaf_candidates
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.pointwise import finish, norm
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, relative_roots, whole_sum
from tpdet.tools.tune.shapes import tuned_row_products

LEAVES = 8
BIT_ROWS = (1, 17, 33, 64, 100, 300, 1100)
KINDS = ("normal", "heavy", "cancelling", "tiny")
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
SHAPES = {  # name: N, K, tensor-parallel sizes
    "o": (4096, 4096, (1, 2, 4)), "down": (4096, 12288, (1, 2, 4)),
    "70B o": (8192, 8192, (4,)), "70B down": (8192, 28672, (4,)),
}  # fmt: skip
BUDGET = 55.0  # seconds of timing
EPS = 1e-6


def words(choice):
    tile = choice.tile
    size = f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
    return f"cut {choice.cut} {choice.kernel} {size} {tile.variant}"


def all_choices(m, n, k, leaves, roots):
    apart = LeafChoice(1, "chain", leaf_tile(m, n, k, leaves, float32=False, sms=132, gpu=H200))
    return list(dict.fromkeys([apart, *leaf_candidates(m, n, k, leaves, roots, H200)]))


def rank_roots(name, ranks, rank):
    return relative_roots(order.fold_plan(name, LEAVES, ranks).roots[rank])


def cuts_keep_their_bits(kind, name, ranks, n=1024, width=512):
    """Every choice against one pointer tile and torch.add, on the first, second and last rank."""
    share, count = LEAVES // ranks, 0
    w = draw(share, n, width, kind=kind, seed=1)
    for m in BIT_ROWS:
        x = draw(m, share * width, kind=kind)
        leaves = leaf_gemm.leaf_gemm(x, w, Tile(64, 64, 64, 4, 3).at(width))
        for rank in sorted({0, min(1, ranks - 1), ranks - 1}):
            roots = rank_roots(name, ranks, rank)
            wanted = [order.evaluate(root, lambda i, p=leaves: p[i], torch.add) for root in roots]
            for choice in all_choices(m, n, width, share, roots):
                sums = leaf_gemm.leaf_sums(x, w, roots, choice)
                for root, total in zip(sums.roots, wanted, strict=True):
                    got = order.evaluate(root, lambda i, s=sums: s.values[i], torch.add)
                    same(got, total, f"M={m} {name} TP {ranks} rank {rank} {words(choice)}")
                count += 1
    return f"{count} cases"


def one_kernel_folds_and_norms(kind, n):
    """Against a fold by torch.add and the norm of the total, for every count of warps."""
    for m in (1, 3, 64, 300, 2048):
        residual = draw(m, n, dtype=torch.float32, kind=kind)
        weight = draw(n, seed=1)
        for count in (1, 2, 4, 8):
            values = draw(count, m, n, dtype=torch.float32, kind=kind, seed=3)
            for name in order.FOLD_ORDERS:
                sums = PartialSums(values, (order.fold_tree(name, count),))
                total = order.evaluate(sums.roots[0], lambda i, v=values: v[i], torch.add)
                behind = norm.rms_norm(total, Norm(weight, EPS)).float()
                for before, h in ((None, total + residual), (weight, behind + residual)):
                    y = norm.rms_norm(h, Norm(weight, EPS))
                    inner = None if before is None else Norm(before, EPS)
                    both = Finish(residual, Norm(weight, EPS), inner)
                    for warps in (None, 8, 16, 32):
                        got = finish.fold_and_norm(sums, both, warps)
                        what = f"M={m} N={n} {count} {name} warps {warps} behind {inner}"
                        same(got[0], h, f"h {what}")
                        same(got[1], y, f"y {what}")


def check_bits():
    attempt("compile", compile_all, order.FOLD_ORDERS, (1, 2, 4), [(1024, 512)], BIT_ROWS)
    for name in order.FOLD_ORDERS:
        for ranks in (1, 2, 4):
            for kind in KINDS:
                attempt(f"cuts {name} TP {ranks} {kind}", cuts_keep_their_bits, kind, name, ranks)
    attempt("cuts, odd sizes", cuts_keep_their_bits, "heavy", "pairs", 1, 272, 592)
    attempt("cuts, leaves of 128", cuts_keep_their_bits, "heavy", "tree", 1, 512, 128)
    for kind in KINDS:
        for n in (1024, 4096, 5120, 8192):
            attempt(f"fold and norm {kind} {n}", one_kernel_folds_and_norms, kind, n)


def compile_one(case):
    """In a separate process: the compiled kernel stays in the cache on disk."""
    m, n, k, leaves, roots, choice = case
    x = torch.zeros(m, leaves * k, dtype=torch.bfloat16, device="cuda")
    w = torch.zeros(leaves, n, k, dtype=torch.bfloat16, device="cuda")
    try:
        leaf_gemm.leaf_sums(x, w, roots, choice)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{words(choice)}: {str(error)[:120]}"
    return None


def compile_all(orders, ranks, shapes, rows, processes=14):
    """Every kernel once, side by side: compiling takes most of the time."""
    seen = {}
    for name in orders:
        for n, width in shapes:
            for size in ranks:
                share, roots = LEAVES // size, rank_roots(name, size, 0)
                for m in rows:
                    for choice in all_choices(m, n, width, share, roots):
                        kind = name if choice.cut > 2 else ""
                        case = m, n, width, share, roots, choice
                        seen.setdefault((choice, kind), case)
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        wrong = [said for said in pool.map(compile_one, list(seen.values()), chunksize=1) if said]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(seen)}: " + " || ".join(wrong[:6]))
    return f"{len(seen)} kernels"


def with_norm(x, roots, choice, residual, weight):
    def run(w):
        sums = leaf_gemm.leaf_sums(x, w, roots, choice)
        if len(sums.roots) > 1:  # a rank of several roots sends them; time one of them
            sums = PartialSums(sums.values, sums.roots[:1])
        return finish.fold_and_norm(sums, Finish(residual, Norm(weight, EPS)))

    return run


def without_leaves(x, n, residual, weight):
    """cuBLAS, then residual and norm of its bf16 product in one kernel."""

    def run(w):
        product = torch.nn.functional.linear(x, w.view(n, -1))
        return finish.fold_and_norm(whole_sum(product), Finish(residual, Norm(weight, EPS)))

    return run


def runs_here(choice, x, w, roots):
    """Whether a choice can be launched; one that cannot is named and left out."""
    try:
        leaf_gemm.leaf_sums(x, w, roots, choice)
    except Exception as error:
        print(f"left out: {words(choice)}: {str(error)[:120]}", flush=True)
        return False
    return True


@cache
def admitted(device):
    """What start-up admits of the committed table."""
    rows = tuned_row_products(["qwen3-8b"], (1, 2, 4))
    return admission.check(rows, device, {"column": 8192, "head": 256}).admitted


def times_of(name, n, k, ranks, m, deadline):
    """One line: the best choice, the chosen one, the peer. Returns their ratios to the peer."""
    leaves, width = LEAVES // ranks, k // LEAVES
    roots = rank_roots("pairs", ranks, 0)
    count = max(2, min(12, int(200e6 // (leaves * n * width * 2)) + 1))
    weights = [draw(leaves, n, width, seed=i) * 0.02 for i in range(count if m <= 1024 else 2)]
    x, residual, weight = draw(m, leaves * width), draw(m, n, dtype=torch.float32), draw(n)
    chosen = admitted(x.device).leaf_choice(x, n, leaves, roots)
    if chosen is None:
        chosen = leaf_choice(m, n, width, leaves, roots, float32=False, sms=132, gpu=H200)
    choices = all_choices(m, n, width, leaves, roots)
    choices = [chosen, *(choice for choice in choices if choice != chosen)]
    choices = [choice for choice in choices if runs_here(choice, x, weights[0], roots)]
    runs = [with_norm(x, roots, choice, residual, weight) for choice in choices]
    repeats = 3 if time.time() < deadline else 1
    peer, *taken = interleaved_medians(
        [without_leaves(x, n, residual, weight), *runs], weights, repeats
    )
    ranked = sorted(zip(taken, choices, strict=True), key=lambda entry: entry[0])
    note = " | ".join(f"{t:.1f} {words(choice)}" for t, choice in ranked[:3])
    print(
        f"{name:8s} TP {ranks} M={m:4d} cuBLAS+norm {peer:7.1f} us | chosen {taken[0]:7.1f} "
        f"ratio {taken[0] / peer:4.2f} {words(chosen)} | best ratio {ranked[0][0] / peer:4.2f} "
        f"of {len(choices)}: {note}",
        flush=True,
    )
    return taken[0] / peer, ranked[0][0] / peer


def check_times():
    start = time.time()
    shapes = [(n, k // LEAVES) for n, k, _ in SHAPES.values()]
    attempt("compile", compile_all, ("pairs",), (1, 2, 4), shapes, ROWS)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    deadline, ratios = time.time() + BUDGET, {"few": [], "many": []}
    for name, (n, k, sizes) in SHAPES.items():
        for ranks in sizes:
            for m in ROWS:
                if name.startswith("70B") and m not in (1, 64, 256, 1024, 4096):
                    continue
                found = []
                case = lambda *args, found=found: found.append(times_of(*args))
                attempt(f"times {name}/{ranks} M={m}", case, name, n, k, ranks, m, deadline)
                ratios["few" if m <= 512 else "many"] += found
    for label, found in ratios.items():
        means = [
            math.exp(sum(map(math.log, part)) / len(part)) for part in zip(*found, strict=True)
        ]
        print(f"{label}: geometric mean, chosen and best: {means}", flush=True)


def check_table():
    attempt("another order", another_order_is_found)
    if shape_table.load_table(torch.cuda.get_device_name()) is None:
        print("no table of this GPU: the static choice", flush=True)
    else:
        attempt("start-up with the table", the_table_is_admitted)


def norm_times():
    for n in (4096, 8192):
        for m in (1, 8, 16, 64, 132, 256, 1024, 8192):
            for count in (1, 2, 4, 8):
                if count * m * n <= 1 << 28:
                    norm_times_of(n, m, count)


def norm_times_of(n, m, count):
    weight, residual = draw(n), draw(m, n, dtype=torch.float32)
    values = [draw(count, m, n, dtype=torch.float32, seed=i) for i in range(2)]
    tree = (order.fold_tree("pairs", count),)

    def by(warps):
        return lambda v: finish.fold_and_norm(
            PartialSums(v, tree), Finish(residual, Norm(weight, EPS)), warps
        )

    plain = lambda v: norm.rms_norm(residual, Norm(weight, EPS))
    runs = [*map(by, (4, 8, 16, 32)), plain]
    *taken, alone = interleaved_medians(runs, values * 5, 5)
    each = " ".join(f"{t:.2f}" for t in taken)
    floor = (4 * count + 10) * m * n / 4.5e6
    print(
        f"N={n} M={m:4d} C={count}: warps 4 8 16 32: {each} us; rms_norm alone {alone:.2f}, "
        f"floor {floor:.2f}",
        flush=True,
    )


def main(arguments):
    parts = {"bits": check_bits, "table": check_table, "norm": norm_times, "times": check_times}
    return run_parts("gemm.rows", parts, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
