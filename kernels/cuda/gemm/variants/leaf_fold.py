"""Leaves folded inside the program that made them, on Hopper: subtrees of the fold tree, no leaf
sums in memory.

`root_form` has the subtrees' one form. Each leaf is its own fp32 chain from +0; sums start from
-0.0, the identity of addition, so the first term keeps its bits. One rolled loop runs over the
steps of all leaves, so that loads never wait for the end of a leaf; unrolled, ptxas serialises the
matrix instructions (warning C7515). What a leaf's end adds up lives in registers where it fits and
is spilled once a leaf where it does not. A leaf takes at least two steps of K, and the number of
steps is not specialised: a loop of one step vanishes, and the compiler then adds into the matrix
instruction's accumulator, in another order.

    M, N, K  rows of x, columns of y, width of a leaf; L leaves, R roots
    x [M, L * K], w [L * N, K] by descriptors: bf16 or fp16; y [R, M, N] fp32
    BM, BN, BK  a tile's rows, columns and step of K
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.gemm.variants.descriptor import describe_operands, store_tile
from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm
from tpdet.kernels.cuda.gemm.variants.swapped import DESCRIPTOR_SWAPPED
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Fold, stages_and_output
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv

MIN_FOLD_STEPS = 2  # steps of K in a leaf that is folded inside a program
MINUS_ZERO = tl.constexpr(-(2**31))  # the bits of -0.0 in fp32
_SUM_BYTES = 4  # of an fp32 sum


@triton.jit
def minus_zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """-0.0 everywhere: x + -0.0 is x for every x, -0.0 too."""
    return tl.full((ROWS, COLUMNS), MINUS_ZERO, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def leaf_chain(x, w, row, column, leaf, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The sum of one leaf for one tile."""
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        total = tl.dot(x.load([row, leaf * k + at]), w.load([leaf * n + column, at]).T, total)
    return total


@triton.jit(do_not_specialize=["m", "roots", "steps"])
def flat_fold(
    x,
    w,
    y,
    m,
    n,
    roots,
    steps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    SWAP: tl.constexpr,
    LEAVES: tl.constexpr,
    PARTS: tl.constexpr,
    PAIR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles [BM, BN] of all roots, LEAVES leaves each, a leaf `steps` = k / BK steps of one loop.

    SWAP: the weight's rows stand on the M side of the matrix instruction.
    """
    await_earlier(DEPENDENT)
    ROWS: tl.constexpr = BN if SWAP else BM
    COLUMNS: tl.constexpr = BM if SWAP else BN
    blocks = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), blocks * roots, tl.num_programs(0)):
        root = tile // blocks
        row, column = tile_origin(tile % blocks, m, n, BM, BN)
        first = root * LEAVES
        leaf_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        total = minus_zeros(ROWS, COLUMNS)
        if PAIR == 2:
            pair = total
        if PARTS == 2:
            group = total
        for i in range(LEAVES * steps):
            # 1. a step of the leaf's chain
            leaf = i // steps
            step = i - leaf * steps
            a = x.load([row, (first * steps + i) * BK])
            b = w.load([(first + leaf) * n + column, step * BK])
            leaf_sum = tl.dot(b, a.T, leaf_sum) if SWAP else tl.dot(a, b.T, leaf_sum)
            # 2. at the leaf's end: pairs, groups of pairs, the root's chain
            if step == steps - 1:
                if PAIR == 1:
                    total += leaf_sum
                else:
                    pair += leaf_sum
                    if leaf % 2 == 1:
                        if PARTS == 1:
                            total += pair
                        else:
                            group += pair
                            if leaf % 4 == 3:
                                total += group
                                group = minus_zeros(ROWS, COLUMNS)
                        pair = minus_zeros(ROWS, COLUMNS)
                leaf_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        # 3. store the tile of the root
        total = tl.trans(total) if SWAP else total
        store_tile(y, root, row, column, total, HALVES)


@triton.jit(do_not_specialize=["m", "roots"])
def nested_fold(
    x,
    w,
    y,
    m,
    n,
    roots,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PAIR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The same with a loop a leaf: less is alive at once, but every leaf's first loads wait."""
    await_earlier(DEPENDENT)
    blocks = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), blocks * roots, tl.num_programs(0)):
        root = tile // blocks
        row, column = tile_origin(tile % blocks, m, n, BM, BN)
        first = root * (GROUPS * PARTS * PAIR)
        total = minus_zeros(BM, BN)
        for group in range(GROUPS):
            if PARTS == 1:
                at = first + group * PAIR
                if PAIR == 1:
                    total += leaf_chain(x, w, row, column, at, n, k, BM, BN, BK)
                else:
                    left = leaf_chain(x, w, row, column, at, n, k, BM, BN, BK)
                    total += left + leaf_chain(x, w, row, column, at + 1, n, k, BM, BN, BK)
            else:
                term = minus_zeros(BM, BN)
                for part in range(PARTS):
                    at = first + (group * PARTS + part) * PAIR
                    left = leaf_chain(x, w, row, column, at, n, k, BM, BN, BK)
                    term += left + leaf_chain(x, w, row, column, at + 1, n, k, BM, BN, BK)
                total += term
        store_tile(y, root, row, column, total, HALVES)


def run_flat(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, form: RootForm, tile: Tile, sms: int
) -> None:
    """x [M, L * K], w [L, N, K] contiguous -> y [at least form.roots, M, N] fp32, roots filled.

    Raises ValueError where it does not fit (leaves of one step, for one).
    """
    _, n, k = w.shape
    if not folds(form, k, tile):
        raise ValueError(f"leaves of {k} by {tile} do not fit 'flat': fold them apart")
    flat_fold[_grid(x, w, form, tile, sms)](
        *describe_operands(x, w, y, tile),
        x.shape[0],
        n,
        form.roots,
        k // tile.depth,
        LEAVES=form.leaves,
        PARTS=form.parts,
        PAIR=form.pair,
        SWAP=tile.variant == DESCRIPTOR_SWAPPED.name,
        **_options(tile),
        **dependent_launch(x.device),
    )


def run_nested(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, form: RootForm, tile: Tile, sms: int
) -> None:
    """As `run_flat`, by a loop a leaf; tiles with the weight on the M side do not fit."""
    _, n, k = w.shape
    if not folds_plain(form, k, tile):
        raise ValueError(f"leaves of {k} by {tile} do not fit 'nested': fold them apart")
    nested_fold[_grid(x, w, form, tile, sms)](
        *describe_operands(x, w, y, tile),
        x.shape[0],
        n,
        form.roots,
        k,
        GROUPS=form.groups,
        PARTS=form.parts,
        PAIR=form.pair,
        **_options(tile),
        **dependent_launch(x.device),
    )


def _grid(x: torch.Tensor, w: torch.Tensor, form: RootForm, tile: Tile, sms: int) -> tuple[int]:
    blocks = cdiv(x.shape[0], tile.rows) * cdiv(w.shape[1], tile.columns)
    return (min(sms * tile.ctas, form.roots * blocks),)


def _options(tile: Tile) -> dict[str, int]:
    """What both kernels compile for."""
    sizes = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "HALVES": tile.halves}
    warps = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return sizes | warps


def folds(form: RootForm, k: int, tile: Tile) -> bool:
    """Whether leaves of width k have two steps or more of this tile, and it fits the memory."""
    several = form.leaves > 1 and k % tile.depth == 0 and k // tile.depth >= MIN_FOLD_STEPS
    return several and stages_and_output(tile, _SUM_BYTES) <= H200.shared_bytes


def folds_plain(form: RootForm, k: int, tile: Tile) -> bool:
    """The same without the weight on the M side."""
    return folds(form, k, tile) and tile.variant != DESCRIPTOR_SWAPPED.name


# `flat` finds at every step which leaf it is in; `nested` begins its loads anew at every leaf.
FLAT = Fold("flat", run_flat, folds, step_cost=1.0, leaf_cost=0.6)
NESTED = Fold("nested", run_nested, folds_plain, step_cost=0.82, leaf_cost=2.4)
