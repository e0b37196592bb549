"""Matrix products by the column product of the contract: one chain over K, whatever the rows.

    mm, addmm    a row of the result depends on its row of the left operand and on the right one
    bmm          each matrix of the batch by itself
    _grouped_mm  each group of rows by its own matrix (experts)

On a CPU each K is tried once before it is used (`kernels/cpu/gemm/admission.py`). On a GPU K is
filled up with zeros to a multiple of 16, which the kernels' instructions read at once.

    M, N, K  rows, outputs and terms of a product;  E  groups
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from tpdet.errors import UsageError
from tpdet.kernels import ops
from tpdet.kernels.cpu.gemm.admission import check_bit_classes
from tpdet.kernels.order import K_GROUP


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] in fp32, rounded once to dtype (x's).

    Raises RuntimeError where this CPU's BLAS has no bit class for K, UsageError for two dtypes.
    """
    if x.dtype != weight.dtype:
        raise UsageError(f"a product of {x.dtype} and {weight.dtype}: give both one dtype")
    (m, k), n = x.shape, weight.shape[0]
    if not (m and n and k):
        y = x.new_zeros(m, n, dtype=dtype or x.dtype)
        return y if bias is None else y + bias.to(y.dtype)
    if x.device.type == "cpu":
        _try_terms(k)
    elif k % K_GROUP:
        x, weight = (pad(operand, (0, -k % K_GROUP)) for operand in (x, weight))
    return ops.column_gemm(x, weight, bias, dtype)


def mm(left: Tensor, right: Tensor) -> Tensor:
    """`aten::mm`: [M, K] x [K, N] -> [M, N]."""
    return product(left, right.t())


def addmm(
    added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`aten::addmm`: beta * added + alpha * (left @ right), in fp32, rounded once."""
    if added.ndim == 1 and beta == alpha == 1 and len(added) == right.shape[1]:
        return product(left, right.t(), added)
    y = product(left, right.t(), None, torch.float32)
    y = y if alpha == 1 else y * alpha
    if beta:
        y = y + (added.float() if beta == 1 else added.float() * beta)
    return y.to(left.dtype)


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """`aten::bmm`: [B, M, K] x [B, K, N] -> [B, M, N]."""
    y = left.new_empty(len(left), left.shape[1], right.shape[2])
    for index, (x, weight) in enumerate(zip(left, right, strict=True)):
        y[index] = product(x, weight.t())
    return y


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """`aten::mv`: [M, K] x [K] -> [M]; an element is that of the product with a matrix."""
    return product(matrix, vector[None])[:, 0]


def dot(left: Tensor, right: Tensor) -> Tensor:
    """`aten::dot`: [K] x [K] -> []."""
    return product(left[None], right[None])[0, 0]


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten::_grouped_mm`: groups end at `offs` [E], of what two-dimensional operands share.

    [M, K] x [E, K, N] -> [M, N]; [E, M, K] x [K, N] -> [M, N]; [M, K] x [K, N] -> [E, M, N]. Rows
    and columns past the last group are zeros.
    """
    if bias is not None:
        raise UsageError("_grouped_mm with a bias: add it to the result")
    dtype = out_dtype or left.dtype
    if offs is None:
        return bmm(left, right).to(dtype)
    spans = [slice(*ends) for ends in pairwise([0, *offs.tolist()])]
    if left.ndim == right.ndim == 2:
        parts = [product(left[:, s], right[s].t(), None, dtype) for s in spans]
        return torch.stack(parts)
    y = left.new_zeros(left.shape[-2], right.shape[-1], dtype=dtype)
    for index, span in enumerate(spans):
        if left.ndim == 2:
            y[span] = product(left[span], right[index].t(), None, dtype)
        else:
            y[:, span] = product(left[index], right[:, span].t(), None, dtype)
    return y


@cache
def _try_terms(terms: int) -> None:
    check_bit_classes([terms], terms)
