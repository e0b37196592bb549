"""The last pass over rows of logits, which every sampled row takes: softmax sum, sample and answer.

`sum_rows` adds a row's softmax sum, the integer mass of `noise.py`, and finds random rows' best
score. The program that ends a row's last part combines the parts and picks the chosen logit's bits.
Which program that is cannot be seen, since only integer sums and maxima are taken. Of whole rows it
makes the answer. Of a shard's rows it stores three numbers to be gathered, from which `answer_rows`
makes it. `pack_rows` subtracts the logarithm of the mass, which is torch's: without fused
multiply-adds the same formula rounds otherwise.

    bounds    int64 [F, BOUND_FIELDS]            states  int64 [F, LIST_FIELDS]     of `find_bounds`
    partials  int64 [parts, R, PARTIAL_FIELDS]   mass and best score of each part of a row
    gathered  int64 [R, GATHERED_FIELDS]         of a shard's row; of all ranks [ranks, R, ..]
    answers   fp64 [4, R]                        fit, token, distance from the maximum, mass * 2^-40
    packed    fp64 [R, PACKED_FIELDS]            what goes to the host
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.sampling.candidates import LIST_FIELDS, LOGITS_MASS, Bounds
from tpdet.kernels.cuda.sampling.noise import MASS_UNIT, fixed_point, sample_of_part
from tpdet.kernels.cuda.sampling.peaks import (
    BLOCK,
    LogitRows,
    RowShape,
    grid_of,
    is_fit,
    largest_peak,
    numbers_beside,
    options,
)
from tpdet.kernels.cuda.sampling.table import (
    ABOVE_ALL,
    BELOW_ALL,
    BOUND_FIELDS,
    COPY,
    GREEDY,
    KIND,
    LOGITS_PEAK,
    RANDOM,
    ROW_FIELDS,
    SAMPLE,
    SAMPLED_PEAK,
    SCORED_TOKEN,
    SLOT,
    float_bits,
    token_of,
    value_of,
)
from tpdet.kernels.inputs.sampled_rows import RowAnswers
from tpdet.kernels.inputs.vocabulary_shard import Shard

MASS, SCORE = tl.constexpr(0), tl.constexpr(1)
PARTIAL_FIELDS = tl.constexpr(2)
CHOSEN_BITS = tl.constexpr(2)  # after MASS and SCORE: the bits of the chosen logit
GATHERED_FIELDS = tl.constexpr(3)
FIT, TOKEN, DISTANCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SHARE_OF_MASS = tl.constexpr(3)  # before `pack_rows` torch replaces it by its logarithm
PACKED_LOGPROB = tl.constexpr(2)  # after FIT and TOKEN
PACKED_FIELDS = tl.constexpr(3)

PACKED_BLOCK = tl.constexpr(128)  # rows that a program packs


@triton.jit
def chosen_token(rows, count, score, row, PARTS: tl.constexpr):
    """A row's token: the scored one, of the best score, or of the largest logit."""
    kind = tl.load(rows.table + row * ROW_FIELDS + KIND)
    token = tl.load(rows.table + row * ROW_FIELDS + SCORED_TOKEN)
    if kind == RANDOM:
        token = token_of(score)
    if kind == GREEDY:
        token = token_of(largest_peak(rows.peaks + SAMPLED_PEAK, row, count, PARTS))
    return token


@triton.jit
def store_answer(into, rows, row, peak, token, mass, bits):
    """Stores a row's maximum and its four answers; rows: how many there are."""
    fit = is_fit(peak)
    maximum = tl.where(fit, value_of(peak), 0.0)
    chosen = bits.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(into.maximum + row, maximum)
    tl.store(into.answers + rows * FIT + row, fit.to(tl.float64))
    tl.store(into.answers + rows * TOKEN + row, tl.where(fit, token, 0).to(tl.float64))
    distance = chosen.to(tl.float64) - maximum.to(tl.float64)
    tl.store(into.answers + rows * DISTANCE + row, distance)
    share = tl.where(fit, mass, 1).to(tl.float64) * MASS_UNIT
    tl.store(into.answers + rows * SHARE_OF_MASS + row, share)


@triton.jit
def combined(partials, row, rows, OWN: tl.constexpr):
    """(mass, best score) of a row from its parts, which other programs stored."""
    part = tl.arange(0, OWN)
    there = part < tl.num_programs(1)
    fields = partials + (part * rows + row) * PARTIAL_FIELDS
    mass = tl.sum(tl.load(fields + MASS, mask=there, other=0, cache_modifier=".cg"), axis=0)
    score = tl.load(fields + SCORE, mask=there, other=BELOW_ALL, cache_modifier=".cg")
    return mass, tl.max(score, axis=0)


@triton.jit(do_not_specialize=["height", "peak_parts", "first_id"])
def sum_rows(
    rows,
    filters,
    partials,
    gathered,
    into,
    shape,
    height,
    peak_parts,
    first_id,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
    RANDOM_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    LISTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The answers of whole rows, or of a shard's rows gathered[row]; program (row, part).

    A program takes SPAN columns into partials[part, row]: the mass, and with RANDOM_ROWS the best
    score. With LISTED, the states have the masses of filtered rows without a copy; where the sample
    of such a row is known as well, part 0 answers alone.
    """
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    width, fields = shape.width, rows.table + row * ROW_FIELDS
    mass, count = tl.zeros((), tl.int64), (height, peak_parts)
    unknown, answered = part >= 0, part < 0
    # 1. what the filters know already
    if LISTED:
        slot = tl.load(fields + SLOT)
        if (tl.load(fields + KIND) == RANDOM) & (slot >= 0) & (tl.load(fields + COPY) < 0):
            unknown = part < 0
            state = filters.states + slot * LIST_FIELDS
            mass = tl.load(state + LOGITS_MASS, mask=part == 0, other=0)
            answered = tl.load(filters.bounds + slot * BOUND_FIELDS + SAMPLE) != ABOVE_ALL
    if (part == 0) | (not answered):
        peak = largest_peak(rows.peaks + LOGITS_PEAK, row, count, PARTS)
        start = rows.logits + row.to(tl.int64) * shape.stride
        # 2. the mass of these columns
        if unknown:
            LANES: tl.constexpr = min(SPAN, BLOCK)
            total = tl.zeros((LANES,), tl.int64)
            for first in range(0, SPAN, LANES):
                at = part * SPAN + first + tl.arange(0, LANES)
                x = tl.load(start + at, mask=at < width, other=-float("inf"))
                total += fixed_point(x, value_of(peak))
            mass = tl.sum(total, axis=0)
        # 3. their best score
        score = tl.full((), BELOW_ALL, tl.int64)
        if RANDOM_ROWS:
            score = sample_of_part(rows, filters.bounds, shape, count, first_id, SPAN, PARTS)
        # 4. the last program of the row combines the parts
        last = part == 0
        if not answered:
            out = partials + (part * height + row) * PARTIAL_FIELDS
            tl.store(out + MASS, mass)
            tl.store(out + SCORE, score)
            tl.debug_barrier()  # all of this program's stores come before its arrival
            arrived = tl.atomic_add(rows.arrivals + row, 1, sem="acq_rel")
            last = arrived == tl.num_programs(1) - 1
            if last:
                mass, score = combined(partials, row, height, OWN)
        # 5. the token and its logit
        if last:
            token = chosen_token(rows, count, score, row, PARTS)
            at = tl.maximum(token, 0) - first_id
            here = (at >= 0) & (at < width)
            chosen = tl.load(start + tl.where(here, at, 0), mask=here, other=0.0)
            bits = float_bits(tl.where(chosen == 0.0, 0.0, chosen))
            if WHOLE:
                store_answer(into, height, row, peak, token, mass, bits)
            else:
                out = gathered + row * GATHERED_FIELDS
                tl.store(out + MASS, mass)
                tl.store(out + SCORE, score)
                tl.store(out + CHOSEN_BITS, bits)


@triton.jit(do_not_specialize=["height", "ranks"])
def answer_rows(rows, gathered, into, height, ranks, RANKS: tl.constexpr, DEPENDENT: tl.constexpr):
    """The answers of rows whose columns ranks share; program (row,).

    Peaks and gathered are of all ranks. A random row's bits are those of the rank with the best
    score; the other ranks chose another id.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0)
    rank, count = tl.arange(0, RANKS), (height, ranks)
    fields = gathered + (rank * height + row) * GATHERED_FIELDS
    mass = tl.sum(tl.load(fields + MASS, mask=rank < ranks, other=0), axis=0)
    score = tl.load(fields + SCORE, mask=rank < ranks, other=BELOW_ALL)
    bits = tl.load(fields + CHOSEN_BITS, mask=rank < ranks, other=0)
    best = tl.max(score, axis=0)
    bits = tl.sum(tl.where(score == best, bits, 0), axis=0)
    token = chosen_token(rows, count, best, row, RANKS)
    peak = largest_peak(rows.peaks + LOGITS_PEAK, row, count, RANKS)
    store_answer(into, height, row, peak, token, mass, bits)


@triton.jit(do_not_specialize=["rows", "share", "length"])
def pack_rows(
    answers, places, into, rows, share, length, PLACED: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Log-probabilities, and the answers as they go to the host; PACKED_BLOCK rows a program.

    answers: fp64 [ranks, length]; each rank's begins with its [4, share]. places[row]: where the
    row stands among all shares, one after the other. Without PLACED there is one share, in order.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0) * PACKED_BLOCK + tl.arange(0, PACKED_BLOCK)
    here = row < rows
    at = row.to(tl.int64)
    if PLACED:
        at = tl.load(places + row, mask=here, other=0)
    fields = answers + at // share * length + at % share
    fit = tl.load(fields + share * FIT, mask=here)
    token = tl.load(fields + share * TOKEN, mask=here)
    distance = tl.load(fields + share * DISTANCE, mask=here, other=0.0)
    log_mass = tl.load(fields + share * SHARE_OF_MASS, mask=here, other=0.0)
    logprob = (distance - log_mass).to(tl.float32)
    tl.store(into.tokens + row, token.to(tl.int64), mask=here)
    tl.store(into.fit + row, fit != 0.0, mask=here)
    tl.store(into.logprobs + row, logprob, mask=here)
    out = into.packed + row * PACKED_FIELDS
    tl.store(out + FIT, fit, mask=here)
    tl.store(out + TOKEN, token, mask=here)
    tl.store(out + PACKED_LOGPROB, logprob.to(tl.float64), mask=here)


def answers_of(rows: LogitRows, filters: Bounds | None, shard: Shard, random: bool) -> RowAnswers:
    """Softmax sum, sample and answer of R rows; filters: of `find_bounds`, None without any.

    random: whether any row is sampled with noise.
    """
    device = rows.logits.device
    peak_parts, height = rows.peaks.shape[:2]
    shape = RowShape(shard.width(rows.logits.shape[1]), rows.logits.stride(0))
    grid, span = grid_of(height, shape.width)
    partials = numbers_beside(rows.logits, grid[1], height, PARTIAL_FIELDS.value)
    whole = shard.gather is None
    gathered = rows.peaks  # not written where rows are whole
    if not whole:
        gathered = numbers_beside(rows.logits, height, GATHERED_FIELDS.value)
    into = RowAnswers(
        numbers_beside(rows.logits, 4, height, dtype=torch.float64),
        numbers_beside(rows.logits, height, dtype=torch.float32),
    )
    count, part_lanes = (height, peak_parts), next_power_of_2(peak_parts)
    filtered, filters = filters is not None, filters or Bounds(rows.peaks, rows.peaks)
    forms = span, part_lanes, next_power_of_2(grid[1]), random, whole, filtered and whole
    sum_rows[grid](
        rows,
        filters,
        partials,
        gathered,
        into,
        shape,
        *count,
        shard.first_id,
        *forms,
        **options(device, 4),
    )
    if shard.gather is not None:
        answer_rows[height,](
            rows, shard.gather(gathered), into, *count, part_lanes, **options(device, 1)
        )
    into.log_masses.log_()
    return into
