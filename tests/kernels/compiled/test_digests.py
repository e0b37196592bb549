"""The kernels of digests compile for a GPU: the interpreter takes what its compiler refuses."""

import pytest

pytest.importorskip("triton")

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tpdet.kernels.cuda.digests.blake3 import hash_chunks, join_nodes


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (hash_chunks, "words messages table nodes first stop columns"),
        pytest.param(
            join_nodes,
            "nodes messages table joined joined_messages level count columns",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_kernel_compiles(kernel, arguments):
    numbers = {"first", "stop", "columns", "level", "count"}
    signature = {x: "i32" if x in numbers else "*i32" for x in arguments.split()}
    assert hopper_kernel(kernel, signature, {"BLOCK": 128}, (), {"num_warps": 4}).ptx
