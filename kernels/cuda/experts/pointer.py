"""Products of experts by pointer loads: every dtype, every GPU, every width that 16 divides.

    y[s, n] = round(sum over k of x[s, k] * w[e, n, k] + bias[e, n])
    gated:  y[s, i] = round(act(g[s, i], u[s, i]))   g, u: columns of the chain, by eights

    S, N, K     slots, weight rows of an expert, depth; e the expert of a slot's block
    x [S, K], w [E, N, K], bias [E, N]: bf16, fp16 or fp32; y [S, N], gated [S, N / 2]: their dtype
    BM, BN, BK  slots of a block, weight rows of a tile, a step of K, which BK divides

The grid is fixed; programs loop over the tiles of the blocks that exist. `SHARED`: all blocks read
the `rows` rows of x, those of the step. `warp_specialised.py` is the fast form on Hopper.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.activation import activated
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.inputs.gated import GROUP

_GROUP = tl.constexpr(GROUP)


@triton.jit(do_not_specialize=["rows"])
def pointer_groups(
    x,
    w,
    bias,
    y,
    blocks,
    rows,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    SHARED: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All tiles [BM, BN] of the blocks that exist, a program taking every num_programs-th."""
    await_earlier(DEPENDENT)
    wide = tl.cdiv(n, BN)
    tiles = tl.load(blocks) * wide
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # 1. where the tile's operands lie
        block = tile // wide
        expert = tl.load(blocks + 1 + block).to(tl.int64)
        first_row, first_column = block * BM, tile % wide * BN
        slots = first_row + tl.arange(0, BM)
        columns = first_column + tl.arange(0, BN)
        depth = tl.arange(0, BK)
        read = tl.arange(0, BM) if SHARED else slots
        here = read < rows
        x_at = x + read.to(tl.int64)[:, None] * k + depth[None, :]
        w_at = w + expert * n * k + columns.to(tl.int64)[:, None] * k + depth[None, :]
        # 2. the chain over K
        total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        for at in range(0, k, BK):
            a = tl.load(x_at + at, mask=here[:, None], other=0.0) if SHARED else tl.load(x_at + at)
            if EVEN_N:
                b = tl.load(w_at + at)
            else:
                b = tl.load(w_at + at, mask=(columns < n)[:, None], other=0.0)
            if SWAP:
                total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
            else:
                total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        # 3. bias, activation and the store, clipped at N
        if SWAP:
            total = tl.trans(total)
        if HAS_BIAS:
            shift = tl.load(bias + expert * n + columns, mask=columns < n, other=0.0)
            total = total + shift.to(tl.float32)[None, :]
        if ACTIVATION != "":
            apart = tl.reshape(total, (BM, BN // (2 * _GROUP), 2, _GROUP))
            gate, up = tl.split(tl.permute(apart, (0, 1, 3, 2)))
            mixed = tl.reshape(activated(gate, up, ACTIVATION), (BM, BN // 2))
            halves = first_column // 2 + tl.arange(0, BN // 2)
            to = y + slots.to(tl.int64)[:, None] * (n // 2) + halves[None, :]
            tl.store(to, mixed.to(y.dtype.element_ty), mask=(halves < n // 2)[None, :])
        else:
            to = y + slots.to(tl.int64)[:, None] * n + columns[None, :]
            tl.store(to, total.to(y.dtype.element_ty), mask=(columns < n)[None, :])


def run_pointer(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    blocks: torch.Tensor,
    tile: Tile,
    programs: int,
    shared: bool,
    activation: str,
) -> None:
    """x [S, K], shared [M, K]; w [E, N, K], bias [E, N] or None -> y [S, N], filled."""
    _, n, k = w.shape
    pointer_groups[(programs,)](
        x,
        w,
        w if bias is None else bias,
        y,
        blocks,
        x.shape[0],
        n,
        k,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SWAP=tile.variant == "pointer_swapped",
        SHARED=shared,
        EVEN_N=n % tile.columns == 0,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
