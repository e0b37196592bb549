"""Kernels run by Triton's interpreter: `TRITON_INTERPRET=1 pytest -m interpreted` of this folder.

Triton decides when it is imported whether it interprets kernels or compiles them, so these tests
are a run apart from the others. Here a product's sums have one exact order, and Gluon's kernels,
which the interpreter does not know, run in emulations.
"""

import os

import numpy
import pytest

from tpdet.kernels import order

HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items):
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker("interpreted")


@pytest.fixture(autouse=True, scope="session")
def _exact_interpreter():
    """Products in groups of 16 in turn, and the merge of splits emulated."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("set TRITON_INTERPRET=1: here kernels are interpreted", pytrace=False)
    from triton.runtime.interpreter import InterpreterBuilder

    from tests.kernels.interpreted.emulated_merge import EmulatedLaunch
    from tpdet.kernels.cuda.attention import decode_launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", grouped_dot)
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

    left, right, sums = a.data.astype(numpy.float64), b.data.astype(numpy.float64), total.data
    for k in range(0, left.shape[1], order.K_GROUP):
        group = left[:, k : k + order.K_GROUP] @ right[k : k + order.K_GROUP]
        sums = (sums + group).astype(numpy.float32)
    return TensorHandle(sums, total.dtype.scalar)
