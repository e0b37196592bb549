"""How an operation becomes an operator of torch: a kernel, shapes for tracing, and a gradient.

The gradient of an operator is that of a plain expression in torch, its reference, which is computed
again in the backward pass: in fp32, or in fp64 of fp64 inputs. Roundings to narrower types count as
the identity. References use operations alone whose backward has one order on a device.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from tpdet.kernels import ops

DEVICES = ("cpu", "cuda")


def operator(
    shapes: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Declare a function of kernels as `tpdet::` and its name; its annotations are the schema.

    shapes: the same parameters -> empty outputs. reference: the same parameters -> outputs that
    autograd differentiates; None: the operator has no gradient. mutates: parameters it writes to.
    """

    def declare(function: Callable[..., Any]) -> CustomOpDef:
        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            with ops.recorded():
                return function(*args, **named)

        name = f"tpdet::{function.__name__}"
        declared = custom_op(name, run, mutates_args=mutates, device_types=DEVICES)
        declared.register_fake(shapes)
        if reference is not None:
            declared.register_autograd(_gradient(reference), setup_context=_save)
        return declared

    return declare


def same_shape(x: Tensor, *others: Any, **named: Any) -> Tensor:
    """The empty output of an operator that gives one value for each of its first input."""
    return x.new_empty(x.shape)


def wide(x: Tensor) -> Tensor:
    """x in the precision of references: fp32, or fp64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.numbers = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.save_for_backward(*(inputs[i] for i in ctx.numbers))
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]


def _gradient(reference: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The backward of an operator whose inputs `_save` kept."""

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        values, leaves = list(ctx.others), []
        for i, saved in zip(ctx.numbers, ctx.saved_tensors, strict=True):
            values[i] = saved.detach().requires_grad_(ctx.needs_input_grad[i])
            if ctx.needs_input_grad[i]:
                leaves.append(i)
        with torch.enable_grad():
            outputs = reference(*values)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, gradient.to(output.dtype))
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        results: list[Any] = [None] * len(values)
        if pairs:
            derived = torch.autograd.grad(
                [output for output, _ in pairs],
                [values[i] for i in leaves],
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
            for i, result in zip(leaves, derived, strict=True):
                results[i] = result
        return tuple(results)

    return backward
