"""Bits and accuracy of the GPU's leaf GEMM and folds: one check a function."""

import math

import torch

from tests.gpu.gemm.leaf_folds import leaf_fold
from tests.gpu.gemm.shapes import KINDS, LEAVES, ROW_SHAPES, each, relative_error
from tests.gpu.lib.checks import draw, poisoned_workspaces, same, surrounded
from tests.gpu.lib.suite import Check
from tpdet.kernels import order
from tpdet.kernels.cpu.pointwise import fold as cpu_fold
from tpdet.kernels.cuda.cost.static import static_tiles
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.choice.candidates import leaf_candidates
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.pointwise import fold
from tpdet.kernels.partial_sums import relative_roots


def leaf_weights(n, k, dtype, kind="normal"):
    """A weight [L, N, K / L], leaf-major, and x's columns in leaf order."""
    return draw(LEAVES, n, k // LEAVES, dtype=dtype, kind=kind, seed=1)


def leaves_fold_alike_at_every_size(n, k, dtype, rows, kind):
    w = leaf_weights(n, k, dtype, kind)
    width = k // LEAVES
    for m in rows:
        x = draw(m, k, dtype=dtype, kind=kind)
        for name in order.FOLD_ORDERS:
            partials = leaf_gemm.leaf_gemm(x, w)
            tree = order.fold_tree(name, LEAVES)
            wanted = order.evaluate(tree, lambda leaf, partials=partials: partials[leaf], torch.add)
            for ranks in (1, 2, 4, 8):
                plan, share = order.fold_plan(name, LEAVES, ranks), LEAVES // ranks
                sent = []
                for rank, roots in enumerate(plan.roots):
                    first = rank * share
                    mine = x[:, first * width : (first + share) * width]
                    part, what = w[first : first + share], f"M={m} {name} {ranks} ranks {rank}"
                    folded = leaf_fold(mine, part, roots, plan.slots)
                    leaves = leaf_gemm.leaf_gemm(mine, part)
                    same(leaves, partials[first : first + share], f"{what} leaves")
                    same(fold.fold_roots(leaves, first, roots, plan.slots), folded, what)
                    sent.append(folded)
                same(
                    fold.fold_final(torch.stack(sent), plan.final), wanted, f"M={m} {name} {ranks}"
                )


def fold_variants_are_one_class(n, k, kind):
    w, count = leaf_weights(n, k, torch.bfloat16, kind), 0
    for m in (33, 100, 300, 1024):
        x = draw(m, k, kind=kind)
        partials = leaf_gemm.leaf_gemm(x, w)
        for name in order.FOLD_ORDERS:
            for ranks, rank in ((1, 0), (2, 1)):
                plan, share = order.fold_plan(name, LEAVES, ranks), LEAVES // ranks
                first, roots = rank * share, plan.roots[rank]
                mine_roots = relative_roots(roots)
                mine = x[:, first * (k // LEAVES) : (first + share) * (k // LEAVES)]
                wanted = fold.fold_roots(partials[first : first + share], first, roots, plan.slots)
                variants = list(leaf_candidates(m, n, k // LEAVES, share, mine_roots, H200))
                run = lambda variant, first=first, share=share, roots=roots, mine=mine, plan=plan: (
                    leaf_fold(mine, w[first : first + share], roots, plan.slots, variant)
                )
                each(variants, run, wanted, f"M={m} {name} {ranks} rank {rank}")
                count += len(variants)
    return f"{count} cases"


def leaf_variants_are_one_class(kind):
    n, k = 1024, 4096
    w = leaf_weights(n, k, torch.bfloat16, kind)
    variants = [
        variant.at(k // LEAVES)
        for variant in static_tiles(float32=False, wide_out=True, descriptors=True)
    ]
    for m in (1, 17, 100, 300):
        x = draw(m, k, kind=kind)
        wanted = leaf_gemm.leaf_gemm(x, w, Tile(64, 64, 64, 4, 3).at(k // LEAVES))
        each(variants, lambda v, x=x: leaf_gemm.leaf_gemm(x, w, v), wanted, f"M={m}")
        chains = [
            gemm.column_gemm(part.contiguous(), w[i], None, torch.float32)
            for i, part in enumerate(x.chunk(LEAVES, 1))
        ]
        same(torch.stack(chains), wanted, f"M={m} leaf against column")


def a_fold_keeps_minus_zero_and_its_neighbours():
    partials = torch.full((2, 3, 64), -0.0, device="cuda")
    same(fold.fold_roots(partials, 0, ((0, 1),), 1)[0], partials[0], "-0.0")
    w, x = draw(4, 80, 512), draw(40, 4 * 512)
    clean = leaf_gemm.leaf_gemm(x, w)
    x[:, 512:1024], w[1] = torch.nan, torch.nan
    dirty = leaf_gemm.leaf_gemm(x, w)
    for leaf in (0, 2, 3):
        same(dirty[leaf], clean[leaf], f"leaf {leaf} beside NaN")
    roots = (0, 1, 2, 3)
    same(leaf_fold(x, w, roots, 4)[0], clean[0], "a root beside NaN")


def folds_have_the_bits_of_the_cpu():
    for leaves in (4, 8, 16):
        partials = draw(leaves, 37, 4096, dtype=torch.float32, kind="heavy")
        for name in order.FOLD_ORDERS:
            for ranks in (1, 2, leaves):
                plan, share, sent = order.fold_plan(name, leaves, ranks), leaves // ranks, []
                for rank, roots in enumerate(plan.roots):
                    mine = partials[rank * share : (rank + 1) * share]
                    got = fold.fold_roots(mine, rank * share, roots, plan.slots)
                    wanted = cpu_fold.fold_roots(mine.cpu(), rank * share, roots, plan.slots)
                    same(got.cpu(), wanted, f"{name} {leaves} {ranks}")
                    sent.append(got)
                gathered = torch.stack(sent)
                wanted = cpu_fold.fold_final(gathered.cpu(), plan.final)
                same(fold.fold_final(gathered, plan.final).cpu(), wanted, f"{name} final")


def poison_changes_nothing():
    """NaN before and behind x and the weight, in sums and workspaces and around them."""
    count = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        w = leaf_weights(272, 8 * 512, dtype)
        around = surrounded(w)
        for m in (1, 17, 40, 100, 300):
            x = draw(m, 8 * 512, dtype=dtype)
            for name in order.FOLD_ORDERS:
                roots = (order.fold_tree(name, LEAVES),)
                wanted = leaf_fold(x, w, roots, 2)[:1]
                with poisoned_workspaces():
                    found = leaf_fold(surrounded(x), around, roots, 2)[:1]
                same(found, wanted, f"{dtype} M={m} {name}")
                count += 1
    return {"calls": count}


def errors_are_small(name):
    """The fp32 sum of 8 leaves at K = 12,288, against fp64."""
    x, w = draw(128, 12288), draw(4096, 12288, seed=1) * 0.02
    leaves = w.view(4096, LEAVES, -1).transpose(0, 1).contiguous()
    found = leaf_fold(x, leaves, (order.fold_tree(name, LEAVES),), 1)[0]
    error = relative_error(found, x.double() @ w.double().t())
    if error > 2e-6:
        raise AssertionError(f"relative error {error:.2e} above 2e-6")
    return {"value": error, "unit": "relative error", "limit": 2e-6}


def unequal_leaves_are_the_chains_of_each(n, widths, dtype):
    """Every static tile, and what is chosen without one; a NaN leaf stays alone."""
    float32 = dtype == torch.float32
    depth = math.gcd(*widths)
    for m in (1, 16, 40, 100, 300, 1000):
        x, w = draw(m, sum(widths), dtype=dtype), draw(1, n, sum(widths), dtype=dtype, seed=1)
        parts = zip(x.split(widths, dim=1), w.split(widths, dim=2), strict=True)
        alone = [leaf_gemm.leaf_gemm(a.contiguous(), b.contiguous())[0] for a, b in parts]
        bad = x.clone()
        bad[:, : widths[0]] = torch.nan
        tiles = static_tiles(float32=float32, wide_out=True, descriptors=not float32)
        for tile in (None, *(tile.at(depth) for tile in tiles)):
            for rows, first in ((x, 0), (bad, 1)):
                found = leaf_gemm.unequal_leaf_gemm(rows, w, widths, tile)
                for leaf in range(first, len(widths)):
                    same(found[leaf], alone[leaf], f"{m} rows, leaf {leaf} of {widths}, {tile}")


def leaf_checks():
    """Every check of leaves and folds."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    checks = []
    for kind in KINDS:
        checks.append(Check(f"leaf variants {kind}", leaf_variants_are_one_class, (kind,)))
        arguments = 1024, 4096, kind
        checks.append(Check(f"fold variants {kind}", fold_variants_are_one_class, arguments))
    fold_alike = leaves_fold_alike_at_every_size
    for name, (n, k) in ROW_SHAPES.items():
        rows = (1, 16, 64, 300, 1024)
        checks.append(Check(f"leaves {name}", fold_alike, (n, k, bf16, rows, "heavy")))
    small = 272, 8 * 592, fp16, (3, 40, 100), "normal"
    checks.append(Check("leaves odd float16", fold_alike, small))
    checks.append(Check("leaves float32", fold_alike, (256, 2048, fp32, (3, 40), "normal")))
    for width in (16, 48, 64, 128):  # leaves of one and of few steps of K
        arguments = 512, 8 * width, bf16, (20, 100, 300, 1000), "normal"
        checks.append(Check(f"leaves {width} wide", fold_alike, arguments))
    for n, widths in (
        (576, (64,) * 7 + (128,)),
        (896, (64, 128, 128, 128)),
        (3584, (384, 512)),
        (512, (16, 48, 32)),
    ):
        for dtype in (bf16, fp16, fp32):
            name = f"unequal leaves {n}x{sum(widths)} {str(dtype).rpartition('.')[2]}"
            arguments = n, widths, dtype
            checks.append(Check(name, unequal_leaves_are_the_chains_of_each, arguments))
    checks.append(Check("neighbours", a_fold_keeps_minus_zero_and_its_neighbours))
    checks.append(Check("folds as on the CPU", folds_have_the_bits_of_the_cpu))
    checks.append(Check("leaf poison", poison_changes_nothing))
    for name in order.FOLD_ORDERS:
        checks.append(Check(f"leaf accuracy {name}", errors_are_small, (name,)))
    return checks
