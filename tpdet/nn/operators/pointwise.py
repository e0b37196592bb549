"""Norms, the end of a block, rotary embedding, activations and soft-caps.

Shapes: M rows, N values of a row, I gates, C sums, D values of a head.
"""

import torch
from torch import Tensor

from tpdet.kernels import ops
from tpdet.kernels.inputs.activations import (
    CLAMP_LIMIT,
    CLAMP_STEEPNESS,
    CLAMPED,
    GELU_CUBIC,
    GELU_LINEAR,
)
from tpdet.kernels.inputs.gated import gate_and_up
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.product import read_roots
from tpdet.kernels.order import evaluate
from tpdet.kernels.partial_sums import PartialSums
from tpdet.nn.operators.declare import operator, same_shape, wide


def _normed(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    """The norm of rows [..., N] by torch, in the precision of references."""
    x, weight, bias = wide(x), wide(weight), None
    if kind == "layer":
        x, (weight, bias) = x - x.mean(-1, keepdim=True), weight.unbind()
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y if bias is None else y + bias


@operator(
    lambda x, weight, eps, kind, dtype: x.new_empty(x.shape, dtype=dtype),
    lambda x, weight, eps, kind, dtype: _normed(x, weight, eps, kind),
)
def norm(x: Tensor, weight: Tensor, eps: float, kind: str, dtype: torch.dtype) -> Tensor:
    """x [M, N], weight [N] -> round(x * r * weight) [M, N] in dtype, r of the mean of squares.

    kind: "rms", or "layer" with a weight [2, N], the bias behind the factors.
    """
    return ops.rms_norm(x, Norm(weight, eps, kind, dtype))


def _finish_reference(
    values: Tensor,
    root: str,
    residual: Tensor,
    weight: Tensor | None,
    behind: Tensor | None,
    eps: float,
    kind: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    sums = wide(values).unbind()
    total = evaluate(read_roots(root)[0], lambda i: sums[i], torch.add)
    h = wide(residual) + (total if behind is None else _normed(total, behind, eps, kind))
    return h, h if weight is None else _normed(h, weight, eps, kind)


@operator(
    lambda values, root, residual, *others: (
        torch.empty_like(residual),
        torch.empty_like(residual, dtype=others[-1]),
    ),
    _finish_reference,
)
def fold_and_norm(
    values: Tensor,
    root: str,
    residual: Tensor,
    weight: Tensor | None,
    behind: Tensor | None,
    eps: float,
    kind: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Sums [C, M, N] by one root, such as "(0+1)+2" -> h and y [M, N], as of `Finish`.

    h = total + residual fp32, the total normed by `behind` if there is one; y in dtype: the norm of
    h by `weight`, or h itself. Both norms have one eps and one kind.
    """
    norms = [None if each is None else Norm(each, eps, kind, dtype) for each in (weight, behind)]
    h, y = ops.fold_and_norm(PartialSums(values, read_roots(root)), Finish(residual, *norms))
    return h, y.clone() if y.data_ptr() == h.data_ptr() else y


def _rotary_reference(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    x = wide(x) if weight is None else _normed(x, weight, eps, "rms")
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@operator(same_shape, _rotary_reference)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Heads x [M, heads, D], normed by weight [D] if any, rotated by cos, sin fp32 [M, D / 2]."""
    return ops.rotate_heads(x, cos, sin, weight, eps)


def gated_values(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up by torch, as `kernels/inputs/activations.py` defines it."""
    if activation == CLAMPED:
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1.0
    return activated(gate, activation) * up


def activated(gate: Tensor, activation: str) -> Tensor:
    """gate * sigmoid(t) by torch, t as the activation has it."""
    exponent = {
        "silu": lambda: gate,
        "gelu_tanh": lambda: gate * (GELU_LINEAR + gate.square() * GELU_CUBIC),
        CLAMPED: lambda: gate * CLAMP_STEEPNESS,
    }[activation]()
    return gate * torch.sigmoid(exponent)


@operator(same_shape, lambda x, activation: activated(wide(x), activation))
def activate(x: Tensor, activation: str = "silu") -> Tensor:
    """x [M, I] -> act(x) [M, I], rounded once to x's dtype."""
    return ops.activate_alone(x, activation)


@operator(
    lambda gate_up, activation="silu", dtype=None: gate_up.new_empty(
        gate_up.shape[0], gate_up.shape[1] // 2, dtype=dtype
    ),
    lambda gate_up, activation, dtype: gated_values(*gate_and_up(wide(gate_up)), activation),
)
def activate_and_multiply(
    gate_up: Tensor, activation: str = "silu", dtype: torch.dtype | None = None
) -> Tensor:
    """Interleaved gate_up [M, 2 * I] -> round(act(gate) * up) [M, I] in dtype (gate_up's)."""
    return ops.activate_and_multiply(gate_up, dtype, activation)


@operator(same_shape, lambda x, cap: torch.tanh(x / cap) * cap)
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), fp32 [M, N] -> fp32 [M, N]."""
    return ops.soft_cap(x.clone(), cap)  # in place on a GPU
