"""One chain over K by pointer loads, one output tile a program: few rows, and before Hopper.

    y[leaf, m, n] = round(sum over k of x[m, leaf * K + k] * w[leaf, n, k] + bias[n])

    M, N, K  rows of x, columns of y, width of a leaf; L leaves (1 of a column product)
    x [M, L * K], w [L, N, K], bias [N]: bf16, fp16 or fp32; y [L, M, N]: their dtype or fp32
    BM, BN, BK  a tile's rows, columns and step of K

With few rows the weight's rows stand on the M side of the matrix instruction (`SWAP`), so a tile
is 64 weight rows by 16 rows of x and a pass over the weight is all that is read.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.gemm.variants.gated import gated_columns
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Variant, stages_alone
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv

_TILE_GROUP = tl.constexpr(8)  # row blocks that share a weight tile in L2


@triton.jit
def tile_origin(pid, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """First row and column of a tile; neighbours in `pid` share weight tiles."""
    row_blocks = tl.cdiv(m, BM)
    width = _TILE_GROUP * tl.cdiv(n, BN)
    group = pid // width
    size = min(row_blocks - group * _TILE_GROUP, _TILE_GROUP)
    rest = pid % width
    return (group * _TILE_GROUP + rest % size) * BM, (rest // size) * BN


@triton.jit(do_not_specialize=["m"])
def pointer_chain(
    x,
    w,
    bias,
    y,
    m,
    n,
    k,
    stride_x,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One [BM, BN] tile of one leaf (program axis 1)."""
    await_earlier(DEPENDENT)
    # 1. where the tile's operands lie
    first_row, first_column = tile_origin(tl.program_id(0), m, n, BM, BN)
    leaf = tl.program_id(1).to(tl.int64)
    rows = first_row + tl.arange(0, BM)
    columns = first_column + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    here = rows < m
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + leaf * k + depth[None, :]
    w_at = w + leaf * n * k + columns.to(tl.int64)[:, None] * k + depth[None, :]
    # 2. the chain over K
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for at in range(0, k, BK):
        a = tl.load(x_at + at, mask=here[:, None], other=0.0)
        if EVEN_N:
            b = tl.load(w_at + at)
        else:
            b = tl.load(w_at + at, mask=(columns < n)[:, None], other=0.0)
        if SWAP:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    # 3. bias, and the store clipped at M and N
    if SWAP:
        total = tl.trans(total)
    if HAS_BIAS:
        total = total + tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = gated_columns(total, GATED)
        columns = first_column // 2 + tl.arange(0, BN // 2)
        n = n // 2
    y_at = y + (leaf * m + rows.to(tl.int64)[:, None]) * n + columns[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=here[:, None] & (columns < n)[None, :])


def run_pointer(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    sms: int = 0,
    gated: int = 0,
) -> None:
    """x [M, L * K], w [L, N, K] contiguous, bias [N] or None -> y [L, M, N], filled."""
    leaves, n, k = w.shape
    m = x.shape[0]
    blocks = cdiv(m, tile.rows) * cdiv(n, tile.columns)
    pointer_chain[(blocks, leaves)](
        x,
        w,
        w if bias is None else bias,
        y,
        m,
        n,
        k,
        x.stride(0),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SWAP=tile.variant == POINTER_SWAPPED.name,
        EVEN_N=n % tile.columns == 0,
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


POINTER = Variant("pointer", "", run_pointer, shared_bytes=stages_alone)
POINTER_SWAPPED = Variant("pointer_swapped", "swap", run_pointer, shared_bytes=stages_alone)
