"""One chain over K by pointer loads: few rows, fp32, GPUs before Hopper, and experts everywhere.

    y[leaf, m, n] = round(sum over k of x[m, leaf * K + k] * w[leaf, n, k] + bias[n])
    experts:  y[p, n] = round(sum over k of x[p, k] * w[e, n, k] + bias[e, n])

    M, N, K   rows of x, columns of y, width of a leaf; L leaves (1 of a column product)
    P, e      rows in the sorted order of tokens, and the expert of a row's block
    x [M, L * K], w [L, N, K], bias [N]: bf16, fp16 or fp32; y [L, M, N]: their dtype or fp32
    FORM      a tile's rows, columns and step of K, and what else is compiled in

With few rows the weight's rows stand on the M side of the matrix instruction (`SWAP`), so a tile
is 64 weight rows by 16 rows of x and a pass over the weight is all that is read.

Leaves may have unequal widths (`EDGES`). They lie side by side in x and in one weight [N, K], whose
K is their sum; a step of K divides each, so no product is masked.
"""

from dataclasses import replace

import triton
import triton.language as tl

from tpdet.kernels.cuda.gemm.variants.form import chain_form
from tpdet.kernels.cuda.gemm.variants.gated import gated_columns
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands, Variant, stages_alone
from tpdet.kernels.cuda.launch.dependent import await_earlier, await_first, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv

_TILE_GROUP = tl.constexpr(8)  # row blocks that share a weight tile in L2
_EXPERT_PROGRAMS = 4096  # that share the tiles of experts before Hopper and in fp32


@triton.jit
def tile_origin(pid, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First row and column of a tile; neighbours in `pid` share weight tiles."""
    row_blocks = tl.cdiv(m, ROWS)
    width = _TILE_GROUP * tl.cdiv(n, COLUMNS)
    group = pid // width
    size = min(row_blocks - group * _TILE_GROUP, _TILE_GROUP)
    rest = pid % width
    return (group * _TILE_GROUP + rest % size) * ROWS, (rest // size) * COLUMNS


@triton.jit
def leaf_bounds(leaf, FORM: tl.constexpr):
    """Where a leaf of unequal ones begins and ends in K."""
    begin = leaf * 0
    end = leaf * 0
    for i in tl.static_range(len(FORM.EDGES) - 1):
        begin = tl.where(leaf == i, FORM.EDGES[i] * FORM.DEPTH, begin)
        end = tl.where(leaf == i, FORM.EDGES[i + 1] * FORM.DEPTH, end)
    return begin, end


@triton.jit
def pointer_tile(
    x, w, bias, y, read, written, column, m, n, k, begin, end, stride_x, FORM: tl.constexpr
):
    """The chains of one tile from `begin` to `end` in K, with what follows them, and their store.

    read, written: its rows in x and in y; column: its first one. Rows of x from m on are zero.
    Tiles of experts store all of their rows.
    """
    # 1. where the tile's operands lie
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    MASKED: tl.constexpr = FORM.SHARED or not FORM.EXPERTS
    here = read < m
    columns = column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, FORM.DEPTH)
    x_at = x + read.to(tl.int64)[:, None] * stride_x + depth[None, :]
    w_at = w + columns.to(tl.int64)[:, None] * k + depth[None, :]
    # 2. the chain over K
    if FORM.SWAP:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(begin, end, FORM.DEPTH):
        a = tl.load(x_at + at, mask=here[:, None], other=0.0) if MASKED else tl.load(x_at + at)
        if FORM.EVEN:
            b = tl.load(w_at + at)
        else:
            b = tl.load(w_at + at, mask=(columns < n)[:, None], other=0.0)
        if FORM.SWAP:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    # 3. bias, gates, and the store clipped at N
    if FORM.SWAP:
        total = tl.trans(total)
    if FORM.BIAS:
        total = total + tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if FORM.GATED:
        total = gated_columns(total, FORM.GATED)
        columns = column // 2 + tl.arange(0, COLUMNS // 2)
        n = n // 2
    y_at = y + written.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (columns < n)[None, :]
    if not FORM.EXPERTS:
        inside = here[:, None] & inside
    tl.store(y_at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m"])
def pointer_chain(
    x, w, bias, y, expert_ids, m, n, k, stride_x, FORM: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One tile of one leaf (program axis 1); of experts, every num_programs-th of their tiles.

    expert_ids: as `Operands` has them, None for leaves.
    """
    await_earlier(DEPENDENT)
    in_tile = tl.arange(0, FORM.ROWS)
    if FORM.EXPERTS:
        wide = tl.cdiv(n, FORM.COLUMNS)
        for tile in range(tl.program_id(0), tl.load(expert_ids) * wide, tl.num_programs(0)):
            block = tile // wide
            expert = tl.load(expert_ids + 1 + block).to(tl.int64)
            rows = block * FORM.ROWS + in_tile
            read = in_tile if FORM.SHARED else rows
            weight, column = w + expert * n * k, tile % wide * FORM.COLUMNS
            shift = bias + expert * n
            pointer_tile(x, weight, shift, y, read, rows, column, m, n, k, 0, k, k, FORM)
    else:
        row, column = tile_origin(tl.program_id(0), m, n, FORM.ROWS, FORM.COLUMNS)
        leaf = tl.program_id(1).to(tl.int64)
        rows = row + in_tile
        written = leaf * m + rows.to(tl.int64)
        if len(FORM.EDGES) > 0:
            begin, end = leaf_bounds(tl.program_id(1), FORM)
            pointer_tile(x, w, bias, y, rows, written, column, m, n, k, begin, end, stride_x, FORM)
        else:
            x += leaf * k
            w += leaf * n * k
            pointer_tile(x, w, bias, y, rows, written, column, m, n, k, 0, k, stride_x, FORM)
    await_first(DEPENDENT)


def run_pointer(operands: Operands, tile: Tile, sms: int = 0) -> None:
    """y is filled; sms: multiprocessors that tiles of experts share, 0 before Hopper."""
    x, w, bias, y, _, widths, expert_ids, _, turn = operands
    (leaves, n, k), m = w.shape, x.shape[0]
    if expert_ids is None:
        grid = (cdiv(m, tile.rows) * cdiv(n, tile.columns), len(widths) or leaves)
    else:
        programs = sms * tile.ctas if sms else _EXPERT_PROGRAMS
        grid = (min(operands.expert_tiles(tile), programs), 1)
    pointer_chain[grid](
        x,
        w,
        w if bias is None else bias,
        y,
        expert_ids,
        m,
        n,
        k,
        x.stride(0),
        FORM=chain_form(operands, tile, n % tile.columns == 0),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **dependent_launch(x.device, turn),
    )


POINTER = Variant("pointer", "", run_pointer, shared_bytes=stages_alone, unequal=True, experts=True)
POINTER_SWAPPED = replace(POINTER, name="pointer_swapped", stored="swap")
