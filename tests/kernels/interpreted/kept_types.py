"""Types of Triton's language that the interpreter would make anew in every operation, kept.

No value changes: a block's type is a function of its element's type and its shape, and is checked
when these first meet.
"""

import math
from functools import cache

import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic

KEPT = {"int1", "int32", "int64", "uint32", "uint64", "fp32"}
"""Types whose operands no operation casts to another."""


def keep_types(patch: pytest.MonkeyPatch) -> None:
    """Have shapes and block types made once, and equal shapes not broadcast."""
    patch.setattr(core.block_type, "__init__", kept_block(core.block_type.__init__))
    patch.setattr(core.block_type, "to_ir", lambda block, builder: block)
    patch.setattr(core.tensor, "__init__", begin_tensor)
    patch.setattr(core.tuple, "__eq__", equal_tuples)
    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        patch.setattr(TritonSemantic, name, unless_alike(getattr(TritonSemantic, name)))


def kept_block(begin):
    """`begin` of a block's type, once for each element's type and shape."""
    kept = {}

    def init(block, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in kept:
            begin(block, element_ty, shape)
            kept[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = kept[key]

    return init


@cache
def constants(*shape):
    """(shape, number of elements) as a tensor tells them."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def begin_tensor(tensor, handle, type):
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = constants(*(type.shape.values if type.is_block() else ()))


def equal_tuples(one, other):
    return core.constexpr(one.values == [*other])


def unless_alike(fit):
    """`fit`, which casts and broadcasts two operands, where it would not return what it got."""

    def fitted(semantic, left, right, *how, **more):
        if (
            type(left) is core.tensor is type(right)
            and left.shape is right.shape
            and left.dtype is right.dtype
            and left.dtype.name in KEPT
        ):
            return left, right
        return fit(semantic, left, right, *how, **more)

    return fitted
