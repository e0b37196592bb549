"""The kernel that moves rows behind drafts, compiled for Hopper."""

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tpdet.kernels.cuda.pointwise.drafts import move_rows


def test_it_waits_for_what_is_earlier_and_spills_nothing():
    wide = ("ids", "positions", "slots", "numbers", "sampled", "moved")
    types = dict.fromkeys(wide, "*i64") | {"spans": "*i32", "tables": "*i32"}
    numbers = {"rows": "i32", "widest": "i32"}
    done = hopper_kernel(
        move_rows, types | numbers, {"BLOCK": 32}, [*types], {"num_warps": 1, "num_stages": 1}
    )
    assert "0 bytes spill stores, 0 bytes spill loads" in done.log
