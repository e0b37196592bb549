"""The router, top-k gating: which experts a row chooses by its best scores, and their weights.

    score_i = l_i, or s_i + b_i with s_i = 1 / (1 + exp2(-l_i * log2 e))   fp32
    order:  larger score first, then the lower id; NaN last
    p_i     = int64(rint(e_i * 2^40)) with e_i = exp2((l_i - max l) * log2 e), or
              int64(rint(s_i * 2^(40 - x))), x the exponent of the largest s that is counted
    w_i     = fp32(fp64(p_i) / fp64(sum of p)), over the chosen or over all; times the scale in fp32

A NaN is no maximum, and its p is 0. Where the sum is 0, w is +0.

    M, E, k  rows, experts, chosen of a row
    logits [M, E] fp32; ids int32 and weights fp32 [M, k], ids ascending
    positions, expert_ids  as in `sorted_tokens.py`: very few rows are sorted by expert here too

Sums are of integers, so no layout reaches a bit. Padding rows, which come after the rows of all
sequences, have ids -1 and weights +0, whatever their logits are: how many rows are real is read on
the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.sorted_tokens import SortedTokens, by_token_rows, room_for_tokens
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.pointwise.norm import nearest_integer
from tpdet.kernels.cuda.sampling.noise import LOG2_E, fixed_point
from tpdet.kernels.inputs.experts import Routing
from tpdet.kernels.order import MASS_BITS

_NO_KEY = tl.constexpr(-(2**63))
_LOWEST = tl.constexpr(-(2**31))
_ABOVE_SIGN = tl.constexpr(0x7FFFFFFF)
_KEY_STEP = tl.constexpr(2**32)
_MASS_BITS = tl.constexpr(MASS_BITS)
_BIAS, _FRACTION = tl.constexpr(1023), tl.constexpr(52)  # of fp64
_SPANS = tl.constexpr(128)  # read at once
_LANES = 32  # least experts that a row is padded to; Triton 3.6 fails to compile a few of less
_JOINED = 4  # rows that are sorted here too; of more, another launch does it sooner


class Gating(NamedTuple):
    """What the kernel is compiled for: rows of a program, experts that a row chooses, and of all
    (`padded_experts`); the rule, as `Routing` has it; rows of a block, 0 if nothing is sorted."""

    ROWS: int
    CHOSEN: int
    EXPERTS: int
    SIGMOID: bool
    BIAS: bool
    OVER_CHOSEN: bool
    BLOCK_ROWS: int


@triton.jit
def order_keys(score, at, here, EXPERTS: tl.constexpr):
    """int64, all different: larger for a better score, then for a lower id; NaN last."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ _ABOVE_SIGN)
    ordered = tl.where(score == score, ordered, _LOWEST)
    key = ordered.to(tl.int64) * _KEY_STEP + (EXPERTS - 1 - at)
    return tl.where(here, key, _NO_KEY)


@triton.jit
def fixed_scores(score, counted):
    """int64 of scores in [0, 1], in units of 2^(x - 40), x the exponent of the largest counted."""
    known = tl.where(counted & (score == score), score, 0.0)
    largest = tl.max(known, 1, keep_dims=True).to(tl.float64)
    exponent = largest.to(tl.int64, bitcast=True) >> _FRACTION
    exponent = tl.where(largest > 0.0, exponent, _BIAS)
    unit = ((0 - exponent) + (2 * _BIAS + _MASS_BITS)) << _FRACTION
    mass = nearest_integer(score.to(tl.float64) * unit.to(tl.float64, bitcast=True))
    return tl.where(score == score, mass, 0)


@triton.jit
def fixed_logits(logit):
    """int64 masses of logits beside the largest of a row, in units of 2^-40."""
    known = tl.where(logit == logit, logit, float("-inf"))
    beside = logit - tl.max(known, 1, keep_dims=True)
    return tl.where(beside == beside, fixed_point(beside, 0.0), 0)


@triton.jit
def real_rows(spans, sequences):
    """Rows of all sequences; spans int32 [B, 3]: first row, count and start of each."""
    total = 0
    for first in range(0, sequences, _SPANS):
        at = first + tl.arange(0, _SPANS)
        total += tl.sum(tl.load(spans + 3 * at + 1, mask=at < sequences, other=0), 0)
    return total


@triton.jit
def _gate(logit, bias, at, here, scale, FORM: tl.constexpr):
    """Rows of logits [R, EXPERTS] -> who is chosen, and weights, which count where one is."""
    # 1. the best, one after another: the last one's key tells who is chosen
    score = logit
    if FORM.SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp2((0.0 - logit) * LOG2_E))
    score_alone = score
    if FORM.BIAS:
        score = score + tl.load(bias + at, mask=here, other=0.0)
    key = order_keys(score, at, here, FORM.EXPERTS)
    left = key
    best = tl.max(left, 1, keep_dims=True)
    for _ in tl.static_range(FORM.CHOSEN - 1):
        left = tl.where(left == best, _NO_KEY, left)
        best = tl.max(left, 1, keep_dims=True)
    chosen = here & (key >= best)
    # 2. their weights
    counted = chosen if FORM.OVER_CHOSEN else here
    mass = fixed_scores(score_alone, counted) if FORM.SIGMOID else fixed_logits(logit)
    total = tl.maximum(tl.sum(tl.where(counted, mass, 0), 1, keep_dims=True), 1)
    return chosen, (mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32) * scale


@triton.jit(do_not_specialize=["rows", "sequences", "first"])
def gate_rows(
    logits,
    bias,
    spans,
    ids,
    weights,
    positions,
    expert_ids,
    rows,
    sequences,
    experts,
    first,
    held,
    stride,
    scale,
    FORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS rows. BLOCK_ROWS above 0: these are all rows; they are sorted, by token, into blocks of
    the `held` experts from `first` on."""
    await_earlier(DEPENDENT)
    row = tl.program_id(0) * FORM.ROWS + tl.arange(0, FORM.ROWS)[:, None]
    at = tl.arange(0, FORM.EXPERTS)[None, :]
    real = row < real_rows(spans, sequences)
    here = (row < rows) & (at < experts)
    from_row = logits + row.to(tl.int64) * stride
    logit = tl.load(from_row + at, mask=here, other=float("-inf"))
    chosen, weight = _gate(logit, bias, at, here, scale, FORM)
    # 3. ascending by id
    to = row * FORM.CHOSEN + tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(ids + to, tl.where(real, at, -1), mask=chosen)
    tl.store(weights + to, tl.where(real, weight, 0.0), mask=chosen)
    # 4. a block for each of this rank's experts that somebody chose
    if FORM.BLOCK_ROWS > 0:
        local = at - first
        own = chosen & real & (local >= 0) & (local < held)
        touched = tl.max(own.to(tl.int32), 0)
        end = tl.cumsum(touched, 0)
        block = end - touched
        position = block[None, :] * FORM.BLOCK_ROWS + row
        tl.store(positions + to, tl.where(own, position, -1), mask=chosen)
        tl.store(expert_ids + 1 + block, tl.arange(0, FORM.EXPERTS) - first, mask=touched > 0)
        tl.store(expert_ids, tl.sum(touched, 0))


def padded_experts(experts: int) -> int:
    """The columns of a row of `experts` logits: a power of two that fills a warp's lanes."""
    return max(_LANES, next_power_of_2(experts))


class Routed(NamedTuple):
    """ids int32 and weights fp32 [M, k]; the tokens sorted by expert, if the router did that."""

    ids: torch.Tensor
    weights: torch.Tensor
    sorted_tokens: SortedTokens | None = None


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    spans: torch.Tensor,
    routing: Routing,
    held: range | None = None,
) -> Routed:
    """logits [M, E] fp32, bias [E] fp32 or None -> what all rows chose.

    spans int32 [B, 3]: `rows` of the step's `PagedBatch`, by which padding is known. held: this
    rank's experts; given these, very few rows are sorted at once.
    """
    rows, experts = logits.shape
    ids = torch.empty(rows, routing.chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.chosen, dtype=torch.float32, device=logits.device)
    found = None
    if held is not None and 0 < rows <= _JOINED:
        found = room_for_tokens(ids, held, by_token_rows(rows), True)
    own = range(0) if held is None else held
    if rows:
        each = 1 if found is None else next_power_of_2(rows)
        gate_rows[(cdiv(rows, each),)](
            logits,
            logits if bias is None else bias,
            spans,
            ids,
            weights,
            *((ids, ids) if found is None else found[:2]),
            rows,
            spans.shape[0],
            experts,
            own.start,
            len(own),
            logits.stride(0),
            routing.scale,
            FORM=Gating(
                each,
                routing.chosen,
                padded_experts(experts),
                routing.sigmoid,
                bias is not None,
                routing.over_chosen,
                0 if found is None else found.block_rows,
            ),
            num_warps=each,  # a row lies in one warp: the best are found by its lanes alone
            enable_fp_fusion=False,
            **dependent_launch(logits.device),
        )
    return Routed(ids, weights, found)
