"""One chain over K by tensor descriptors with the weight's rows on the M side: few rows on Hopper.

    y[leaf, m, n] = round(sum over k of x[m, leaf * K + k] * w[leaf, n, k] + bias[n])

    M, N, K  rows of x, columns of y, width of a leaf; L leaves (1 of a column product)
    x [M, L * K], w [L, N, K], bias [N]: bf16 or fp16; y [L, M, N]: their dtype or fp32
    BM, BN, BK  a tile's rows, columns and step of K

A tile is 64 or 128 weight rows by 8 to 128 rows of x: one pass over the weight is all that is read,
and loads need no registers, which leaves room for many stages. Tiles past M or N are clipped as in
`descriptor.py`.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.gemm.variants.descriptor import describe_operands, store_tile
from tpdet.kernels.cuda.gemm.variants.gated import gated_columns
from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Variant
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv


@triton.jit(do_not_specialize=["m"])
def swapped_chain(
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
        total = tl.zeros((BN, BM), tl.float32)
        for at in range(0, k, BK):
            b = w.load([leaf * n + column, at])
            a = x.load([row, leaf * k + at])
            total = tl.dot(b, a.T, total)
        turned = tl.trans(total)
        if HAS_BIAS:
            columns = column + tl.arange(0, BN)
            loaded = tl.load(bias + columns, mask=columns < n, other=0.0)
            turned = turned + loaded.to(tl.float32)[None, :]
        if GATED:
            turned = gated_columns(turned, GATED)
            column = column // 2
        store_tile(y, leaf, row, column, turned, HALVES)


def run_swapped(
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
    swapped_chain[(min(sms * tile.ctas, blocks),)](
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


DESCRIPTOR_SWAPPED = Variant("descriptor_swapped", "swap tma", run_swapped, descriptors=True)
