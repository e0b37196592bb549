"""The last pass over rows of logits, which every sampled row takes: mass, sample and answer.

`weigh_rows` adds a row's integer mass (`log_softmax`) and, for random rows, finds the best score
(`gumbel_scores`). The program that ends a row's last part combines the parts and picks the chosen
logit's bits. Which program that is cannot be seen, since only integer sums and maxima are taken.
Of whole rows it makes the answer. Of a shard's rows it stores three numbers to be gathered, from
which `answer_rows` makes it. `pack_rows` subtracts the logarithm of the mass, which is torch's.

    logits    fp32 [R, W]                      table   int64 [R, ROW_FIELDS]
    peaks     int64 [parts, R, PEAK_FIELDS]    bounds  int64 [F, BOUND_FIELDS]
    states    int64 [F, LIST_FIELDS]           of `candidate_list`
    partials  int64 [parts, R, PARTIAL_FIELDS] mass and best score of each part of a row
    gathered  int64 [R, GATHERED_FIELDS]       of a shard's row; of all ranks [ranks, R, ..]
    answers   fp64 [4, R]                      fit, token, distance from the maximum, mass * 2^-40
    packed    fp64 [R, PACKED_FIELDS]          what goes to the host
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.candidate_list import LIST_FIELDS, LOGITS_MASS
from tpdet.kernels.cuda.sampling.gumbel_scores import sample_of_part
from tpdet.kernels.cuda.sampling.log_softmax import MASS_UNIT, fixed_point
from tpdet.kernels.cuda.sampling.row_peaks import is_fit, largest_peak
from tpdet.kernels.cuda.sampling.row_table import (
    BOUND_FIELDS,
    COPY,
    GIVEN_TOKEN,
    GREEDY,
    KIND,
    LOGITS_PEAK,
    RANDOM,
    ROW_FIELDS,
    SAMPLE,
    SAMPLED_PEAK,
    SLOT,
    float_bits,
)
from tpdet.kernels.cuda.sampling.sort_keys import ABOVE_ALL, BELOW_ALL, token_of, value_of

MASS, SCORE = tl.constexpr(0), tl.constexpr(1)
PARTIAL_FIELDS = tl.constexpr(2)
CHOSEN_BITS = tl.constexpr(2)  # after MASS and SCORE: the bits of the chosen logit
GATHERED_FIELDS = tl.constexpr(3)
FIT, TOKEN, DISTANCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SHARE_OF_MASS = tl.constexpr(3)  # before `pack_rows` torch replaces it by its logarithm
PACKED_LOGPROB = tl.constexpr(2)  # after FIT and TOKEN
PACKED_FIELDS = tl.constexpr(3)


@triton.jit
def chosen_token(table, peaks, score, row, rows, peak_parts, PARTS: tl.constexpr):
    """A row's token: given, of the best score, or of the largest logit."""
    kind = tl.load(table + row * ROW_FIELDS + KIND)
    token = tl.load(table + row * ROW_FIELDS + GIVEN_TOKEN)
    if kind == RANDOM:
        token = token_of(score)
    if kind == GREEDY:
        token = token_of(largest_peak(peaks + SAMPLED_PEAK, row, rows, peak_parts, PARTS))
    return token


@triton.jit
def store_answer(answers, maxima, row, rows, peak, token, mass, bits):
    """Stores a row's maximum and its four answers.

    The logarithm of the mass is torch's: without fused multiply-adds the same formula rounds
    otherwise.
    """
    fit = is_fit(peak)
    maximum = tl.where(fit, value_of(peak), 0.0)
    chosen = bits.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(maxima + row, maximum)
    tl.store(answers + rows * FIT + row, fit.to(tl.float64))
    tl.store(answers + rows * TOKEN + row, tl.where(fit, token, 0).to(tl.float64))
    tl.store(answers + rows * DISTANCE + row, chosen.to(tl.float64) - maximum.to(tl.float64))
    share = tl.where(fit, mass, 1).to(tl.float64) * MASS_UNIT
    tl.store(answers + rows * SHARE_OF_MASS + row, share)


@triton.jit
def combined(partials, row, rows, OWN: tl.constexpr):
    """(mass, best score) of a row from its parts, which other programs stored."""
    at = tl.arange(0, OWN)
    there = at < tl.num_programs(1)
    place = partials + (at * rows + row) * PARTIAL_FIELDS
    mass = tl.sum(tl.load(place + MASS, mask=there, other=0, cache_modifier=".cg"), axis=0)
    score = tl.load(place + SCORE, mask=there, other=BELOW_ALL, cache_modifier=".cg")
    return mass, tl.max(score, axis=0)


@triton.jit(do_not_specialize=["rows", "first_id", "peak_parts"])
def weigh_rows(
    logits,
    copies,
    table,
    peaks,
    bounds,
    states,
    partials,
    arrivals,
    gathered,
    answers,
    maxima,
    rows,
    width,
    first_id,
    stride,
    peak_parts,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORED: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
    RANDOM_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    LISTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The answers of whole rows, or of a shard's rows gathered[row]; program (row, part).

    A program takes SPAN columns into partials[part, row]: the mass, and with RANDOM_ROWS the best
    score (SCORED columns at a time). arrivals[row] int32 is 0 before. bounds and states are of
    `find_bounds`. With LISTED, states have the masses of filtered rows without a copy; where the
    sample of such a row is known as well, part 0 answers alone.
    """
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    fields, mass = table + row * ROW_FIELDS, tl.zeros((), tl.int64)
    unknown, answered = part >= 0, part < 0
    # 1. what the filters found out already
    if LISTED:
        slot = tl.load(fields + SLOT)
        if (tl.load(fields + KIND) == RANDOM) & (slot >= 0) & (tl.load(fields + COPY) < 0):
            unknown = part < 0
            mass = tl.load(states + slot * LIST_FIELDS + LOGITS_MASS, mask=part == 0, other=0)
            answered = tl.load(bounds + slot * BOUND_FIELDS + SAMPLE) != ABOVE_ALL
    if (part == 0) | (not answered):
        peak = largest_peak(peaks + LOGITS_PEAK, row, rows, peak_parts, PARTS)
        start = logits + row.to(tl.int64) * stride
        # 2. the mass of these columns
        if unknown:
            total = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, SPAN, BLOCK):
                at = part * SPAN + first + tl.arange(0, BLOCK)
                x = tl.load(start + at, mask=at < width, other=-float("inf"))
                total += fixed_point(x, value_of(peak))
            mass = tl.sum(total, axis=0)
        # 3. their best score
        score = tl.full((), BELOW_ALL, tl.int64)
        if RANDOM_ROWS:
            score = sample_of_part(
                logits,
                copies,
                table,
                peaks,
                bounds,
                row,
                part,
                rows,
                width,
                first_id,
                stride,
                peak_parts,
                SPAN,
                SCORED,
                PARTS,
            )
        # 4. the last program of the row combines the parts
        last = part == 0
        if not answered:
            out = partials + (part * rows + row) * PARTIAL_FIELDS
            tl.store(out + MASS, mass)
            tl.store(out + SCORE, score)
            tl.debug_barrier()  # all of this program's stores come before its arrival
            arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
            last = arrived == tl.num_programs(1) - 1
            if last:
                mass, score = combined(partials, row, rows, OWN)
        # 5. the token and its logit
        if last:
            token = chosen_token(table, peaks, score, row, rows, peak_parts, PARTS)
            at = tl.maximum(token, 0) - first_id
            mine = (at >= 0) & (at < width)
            chosen = tl.load(start + tl.where(mine, at, 0), mask=mine, other=0.0)
            chosen = tl.where(chosen == 0.0, 0.0, chosen)
            bits = float_bits(chosen)
            if WHOLE:
                store_answer(answers, maxima, row, rows, peak, token, mass, bits)
            else:
                out = gathered + row * GATHERED_FIELDS
                tl.store(out + MASS, mass)
                tl.store(out + SCORE, score)
                tl.store(out + CHOSEN_BITS, bits)


@triton.jit(do_not_specialize=["rows", "ranks"])
def answer_rows(
    table,
    peaks,
    gathered,
    answers,
    maxima,
    rows,
    ranks,
    RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The answers of rows whose columns ranks share; program (row,).

    peaks and gathered are of all ranks. A random row's bits are those of the rank with the best
    score; the other ranks chose another id.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0)
    at = tl.arange(0, RANKS)
    place = gathered + (at * rows + row) * GATHERED_FIELDS
    mass = tl.sum(tl.load(place + MASS, mask=at < ranks, other=0), axis=0)
    score = tl.load(place + SCORE, mask=at < ranks, other=BELOW_ALL)
    bits = tl.load(place + CHOSEN_BITS, mask=at < ranks, other=0)
    best = tl.max(score, axis=0)
    bits = tl.sum(tl.where(score == best, bits, 0), axis=0)
    token = chosen_token(table, peaks, best, row, rows, ranks, RANKS)
    peak = largest_peak(peaks + LOGITS_PEAK, row, rows, ranks, RANKS)
    store_answer(answers, maxima, row, rows, peak, token, mass, bits)


@triton.jit(do_not_specialize=["rows", "share", "length"])
def pack_rows(
    answers,
    places,
    tokens,
    fits,
    logprobs,
    packed,
    rows,
    share,
    length,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Log-probabilities, and the answers as they go to the host; BLOCK rows a program.

    answers: fp64 [ranks, length]; each rank's begins with its [4, share]. places[row]: where the
    row stands among all shares, one after the other. Without PLACED there is one share, in order.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    at = row.to(tl.int64)
    if PLACED:
        at = tl.load(places + row, mask=here, other=0)
    mine = answers + at // share * length + at % share
    fit = tl.load(mine + share * FIT, mask=here)
    token = tl.load(mine + share * TOKEN, mask=here)
    distance = tl.load(mine + share * DISTANCE, mask=here, other=0.0)
    log_mass = tl.load(mine + share * SHARE_OF_MASS, mask=here, other=0.0)
    logprob = (distance - log_mass).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64), mask=here)
    tl.store(fits + row, fit != 0.0, mask=here)
    tl.store(logprobs + row, logprob, mask=here)
    out = packed + row * PACKED_FIELDS
    tl.store(out + FIT, fit, mask=here)
    tl.store(out + TOKEN, token, mask=here)
    tl.store(out + PACKED_LOGPROB, logprob.to(tl.float64), mask=here)
