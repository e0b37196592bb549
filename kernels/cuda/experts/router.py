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
from tpdet.kernels.cuda.pointwise.gate import opened
from tpdet.kernels.cuda.pointwise.norm import nearest_integer
from tpdet.kernels.cuda.sampling.noise import fixed_point
from tpdet.kernels.inputs.experts import Routing
from tpdet.kernels.order import MASS_BITS

_TAKEN = tl.constexpr(-(2**31))  # the key of what was chosen before, or is none of the row's
_NOT_A_NUMBER = tl.constexpr(1 - 2**31)  # that of a NaN, above it and below all numbers' keys
_BELOW_SIGN = tl.constexpr(0x7FFFFFFF)  # all bits but the sign
_MASS_BITS = tl.constexpr(MASS_BITS)
_BIAS, _FRACTION = tl.constexpr(1023), tl.constexpr(52)  # of fp64
_SPANS = tl.constexpr(128)  # read at once
_LANES = 32  # of a warp: least experts that a row is padded to
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
def best_ids(score, expert, here, experts, FORM: tl.constexpr):
    """ids int32 [R, slots] of the best, one after another; EXPERTS where a slot is left over.

    A round asks for two numbers of 32 bits, which a warp finds in one instruction each: the largest
    key and the lowest id that has it. Rounds are a loop: all but the first find their code cached.
    """
    SLOTS: tl.constexpr = triton.next_power_of_2(FORM.CHOSEN)
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    left = tl.where(bits >= 0, bits, bits ^ _BELOW_SIGN)
    left = tl.where(score == score, left, _NOT_A_NUMBER)
    left = tl.where(here, left, _TAKEN)
    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.full((FORM.ROWS, SLOTS), FORM.EXPERTS, tl.int32)
    for number in range(tl.minimum(experts, FORM.CHOSEN)):
        best = tl.max(left, 1, keep_dims=True)
        lowest = tl.min(tl.where(left == best, expert, FORM.EXPERTS), 1, keep_dims=True)
        left = tl.where(expert == lowest, _TAKEN, left)
        ids = tl.where(slot == number, lowest, ids)
    return ids


@triton.jit
def largest_of(score, counted, least):
    """The largest [R, 1] of those that are counted; `least` where all are NaN or none is."""
    return tl.max(tl.where(counted & (score == score), score, least), 1, keep_dims=True)


@triton.jit
def masses(score, largest, SIGMOID: tl.constexpr):
    """int64 of scores beside the largest that is counted: `fixed_scores` or `fixed_logits`."""
    return fixed_scores(score, largest) if SIGMOID else fixed_logits(score, largest)


@triton.jit
def fixed_scores(score, largest):
    """int64 of scores in [0, 1], in units of 2^(x - 40), x the exponent of the largest."""
    largest = largest.to(tl.float64)
    exponent = largest.to(tl.int64, bitcast=True) >> _FRACTION
    exponent = tl.where(largest > 0.0, exponent, _BIAS)
    unit = ((0 - exponent) + (2 * _BIAS + _MASS_BITS)) << _FRACTION
    mass = nearest_integer(score.to(tl.float64) * unit.to(tl.float64, bitcast=True))
    return tl.where(score == score, mass, 0)


@triton.jit
def fixed_logits(logit, largest):
    """int64 masses of logits beside the largest of a row, in units of 2^-40."""
    beside = logit - largest
    return tl.where(beside == beside, fixed_point(beside, 0.0), 0)


@triton.jit
def real_rows(spans, sequences):
    """Rows of all sequences; spans int32 [B, 3]: first row, count and start of each."""
    total = 0
    for first in range(0, sequences, _SPANS):
        sequence = first + tl.arange(0, _SPANS)
        count = tl.load(spans + 3 * sequence + 1, mask=sequence < sequences, other=0)
        total += tl.sum(count, 0)
    return total


@triton.jit
def weights_of(score, here, chosen, live, FORM: tl.constexpr):
    """Weights [R, slots] of the chosen, without the scale.

    score, chosen: scores, or logits, of all experts and of the chosen. Where no bias has a say, a
    row's largest logit is one of the chosen.
    """
    LEAST: tl.constexpr = 0.0 if FORM.SIGMOID else float("-inf")
    if FORM.OVER_CHOSEN and (FORM.SIGMOID or not FORM.BIAS):
        largest = largest_of(chosen, live, LEAST)
    else:
        largest = largest_of(score, here, LEAST)
    mass = masses(chosen, largest, FORM.SIGMOID)
    if FORM.OVER_CHOSEN:
        counted = tl.where(live, mass, 0)
    else:
        counted = tl.where(here, masses(score, largest, FORM.SIGMOID), 0)
    total = tl.maximum(tl.sum(counted, 1, keep_dims=True), 1)
    return (mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32)


@triton.jit
def blocks_of(own, ids, FORM: tl.constexpr):
    """(block [R, slots] of each choice's expert, how many blocks): one for each that is chosen."""
    COUNT: tl.constexpr = ids.shape[0] * ids.shape[1]
    number = tl.arange(0, COUNT)
    expert = tl.reshape(tl.where(own, ids, -1), (COUNT,))
    one, other = expert[:, None], expert[None, :]
    new = other >= 0
    if FORM.ROWS > 1:  # a row chooses none twice
        before = (one == other) & (number[:, None] < number[None, :])
        new &= tl.max(before.to(tl.int32), 0, keep_dims=True) == 0
    block = tl.sum((new & (other < one)).to(tl.int32), 1)
    return tl.reshape(block, ids.shape), tl.sum(new.to(tl.int32))


# Of stride and bias it is not known that they are multiples of 16: so a thread reads one number at
# a time, and has one of the chosen, not four.
@triton.jit(do_not_specialize=["rows", "sequences", "first", "stride", "bias"])
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
    expert = tl.arange(0, FORM.EXPERTS)[None, :]
    # 1. scores, or logits; how many rows are real is read beside them
    here = (row < rows) & (expert < experts)
    from_row = logits + row.to(tl.int64) * stride
    score = tl.load(from_row + expert, mask=here, other=float("-inf"))
    real = row < real_rows(spans, sequences)
    if FORM.SIGMOID:
        score = opened(score)
    shifted = score
    if FORM.BIAS:
        shifted = score + tl.load(bias + expert, mask=here, other=0.0)
    # 2. who is chosen, ascending by id
    chosen = best_ids(shifted, expert, here, experts, FORM)
    live = (row < rows) & (chosen < FORM.EXPERTS)
    of_chosen = tl.load(from_row + chosen, mask=live, other=float("-inf"))
    lower = (chosen[:, None, :] < chosen[:, :, None]).to(tl.int32)
    to = row * FORM.CHOSEN + tl.sum(lower, 2)
    tl.store(ids + to, tl.where(real, chosen, -1), mask=live)
    # 3. a block for each of this rank's experts that somebody chose
    if FORM.BLOCK_ROWS > 0:
        local = chosen - first
        own = live & real & (local >= 0) & (local < held)
        block, count = blocks_of(own, chosen, FORM)
        tl.store(positions + to, tl.where(own, block * FORM.BLOCK_ROWS + row, -1), mask=live)
        tl.store(expert_ids + 1 + block, local, mask=own)  # more than once, but the same
        tl.store(expert_ids, count)
    # 4. weights
    if FORM.SIGMOID:
        of_chosen = opened(of_chosen)
    weight = weights_of(score, here, of_chosen, live, FORM) * scale
    tl.store(weights + to, tl.where(real, weight, 0.0), mask=live)


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
    sorted_tokens = None
    if held is not None and 0 < rows <= _JOINED:
        sorted_tokens = room_for_tokens(ids, held, by_token_rows(rows), True)
    own = range(0) if held is None else held
    if rows:
        together = 1 if sorted_tokens is None else next_power_of_2(rows)
        gate_rows[(cdiv(rows, together),)](
            logits,
            logits if bias is None else bias,
            spans,
            ids,
            weights,
            *((ids, ids) if sorted_tokens is None else sorted_tokens[:2]),
            rows,
            spans.shape[0],
            experts,
            own.start,
            len(own),
            logits.stride(0),
            routing.scale,
            FORM=Gating(
                together,
                routing.chosen,
                padded_experts(experts),
                routing.sigmoid,
                bias is not None,
                routing.over_chosen,
                0 if sorted_tokens is None else sorted_tokens.block_rows,
            ),
            num_warps=together,  # a row lies in one warp: the best are found by its lanes alone
            enable_fp_fusion=False,
            **dependent_launch(logits.device),
        )
    return Routed(ids, weights, sorted_tokens)
