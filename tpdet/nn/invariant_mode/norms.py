"""Layer norm and root-mean-square norm, forward and backward, of rows of N values.

    x' = (x - mean) * r, or x * r                      r = 1 / sqrt(mean of squares + eps)
    forward   y = x' * w + b                           the kernels of the contract (section 3)
    backward  dx = r * ((g - mean g) - x' * mean(g x'))      g = dy * w; no mean of g without one
              dw = Σ dy x', db = Σ dy                        over rows

Every sum is one in fixed point, so its order is free; the rest is fp32.
"""

import math

import torch
from torch import Tensor

from tpdet.kernels import ops
from tpdet.kernels.exact.fixed_point import order_free_sum
from tpdet.kernels.inputs.norm import Norm
from tpdet.nn.invariant_mode.reductions import narrowed


def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::native_layer_norm`: y, mean and r."""
    rows = _rows(x, shape)
    width = rows.shape[-1]
    factor = rows.new_ones(width) if weight is None else weight.reshape(-1)
    shift = torch.zeros_like(factor) if bias is None else bias.reshape(-1)
    norm = Norm(torch.stack([factor, shift.to(factor.dtype)]), eps, "layer", x.dtype)
    y = ops.rms_norm(rows, norm).view(x.shape)
    mean = (order_free_sum(rows, [-1]) / width).float()
    root = _root(rows.float() - mean, eps)
    kept = [*x.shape[: x.ndim - len(shape)], *[1] * len(shape)]
    return y, mean.view(kept), root.view(kept)


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`aten::native_layer_norm_backward`."""
    centred = _rows(x, shape).float() - mean.reshape(-1, 1).float()
    dx, dw = _gradients(grad, centred, shape, rstd, weight, True)
    db = order_free_sum(_rows(grad, shape), [0])
    return (
        narrowed(dx, x.dtype).view(x.shape) if output_mask[0] else None,
        _of_parameter(dw, weight, output_mask[1]),
        _of_parameter(db, bias, output_mask[2]),
    )


def rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """`aten::_fused_rms_norm`: y and r; without eps that of x's dtype."""
    rows = _rows(x, shape)
    chosen = torch.finfo(x.dtype).eps if eps is None else eps
    factor = rows.new_ones(rows.shape[-1]) if weight is None else weight.reshape(-1)
    y = ops.rms_norm(rows, Norm(factor, chosen, "rms", x.dtype)).view(x.shape)
    kept = [*x.shape[: x.ndim - len(shape)], *[1] * len(shape)]
    return y, _root(rows.float(), chosen).view(kept)


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """`aten::_fused_rms_norm_backward`."""
    dx, dw = _gradients(grad, _rows(x, shape).float(), shape, rstd, weight, False)
    return (
        narrowed(dx, x.dtype).view(x.shape) if output_mask[0] else None,
        _of_parameter(dw, weight, output_mask[1]),
    )


def _gradients(
    grad: Tensor,
    centred: Tensor,
    shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    centre: bool,
) -> tuple[Tensor, Tensor]:
    """dx [R, N] fp32 and dw [1, N] fp64 of rows of x without their mean, [R, N] fp32."""
    rows, root = _rows(grad, shape).float(), rstd.reshape(-1, 1).float()
    width = rows.shape[-1]
    normed = centred * root
    by_weight = rows if weight is None else rows * weight.reshape(-1).float()
    projection = (order_free_sum(by_weight * normed, [-1]) / width).float()
    inner = by_weight
    if centre:
        inner = by_weight - (order_free_sum(by_weight, [-1]) / width).float()
    return root * (inner - normed * projection), order_free_sum(rows * normed, [0])


def _root(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) of rows [R, N] fp32 -> [R, 1] fp32, rounded once."""
    wide = x.double()
    return (1.0 / torch.sqrt(order_free_sum(wide * wide, [-1]) / x.shape[-1] + eps)).float()


def _rows(x: Tensor, shape: list[int]) -> Tensor:
    return x.reshape(-1, math.prod(shape))


def _of_parameter(total: Tensor, parameter: Tensor | None, asked: bool) -> Tensor | None:
    if parameter is None or not asked:
        return None
    return narrowed(total, parameter.dtype).view(parameter.shape)
