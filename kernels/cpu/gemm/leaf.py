"""Row products of the CPU path: one chain a leaf (`gemm`); the fold is the reader's."""

from collections.abc import Sequence

import torch

from tpdet.kernels.cpu.gemm.column import chain, of_cpu, padded_rows
from tpdet.kernels.inputs.packed import PackedStack, Weight, WeightStack
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums


def leaf_gemm(x: torch.Tensor, weight: WeightStack, widths: tuple[int, ...] = ()) -> torch.Tensor:
    """One fp32 chain a leaf: x [M, L * K], weight [L, N, K] -> partial sums [L, M, N] in fp32.

    widths: of leaves of unequal K, which lie side by side in x and in a weight [1, N, their sum].
    """
    weights: Sequence[Weight]
    weight = of_cpu(weight)
    if isinstance(weight, PackedStack):
        weights = weight.matrices
    else:
        weights = weight[0].split(widths, dim=1) if widths else weight.unbind()
    inputs = padded_rows(x).split([each.shape[1] for each in weights], dim=1)
    parts = [chain(x.contiguous(), leaf) for x, leaf in zip(inputs, weights, strict=True)]
    return torch.stack([part[: x.shape[0]] for part in parts])


def leaf_sums(
    x: torch.Tensor,
    weight: WeightStack,
    roots: tuple[Expression, ...],
    *,
    admitted: object = None,
    widths: tuple[int, ...] = (),
) -> PartialSums:
    """x [M, L * K], weight [L, N, K] -> sums [C, M, N] of leaves or of larger subtrees of `roots`.

    `roots` are over this rank's leaves, counted from 0. How much of them is folded here is free:
    nothing on a CPU. admitted: as of `column_gemm`. widths: of leaves of unequal K, which lie side
    by side in x and in a weight [1, N, sum of widths].
    """
    return PartialSums(leaf_gemm(x, weight, widths), roots)
