"""The last pass over rows of logits that every sampled row takes: the mass, the sample, the answer.

`weigh_rows` adds a row's integer mass (`log_softmax`) and, for random rows, finds the best score
(`gumbel_scores`). The program that ends a row's last part combines the parts and picks the chosen
logit's bits: which one it is cannot be seen, since all it takes are integer sums and maxima. Of
whole rows it makes the answer; of a shard's it leaves three numbers to be gathered, from which
`answer_rows` makes it. `pack_rows` subtracts the logarithm of the mass, which is torch's.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.gumbel_scores import sample_of_part
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_scan import is_fit, largest, token_of, value_of


@triton.jit
def chosen_token(
    table, peaks, score, row, rows, peak_parts, FIELDS: tl.constexpr, PARTS: tl.constexpr
):
    """A row's token: given (kind 2), of the best score (1), or of the largest logit (0)."""
    kind = tl.load(table + row * FIELDS + 5)
    token = tl.load(table + row * FIELDS + 10)
    if kind == 1:
        token = token_of(score)
    if kind == 0:
        token = token_of(largest(peaks + 1, row, rows, peak_parts, 2, PARTS))
    return token


@triton.jit
def store_answer(answers, maxima, row, rows, peak, token, mass, bits):
    """Maximum; fitness, token, the chosen logit's distance from the maximum, mass * 2^-40.

    answers: fp64 [4, rows]. The logarithm of the mass is torch's: without fused multiply-adds the
    same formula rounds otherwise.
    """
    fit = is_fit(peak)
    maximum = tl.where(fit, value_of(peak), 0.0)
    chosen = bits.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(maxima + row, maximum)
    tl.store(answers + row, fit.to(tl.float64))
    tl.store(answers + rows + row, tl.where(fit, token, 0).to(tl.float64))
    tl.store(answers + 2 * rows + row, chosen.to(tl.float64) - maximum.to(tl.float64))
    share = tl.where(fit, mass, 1).to(tl.float64) * 9.094947017729282e-13
    tl.store(answers + 3 * rows + row, share)


@triton.jit
def combined(parts_of, row, rows, OWN: tl.constexpr):
    """(mass, best score) of a row from its parts int64 [parts, rows, 2] by other programs."""
    at = tl.arange(0, OWN)
    there = at < tl.num_programs(1)
    place = parts_of + (at * rows + row) * 2
    mass = tl.sum(tl.load(place, mask=there, other=0, cache_modifier=".cg"), axis=0)
    score = tl.load(place + 1, mask=there, other=-4611686018427387904, cache_modifier=".cg")
    return mass, tl.max(score, axis=0)


@triton.jit(do_not_specialize=["rows", "first_id", "peak_parts"])
def weigh_rows(
    logits,
    copies,
    table,
    peaks,
    bounds,
    tops,
    parts_of,
    arrivals,
    gathered,
    answers,
    maxima,
    rows,
    width,
    first_id,
    stride,
    peak_parts,
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORED: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
    RANDOM: tl.constexpr,
    WHOLE: tl.constexpr,
    LISTED: tl.constexpr,
    TOPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The answers of whole rows, or gathered[row]: mass, best score, its logit's bits (of a shard).

    Program (row, part) takes SPAN columns into parts_of[part, row]: mass, and with RANDOM the best
    score (SCORED columns at a time). arrivals[row] int32 is 0 before. bounds and tops: of
    `find_bounds`; with LISTED, that has the masses of filtered rows without a copy, and where the
    sample of one stands there too, part 0 answers alone.
    """
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    fields, mass = table + row * FIELDS, tl.zeros((), tl.int64)
    unknown, answered = part >= 0, part < 0
    if LISTED:
        slot = tl.load(fields + 10)
        if (tl.load(fields + 5) == 1) & (slot >= 0) & (tl.load(fields + 9) < 0):
            unknown = part < 0
            mass = tl.load(tops + slot * TOPS + 9, mask=part == 0, other=0)
            answered = tl.load(bounds + slot * 2 + 1) != 4611686018427387904
    if (part == 0) | (not answered):
        peak = largest(peaks, row, rows, peak_parts, 2, PARTS)
        start = logits + row.to(tl.int64) * stride
        if unknown:
            total = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, SPAN, BLOCK):
                at = part * SPAN + first + tl.arange(0, BLOCK)
                x = tl.load(start + at, mask=at < width, other=-float("inf"))
                total += fixed_point(x, value_of(peak))
            mass = tl.sum(total, axis=0)
        score = tl.full((), -4611686018427387904, tl.int64)
        if RANDOM:
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
                FIELDS,
                SPAN,
                SCORED,
                PARTS,
            )
        last = part == 0
        if not answered:
            out = parts_of + (part * rows + row) * 2
            tl.store(out, mass)
            tl.store(out + 1, score)
            tl.debug_barrier()  # all of this program's stores come before its arrival
            arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
            last = arrived == tl.num_programs(1) - 1
            if last:
                mass, score = combined(parts_of, row, rows, OWN)
        if last:
            token = chosen_token(table, peaks, score, row, rows, peak_parts, FIELDS, PARTS)
            at = tl.maximum(token, 0) - first_id
            mine = (at >= 0) & (at < width)
            chosen = tl.load(start + tl.where(mine, at, 0), mask=mine, other=0.0)
            chosen = tl.where(chosen == 0.0, 0.0, chosen)
            bits = chosen.to(tl.int32, bitcast=True).to(tl.int64)
            if WHOLE:
                store_answer(answers, maxima, row, rows, peak, token, mass, bits)
            else:
                tl.store(gathered + row * 3, mass)
                tl.store(gathered + row * 3 + 1, score)
                tl.store(gathered + row * 3 + 2, bits)


@triton.jit(do_not_specialize=["rows", "ranks"])
def answer_rows(
    table,
    peaks,
    gathered,
    answers,
    maxima,
    rows,
    ranks,
    FIELDS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The answers of rows whose columns ranks share; program (row,).

    peaks int64 [ranks, rows, 2] and gathered [ranks, rows, 3]. A random row's bits are those of the
    rank with the best score; the others chose an id of their own.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0)
    at = tl.arange(0, RANKS)
    place = gathered + (at * rows + row) * 3
    mass = tl.sum(tl.load(place, mask=at < ranks, other=0), axis=0)
    score = tl.load(place + 1, mask=at < ranks, other=-4611686018427387904)
    bits = tl.load(place + 2, mask=at < ranks, other=0)
    best = tl.max(score, axis=0)
    bits = tl.sum(tl.where(score == best, bits, 0), axis=0)
    token = chosen_token(table, peaks, best, row, rows, ranks, FIELDS, RANKS)
    peak = largest(peaks, row, rows, ranks, 2, RANKS)
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

    answers: fp64 [ranks, length], each rank's beginning with its [4, share]. places[row]: where the
    row stands among all shares, one after the other; without PLACED there is one share, in order.
    """
    await_earlier(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    at = row.to(tl.int64)
    if PLACED:
        at = tl.load(places + row, mask=here, other=0)
    mine = answers + at // share * length + at % share
    fit, token = tl.load(mine, mask=here), tl.load(mine + share, mask=here)
    distance = tl.load(mine + 2 * share, mask=here, other=0.0)
    logprob = (distance - tl.load(mine + 3 * share, mask=here, other=0.0)).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64), mask=here)
    tl.store(fits + row, fit != 0.0, mask=here)
    tl.store(logprobs + row, logprob, mask=here)
    tl.store(packed + row * 3, fit, mask=here)
    tl.store(packed + row * 3 + 1, token, mask=here)
    tl.store(packed + row * 3 + 2, logprob.to(tl.float64), mask=here)
