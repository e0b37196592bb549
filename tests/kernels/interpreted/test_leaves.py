"""Leaf products, their cuts and the kernel that folds and norms, in Triton's interpreter."""

from itertools import count

import pytest
import torch

from tests.kernels.product_inputs import chain, draw
from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.pairwise import pairwise
from tpdet.kernels import order
from tpdet.kernels.cpu.pointwise import finish as cpu_finish
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm import leaf_trials
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice, cut_roots
from tpdet.kernels.cuda.gemm.choice.variants import FOLDS
from tpdet.kernels.cuda.gemm.variants.root_form import root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import NO_GPU
from tpdet.kernels.cuda.pointwise import finish, fold
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.kernels.partial_sums import PartialSums, gathered_sums, relative_roots

LEAVES, WIDTH, COLUMNS = 8, 32, 48
APART = Tile(16, 16, 16, 4, 3)
TILES = (
    Tile(32, 16, 16, 4, 3, "descriptor"),
    Tile(64, 32, 16, 4, 3, "descriptor", halves=2),
    Tile(16, 32, 16, 4, 3, "descriptor_swapped"),
)


@pytest.fixture(autouse=True)
def a_device_with_descriptors(monkeypatch):
    monkeypatch.setattr(leaf_gemm, "descriptor_sms", lambda *_: 3)


def choices(roots, leaves, turn):
    """Every cut of these roots by every kernel that the interpreter runs, each with one tile.

    Tiles take turns from `turn` on.
    """
    turns = count(turn)
    for cut in (1, 2, 4, 8):
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        if form is None:
            continue
        for kernel in ("chain",) if cut == 1 else ("flat", "nested"):
            fitting = [
                tile for tile in TILES if cut == 1 or FOLDS[kernel].fits(form, WIDTH, tile, NO_GPU)
            ]
            if fitting:
                yield LeafChoice(cut, kernel, fitting[next(turns) % len(fitting)])


def check_rank(x, w, roots, wanted, turn, what):
    """Every choice gives each root's bits; returns the choices."""
    found = list(choices(roots, w.shape[0], turn))
    for choice in found:
        sums = leaf_gemm.leaf_sums(x, w, roots, choice)
        for root, total in zip(sums.roots, wanted, strict=True):
            got = order.evaluate(root, lambda i, sums=sums: sums.values[i], torch.add)
            assert_same_bits(got, total, f"{what} {choice}")
    return found


def test_every_cut_has_the_bits_of_leaves_apart():
    """Roots that are placed alike within their ranks take the same kernels: once a row count."""
    cuts, of_roots, tried = {}, {}, set()
    for m, orders in ((37, order.FOLD_ORDERS), (1, ("pairs",))):
        x = draw(m, LEAVES * WIDTH, dtype=torch.float16, spread=True)
        w = draw(LEAVES, COLUMNS, WIDTH, dtype=torch.float16, seed=1)
        partials = chain(x, w, APART)
        for name in orders:
            for ranks in (1, 2, 4):
                share = LEAVES // ranks
                for rank, roots in enumerate(order.fold_plan(name, LEAVES, ranks).roots):
                    first = rank * share
                    mine = x[:, first * WIDTH : (first + share) * WIDTH]
                    leaf = lambda i, partials=partials: partials[i]
                    totals = [order.evaluate(root, leaf, torch.add) for root in roots]
                    placed = relative_roots(roots)
                    if (m, placed) not in of_roots:
                        found = check_rank(
                            mine,
                            w[first : first + share],
                            placed,
                            totals,
                            len(of_roots),
                            f"{m} {name} {ranks} {rank}",
                        )
                        of_roots[m, placed] = {choice.cut for choice in found}
                        tried.update((choice.cut, choice.kernel, choice.tile) for choice in found)
                    cuts[name, ranks, rank] = of_roots[m, placed]
    assert tried == {
        *((1, "chain", tile) for tile in TILES),
        *((cut, "flat", tile) for cut in (2, 4, 8) for tile in TILES),
        *((cut, "nested", tile) for cut in (2, 4, 8) for tile in TILES[:2]),
    }
    assert cuts["pairs", 1, 0] == {1, 2, 8} and cuts["tree", 1, 0] == {1, 2, 4, 8}
    assert cuts["sequential", 1, 0] == {1, 8} and cuts["sequential", 2, 1] == {1}
    assert cuts["pairs", 2, 0] == {1, 2, 4} and cuts["pairs", 2, 1] == {1, 2}


def test_an_order_shows():
    """Negative control: the orders differ on this data, so a wrong one would be seen."""
    x = draw(37, LEAVES * WIDTH, dtype=torch.float16, spread=True)
    w = draw(LEAVES, COLUMNS, WIDTH, dtype=torch.float16, seed=1)
    totals = []
    for name in order.FOLD_ORDERS:
        roots = (order.fold_tree(name, LEAVES),)
        totals.append(leaf_gemm.leaf_sums(x, w, roots, LeafChoice(8, "flat", TILES[0])).values)
    assert not same_bits(totals[0], totals[1]) and not same_bits(totals[1], totals[2])


def test_a_trial_sees_another_order():
    x = draw(37, LEAVES * WIDTH, dtype=torch.float16, spread=True)
    w = draw(LEAVES, COLUMNS, WIDTH, dtype=torch.float16, seed=1)
    for name in order.FOLD_ORDERS:
        roots = (order.fold_tree(name, LEAVES),)
        product = Product("row", COLUMNS, WIDTH, LEAVES, write_roots(roots))
        wanted = leaf_trials.wanted_roots(x, w, product, APART)
        for other in order.FOLD_ORDERS:
            tree = (order.fold_tree(other, LEAVES),)
            sums = leaf_gemm.leaf_sums(x[:5], w, tree, LeafChoice(LEAVES, "flat", TILES[0]))
            found = bool(leaf_trials.differs(sums, wanted[:, :5]))
            assert found == (name != other), f"{name} {other}"


def test_minus_zero_and_neighbours_stay():
    x, w = torch.full((1, 128), -1e-30), torch.full((4, 16, 32), 1e-30)
    roots = (((0, 1), (2, 3)),)
    wanted = leaf_gemm.leaf_sums(x, w, roots, LeafChoice(1, "chain", TILES[0]))
    total = order.evaluate(wanted.roots[0], lambda i: wanted.values[i], torch.add)
    for kernel in ("flat", "nested"):
        got = leaf_gemm.leaf_sums(x, w, roots, LeafChoice(4, kernel, TILES[0])).values[0]
        assert_same_bits(got, total, kernel)
    x, w = draw(20, 4 * 32, dtype=torch.float16), draw(4, 48, 32, dtype=torch.float16, seed=1)
    halves = ((0, 1), (2, 3))
    for tile in TILES:
        choice = LeafChoice(2, "flat", tile)
        clean = leaf_gemm.leaf_sums(x, w, halves, choice).values
        bad_x, bad_w = x.clone(), w.clone()
        bad_x[7], bad_x[:, 64:], bad_w[2:] = torch.nan, torch.nan, torch.nan
        dirty = leaf_gemm.leaf_sums(bad_x, bad_w, halves, choice).values
        keep = [row for row in range(20) if row != 7]
        assert_same_bits(dirty[0, keep], clean[0, keep], f"{tile}")


def test_a_choice_that_does_not_fit_is_refused():
    x, w = draw(3, 8 * 32, dtype=torch.float16), draw(8, 16, 32, dtype=torch.float16)
    roots = (order.fold_tree("sequential", 8),)
    one_step = Tile(32, 16, 32, 4, 3, "descriptor")
    too_deep = Tile(16, 16, 64, 4, 3)
    for bad in (
        LeafChoice(2, "flat", TILES[0]),
        LeafChoice(8, "flat", one_step),
        LeafChoice(8, "parked", TILES[0]),
        LeafChoice(8, "nested", TILES[2]),
        LeafChoice(1, "chain", too_deep),
    ):
        with pytest.raises(ValueError):
            leaf_gemm.leaf_sums(x, w, roots, bad)


def test_fold_and_norm_is_one_kernel_with_the_bits_of_the_cpu():
    sizes = (64, 5), (200, 3), (1024, 2)
    dtypes = torch.float16, torch.bfloat16, torch.float32
    counts = 1, 2, 4, 8, 16
    cases = pairwise(sizes, counts, order.FOLD_ORDERS, dtypes, (False, True))
    for (size, m), partials, name, dtype, behind in cases:
        residual = draw(m, 2 * size, seed=2)[:, :size]
        norms = [Norm(draw(size, dtype=dtype, seed=seed), 1e-6) for seed in (3, 4)]
        values = draw(partials, m, size, seed=5, spread=True)
        values[:, 1] = 0.0
        sums = PartialSums(values, (order.fold_tree(name, partials),))
        args = sums, Finish(residual, *(norms if behind else norms[:1]))
        wanted, got = cpu_finish.fold_and_norm(*args), finish.fold_and_norm(*args)
        what = f"{size} {dtype} {partials} {name} {behind}"
        assert_same_bits(got[0], wanted[0], f"h {what}")
        assert_same_bits(got[1], wanted[1], f"y {what}")
    two = PartialSums(draw(2, 3, 64), (0, 1))
    with pytest.raises(ValueError):
        finish.fold_and_norm(two, Finish(draw(3, 64), Norm(draw(64), 1e-6)))


UNEQUAL = (16, 48, 32)
UNEQUAL_TILES = (
    Tile(16, 16, 16, 4, 3),
    Tile(16, 32, 16, 4, 3, "pointer_swapped"),
    Tile(32, 16, 16, 4, 3, "descriptor"),
    Tile(64, 32, 16, 4, 3, "descriptor", halves=2),
)


def test_unequal_leaves_are_the_chains_that_each_leaf_alone_has():
    """And nothing of a neighbour: of a leaf beside NaN every bit stays."""
    for m in (1, 37):
        x = draw(m, sum(UNEQUAL), dtype=torch.float16, spread=True)
        w = draw(1, COLUMNS, sum(UNEQUAL), dtype=torch.float16, seed=1)
        parts = zip(x.split(UNEQUAL, dim=1), w.split(UNEQUAL, dim=2), strict=True)
        wanted = [chain(a.contiguous(), b.contiguous(), APART)[0] for a, b in parts]
        for tile in UNEQUAL_TILES:
            found = leaf_gemm.unequal_leaf_gemm(x, w, UNEQUAL, tile)
            for got, leaf in zip(found, wanted, strict=True):
                assert_same_bits(got, leaf, f"{m} {tile}")
        x[:, : UNEQUAL[0]] = torch.nan
        for tile in UNEQUAL_TILES:
            beside = leaf_gemm.unequal_leaf_gemm(x, w, UNEQUAL, tile)
            assert_same_bits(beside[1:], torch.stack(wanted[1:]), f"beside NaN {tile}")
    sums = leaf_gemm.leaf_sums(x, w, ((0, 1), 2), widths=UNEQUAL)
    assert sums.roots == ((0, 1), 2) and sums.values.shape == (3, 37, COLUMNS)


def test_every_size_folds_unequal_leaves_alike():
    """Empty leaves among them; what runs by itself is the static choice."""
    cut = order.cut_leaves(5, 16, 8)
    x = draw(20, 80, dtype=torch.float16, spread=True)
    w = draw(1, COLUMNS, 80, dtype=torch.float16, seed=1)
    weight, residual = torch.ones(COLUMNS, dtype=torch.float16), torch.zeros(20, COLUMNS)
    wide = order.Leaves((0, 0, 16, 16, 48, 48, 48, 64, 80))
    for leaves in (cut, wide):
        for name in order.FOLD_ORDERS:
            found = []
            for ranks in (1, 2) if leaves is wide else (1, 2, 4):
                plan, share = order.fold_plan(name, 8, ranks, leaves.empty), 8 // ranks
                sent = []
                for rank, roots in enumerate(plan.roots):
                    mine = range(rank * share, (rank + 1) * share)
                    inputs, widths = leaves.inputs(mine), leaves.widths(mine)
                    part = slice(inputs.start, inputs.stop)
                    own = w[:, :, part].contiguous()
                    sums = leaf_gemm.leaf_sums(
                        x[:, part], own, relative_roots(roots), widths=widths
                    )
                    sent.append(fold.fold_roots(sums.values, 0, sums.roots, plan.slots))
                whole = gathered_sums(torch.stack(sent), plan.final)
                given = Finish(residual, Norm(weight, 1e-6))
                found.append(finish.fold_and_norm(whole, given)[0])
            for other in found[1:]:
                assert_same_bits(other, found[0], f"{name} {leaves}")


def test_a_depth_that_divides_no_leaf_is_refused():
    x, w = draw(3, 96, dtype=torch.float16), draw(1, COLUMNS, 96, dtype=torch.float16)
    with pytest.raises(ValueError, match="depth 32 does not divide leaves"):
        leaf_gemm.unequal_leaf_gemm(x, w, UNEQUAL, Tile(16, 16, 32, 4, 3))
    with pytest.raises(ValueError, match="takes no unequal leaves"):
        other = Tile(16, 16, 16, 4, 3, "descriptor_swapped")
        leaf_gemm.unequal_leaf_gemm(x, w, UNEQUAL, other)
