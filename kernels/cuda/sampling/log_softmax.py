"""Log-probabilities from an integer softmax mass, on the GPU.

    m     = max(x)
    q_i   = round_half_even(exp2((x_i - m) * fp32(log2 e)) * 2^40)         fp32, then fp64 to int64
    mass  = q_0 + q_1 + ...                                                int64: any order
    log p_i = fp32( (fp64(x_i) - fp64(m)) - log(fp64(mass) * 2^-40) )

A program adds one part of a row; the parts are added as integers. Rounding to an integer is an
addition of 1.5 * 2^52 in fp64, after which the integer stands in the low bits (magnitudes < 2^51).
"""

import torch
import triton
import triton.language as tl

MASS_BITS = 40
MAX_VOCABULARY = 1 << 22

_SPAN = 8192
_BLOCK = 2048


@triton.jit
def fixed_point(x, maximum):
    """int64 mass of fp32 logits x against their finite maximum; -inf has none."""
    weight = tl.exp2((x - maximum) * 1.4426950408889634)
    scaled = weight.to(tl.float64) * 1099511627776.0
    return (scaled + 6755399441055744.0).to(tl.int64, bitcast=True) - 4843621399236968448


@triton.jit
def add_masses(
    logits, maximum, masses, vocabulary, stride, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    """masses[row, part]: the mass of SPAN ids; program (row, part)."""
    row, part = tl.program_id(0), tl.program_id(1)
    largest = tl.load(maximum + row)
    start = logits + row.to(tl.int64) * stride
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, SPAN, BLOCK):
        ids = part * SPAN + first + tl.arange(0, BLOCK)
        x = tl.load(start + ids, mask=ids < vocabulary, other=-float("inf"))
        total += fixed_point(x, largest)
    tl.store(masses + row * tl.num_programs(1) + part, tl.sum(total, axis=0))


def log_mass(logits: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """log(mass * 2^-40) of each row: fp32 [R, V], maximum fp32 [R] finite -> fp64 [R].

    Raises ValueError when V is over 2^22.
    """
    rows, vocabulary = logits.shape
    if vocabulary > MAX_VOCABULARY:
        raise ValueError(f"vocabulary of {vocabulary} ids; the int64 mass holds {MAX_VOCABULARY}")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = triton.cdiv(vocabulary, _SPAN)
    masses = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    add_masses[rows, parts](
        logits,
        maximum.contiguous(),
        masses,
        vocabulary,
        logits.stride(0),
        _SPAN,
        _BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return torch.log(masses.sum(-1).to(torch.float64) * 2.0**-MASS_BITS)


def log_probabilities(
    values: torch.Tensor, maximum: torch.Tensor, log_masses: torch.Tensor
) -> torch.Tensor:
    """log p of logits picked from rows: fp32 [..], maximum fp32, log_masses fp64 -> fp32 [..]."""
    distance = values.to(torch.float64) - maximum.to(torch.float64)
    return (distance - log_masses).to(torch.float32)
