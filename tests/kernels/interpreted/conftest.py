"""Kernels run by Triton's interpreter: `TRITON_INTERPRET=1 pytest -m interpreted` of this folder.

Triton decides when it is imported whether it interprets kernels or compiles them, so these tests
are a run apart from the others. Here a product's sums have one exact order, bf16 is rounded to
nearest even (the interpreter cuts it off, and loses subnormals), and Gluon's kernels, which the
interpreter does not know, run in emulations. Most of the interpreter's time changes no value and is
left out: it prepared the language again at every call inside a kernel, computed integers twice for
a check of overflow that asserts only while debugging, and made types anew (`kept_types.py`).
"""

import os

import numpy
import pytest
import torch

from tpdet.kernels import order

HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items):
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker("interpreted")


@pytest.fixture(autouse=True, scope="session")
def _exact_interpreter():
    """Products in groups of 16 in turn, bf16 by torch, and the merge of splits emulated."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("set TRITON_INTERPRET=1: here kernels are interpreted", pytrace=False)
    from triton.runtime.interpreter import (
        InterpretedFunction,
        InterpreterBuilder,
        InterpreterOptions,
        interpreter_builder,
    )

    from tests.kernels.interpreted.emulated.merge import EmulatedLaunch
    from tests.kernels.interpreted.kept_types import keep_types
    from tpdet.kernels.cuda.attention import decode_launch

    with pytest.MonkeyPatch.context() as patch:
        keep_types(patch)
        patch.setattr(InterpretedFunction, "__call__", prepared_once(InterpretedFunction.__call__))
        patch.setattr(interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False))
        patch.setattr(InterpreterBuilder, "create_dot", grouped_dot)
        cast = InterpreterBuilder.cast_impl
        patch.setattr(InterpreterBuilder, "cast_impl", lambda *told: rounded_cast(cast, *told))
        patch.setattr(decode_launch, "merge_splits", EmulatedLaunch())
        yield


@pytest.fixture(autouse=True)
def _quiet_numpy():
    """Overflows and NaN are data here; the kernels' own checks see them."""
    with numpy.errstate(all="ignore"):
        yield


def grouped_dot(builder, a, b, total, *_):
    """total + a @ b, groups of 16 in turn: in place of a dot whose order is unknown."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (values_of(x).astype(numpy.float64) for x in (a, b))
    sums = total.data
    for k in range(0, left.shape[1], order.K_GROUP):
        group = left[:, k : k + order.K_GROUP] @ right[k : k + order.K_GROUP]
        sums = (sums + group).astype(numpy.float32)
    return TensorHandle(sums, total.dtype.scalar)


def prepared_once(call):
    """`call` for a function inside a kernel: Triton's language is prepared the first time only."""
    prepared = set()

    def called(function, *arguments, **named):
        if function in prepared:
            return function.rewrite()(*arguments, **named)
        prepared.add(function)
        return call(function, *arguments, **named)

    return called


def values_of(handle):
    """What a tensor of the interpreter holds; of bf16 it has the bits."""
    if handle.dtype.scalar.name != "bf16":
        return handle.data
    return (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)


def rounded_cast(cast, builder, source, target):
    """The interpreter's cast, but fp32 to bf16 and back as torch and GPUs do it."""
    from triton.runtime.interpreter import TensorHandle

    names = source.dtype.scalar.name, target.scalar.name
    if names == ("bf16", "fp32"):
        return TensorHandle(values_of(source), target.scalar)
    if names == ("fp32", "bf16"):
        rounded = torch.from_numpy(numpy.ascontiguousarray(source.data)).bfloat16()
        bits = rounded.view(torch.int16).numpy().view(numpy.uint16)
        return TensorHandle(bits.reshape(source.data.shape), target.scalar)
    return cast(builder, source, target)
