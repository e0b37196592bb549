"""Parts of quantised matrices with other dtypes, shapes and values: numbers, or refused by name."""

import pytest
import torch

from tests.checkpoint.test_quantised import (
    MADE,
    K,
    N,
    awq,
    compressed,
    integers,
    some_scales,
    written,
)
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.pieces import part_of
from tpdet.errors import CheckpointError

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e38)
INTEGERS = (0, -1, 2**31 - 1, -(2**31), 2**62, -(2**63), 255)
CUTS = ((0, 0, N), (0, 70, 131), (1, 48, 112), (0, 10, 10), (1, 16, 16))


def casts(tensor):
    yield from (tensor.float().to(dtype) for dtype in DTYPES if dtype != tensor.dtype)
    for dtype in DTYPES:
        if dtype.itemsize <= tensor.dtype.itemsize and dtype not in (tensor.dtype, torch.bool):
            yield tensor.contiguous().view(dtype)


def shapes(tensor):
    yield from (tensor.flatten(), tensor.T, tensor.unsqueeze(0), tensor.flatten()[0].clone())
    for dim, extent in enumerate(tensor.shape):
        yield from (tensor.narrow(dim, 0, n) for n in (0, 1, extent // 2, extent - 1))


def values(tensor):
    if tensor.is_floating_point():
        for value in FLOATS:
            changed = tensor.float()
            changed.view(-1)[changed.numel() // 2] = value
            yield changed.to(tensor.dtype)
        return
    most = torch.iinfo(tensor.dtype)
    for value in INTEGERS:
        if most.min <= value <= most.max:
            yield torch.full_like(tensor, value)


def damages(parts):
    for name, tensor in parts.items():
        for damage in (casts, shapes, values) if tensor.dim() == 2 else (casts, values):
            yield from (parts | {name: changed} for changed in damage(tensor))


def check(folder, config, parts):
    """Whether the parts are refused, by the matrix's name; else every cut has numbers."""
    try:
        checkpoint = open_checkpoint(written(folder, config, parts))
        for dim, first, last in CUTS:
            found = checkpoint.piece(part_of("a.weight", (N, K), dim, first, last))
            assert found.shape == ((last - first, K) if dim == 0 else (N, last - first))
            assert torch.isfinite(found.float()).all()
        checkpoint.check_all_read(["a.weight"])
    except CheckpointError as error:
        assert "tensor a" in str(error) and "\n" not in str(error) and len(str(error)) <= 500
        return True
    return False


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize(
    "step", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_damaged_parts_are_numbers_or_refused_by_name(step, make, tmp_path):
    config, parts, _ = make()
    assert not check(tmp_path, config, parts)
    refused = [check(tmp_path, config, each) for each in [*damages(parts)][::step]]
    assert sum(refused) > len(refused) // 3


@pytest.mark.parametrize("make", [make for make in MADE if "weight" not in make()[1]])
def test_a_matrix_that_is_stored_plain_as_well_is_refused(make, tmp_path):
    config, parts, _ = make()
    marker = next(iter(parts))
    with pytest.raises(CheckpointError, match=rf"tensor a\.weight is stored as a\.{marker}, too"):
        open_checkpoint(written(tmp_path, config, parts | {"weight": torch.ones(N, K)}))


def test_matrices_without_columns_are_refused(tmp_path):
    form = compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=True)
    parts = {
        "weight_packed": torch.empty(N, 0).int(), "weight_scale": some_scales(N, 1),
        "weight_shape": torch.tensor([N, 0]),
    }  # fmt: skip
    form["config_groups"]["g"]["weights"]["group_size"] = -1
    refuse_no_columns(tmp_path, form, parts)
    parts = {
        "qweight": torch.empty(0, N // 8).int(), "qzeros": integers(0, 1, 1, N // 8).int(),
        "scales": some_scales(1, N).half(),
    }  # fmt: skip
    refuse_no_columns(tmp_path, awq()[0] | {"group_size": -1}, parts)


def refuse_no_columns(folder, config, parts):
    checkpoint = open_checkpoint(written(folder, config, parts))
    with pytest.raises(CheckpointError, match="tensor a: 0 columns are no groups"):
        checkpoint.piece(part_of("a.weight", (N, 0), 0, 0, N))
