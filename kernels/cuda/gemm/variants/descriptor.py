"""One chain over K by tensor descriptors, persistent over tiles: few and many rows on Hopper.

    y[leaf, m, n] = round(sum over k of x[m, leaf * K + k] * w[leaf, n, k] + bias[n])

    M, N, K  rows of x, columns of y, width of a leaf; L leaves (1 of a column product)
    x [M, L * K], w [L, N, K], bias [N]: bf16 or fp16; y [L, M, N]: their dtype or fp32
    FORM     a tile's rows, columns and step of K, and what else is compiled in

Descriptors are made on the host and travel as kernel arguments: no workspace, graphs may hold
them. A tile that reaches past N reads the next leaf's weight rows; those columns are clipped at
the store, and a column's value reads no other column.

Few rows take tiles with the weight's rows on the M side of the matrix instruction (`SWAP`): 64 or
128 weight rows by 8 to 128 rows of x. One pass over the weight is all that is read, and loads need
no registers, which leaves room for many stages. Leaves of unequal width lie as in `pointer.py`.
"""

from dataclasses import replace

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tpdet.kernels.cuda.gemm.variants.form import chain_form
from tpdet.kernels.cuda.gemm.variants.gated import gated_columns
from tpdet.kernels.cuda.gemm.variants.pointer import leaf_bounds, tile_origin
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands, Variant
from tpdet.kernels.cuda.launch.dependent import await_earlier, await_first, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv


@triton.jit
def store_tile(y, root, row, column, tile, HALVES: tl.constexpr):
    """Round a tile [ROWS, COLUMNS] and store it at y[root, row:, column:], clipped at M and N."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    HALF: tl.constexpr = COLUMNS // 2
    if HALVES == 2:
        left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))
        y.store([root, row, column], tl.reshape(left.to(y.dtype), (1, ROWS, HALF)))
        y.store([root, row, column + HALF], tl.reshape(right.to(y.dtype), (1, ROWS, HALF)))
    else:
        y.store([root, row, column], tl.reshape(tile.to(y.dtype), (1, ROWS, COLUMNS)))


@triton.jit
def add_step(x, w, row, column, leaf, n, k, at, total, SWAP: tl.constexpr):
    """total + a step of a leaf's K, from `at` on: x[row:] w[leaf, column:]^T; SWAP: turned."""
    if SWAP:
        b = w.load([leaf * n + column, at])
        a = x.load([row, leaf * k + at])
        total = tl.dot(b, a.T, total)
    else:
        a = x.load([row, leaf * k + at])
        b = w.load([leaf * n + column, at])
        total = tl.dot(a, b.T, total)
    return total


@triton.jit(do_not_specialize=["m"])
def descriptor_chain(x, w, bias, y, m, n, k, leaves, FORM: tl.constexpr, DEPENDENT: tl.constexpr):
    """Tiles of all leaves, a program taking every num_programs-th."""
    await_earlier(DEPENDENT)
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    UNEQUAL: tl.constexpr = len(FORM.EDGES) > 0
    blocks = tl.cdiv(m, ROWS) * tl.cdiv(n, COLUMNS)
    tiles = blocks * leaves
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not UNEQUAL):
        # 1. where the tile lies
        leaf = tile // blocks
        row, column = tile_origin(tile % blocks, m, n, ROWS, COLUMNS)
        if FORM.SWAP:
            total = tl.zeros((COLUMNS, ROWS), tl.float32)
        else:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
        # 2. the chain over K
        if UNEQUAL:
            begin, end = leaf_bounds(leaf, FORM)
            for at in range(begin, end, FORM.DEPTH):
                total = add_step(x, w, row, column, 0, n, k, at, total, FORM.SWAP)
        else:
            for at in range(0, k, FORM.DEPTH):
                total = add_step(x, w, row, column, leaf, n, k, at, total, FORM.SWAP)
        # 3. bias, gates, and the store clipped at M and N
        if FORM.SWAP:
            total = tl.trans(total)
        if FORM.BIAS:
            columns = column + tl.arange(0, COLUMNS)
            loaded = tl.load(bias + columns, mask=columns < n, other=0.0)
            total = total + loaded.to(tl.float32)[None, :]
        if FORM.GATED:
            total = gated_columns(total, FORM.GATED)
            column = column // 2
        store_tile(y, leaf, row, column, total, FORM.HALVES)
    await_first(DEPENDENT)


def describe_operands(operands: Operands, tile: Tile) -> tuple[TensorDescriptor, ...]:
    """x [M, L * K], w [L * N, K], y [R, M, N] in blocks of the variant's tile."""
    x, w, _, y = operands[:4]
    block = [1, tile.rows, tile.columns // tile.halves // operands.pair]
    return (
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(w.view(-1, w.shape[2]), [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(y, block),
    )


def run_descriptor(operands: Operands, tile: Tile, sms: int) -> None:
    """y is filled by up to `sms` programs, or tile.ctas times as many."""
    x, w, bias = operands[:3]
    (leaves, n, k), m = w.shape, x.shape[0]
    leaves = len(operands.widths) or leaves
    x_at, w_at, y_at = describe_operands(operands, tile)
    tiles = leaves * cdiv(m, tile.rows) * cdiv(n, tile.columns)
    descriptor_chain[(min(sms * tile.ctas, tiles),)](
        x_at,
        w_at,
        w if bias is None else bias,
        y_at,
        m,
        n,
        k,
        leaves,
        FORM=chain_form(operands, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **dependent_launch(x.device, operands.turn),
    )


DESCRIPTOR = Variant("descriptor", "tma", run_descriptor, descriptors=True, unequal=True)
DESCRIPTOR_SWAPPED = replace(
    DESCRIPTOR, name="descriptor_swapped", stored="swap tma", unequal=False
)
