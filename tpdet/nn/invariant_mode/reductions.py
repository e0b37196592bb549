"""Sums, means, softmax and losses whose order is free: additions of integers, maxima, no more.

    sum      fp32(Σ)                         Σ in fixed point (`kernels/exact/fixed_point.py`)
    softmax  fp32(fp64(e_i) / Σ e)           e_i = exp(x_i - max)
    log      fp32((fp64(x_i) - fp64(max)) - log64(Σ e))

A masked entry (exp of it is 0) adds nothing, wherever it stands: rows may be padded at either end.
Results are rounded to fp32 and then to the dtype of the result.

    R, N  rows and values of a row; R is cut in blocks, which bound the temporaries, not the bits
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tpdet.kernels.exact.fixed_point import exponent_of, fixed_point, order_free_sum, power_of_two
from tpdet.kernels.exact.thresholds import log_probabilities
from tpdet.kernels.order import fraction_bits
from tpdet.nn.invariant_mode.pointwise import exponential, logarithm

_BLOCK_ELEMENTS = 1 << 22


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 to fp32 and then to dtype."""
    return x.float().to(dtype)


def sum_of(
    x: Tensor,
    dims: list[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten::sum` and `aten::sum.dim_IntList`; integers and booleans are exact in any order."""
    if dtype is not None and dtype.is_floating_point:
        x = x.to(dtype)
    if not x.is_floating_point():
        return torch.sum(x, dims or list(range(x.ndim)), keepdim, dtype=dtype)
    return _sum(x, dims, keepdim, dtype, 1)


def mean_of(
    x: Tensor,
    dims: list[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten::mean` and `aten::mean.dim`."""
    count = math.prod(x.shape[dim] for dim in dims or range(x.ndim))
    return _sum(x, dims, keepdim, dtype, count)


def running_sum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`aten::cumsum`, of floating values by the fixed point of the whole row."""
    if not x.is_floating_point():
        return torch.cumsum(x, dim, dtype=dtype)
    wide = x.double()
    exponent = exponent_of(wide.abs().amax(dim, keepdim=True))
    bits = fraction_bits(x.shape[dim] if x.ndim else 1)
    whole = fixed_point(wide, exponent, bits).cumsum(dim)
    total = torch.where(torch.isfinite(wide), whole * power_of_two(exponent - bits), wide)
    return narrowed(total, dtype or x.dtype)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`aten::_softmax`."""
    dtype = torch.float32 if half_to_float else x.dtype
    return by_rows(_softmax_rows, dim, dtype, x)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`aten::_log_softmax`."""
    dtype = torch.float32 if half_to_float else x.dtype
    return by_rows(_log_softmax_rows, dim, dtype, x)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """`aten::_softmax_backward_data`: p * (g - Σ g p)."""

    def by_row(grad: Tensor, output: Tensor) -> Tensor:
        return output * (grad - order_free_sum(grad * output, [-1]).float())

    return by_rows(by_row, dim, dtype, grad, output)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """`aten::_log_softmax_backward_data`: g - exp(log p) * Σ g."""

    def by_row(grad: Tensor, output: Tensor) -> Tensor:
        return grad - exponential(output) * order_free_sum(grad, [-1]).float()

    return by_rows(by_row, dim, dtype, grad, output)


def log_sum_exp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """`aten::logsumexp`: max + log64(Σ exp(x - max))."""
    largest = x.float().amax(dims, keepdim=True)
    base = torch.where(torch.isfinite(largest), largest, 0.0)
    total = order_free_sum(exponential(x.float() - base), dims)
    y = narrowed(base.double() + logarithm(total), x.dtype)
    return y if keepdim else y.squeeze(dims)


def nll_loss(
    log_p: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """`aten::nll_loss_forward` of log_p [M, C] and target [M], or [C] and a number."""
    counted = target != ignore_index
    classes = torch.where(counted, target, 0)
    picked = -log_p.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    share = log_p.new_ones(target.shape) if weight is None else weight[classes]
    share = torch.where(counted, share, 0)
    losses = torch.where(counted, picked * share, 0)
    if reduction == 0 and log_p.ndim > 1:
        return losses, log_p.new_zeros(())
    weights = order_free_sum(share, list(range(share.ndim))).reshape(())
    total = order_free_sum(losses, list(range(losses.ndim))).reshape(())
    y = total / weights if reduction == 1 else total
    return narrowed(y, log_p.dtype), narrowed(weights, log_p.dtype)


def by_rows(
    function: Callable[..., Tensor], dim: int, dtype: torch.dtype, *tensors: Tensor
) -> Tensor:
    """A function of fp32 rows [R, N] along `dim` of tensors of one shape -> that shape, dtype."""
    shape = tensors[0].movedim(dim, -1).shape if tensors[0].ndim else (1,)
    if not tensors[0].numel():
        return torch.empty_like(tensors[0], dtype=dtype)
    rows = [(x.movedim(dim, -1) if x.ndim else x).reshape(-1, shape[-1]) for x in tensors]
    y = torch.empty(rows[0].shape, dtype=dtype, device=rows[0].device)
    height = max(1, _BLOCK_ELEMENTS // shape[-1])
    for first in range(0, len(y), height):
        part = slice(first, first + height)
        y[part] = function(*(x[part].float() for x in rows)).to(dtype)
    y = y.view(shape)
    return y.movedim(-1, dim).contiguous() if tensors[0].ndim else y.view(())


def _sum(
    x: Tensor, dims: list[int] | None, keepdim: bool, dtype: torch.dtype | None, count: int
) -> Tensor:
    """The sum over `dims` (all, if none are named) divided by `count`."""
    chosen = list(dims) if dims else list(range(x.ndim))
    total = order_free_sum(x, chosen) / count
    if not keepdim and chosen:
        total = total.squeeze(chosen)
    return narrowed(total, dtype or x.dtype)


def _exponentials(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R, N] -> exp(x - max), max [R, 1], all fp32, and Σ [R, 1] fp64, NaN if max is."""
    largest = x.amax(-1, keepdim=True)
    finite = torch.isfinite(largest)
    powers = exponential(x - torch.where(finite, largest, 0.0))
    total = order_free_sum(torch.where(finite, powers, 0.0), [-1])
    return powers, largest, torch.where(finite, total, torch.nan)


def _softmax_rows(x: Tensor) -> Tensor:
    powers, _, total = _exponentials(x)
    return (powers.double() / total).float()


def _log_softmax_rows(x: Tensor) -> Tensor:
    _, largest, total = _exponentials(x)
    return log_probabilities(x, largest, logarithm(total))
