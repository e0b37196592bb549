"""Choice of experts: a row's best scores, and the weights of what it chose.

    score_i = l_i, or s_i + b_i with s_i = 1 / (1 + exp2(-l_i * log2 e))   fp32
    order:  larger score first, then the lower id; NaN last
    p_i     = int64(rint(e_i * 2^40)) with e_i = exp2((l_i - max l) * log2 e), or
              int64(rint(s_i * 2^(40 - x))), x the exponent of the row's largest s
    w_i     = fp32(fp64(p_i) / fp64(sum of p)), over the chosen or over all; times the scale in fp32

    M, E, k  rows, experts, chosen of a row
    logits [M, E] fp32; ids int32 and weights fp32 [M, k], ids ascending

Sums are of integers, so no layout reaches a bit. Padding rows, which come after the rows of all
sequences, have ids -1 and weights +0, whatever their logits are: how many rows are real is read on
the device.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.sampling.log_softmax import (
    LOG2_E,
    ROUNDER,
    ROUNDER_BITS,
    fixed_point,
)
from tpdet.kernels.order import MASS_BITS

_NO_KEY = tl.constexpr(-(2**63))
_LOWEST = tl.constexpr(-(2**31))
_ABOVE_SIGN = tl.constexpr(0x7FFFFFFF)
_KEY_STEP = tl.constexpr(2**32)
_UNIT_BIAS = tl.constexpr(1023 + MASS_BITS + 127)  # of an fp64 exponent, from an fp32 one
_DOUBLE_FRACTION = tl.constexpr(52)
_SPANS = tl.constexpr(128)  # read at once


@triton.jit
def order_keys(score, at, here, EXPERTS: tl.constexpr):
    """int64, all different: larger for a better score, then for a lower id; NaN last."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ _ABOVE_SIGN)
    ordered = tl.where(score == score, ordered, _LOWEST)
    key = ordered.to(tl.int64) * _KEY_STEP + (EXPERTS - 1 - at)
    return tl.where(here, key, _NO_KEY)


@triton.jit
def fixed_scores(score):
    """int64 of scores in [0, 1], in units of 2^(x - 40), x the exponent of the largest."""
    largest = tl.max(score, 0).to(tl.int32, bitcast=True) >> 23
    unit = ((0 - tl.maximum(largest, 1)) + _UNIT_BIAS).to(tl.int64)
    scaled = score.to(tl.float64) * (unit << _DOUBLE_FRACTION).to(tl.float64, bitcast=True)
    return (scaled + ROUNDER).to(tl.int64, bitcast=True) - ROUNDER_BITS


@triton.jit
def real_rows(spans, sequences):
    """Rows of all sequences; spans int32 [B, 3]: first row, count and start of each."""
    total = 0
    for first in range(0, sequences, _SPANS):
        at = first + tl.arange(0, _SPANS)
        total += tl.sum(tl.load(spans + 3 * at + 1, mask=at < sequences, other=0), 0)
    return total


@triton.jit(do_not_specialize=["sequences"])
def choose_rows(
    logits,
    bias,
    spans,
    ids,
    weights,
    sequences,
    experts,
    stride,
    scale,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVER_CHOSEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row. EXPERTS: `experts` padded to a power of two."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    real = row < real_rows(spans, sequences)
    at = tl.arange(0, EXPERTS)
    here = at < experts
    logit = tl.load(logits + row * stride + at, mask=here, other=float("-inf"))
    # 1. the best, one after another: the last one's key tells who is chosen
    score = logit
    if SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp2((0.0 - logit) * LOG2_E))
    score_alone = score
    if HAS_BIAS:
        score = score + tl.load(bias + at, mask=here, other=0.0)
    key = order_keys(score, at, here, EXPERTS)
    left = key
    best = tl.max(left, 0)
    for _ in tl.static_range(CHOSEN - 1):
        left = tl.where(left == best, _NO_KEY, left)
        best = tl.max(left, 0)
    chosen = here & (key >= best)
    # 2. their weights
    mass = fixed_scores(score_alone) if SIGMOID else fixed_point(logit, tl.max(logit, 0))
    counted = chosen if OVER_CHOSEN else here
    total = tl.sum(tl.where(counted, mass, 0), 0)
    weight = (mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32) * scale
    # 3. ascending by id
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    to = row * CHOSEN + place
    tl.store(ids + to, tl.where(real, at, -1), mask=chosen)
    tl.store(weights + to, tl.where(real, weight, 0.0), mask=chosen)


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    spans: torch.Tensor,
    chosen: int,
    *,
    sigmoid: bool,
    over_chosen: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, E] fp32, bias [E] fp32 or None -> ids, weights [M, chosen].

    spans int32 [B, 3]: `rows` of the step's `PagedBatch`, by which padding is known.

    sigmoid: of scores, to which the bias is added for the choice alone; over_chosen: whether
    weights sum to `scale` over the chosen, or over all experts.
    """
    rows, experts = logits.shape
    ids = torch.empty(rows, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=logits.device)
    if rows:
        choose_rows[(rows,)](
            logits,
            logits if bias is None else bias,
            spans,
            ids,
            weights,
            spans.shape[0],
            experts,
            logits.stride(0),
            scale,
            CHOSEN=chosen,
            EXPERTS=triton.next_power_of_2(experts),
            SIGMOID=sigmoid,
            HAS_BIAS=bias is not None,
            OVER_CHOSEN=over_chosen,
            num_warps=1,
            enable_fp_fusion=False,
            **dependent_launch(logits.device),
        )
    return ids, weights
