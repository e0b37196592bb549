"""The formats that `tpdet quantise` writes: one rule each, from fp32 weights to stored parts.

Every step is one IEEE operation in fp32, or a rounding to the nearest with ties to even:

    fp8-block   blocks of 128 x 128, smaller at the edges
                scale = bf16(amax / 448), w -> e4m3(clamp(w / scale, -448, 448))
    int4-g128   groups of 128 along K
                scale = bf16(amax / 7.5), w -> clamp(integer(w / scale), -8, 7)
    mxfp4       groups of 32 along K
                scale = 2^e, e = floor(log2(amax)) - 2, one more where amax >= 1.75 * 2^(e + 2),
                from 2^-127 to 2^127; w -> e2m1(w / scale), at most 6 (Open Compute Project, MX 1.0)

amax is the largest size in the block or group. A scale that would be zero is 1. A weight that
becomes zero keeps its sign where the format has one.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

_BLOCK, _GROUP, _MX_GROUP = 128, 128, 32
_E4M3_MOST, _INT4_HALF_RANGE = 448.0, 7.5
_E8M0_BIAS, _E8M0_MOST, _E2M1_MOST_EXPONENT = 127, 254, 2
_ROUNDED_UP = 0.875  # of twice a power of two: from 1.75 times it on, the largest would become 8

_E2M1_HALVES = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
    (5.0, False),
)  # fmt: skip
"""Halfway between two numbers, and whether the larger one has the even code."""

Parts = dict[str, torch.Tensor]
"""What a matrix is stored as, by suffix."""
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype, as safetensors names it, and the shape of each part."""


class WeightFormat(NamedTuple):
    """format, weights: what `quantization_config` says; unit: what the inputs are a multiple of."""

    format: str
    weights: MappingProxyType[str, Any]
    unit: int
    layout: Callable[[int, int], Layout]
    encode: Callable[[torch.Tensor], Parts]


def fp8_block(weight_NK: torch.Tensor) -> Parts:
    """fp32 [N, K] -> e4m3 [N, K] and bf16 scales [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = weight_NK.shape
    edges = (0, -columns % _BLOCK, 0, -rows % _BLOCK)
    blocks = torch.nn.functional.pad(weight_NK, edges).unflatten(1, (-1, _BLOCK))
    blocks = blocks.unflatten(0, (-1, _BLOCK))  # [N / 128, 128, K / 128, 128]
    scale = _not_zero((blocks.abs().amax((1, 3)) / _E4M3_MOST).bfloat16())
    scaled = blocks / scale.float()[:, None, :, None]
    codes = scaled.clamp(-_E4M3_MOST, _E4M3_MOST).flatten(2).flatten(0, 1)[:rows, :columns]
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_block_layout(rows: int, columns: int) -> Layout:
    blocks = -(-rows // _BLOCK), -(-columns // _BLOCK)
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("BF16", blocks)}


def int4_groups(weight_NK: torch.Tensor) -> Parts:
    """fp32 [N, K] -> int32 [N, K / 8], lowest bits first, bf16 scales [N, K / 128], the shape."""
    groups = weight_NK.unflatten(1, (-1, _GROUP))
    scale = _not_zero((groups.abs().amax(2) / _INT4_HALF_RANGE).bfloat16())
    codes = (groups / scale.float()[:, :, None]).round().clamp(-8, 7) + 8
    return {
        "weight_packed": _nibbles(codes.to(torch.uint8).flatten(1)).view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight_NK.shape),
    }


def _int4_layout(rows: int, columns: int) -> Layout:
    return {
        "weight_packed": ("I32", (rows, columns // 8)),
        "weight_scale": ("BF16", (rows, columns // _GROUP)),
        "weight_shape": ("I64", (2,)),
    }


def mxfp4(weight_NK: torch.Tensor) -> Parts:
    """fp32 [N, K] -> e2m1 in uint8 [N, K / 2], low nibble first, and e8m0 uint8 [N, K / 32]."""
    groups = weight_NK.unflatten(1, (-1, _MX_GROUP))
    largest = groups.abs().amax(2)
    fraction, exponent = torch.frexp(largest)  # of a fraction in [0.5, 1)
    exponent = exponent - 1 - _E2M1_MOST_EXPONENT + (fraction >= _ROUNDED_UP).int()
    exponent = torch.where(largest > 0, exponent, 0).clamp(-_E8M0_BIAS, _E8M0_MOST - _E8M0_BIAS)
    scaled = torch.ldexp(groups, -exponent[:, :, None])
    return {
        "weight_packed": _nibbles(e2m1_codes(scaled).flatten(1)),
        "weight_scale": (exponent + _E8M0_BIAS).to(torch.uint8),
    }


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> uint8, the code of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties to even codes."""
    size = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    for half, tie_goes_up in _E2M1_HALVES:
        codes += size >= half if tie_goes_up else size > half
    return codes


def _mxfp4_layout(rows: int, columns: int) -> Layout:
    return {
        "weight_packed": ("U8", (rows, columns // 2)),
        "weight_scale": ("U8", (rows, columns // _MX_GROUP)),
    }


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1, scale)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] below 16 -> uint8 [N, K / 2], the first of a pair in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> MappingProxyType[str, Any]:
    common = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy}
    return MappingProxyType(common | {"dynamic": False} | more)


ENCODINGS = MappingProxyType(
    {
        "fp8-block": WeightFormat(
            "float-quantized",
            _weights(8, "float", "block", block_structure=[_BLOCK, _BLOCK]),
            1,
            _fp8_block_layout,
            fp8_block,
        ),
        "int4-g128": WeightFormat(
            "pack-quantized",
            _weights(4, "int", "group", group_size=_GROUP),
            _GROUP,
            _int4_layout,
            int4_groups,
        ),
        "mxfp4": WeightFormat(
            "mxfp4-pack-quantized",
            _weights(4, "float", "group", group_size=_MX_GROUP, scale_dtype="torch.uint8"),
            _MX_GROUP,
            _mxfp4_layout,
            mxfp4,
        ),
    }
)
"""By the name that `--format` has for each."""
