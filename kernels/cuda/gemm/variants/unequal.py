"""Leaves of unequal width, one chain each: by pointer loads, and by descriptors for many rows.

    y[l, m, n] = sum over k in [edge l, edge l + 1) of x[m, k] * w[n, k]             fp32

    M, N  rows of x, columns of y; L leaves side by side in K columns
    x [M, K], w [N, K]: bf16, fp16 or fp32 (descriptors: not fp32); y [L, M, N] fp32
    BM, BN, BK  a tile's rows, columns and step of K

A step of K divides every leaf, so no product is masked. The edges are known when a kernel is
compiled. Where all leaves are equal, the other variants run: they also fold leaves in a program.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.gemm.variants.descriptor import DESCRIPTOR, describe_operands, store_tile
from tpdet.kernels.cuda.gemm.variants.pointer import POINTER, POINTER_SWAPPED, tile_origin
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv


class Steps(NamedTuple):
    """Where leaves begin, and the last one ends, in steps of K."""

    edges: tuple[int, ...]


@triton.jit
def leaf_steps(leaf, STEPS: tl.constexpr):
    """The first step of a leaf, and the end of its steps."""
    first = leaf * 0
    end = leaf * 0
    for i in tl.static_range(len(STEPS.edges) - 1):
        first = tl.where(leaf == i, STEPS.edges[i], first)
        end = tl.where(leaf == i, STEPS.edges[i + 1], end)
    return first, end


@triton.jit(do_not_specialize=["m"])
def unequal_pointer(
    x,
    w,
    y,
    m,
    n,
    stride_x,
    stride_w,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One [BM, BN] tile of one leaf (program axis 1)."""
    await_earlier(DEPENDENT)
    # 1. where the tile's operands lie
    first_row, first_column = tile_origin(tl.program_id(0), m, n, BM, BN)
    leaf = tl.program_id(1)
    first, end = leaf_steps(leaf, STEPS)
    rows = first_row + tl.arange(0, BM)
    columns = first_column + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    here = rows < m
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + depth[None, :]
    w_at = w + columns.to(tl.int64)[:, None] * stride_w + depth[None, :]
    # 2. the chain over the leaf's part of K
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for step in range(first, end):
        a = tl.load(x_at + step * BK, mask=here[:, None], other=0.0)
        if EVEN_N:
            b = tl.load(w_at + step * BK)
        else:
            b = tl.load(w_at + step * BK, mask=(columns < n)[:, None], other=0.0)
        if SWAP:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    # 3. the store clipped at M and N
    if SWAP:
        total = tl.trans(total)
    y_at = y + (leaf.to(tl.int64) * m + rows.to(tl.int64)[:, None]) * n + columns[None, :]
    tl.store(y_at, total, mask=here[:, None] & (columns < n)[None, :])


@triton.jit(do_not_specialize=["m"])
def unequal_descriptor(
    x,
    w,
    y,
    m,
    n,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    HALVES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles [BM, BN] of all leaves, a program taking every num_programs-th."""
    await_earlier(DEPENDENT)
    blocks = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    leaves: tl.constexpr = len(STEPS.edges) - 1
    for tile in tl.range(tl.program_id(0), blocks * leaves, tl.num_programs(0)):
        leaf = tile // blocks
        first, end = leaf_steps(leaf, STEPS)
        row, column = tile_origin(tile % blocks, m, n, BM, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for step in range(first, end):
            total = tl.dot(x.load([row, step * BK]), w.load([column, step * BK]).T, total)
        store_tile(y, leaf, row, column, total, HALVES)


def run_unequal(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    widths: tuple[int, ...],
    tile: Tile,
    sms: int = 0,
) -> None:
    """x [M, K], w [1, N, K] contiguous, K the sum of widths -> y [L, M, N], filled.

    The tile's variant is a pointer or the descriptor one. Raises ValueError for another, and for a
    depth that does not divide every width.
    """
    if any(width % tile.depth for width in widths) or sum(widths) != x.shape[1]:
        raise ValueError(f"depth {tile.depth} does not divide leaves {widths} of {x.shape[1]}")
    m, n = x.shape[0], w.shape[1]
    steps = Steps((0, *accumulate(width // tile.depth for width in widths)))
    blocks = cdiv(m, tile.rows) * cdiv(n, tile.columns)
    common = {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "STEPS": steps,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }
    if tile.variant == DESCRIPTOR.name:
        programs = min(sms * tile.ctas, blocks * len(widths))
        operands = describe_operands(x, w, y, tile)
        unequal_descriptor[(programs,)](
            *operands, m, n, HALVES=tile.halves, **common, **dependent_launch(x.device)
        )
        return
    if tile.variant not in (POINTER.name, POINTER_SWAPPED.name):
        raise ValueError(f"{tile.variant} takes no unequal leaves: use {DESCRIPTOR.name}")
    unequal_pointer[(blocks, len(widths))](
        x,
        w,
        y,
        m,
        n,
        x.stride(0),
        w.stride(1),
        SWAP=tile.variant == POINTER_SWAPPED.name,
        EVEN_N=n % tile.columns == 0,
        **common,
        **dependent_launch(x.device),
    )
