"""Tokens of many rows of logits at once, in the frozen order of the contract.

    x + 0.0  ->  bias  ->  repetition, frequency, presence penalties  ->  forbidden ids
      ->  temperature  ->  top-k  ->  top-p  ->  min-p  ->  Gumbel-max draw (greedy: the argmax)

A filter is a bound in the total order of `order_select`: kept are the ids whose order is at least
the bound. It is found bit pair by bit pair, from integer sums over the whole row: the largest bound
at which the kept ids' weight (1 each, or their softmax mass) reaches the threshold. One program
does a row's bounds; programs over parts of a row draw. Formulas are in the CPU's files: `filters`
for the thresholds, `gumbel` for the noise. One row's result depends on that row alone.
"""

import struct
from decimal import Decimal

import torch
import triton
import triton.language as tl

from tpdet.kernels.cpu.sampling.filters import TOP_P_BITS, top_p_numerator
from tpdet.kernels.cpu.sampling.penalties import hold_finite
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.penalties import penalise, to_device
from tpdet.kernels.cuda.sampling.sort_keys import ID_BITS, LEAST_KEY, id_of, order_of
from tpdet.kernels.inputs.sampling import Draw

NO_TOKEN = -1

_SPAN = 4096
_BLOCK = 1024
_BOUND_BLOCK = 2048
_FIELDS = 8  # int64 values of a row, see `_parameters`


@triton.jit
def largest_bound(
    x, vocabulary, maximum, floor, threshold, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest order at which the ids from it up, of those from `floor` up, weigh `threshold`.

    x: a row's start. Searches from -2^53, below which no order lies; that if the whole weighs less.
    """
    found = tl.full((), -9007199254740992, tl.int64)
    unit = tl.full((), 4503599627370496, tl.int64)  # 2^52: orders have 54 bits, two a pass
    for _ in range(27):
        sum1, sum2, sum3 = (
            tl.zeros((BLOCK,), tl.int64),
            tl.zeros((BLOCK,), tl.int64),
            tl.zeros((BLOCK,), tl.int64),
        )
        for first in range(0, vocabulary, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            value = tl.load(x + ids, mask=ids < vocabulary, other=-float("inf"))
            order = order_of(value, ids)
            weight = tl.full((BLOCK,), 1, tl.int64)
            if BY_MASS:
                weight = fixed_point(value, maximum)
            weight = tl.where((ids < vocabulary) & (order >= floor), weight, 0)
            sum1 += tl.where(order >= found + unit, weight, 0)
            sum2 += tl.where(order >= found + 2 * unit, weight, 0)
            sum3 += tl.where(order >= found + 3 * unit, weight, 0)
        reached = (tl.sum(sum1, axis=0) >= threshold).to(tl.int64)
        reached += (tl.sum(sum2, axis=0) >= threshold).to(tl.int64)
        reached += (tl.sum(sum3, axis=0) >= threshold).to(tl.int64)
        found += reached * unit
        unit = unit >> 2
    return found


@triton.jit
def mass_from(x, vocabulary, maximum, floor, BLOCK: tl.constexpr):
    """Mass of a row's ids from order `floor` up."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, vocabulary, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        value = tl.load(x + ids, mask=ids < vocabulary, other=-float("inf"))
        kept = (ids < vocabulary) & (order_of(value, ids) >= floor)
        total += tl.where(kept, fixed_point(value, maximum), 0)
    return tl.sum(total, axis=0)


@triton.jit
def find_bounds(
    x, maximum, parameters, bounds, vocabulary, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    """bounds[row]: the smallest order that top-k and top-p keep; program (row,)."""
    row = tl.program_id(0)
    start = x + row.to(tl.int64) * vocabulary
    largest = tl.load(maximum + row)
    top_k = tl.load(parameters + row * FIELDS + 4)
    numerator = tl.load(parameters + row * FIELDS + 5)
    bound = tl.full((), -9007199254740992, tl.int64)
    if top_k < vocabulary:
        bound = largest_bound(start, vocabulary, largest, bound, top_k, False, BLOCK)
    if numerator < 1073741824:
        total = mass_from(start, vocabulary, largest, bound, BLOCK)
        low = total & 1073741823
        threshold = numerator * (total >> 30) + ((numerator * low + 1073741823) >> 30)
        found = largest_bound(start, vocabulary, largest, bound, threshold, True, BLOCK)
        bound = tl.maximum(bound, found)
    tl.store(bounds + row, bound)


@triton.jit
def philox_word(ids, position, choice, key0, key1):
    """Word 0 of Philox4x32-10 for counter (id, position, choice, 0), all uint64 below 2^32."""
    c0 = ids.to(tl.uint64)
    c1 = tl.zeros_like(c0) + position
    c2 = tl.zeros_like(c0) + choice
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        first = c0 * 0xD2511F53
        second = c2 * 0xCD9E8D57
        c0 = (second >> 32) ^ c1 ^ key0
        c1 = second & 0xFFFFFFFF
        c2 = (first >> 32) ^ c3 ^ key1
        c3 = first & 0xFFFFFFFF
        key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF
        key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


@triton.jit
def gumbel_noise(word):
    """fp32(-log(-log(1 - (word + 0.5) * 2^-32))), logarithms in fp64."""
    survival = 1.0 - (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(survival))).to(tl.float32)


@triton.jit
def draw_parts(
    x,
    parameters,
    bounds,
    best,
    vocabulary,
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """best[row, part]: the largest order of a kept score among SPAN ids; program (row, part)."""
    row, part = tl.program_id(0), tl.program_id(1)
    start = x + row.to(tl.int64) * vocabulary
    fields = parameters + row * FIELDS
    key0 = tl.load(fields).to(tl.uint64)
    key1 = tl.load(fields + 1).to(tl.uint64)
    position = tl.load(fields + 2).to(tl.uint64)
    choice = tl.load(fields + 3).to(tl.uint64)
    least = tl.load(fields + 6).to(tl.int32).to(tl.float32, bitcast=True)
    greedy = tl.load(fields + 7) != 0
    bound = tl.load(bounds + row)
    nothing = tl.full((BLOCK,), -4611686018427387904, tl.int64)
    largest = nothing
    for first in range(0, SPAN, BLOCK):
        ids = part * SPAN + first + tl.arange(0, BLOCK)
        value = tl.load(start + ids, mask=ids < vocabulary, other=-float("inf"))
        kept = (ids < vocabulary) & (order_of(value, ids) >= bound) & (value >= least)
        noise = gumbel_noise(philox_word(ids, position, choice, key0, key1))
        score = tl.where(greedy, value, value + noise)
        largest = tl.maximum(largest, tl.where(kept, order_of(score, ids), nothing))
    tl.store(best + row * tl.num_programs(1) + part, tl.max(largest, axis=0))


def choose_tokens(logits: torch.Tensor, draws: dict[int, Draw]) -> dict[int, int]:
    """Tokens of some rows: fp32 [R, V] (maxima finite) and draws by row -> tokens by row.

    NO_TOKEN (-1) where bias and forbidden ids leave nothing to choose. One wait for the device.
    """
    rows, hows = list(draws), list(draws.values())
    if not rows:
        return {}
    x = logits[to_device(rows, torch.int64, logits.device)] + 0.0
    if any(how.changes_logits for how in hows):
        penalise(x, hows)
    temperatures = [how.temperature or 1.0 for how in hows]
    divisor = to_device(temperatures, torch.float32, x.device)[:, None]
    # Greedy rows are left as they are: overflow is held at the largest number only where scaled.
    greedy = to_device([how.temperature == 0.0 for how in hows], torch.bool, x.device)
    x = torch.where(greedy[:, None], x, hold_finite(x / divisor, x) + 0.0)
    return dict(zip(rows, _draw(x, hows).tolist(), strict=True))


def _draw(x: torch.Tensor, hows: list[Draw]) -> torch.Tensor:
    """Tokens of x [D, V] after temperature: int64 [D]."""
    height, vocabulary = x.shape
    maximum = x.amax(-1)
    parameters = _parameters(hows, vocabulary, maximum)
    bounds = torch.full((height,), -(1 << 53), dtype=torch.int64, device=x.device)
    if any(_filters(how, vocabulary) for how in hows):
        find_bounds[height,](
            x,
            maximum,
            parameters,
            bounds,
            vocabulary,
            _FIELDS,
            _BOUND_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    parts = triton.cdiv(vocabulary, _SPAN)
    best = torch.empty(height, parts, dtype=torch.int64, device=x.device)
    draw_parts[height, parts](
        x,
        parameters,
        bounds,
        best,
        vocabulary,
        _FIELDS,
        _SPAN,
        _BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    chosen = best.amax(-1)
    return torch.where((chosen >> ID_BITS) > LEAST_KEY, id_of(chosen), NO_TOKEN)


def _parameters(hows: list[Draw], vocabulary: int, maximum: torch.Tensor) -> torch.Tensor:
    """int64 [D, 8]: seed words, position, choice, top-k, top-p's P, least value's bits, greedy.

    The least value that min-p keeps is max + fp32(ln(min_p)).
    """
    ints, distances = [], []
    for how in hows:
        filtered = how.temperature != 0.0
        top_k = how.top_k if filtered and how.top_k > 0 else vocabulary
        numerator = top_p_numerator(how.top_p) if filtered else 1 << TOP_P_BITS
        ints += [how.seed & 0xFFFFFFFF, how.seed >> 32, how.position, how.choice]
        ints += [min(top_k, vocabulary), numerator, 0, int(not filtered)]
        by_min_p = filtered and how.min_p > 0.0
        distances.append(_round32(float(Decimal(how.min_p).ln())) if by_min_p else -torch.inf)
    parameters = to_device(ints, torch.int64, maximum.device).view(-1, _FIELDS)
    least = maximum + to_device(distances, torch.float32, maximum.device)
    parameters[:, 6] = least.view(torch.int32)
    return parameters


def _filters(how: Draw, vocabulary: int) -> bool:
    by_top_k = 0 < how.top_k < vocabulary
    return how.temperature != 0.0 and (by_top_k or top_p_numerator(how.top_p) < 1 << TOP_P_BITS)


def _round32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]
