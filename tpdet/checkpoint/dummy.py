"""Random weights for benchmarks: the same full weights at every tensor-parallel size."""

import blake3
import torch

from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.errors import UsageError
from tpdet.kernels.inputs.packed import PackedMatrix

_SCALE = 0.02
BLOCK = 128
"""Rows that share a scale in blocks of fp8."""
_SIZES = {"fp8 block": 1.3e-4, "packed int": 4e-3}
"""Scales by which the numbers of uniform codes have a standard deviation of about 0.02."""
_EXPONENT = 120  # of MXFP4's scales: 2^-7


def draw_piece(
    seed: int, name: str, index: int, shape: tuple[int, ...], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Piece `index` of tensor `name`: fp32 [*shape], a function of the arguments alone.

    Values are normal with standard deviation 0.02, around 1 for norm weights and around 0 for all
    others.
    """
    generator = _generator(seed, name, index, device)
    values = torch.randn(shape, generator=generator, device=device).mul_(_SCALE)
    return values + 1.0 if name.endswith("norm.weight") else values


def is_quantised(name: str) -> bool:
    """Whether a tensor of a quantised model is: a matrix of the layers' products."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def draw_packed(
    seed: int,
    name: str,
    index: int,
    shape: tuple[int, ...],
    form: Quantisation,
    device: torch.device | str = "cpu",
) -> PackedMatrix:
    """The same as codes and scales: piece [N, K] of a quantised matrix, its codes about uniform.

    Raises UsageError for a form that is not drawn.
    """
    (rows, columns), generator = shape, _generator(seed, name, index, device)
    bits = form.bits
    if form.kind not in (*_SIZES, "mxfp4") or bits != (8 if form.kind == "fp8 block" else 4):
        raise UsageError(f"load_format dummy draws no {form.rule}: load the model's files")
    if form.zero_points or not form.group:
        raise UsageError(f"load_format dummy draws no {form.rule}: load the model's files")
    codes = torch.randint(
        0, 256, (rows, -(-columns * bits // 8)), generator=generator, device=device
    ).to(torch.uint8)
    groups, scale_rows, kind = -(-columns // form.group), None, "int"
    if form.kind == "mxfp4":
        scales = torch.full((rows, groups), _EXPONENT, dtype=torch.uint8, device=device)
        return PackedMatrix("e2m1", bits, codes, range(columns), scales, form.group)
    if form.kind == "fp8 block":
        codes = torch.where(codes & 127 == 127, codes - 1, codes)  # 127 is NaN
        scale_rows, kind = (torch.arange(rows, device=device) // BLOCK).int(), "e4m3"
    else:  # of eight and more as many as of less than eight, so that numbers have mean 0
        codes = torch.where(codes & 15 == 0, codes | 8, codes)
        codes = torch.where(codes >> 4 == 0, codes | 128, codes)
    many = rows if scale_rows is None else -(-rows // BLOCK)
    spread = torch.rand((many, groups), generator=generator, device=device)
    scales = ((0.5 + spread) * _SIZES[form.kind]).bfloat16()
    zero = 8 if kind == "int" else 0
    return PackedMatrix(
        kind, bits, codes, range(columns), scales, form.group, scale_rows=scale_rows, zero=zero
    )


def _generator(seed: int, name: str, index: int, device: torch.device | str) -> torch.Generator:
    key = blake3.blake3(f"{seed}\0{name}\0{index}".encode()).digest(length=8)
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
