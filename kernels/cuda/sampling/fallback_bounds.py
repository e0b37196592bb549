"""The bound of a row that falls through the candidate list: from its window, or digit by digit.

One launch for both: where no row falls through, which is usual, it ends at once.

    states     int64 [F, LIST_FIELDS]      of `candidate_list`
    bounds     int64 [F, BOUND_FIELDS]     windows    int64 [F, WINDOW_FIELDS]
    lists      int64 [F, CAPACITY]         run_parts  int32 [F, RUNS, parts]
    digits     int64 [F, DIGITS]           room for the sums of `digit_search`
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.candidate_list import LIST_FIELDS, ROW_MASS
from tpdet.kernels.cuda.sampling.digit_search import DIGITS, bound_by_digits
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_parameters import TOP_P_OFF, row_of_slot, threshold_of
from tpdet.kernels.cuda.sampling.row_table import BOUND, BOUND_FIELDS, load_float
from tpdet.kernels.cuda.sampling.sort_key_search import heaviest_bound
from tpdet.kernels.cuda.sampling.sort_keys import ABOVE_ALL, KEEPS_ALL, value_of
from tpdet.kernels.cuda.sampling.tied_runs import RUNS, enough_of_runs, key_in_run
from tpdet.kernels.cuda.sampling.value_window import (
    CAPACITY,
    COLLECTED,
    FIRST_RUN,
    HIGH,
    IDS_ABOVE,
    MASS_ABOVE,
    MIDDLE,
    WINDOW_FIELDS,
)


@triton.jit
def bound_of_window(keys, listed, top, vocabulary, top_k, numerator, above, mass_above, total):
    """The smallest kept sort key, from a window's list; ABOVE_ALL where the window was wrong."""
    bound = tl.full((), KEEPS_ALL, tl.int64)
    if top_k < vocabulary:
        bound = heaviest_bound(keys, listed.to(tl.int64), top_k - above)
    if numerator < TOP_P_OFF:
        weights = tl.where(listed & (keys >= bound), fixed_point(value_of(keys), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        missing = threshold_of(numerator, total) - mass_above
        if (missing <= 0) | (inside < missing):
            bound = tl.full((), ABOVE_ALL, tl.int64)
        else:
            bound = tl.maximum(bound, heaviest_bound(keys, weights, missing))
    return bound


@triton.jit
def bound_in_window(
    start,
    temperature,
    top,
    top_k,
    numerator,
    total,
    window,
    lists,
    run_parts,
    parts,
    width,
    BLOCK: tl.constexpr,
    ROW_PARTS: tl.constexpr,
):
    """A row's smallest kept sort key from its window; ABOVE_ALL where that was wrong.

    window, lists and run_parts are the row's; total: its mass.
    """
    # 1. the window, as `collect_window` left it
    high = load_float(window + HIGH)
    above, count = tl.load(window + IDS_ABOVE), tl.load(window + COLLECTED)
    mass_above, middle = tl.load(window + MASS_ABOVE), tl.load(window + MIDDLE)
    bound = tl.full((), ABOVE_ALL, tl.int64)
    if high >= 0.0:
        # 2. a bound inside a run of ties
        if middle >= 0:
            run, kept, value_key = enough_of_runs(
                window + FIRST_RUN, top, width, top_k, numerator, above, mass_above, total
            )
            if kept > 0:
                bound = key_in_run(
                    start,
                    width,
                    temperature,
                    value_key,
                    run_parts + run * parts,
                    parts,
                    kept,
                    BLOCK,
                    ROW_PARTS,
                )
        # 3. or among the listed sort keys
        elif count <= CAPACITY:
            at = tl.arange(0, CAPACITY)
            listed = at < count
            keys = tl.load(lists + at, mask=listed, other=0)
            bound = bound_of_window(
                keys, listed, top, width, top_k, numerator, above, mass_above, total
            )
    return bound


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def bound_fallbacks(
    logits,
    copies,
    table,
    peaks,
    slots,
    states,
    bounds,
    lists,
    run_parts,
    windows,
    digits,
    rows,
    width,
    stride,
    peak_parts,
    parts,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BY_WINDOW: tl.constexpr,
    BY_DIGITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """bounds[slot] of rows that fall through (ABOVE_ALL); program (slot,).

    BLOCK: of `collect_window`. BY_WINDOW and BY_DIGITS: whether the window, and the search by
    digits where it was wrong, may answer.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    # 1. from the window
    if BY_WINDOW:
        if tl.load(bounds + slot * BOUND_FIELDS + BOUND) == ABOVE_ALL:
            start, temperature, top, top_k, numerator = row_of_slot(
                logits, copies, table, peaks, slots, rows, width, stride, peak_parts, PARTS, WHOLE
            )
            bound = bound_in_window(
                start,
                temperature,
                top,
                top_k,
                numerator,
                tl.load(states + slot * LIST_FIELDS + ROW_MASS),
                windows + slot * WINDOW_FIELDS,
                lists + slot.to(tl.int64) * CAPACITY,
                run_parts + slot * RUNS * parts,
                parts,
                width,
                BLOCK,
                ROW_PARTS,
            )
            tl.store(bounds + slot * BOUND_FIELDS + BOUND, bound)
        # The bound is read again, as the row is: no register holds them meanwhile.
        tl.debug_barrier()
    # 2. digit by digit, where the window was wrong
    if BY_DIGITS:
        bound = tl.load(bounds + slot * BOUND_FIELDS + BOUND)
        if bound == ABOVE_ALL:
            start, temperature, top, top_k, numerator = row_of_slot(
                logits, copies, table, peaks, slots, rows, width, stride, peak_parts, PARTS, WHOLE
            )
            mine = digits + slot.to(tl.int64) * DIGITS
            bound = bound_by_digits(
                start, width, temperature, top, top_k, numerator, mine, ROW_BLOCK
            )
            tl.store(bounds + slot * BOUND_FIELDS + BOUND, bound)
