"""One chain over K by tensor descriptors, persistent over tiles: many rows on Hopper.

    y[leaf, m, n] = round(sum over k of x[m, leaf * K + k] * w[leaf, n, k] + bias[n])

    M, N, K  rows of x, columns of y, width of a leaf; L leaves (1 of a column product)
    x [M, L * K], w [L, N, K], bias [N]: bf16 or fp16; y [L, M, N]: their dtype or fp32
    BM, BN, BK  a tile's rows, columns and step of K

Descriptors are made on the host and travel as kernel arguments: no workspace, graphs may hold
them. A tile that reaches past N reads the next leaf's weight rows; those columns are clipped at
the store, and a column's value reads no other column.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tpdet.kernels.cuda.gemm.variants.gated import gated_columns
from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Variant
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv


@triton.jit
def store_tile(y, root, row, column, tile, HALVES: tl.constexpr):
    """Round a tile [BM, BN] and store it at y[root, row:, column:], clipped at M and N."""
    BM: tl.constexpr = tile.shape[0]
    BN: tl.constexpr = tile.shape[1]
    if HALVES == 2:
        left, right = tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))
        y.store([root, row, column], tl.reshape(left.to(y.dtype), (1, BM, BN // 2)))
        y.store([root, row, column + BN // 2], tl.reshape(right.to(y.dtype), (1, BM, BN // 2)))
    else:
        y.store([root, row, column], tl.reshape(tile.to(y.dtype), (1, BM, BN)))


@triton.jit(do_not_specialize=["m"])
def descriptor_chain(
    x,
    w,
    bias,
    y,
    m,
    n,
    k,
    leaves,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles [BM, BN] of all leaves, a program taking every num_programs-th."""
    await_earlier(DEPENDENT)
    blocks = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), blocks * leaves, tl.num_programs(0), flatten=True):
        leaf = tile // blocks
        row, column = tile_origin(tile % blocks, m, n, BM, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for at in range(0, k, BK):
            a = x.load([row, leaf * k + at])
            b = w.load([leaf * n + column, at])
            total = tl.dot(a, b.T, total)
        if HAS_BIAS:
            columns = column + tl.arange(0, BN)
            loaded = tl.load(bias + columns, mask=columns < n, other=0.0)
            total = total + loaded.to(tl.float32)[None, :]
        if GATED:
            total = gated_columns(total, GATED)
            column = column // 2
        store_tile(y, leaf, row, column, total, HALVES)


def describe_operands(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tile: Tile, gated: int = 0
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """x [M, L * K], w [L, N, K], y [R, M, N] in blocks of the variant's tile."""
    flat = w.view(-1, w.shape[2])
    block = [1, tile.rows, tile.columns // tile.halves // (2 if gated else 1)]
    return (
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(flat, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(y, block),
    )


def run_descriptor(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    sms: int,
    gated: int = 0,
) -> None:
    """x [M, L * K], w [L, N, K] contiguous, bias [N] or None -> y [L, M, N], filled."""
    leaves, n, k = w.shape
    m = x.shape[0]
    blocks = leaves * cdiv(m, tile.rows) * cdiv(n, tile.columns)
    x_at, w_at, y_at = describe_operands(x, w, y, tile, gated)
    descriptor_chain[(min(sms * tile.ctas, blocks),)](
        x_at,
        w_at,
        w if bias is None else bias,
        y_at,
        m,
        n,
        k,
        leaves,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        HALVES=tile.halves,
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


DESCRIPTOR = Variant("descriptor", "tma", run_descriptor, descriptors=True)
