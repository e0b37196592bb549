"""Additions at indices, and orders with ties: neither depends on which index comes first.

    y[i] = fp32(self[i] + Σ of what is added at i)          Σ in fixed point, so in any order

Only rows that an index names are widened: memory grows with what is added, not with `self`.
topk takes the first k of a stable sort: of equal values the lower index.
"""

import torch
from torch import Tensor

from tpdet.errors import UsageError
from tpdet.kernels.exact.fixed_point import exponent_of, fixed_point, power_of_two
from tpdet.kernels.order import fraction_bits
from tpdet.nn.invariant_mode.reductions import narrowed


def index_put(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`aten::index_put`; without accumulation the indices must differ, as they must in PyTorch."""
    if not accumulate or not x.is_floating_point():
        return torch.ops.aten.index_put(x, indices, values, accumulate)
    first = indices[0] if indices else None
    alone = first is not None and not any(index is not None for index in indices[1:])
    if alone and first is not None and first.dtype == torch.int64 and x.ndim:
        source = values.expand(*first.shape, *x.shape[1:])
        return _add_rows(x, first.reshape(-1), source.reshape(first.numel(), -1))
    numbers = torch.arange(x.numel(), device=x.device).view(x.shape)
    elements = torch.ops.aten.index(numbers, indices)
    source = values.expand(elements.shape)
    return _add_rows(x.reshape(-1), elements.reshape(-1), source.reshape(-1, 1)).view(x.shape)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """`aten::index_add`."""
    if not x.is_floating_point():
        return torch.ops.aten.index_add(x, dim, index, source, alpha=alpha)
    if alpha != 1:
        source = source * alpha
    rows = source.movedim(dim, 0) if x.ndim else source
    y = _add_rows(x.movedim(dim, 0), index.reshape(-1), rows.reshape(index.numel(), -1))
    return y.movedim(0, dim).contiguous()


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`aten::scatter_add`."""
    if not x.is_floating_point():
        return torch.ops.aten.scatter_add(x, dim, index, source)
    numbers = torch.arange(x.numel(), device=x.device).view(x.shape)
    elements = numbers[tuple(slice(size) for size in index.shape)]
    wide = numbers.new_zeros(index.shape)
    stride = numbers.stride(dim) if x.ndim else 1
    here = wide + elements.select(dim, 0).unsqueeze(dim) if index.numel() else wide
    flat = here + index * stride
    values = source[tuple(slice(size) for size in index.shape)]
    return _add_rows(x.reshape(-1), flat.reshape(-1), values.reshape(-1, 1)).view(x.shape)


def embedding_backward(
    grad: Tensor, indices: Tensor, count: int, padding_index: int, by_frequency: bool
) -> Tensor:
    """`aten::embedding_dense_backward`: the gradient of a table of `count` rows."""
    if by_frequency:
        raise UsageError("embedding with scale_grad_by_freq: set it to False")
    rows, ids = grad.reshape(-1, grad.shape[-1]), indices.reshape(-1)
    counted = ids != padding_index
    return _add_rows(grad.new_zeros(count, grad.shape[-1]), ids[counted], rows[counted])


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[Tensor, Tensor]:
    """`aten::topk`: sorted, whether that was asked for or not."""
    values, order = torch.sort(x, dim=dim, descending=largest, stable=True)
    if not x.ndim:
        return values, order
    return values.narrow(dim, 0, k).contiguous(), order.narrow(dim, 0, k).contiguous()


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """`aten::sort`, stable."""
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def _add_rows(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """x [V, ..] plus source [n, C] at rows index [n] int64, C values a row -> a tensor like x.

    Where infinity or NaN is added, the sum is NaN.
    """
    y = x.clone(memory_format=torch.contiguous_format)
    if not source.numel():
        return y
    flat = y.view(len(x), -1)
    rows, slot = torch.unique(torch.where(index < 0, index + len(x), index), return_inverse=True)
    wide = source.double()
    slots = slot[:, None].expand(wide.shape)
    largest = wide.new_zeros(len(rows), wide.shape[1])
    sizes = torch.where(torch.isfinite(wide), wide.abs(), torch.inf)
    largest.scatter_reduce_(0, slots, sizes, "amax")
    exponent, finite = exponent_of(largest), torch.isfinite(largest)
    bits = fraction_bits(len(source))
    terms = torch.where(finite.gather(0, slots), wide, 0.0)
    whole = torch.zeros_like(exponent)
    whole.index_add_(0, slot, fixed_point(terms, exponent.gather(0, slots), bits))
    added = torch.where(finite, whole.double() * power_of_two(exponent - bits), torch.nan)
    before = flat[rows]
    flat[rows] = torch.where(added == 0, before, narrowed(before.double() + added, x.dtype))
    return y
