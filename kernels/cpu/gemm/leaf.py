"""Row products of the CPU path: one chain a leaf (`gemm`); the fold is the reader's."""

import torch

from tpdet.kernels.cpu.gemm.column import chain, padded_rows
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums


def leaf_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One fp32 chain a leaf: x [M, L * K], weight [L, N, K] -> partial sums [L, M, N] in fp32."""
    leaves, _, width = weight.shape
    rows = padded_rows(x)
    parts = [
        chain(rows[:, leaf * width : (leaf + 1) * width].contiguous(), weight[leaf])
        for leaf in range(leaves)
    ]
    return torch.stack([part[: x.shape[0]] for part in parts])


def leaf_sums(x: torch.Tensor, weight: torch.Tensor, roots: tuple[Expression, ...]) -> PartialSums:
    """Every leaf's sum; the fold is the reader's."""
    return PartialSums(leaf_gemm(x, weight), roots)
