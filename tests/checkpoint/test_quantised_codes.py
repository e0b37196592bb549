"""Every code of e4m3 and e2m1 times every scale: bits worked out from the formats' definitions.

Expected numbers are made in fp64 of the codes' bits, and rounded once by integer arithmetic: no
conversion of torch's is part of them.
"""

import numpy as np
import pytest
import torch

from tests.checkpoint.test_quantised import compressed, fp8_channel, packed, written
from tests.lib.bits import assert_same_bits
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.pieces import Pieces, part_of
from tpdet.checkpoint.source import WeightSource
from tpdet.errors import CheckpointError

CODES = np.arange(256)
GRIDS = {
    torch.bfloat16: (8, -133, 128), torch.float16: (11, -24, 16), torch.float32: (24, -149, 128),
}  # fmt: skip
"""Significant bits, and the exponents of the least number and of the first that is too large."""


def e4m3_values():
    """fp64 of the 256 codes; NaN of 0x7f and 0xff."""
    exponent, mantissa = CODES >> 3 & 15, CODES & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    size[(CODES & 127) == 127] = np.nan
    return np.where(CODES >> 7, -size, size)


def e2m1_values():
    """fp64 of the 16 codes."""
    code = np.arange(16)
    exponent, mantissa = code >> 1 & 3, code & 1
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * np.exp2(exponent - 1.0))
    return np.where(code >> 3, -size, size)


def float_values(bits, exponent_bits, mantissa_bits):
    """fp64 of codes of an IEEE format."""
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (bits & ((1 << mantissa_bits) - 1)) / 2.0**mantissa_bits
    size = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * np.exp2(exponent - bias * 1.0)
    )
    return np.where(bits >> (exponent_bits + mantissa_bits), -size, size)


def rounded_once(exact, dtype):
    """fp64 -> the nearest of a 16-bit dtype or fp32, ties to even; too large ones become inf."""
    places, least, most = GRIDS[dtype]
    _, exponent = np.frexp(exact)
    unit = np.maximum(exponent - places, least)
    nearest = np.ldexp(np.rint(np.ldexp(exact, -unit)), unit)
    with np.errstate(over="ignore"):
        nearest = np.where(np.abs(nearest) >= 2.0**most, np.copysign(np.inf, exact), nearest)
    return torch.from_numpy(nearest).to(dtype)  # exact: each is a number of the dtype


def scales_of(dtype):
    """Every finite scale above zero of a 16-bit dtype as (tensor, fp64)."""
    exponent_bits, mantissa_bits = (8, 7) if dtype == torch.bfloat16 else (5, 10)
    bits = np.arange(1, ((1 << exponent_bits) - 1) << mantissa_bits)
    stored = torch.from_numpy(bits.astype(np.int16)).view(dtype)
    return stored, float_values(bits, exponent_bits, mantissa_bits)


def read_as(folder, shape, dtype):
    """The matrix as a model of this dtype has it."""
    source = WeightSource(open_checkpoint(folder), dtype, 0, False)
    found = source.read("a.weight", shape, Pieces.whole())
    source.finish()
    return found


def test_the_tables_are_those_of_the_formats():
    assert e2m1_values()[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert np.nanmax(e4m3_values()) == 448 and e4m3_values()[1] == 2.0**-9
    bits = np.arange(0x7F80)
    stored = torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)
    assert_same_bits(rounded_once(float_values(bits, 8, 7), torch.bfloat16), stored)
    halfway = 1 + np.array([1, 3]) * 2.0**-8  # 1 and 1 + 2^-6 are the even neighbours
    assert rounded_once(halfway, torch.bfloat16).tolist() == [1.0, 1 + 2.0**-6]


@pytest.mark.parametrize(
    "step", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"]
)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_code_of_e4m3_times_every_16_bit_scale_is_rounded_once(
    step, scale_dtype, dtype, tmp_path
):
    scales, numbers = (every[::step] for every in scales_of(scale_dtype))
    codes = np.delete(CODES, [0x7F, 0xFF])
    values = e4m3_values()[codes]
    fits = numbers * 448 < (65520 if dtype == torch.float16 else 3.39e38)
    fits &= numbers >= 2.0**-100  # below, a product may be smaller than fp32's least
    scales, numbers = scales[torch.from_numpy(fits)], numbers[fits]
    weight = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    parts = {"weight": weight.expand(len(scales), -1), "weight_scale": scales[:, None]}
    found = read_as(written(tmp_path, fp8_channel()[0], parts), (len(scales), 254), dtype)
    assert_same_bits(found, rounded_once(np.outer(numbers, values), dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_scale_of_fp32_is_multiplied_in_fp32_as_it_is_stored(dtype, tmp_path):
    generator = torch.Generator().manual_seed(3)
    scales = torch.exp(torch.rand(512, generator=generator) * 8 - 10)
    places = 8 if dtype == torch.bfloat16 else 11
    ties = 1 + torch.arange(1, 1 << places, 2).double() / (1 << places)
    scales = torch.cat(
        [scales, (ties / 1.875).float()]
    )  # 1.875 times it is fp32's nearest to a tie
    codes = np.delete(CODES, [0x7F, 0xFF])
    weight = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    parts = {"weight": weight.expand(len(scales), -1), "weight_scale": scales[:, None]}
    found = read_as(written(tmp_path, fp8_channel()[0], parts), (len(scales), 254), dtype)
    exact = np.outer(scales.double().numpy(), e4m3_values()[codes])
    twice = rounded_once(rounded_once(exact, torch.float32).double().numpy(), dtype)
    assert_same_bits(found, twice)
    assert not torch.equal(twice, rounded_once(exact, dtype))  # the second rounding is seen
    early = rounded_once(scales.double().numpy(), dtype).double().numpy()
    assert not torch.equal(twice, rounded_once(np.outer(early, e4m3_values()[codes]), dtype))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_the_codes_of_e4m3_that_are_no_numbers_are_refused(code, tmp_path):
    weight = torch.full((4, 8), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    parts = {"weight": weight, "weight_scale": torch.ones(4, 1)}
    checkpoint = open_checkpoint(written(tmp_path, fp8_channel()[0], parts))
    with pytest.raises(CheckpointError, match=r"tensor a\.weight holds NaN or infinity"):
        checkpoint.piece(part_of("a.weight", (4, 8), 0, 0, 4))


MXFP4 = compressed(
    "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
)


def mxfp4_parts(exponents):
    """A row of each exponent, in which every code stands twice."""
    codes = torch.arange(16).repeat(2)
    row = (codes[::2] | codes[1::2] << 4).to(torch.uint8)
    stored = torch.tensor(exponents, dtype=torch.uint8)[:, None]
    return {"weight_packed": row.expand(len(exponents), -1), "weight_scale": stored}


def mxfp4_numbers(exponents):
    scales = np.exp2(np.array(exponents) - 127.0)
    return np.outer(scales, np.tile(e2m1_values(), 2))


def test_every_code_of_e2m1_times_every_scale_is_exact(tmp_path):
    exponents = [*range(255)]
    checkpoint = open_checkpoint(written(tmp_path, MXFP4, mxfp4_parts(exponents)))
    found = checkpoint.unchecked_piece(part_of("a.weight", (255, 32), 0, 0, 255))
    exact = mxfp4_numbers(exponents)
    assert_same_bits(found, rounded_once(exact, torch.float32))
    fits = torch.isfinite(found)
    assert (~fits).sum() == 2 * (2 * 2 + 4 * 2)  # 4 and 6 by 2^126; 2, 3, 4 and 6 by 2^127
    assert torch.equal(found.double()[fits], torch.from_numpy(exact)[fits])
    assert torch.equal(found.bfloat16().double()[fits], torch.from_numpy(exact)[fits])


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 252), (torch.float16, 140)])
def test_a_model_has_the_codes_of_e2m1_rounded_once(dtype, most, tmp_path):
    exponents = [*range(most + 1)]
    folder = written(tmp_path, MXFP4, mxfp4_parts(exponents))
    found = read_as(folder, (len(exponents), 32), dtype)
    assert_same_bits(found, rounded_once(mxfp4_numbers(exponents), dtype))
    folder = written(tmp_path, MXFP4, mxfp4_parts([most + 1]))
    with pytest.raises(CheckpointError, match=r"NaN or infinity|values too large for"):
        read_as(folder, (1, 32), dtype)


def test_a_scale_of_255_is_no_number(tmp_path):
    folder = written(tmp_path, MXFP4, mxfp4_parts([127, 255]))
    with pytest.raises(CheckpointError, match=r"a\.weight_scale holds a scale of NaN"):
        read_as(folder, (2, 32), torch.bfloat16)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_integer_and_zero_point_times_16_bit_scales_is_rounded_once(
    scale_dtype, bits, dtype, tmp_path
):
    count = 1 << bits
    scales, numbers = scales_of(scale_dtype)
    some = np.flatnonzero((numbers * count < 65504) & (numbers >= 2.0**-100))
    some = some[:: 7 if bits == 4 else 211]
    scales, numbers = scales[torch.from_numpy(some)], numbers[some]
    zeros = torch.arange(len(some)) % count
    values = torch.arange(count).repeat(128 // count or 1)
    width = len(values)
    parts = {
        "weight_packed": packed(values[None], 1, bits).expand(len(some), -1),
        "weight_scale": scales[:, None],
        "weight_shape": torch.tensor([len(some), width]),
        "weight_zero_point": packed(zeros[:, None], 0, bits),
    }
    channels = {"strategy": "channel", "symmetric": False, "group_size": -1}
    form = compressed("pack-quantized", num_bits=bits, type="int", **channels)
    found = read_as(written(tmp_path, form, parts), (len(some), width), dtype)
    exact = numbers[:, None] * (values.numpy()[None] - zeros.numpy()[:, None]).astype(float)
    assert_same_bits(found, rounded_once(exact, dtype))
