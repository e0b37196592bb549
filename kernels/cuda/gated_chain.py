"""Gate and up products with SiLU-and-multiply in their epilogue, by tensor descriptors on Hopper.

    g[m, i] = round(sum over k of x[m, k] * w[i, k])
    u[m, i] = round(sum over k of x[m, k] * w[I + i, k])
    y[m, i] = round(silu(g[m, i]) * u[m, i])

The weight lies as everywhere, all gate rows, then all up rows: one descriptor over [2, I, K] brings
a block of both as one operand, and in the matrix instruction's accumulator a thread holds a gate
column and the up column that belongs to it, so that nothing is exchanged between threads. Every
column is the chain of `gemm_descriptor`; roundings and SiLU are those of `activation`. What is
saved is writing and reading [M, 2 * I] once each.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tpdet.kernels.cuda.activation import gated
from tpdet.kernels.cuda.gemm_pointer import tile_origin
from tpdet.kernels.cuda.gemm_variants import Variant


@triton.jit(do_not_specialize=["m"])
def gated_chain(
    x, w, y, m, width, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN / 2] of y [m, width], a program taking every num_programs-th.

    x [m, k] in blocks [BM, BK], w [2, width, k] in blocks [2, BN / 2, BK].
    """
    HALF: tl.constexpr = BN // 2
    tiles = tl.cdiv(m, BM) * tl.cdiv(width, HALF)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = tile_origin(tile, m, width, BM, HALF)
        total = tl.zeros((BM, BN), tl.float32)
        for at in range(0, k, BK):
            a = x.load([row, at])
            b = tl.reshape(w.load([0, column, at]), (BN, BK))
            total = tl.dot(a, b.T, total)
        gate, up = tl.split(tl.permute(tl.reshape(total, (BM, 2, HALF)), (0, 2, 1)))
        y.store([row, column], gated(gate.to(y.dtype), up.to(y.dtype)))


def run_gated(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, variant: Variant, sms: int
) -> None:
    """x [M, K], w [2 * I, K] contiguous, gate first -> y [M, I], filled."""
    m, (width, k) = x.shape[0], (w.shape[0] // 2, w.shape[1])
    half = variant.columns // 2
    tiles = triton.cdiv(m, variant.rows) * triton.cdiv(width, half)
    gated_chain[(min(sms * variant.ctas, tiles),)](
        TensorDescriptor.from_tensor(x, [variant.rows, variant.depth]),
        TensorDescriptor.from_tensor(w.view(2, width, k), [2, half, variant.depth]),
        TensorDescriptor.from_tensor(y, [variant.rows, half]),
        m, width, k, BM=variant.rows, BN=variant.columns, BK=variant.depth,
        num_warps=variant.warps, num_stages=variant.stages, enable_fp_fusion=False,
    )  # fmt: skip
