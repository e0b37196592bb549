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
    TILE     a tile's rows, columns and step of K; ROOT: what is folded, of one root
"""

from typing import Any

import triton
import triton.language as tl

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.gemm.variants.descriptor import (
    DESCRIPTOR_SWAPPED,
    add_step,
    describe_operands,
    store_tile,
)
from tpdet.kernels.cuda.gemm.variants.form import chain_form
from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Fold, Operands, stages_and_output
from tpdet.kernels.cuda.hardware import Gpu
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
def leaf_chain(x, w, row, column, leaf, n, k, TILE: tl.constexpr):
    """The sum of one leaf for one tile."""
    ROWS: tl.constexpr = TILE.ROWS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, k, TILE.DEPTH):
        total = add_step(x, w, row, column, leaf, n, k, at, total, False)
    return total


@triton.jit(do_not_specialize=["m", "roots", "steps"])
def flat_fold(
    x, w, y, m, n, roots, steps, TILE: tl.constexpr, ROOT: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Tiles of all roots, a leaf `steps` = k / DEPTH steps of one loop.

    SWAP: the weight's rows stand on the M side of the matrix instruction.
    """
    await_earlier(DEPENDENT)
    LEAVES: tl.constexpr = ROOT.GROUPS * ROOT.PARTS * ROOT.PAIR
    ROWS: tl.constexpr = TILE.COLUMNS if TILE.SWAP else TILE.ROWS
    COLUMNS: tl.constexpr = TILE.ROWS if TILE.SWAP else TILE.COLUMNS
    blocks = tl.cdiv(m, TILE.ROWS) * tl.cdiv(n, TILE.COLUMNS)
    for tile in tl.range(tl.program_id(0), blocks * roots, tl.num_programs(0)):
        root = tile // blocks
        row, column = tile_origin(tile % blocks, m, n, TILE.ROWS, TILE.COLUMNS)
        first = root * LEAVES
        leaf_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        total = minus_zeros(ROWS, COLUMNS)
        if ROOT.PAIR == 2:
            pair = total
        if ROOT.PARTS == 2:
            group = total
        for i in range(LEAVES * steps):
            # 1. a step of the leaf's chain
            leaf = i // steps
            step = i - leaf * steps
            a = x.load([row, (first * steps + i) * TILE.DEPTH])
            b = w.load([(first + leaf) * n + column, step * TILE.DEPTH])
            leaf_sum = tl.dot(b, a.T, leaf_sum) if TILE.SWAP else tl.dot(a, b.T, leaf_sum)
            # 2. at the leaf's end: pairs, groups of pairs, the root's chain
            if step == steps - 1:
                if ROOT.PAIR == 1:
                    total += leaf_sum
                else:
                    pair += leaf_sum
                    if leaf % 2 == 1:
                        if ROOT.PARTS == 1:
                            total += pair
                        else:
                            group += pair
                            if leaf % 4 == 3:
                                total += group
                                group = minus_zeros(ROWS, COLUMNS)
                        pair = minus_zeros(ROWS, COLUMNS)
                leaf_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        # 3. store the tile of the root
        total = tl.trans(total) if TILE.SWAP else total
        store_tile(y, root, row, column, total, TILE.HALVES)


@triton.jit(do_not_specialize=["m", "roots"])
def nested_fold(
    x, w, y, m, n, roots, k, TILE: tl.constexpr, ROOT: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The same with a loop a leaf: less is alive at once, but every leaf's first loads wait."""
    await_earlier(DEPENDENT)
    blocks = tl.cdiv(m, TILE.ROWS) * tl.cdiv(n, TILE.COLUMNS)
    for tile in tl.range(tl.program_id(0), blocks * roots, tl.num_programs(0)):
        root = tile // blocks
        row, column = tile_origin(tile % blocks, m, n, TILE.ROWS, TILE.COLUMNS)
        first = root * (ROOT.GROUPS * ROOT.PARTS * ROOT.PAIR)
        total = minus_zeros(TILE.ROWS, TILE.COLUMNS)
        for group in range(ROOT.GROUPS):
            if ROOT.PARTS == 1:
                at = first + group * ROOT.PAIR
                if ROOT.PAIR == 1:
                    total += leaf_chain(x, w, row, column, at, n, k, TILE)
                else:
                    left = leaf_chain(x, w, row, column, at, n, k, TILE)
                    total += left + leaf_chain(x, w, row, column, at + 1, n, k, TILE)
            else:
                term = minus_zeros(TILE.ROWS, TILE.COLUMNS)
                for part in range(ROOT.PARTS):
                    at = first + (group * ROOT.PARTS + part) * ROOT.PAIR
                    left = leaf_chain(x, w, row, column, at, n, k, TILE)
                    term += left + leaf_chain(x, w, row, column, at + 1, n, k, TILE)
                total += term
        store_tile(y, root, row, column, total, TILE.HALVES)


def run_flat(operands: Operands, form: RootForm, tile: Tile, sms: int) -> None:
    """The roots of y [at least form.roots, M, N] fp32 are filled.

    Raises ValueError where it does not fit (leaves of one step, for one).
    """
    k = operands.w.shape[2]
    if not folds(form, k, tile, hardware.gpu_of(operands.x.device)):
        raise ValueError(f"leaves of {k} by {tile} do not fit 'flat': fold them apart")
    flat_fold[_grid(operands, form, tile, sms)](
        *describe_operands(operands, tile),
        *operands.sizes,
        form.roots,
        k // tile.depth,
        **_options(operands, form, tile),
        **dependent_launch(operands.x.device),
    )


def run_nested(operands: Operands, form: RootForm, tile: Tile, sms: int) -> None:
    """As `run_flat`, by a loop a leaf; tiles with the weight on the M side do not fit."""
    k = operands.w.shape[2]
    if not folds_plain(form, k, tile, hardware.gpu_of(operands.x.device)):
        raise ValueError(f"leaves of {k} by {tile} do not fit 'nested': fold them apart")
    nested_fold[_grid(operands, form, tile, sms)](
        *describe_operands(operands, tile),
        *operands.sizes,
        form.roots,
        k,
        **_options(operands, form, tile),
        **dependent_launch(operands.x.device),
    )


def _grid(operands: Operands, form: RootForm, tile: Tile, sms: int) -> tuple[int]:
    m, n = operands.sizes
    tiles = form.roots * cdiv(m, tile.rows) * cdiv(n, tile.columns)
    return (min(sms * tile.ctas, tiles),)


def _options(operands: Operands, form: RootForm, tile: Tile) -> dict[str, Any]:
    """What both kernels compile for."""
    forms = {"TILE": chain_form(operands, tile), "ROOT": form.shape}
    warps = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return {**forms, **warps}


def folds(form: RootForm, k: int, tile: Tile, gpu: Gpu) -> bool:
    """Whether leaves of width k have two steps or more of this tile, and it fits the memory."""
    several = form.leaves > 1 and k % tile.depth == 0 and k // tile.depth >= MIN_FOLD_STEPS
    return several and stages_and_output(tile, _SUM_BYTES) <= gpu.shared_bytes


def folds_plain(form: RootForm, k: int, tile: Tile, gpu: Gpu) -> bool:
    """The same without the weight on the M side."""
    return folds(form, k, tile, gpu) and tile.variant != DESCRIPTOR_SWAPPED.name


# `flat` finds at every step which leaf it is in; `nested` begins its loads anew at every leaf.
FLAT = Fold("flat", run_flat, folds, step_cost=1.0, leaf_cost=0.6)
NESTED = Fold("nested", run_nested, folds_plain, step_cost=0.82, leaf_cost=2.4)
