"""Matrix products: columns in one chain over K, gated columns, and rows by leaves of K.

Shapes: M rows, K inputs, N outputs, L leaves, I outputs of gate or up.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpdet.kernels import ops
from tpdet.kernels.inputs.gated import gate_and_up
from tpdet.kernels.inputs.product import read_roots
from tpdet.kernels.order import evaluate
from tpdet.kernels.partial_sums import PartialSums
from tpdet.nn.operators.declare import operator, wide
from tpdet.nn.operators.pointwise import gated_values


def _columns_reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any) -> Tensor:
    y = wide(x) @ wide(weight).t()
    return y if bias is None else y + wide(bias)


@operator(
    lambda x, weight, bias=None, dtype=None: x.new_empty(x.shape[0], weight.shape[0], dtype=dtype),
    _columns_reference,
)
def columns(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] in dtype (x's if None), rounded once."""
    return ops.column_gemm(x, weight, bias, dtype)


def _gated_reference(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return gated_values(*gate_and_up(wide(x) @ wide(weight).t()), activation)


@operator(lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0] // 2), _gated_reference)
def gated_columns(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    """x [M, K], interleaved weight [2 * I, K] -> round(act(gate) * up) [M, I] in x's dtype."""
    return ops.gated_gemm(x, weight, activation=activation)


def _rows_reference(
    x: Tensor, weight: Tensor, roots: str, slots: int, widths: Sequence[int] | None
) -> Tensor:
    leaves = wide(weight[0]).split([*widths], dim=1) if widths else wide(weight).unbind()
    inputs = wide(x).split([leaf.shape[1] for leaf in leaves], dim=1)
    sums = [part @ leaf.t() for part, leaf in zip(inputs, leaves, strict=True)]
    return _folded(sums, roots, slots)


@operator(
    lambda x, weight, roots, slots, widths=None: x.new_empty(
        slots, x.shape[0], weight.shape[1], dtype=torch.float32
    ),
    _rows_reference,
)
def rows(
    x: Tensor, weight: Tensor, roots: str, slots: int, widths: Sequence[int] | None = None
) -> Tensor:
    """x [M, L * K], weight [L, N, K] -> the roots of this rank's leaves [slots, M, N] fp32.

    roots: such as "0+1 2+3", over leaves counted from 0; slots without one are zero. widths: the K
    of unequal leaves, which lie side by side in x and in a weight [1, N, their sum].
    """
    sums = ops.leaf_sums(x, weight, read_roots(roots), widths=tuple(widths or ()))
    return ops.fold_roots(sums, slots)


@operator(
    lambda values, roots, slots: values.new_empty(slots, *values.shape[1:]),
    lambda values, roots, slots: _folded([*values.unbind()], roots, slots),
)
def fold_roots(values: Tensor, roots: str, slots: int) -> Tensor:
    """Sums [C, M, N] fp32 -> the roots of a rank [slots, M, N] fp32, zero where it has none."""
    return ops.fold_roots(PartialSums(values, read_roots(roots)), slots)


def _folded(sums: list[Tensor], roots: str, slots: int) -> Tensor:
    folded = [evaluate(root, lambda i: sums[i], torch.add) for root in read_roots(roots)]
    return torch.stack([*folded, *[torch.zeros_like(sums[0])] * (slots - len(folded))])
