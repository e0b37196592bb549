"""The rules of `tpdet quantise` against the nearest of all codes, searched for in fp64."""

import numpy as np
import pytest
import torch

from tests.checkpoint.test_quantised_codes import e2m1_values, e4m3_values, rounded_once
from tests.lib.bits import assert_same_bits
from tpdet.tools.quantise.arguments import FORMATS
from tpdet.tools.quantise.encodings import ENCODINGS, e2m1_codes, fp8_block, int4_groups, mxfp4

INT4 = np.arange(-8.0, 8.0)
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "U8": torch.uint8, "I32": torch.int32,
    "I64": torch.int64,
}  # fmt: skip


def nearest(values, numbers):
    """Indices of the nearest of ascending `numbers`; of two that are as near, the even one."""
    after = np.clip(np.searchsorted(numbers, values), 1, len(numbers) - 1)
    down, up = values - numbers[after - 1], numbers[after] - values
    takes_up = (up < down) | ((up == down) & (after % 2 == 0))
    return np.where(takes_up, after, after - 1)


def some_weights(rows, columns, dtype=torch.bfloat16):
    """Sizes from 2^-20 to 2^3, rows and blocks of zeros, one huge value."""
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.exp2(torch.randint(-20, 3, (rows, 1), generator=generator).float())
    weight = torch.randn(rows, columns, generator=generator) * sizes
    weight[3], weight[5, : columns // 2] = 0.0, -0.0
    weight[7, 1] = 3e4
    return weight.to(dtype).float()


def divided(weight, scales):
    """The fp32 quotient, worked out in fp64, as fp64."""
    exact = weight.double().numpy() / scales  # of numbers of 24 and 8 bits: rounded twice alike
    return rounded_once(exact, torch.float32).double().numpy()


def largest(weight, rows, columns):
    """fp64 of the largest size in each block of rows by columns, and its place in every element."""
    height, width = weight.shape
    of_row, of_column = np.arange(height) // rows, np.arange(width) // columns
    amax = np.zeros((of_row[-1] + 1, of_column[-1] + 1))
    np.maximum.at(amax, (of_row[:, None], of_column[None]), weight.abs().double().numpy())
    return amax, np.ix_(of_row, of_column)


def bf16_scales(amax, most):
    scales = rounded_once(rounded_once(amax / most, torch.float32).double().numpy(), torch.bfloat16)
    return np.where(scales.double().numpy() == 0, 1.0, scales.double().numpy())


def test_the_flag_has_a_rule_for_each_format():
    assert tuple(ENCODINGS) == FORMATS


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (200, 176), (9, 130), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_has_the_nearest_code_of_each_weight(rows, columns, dtype):
    weight = some_weights(rows, columns, dtype)
    parts = fp8_block(weight)
    amax, blocks = largest(weight, 128, 128)
    scales = bf16_scales(amax, 448)
    assert_same_bits(parts["weight_scale"], torch.from_numpy(scales).bfloat16())
    scaled = np.clip(divided(weight, scales[blocks]), -448, 448)
    positive = e4m3_values()[:127]
    codes = nearest(np.abs(scaled), positive) | np.where(np.signbit(scaled), 128, 0)
    found = parts["weight"].view(torch.uint8).numpy()
    assert np.array_equal(found, codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_has_the_nearest_code_of_each_weight(dtype):
    weight = some_weights(64, 384, dtype)
    parts = int4_groups(weight)
    amax, groups = largest(weight, 1, 128)
    scales = bf16_scales(amax, 7.5)
    assert_same_bits(parts["weight_scale"], torch.from_numpy(scales).bfloat16())
    assert parts["weight_shape"].tolist() == [64, 384]
    codes = nearest(np.clip(divided(weight, scales[groups]), -8, 7), INT4)
    stored = parts["weight_packed"].numpy().astype(np.uint32)
    found = np.stack([stored >> 4 * place & 15 for place in range(8)], -1).reshape(64, 384)
    assert np.array_equal(found, codes)
    assert {0, 15} <= {*codes.flatten()}  # both ends are reached


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_has_the_nearest_code_of_each_weight(dtype):
    weight = some_weights(64, 96, dtype)
    weight[9] = 2.0**-131  # subnormal in bf16, and in fp32
    weight[11, 0], weight[13, 0] = 1.75, 1.7421875
    weight[11, 1:], weight[13, 1:] = 0.3, 0.3
    parts = mxfp4(weight)
    amax, groups = largest(weight, 1, 32)
    exponents = np.floor(np.log2(np.where(amax > 0, amax, 4.0)))
    exponents += amax >= 1.75 * np.exp2(exponents)
    exponents = np.clip(exponents - 2, -127, 127)
    assert np.array_equal(parts["weight_scale"].numpy(), exponents + 127)
    scaled = np.clip(weight.double().numpy() / np.exp2(exponents)[groups], -6, 6)
    codes = nearest(np.abs(scaled), e2m1_values()[:8]) | np.where(np.signbit(scaled), 8, 0)
    stored = parts["weight_packed"].numpy()
    found = np.stack([stored & 15, stored >> 4], -1).reshape(64, 96)
    assert np.array_equal(found, codes)
    assert parts["weight_scale"][3].tolist() == [127] * 3  # of zeros
    assert parts["weight_scale"][[11, 13], 0].tolist() == [126, 125]


def test_ties_of_e2m1_go_to_even_codes():
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1_codes(halves).tolist() == [0, 2, 2, 4, 4, 6, 6]
    above = torch.nextafter(halves, torch.tensor(9.0))
    assert e2m1_codes(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1_codes(-above).tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert e2m1_codes(torch.tensor([-0.0, 100.0])).tolist() == [8, 7]


@pytest.mark.parametrize("name", FORMATS)
def test_a_layout_is_that_of_the_parts(name):
    encoding = ENCODINGS[name]
    for rows, columns in ((8, 128), (130, 384)):
        parts = encoding.encode(some_weights(rows, columns))
        layout = encoding.layout(rows, columns)
        assert parts.keys() == layout.keys()
        for suffix, (dtype, shape) in layout.items():
            assert tuple(parts[suffix].shape) == shape
            assert parts[suffix].dtype == DTYPES[dtype]
