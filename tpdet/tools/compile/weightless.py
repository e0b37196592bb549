"""Tensors of the CPU that have shapes, strides and addresses, and take neither memory nor time.

    with Weightless():
        y = torch.zeros(1 << 30).mul(2)          # at once: what nobody writes, no page holds

A rehearsal of a large model is done so where nothing reads what it computes. Results of `SMALL`
values or fewer are computed as ever, because a host may look at them: lengths, ids, tables.
"""

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_flatten, tree_map

SMALL = 1 << 16
"""Values of a tensor that is computed."""


class Weightless(TorchDispatchMode):
    """Inside, a large result is zeros that are mapped when they are read, and views stay views."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute small tensors; of large ones the shape."""
        kwargs = kwargs or {}
        operands = args, kwargs
        if func.is_view or not (tree_any(_large, operands) or _makes(func, operands)):
            return func(*args, **kwargs)
        written = [
            kwargs.get(argument.name, args[i] if i < len(args) else None)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if len(written) == 1 and _large(written[0]):
            return written[0]
        if written:
            return func(*args, **kwargs)
        shapes = _shapes(func, args, kwargs)
        if shapes is None or not (tree_any(_large, operands) or tree_any(_large, shapes)):
            return func(*args, **kwargs)
        return tree_map(_unwritten, shapes)


def _makes(func: Any, operands: Any) -> bool:
    """Whether it makes a tensor of no other."""
    return _takes_device(func) and not tree_any(torch.is_tensor, operands)


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results without values; None where they depend on values."""
    named = kwargs | ({"generator": None} if "generator" in kwargs else {})
    if _takes_device(func):
        named |= {"device": "meta"}
    if "pin_memory" in named:
        named |= {"pin_memory": None}
    try:
        results = func(*tree_map(_to_meta, args), **tree_map(_to_meta, named))
    except (RuntimeError, NotImplementedError):
        return None
    tensors = [tensor for tensor in tree_flatten(results)[0] if isinstance(tensor, torch.Tensor)]
    return results if tensors else None


def _to_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _unwritten(like: Any) -> Any:
    """Zeros of the shape and strides of a tensor without values."""
    if not isinstance(like, torch.Tensor):
        return like
    values = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True)) + 1
    memory = np.zeros(max(1, values) * like.element_size() if like.numel() else 0, np.uint8)
    flat = torch.from_numpy(memory).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > SMALL
