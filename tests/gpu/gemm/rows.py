"""Row products with the kernel that folds and norms: bits, and the committed table at start-up.

python -m tests.gpu.gemm.rows
"""

import multiprocessing
import sys

import torch

from tests.gpu.gemm.row_table import another_order_is_found, the_table_is_admitted
from tests.gpu.lib.checks import attempt, draw, ended, same
from tpdet.kernels import order
from tpdet.kernels.cuda.cost.static import leaf_tile
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.choice import shape_table
from tpdet.kernels.cuda.gemm.choice.candidates import leaf_candidates
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.pointwise import finish, norm
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, relative_roots

LEAVES = 8
BIT_ROWS = (1, 17, 33, 64, 100, 300, 1100)
KINDS = ("normal", "heavy", "cancelling", "tiny")
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


def check_table():
    attempt("another order", another_order_is_found)
    if shape_table.load_table(torch.cuda.get_device_name()) is None:
        print("no table of this GPU: the static choice", flush=True)
    else:
        attempt("start-up with the table", the_table_is_admitted)


def main(_):
    check_bits()
    check_table()
    return ended()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
