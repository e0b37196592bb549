"""The bound of a row that falls through `filter_top`: from its window, or digit by digit.

One launch for both: where no row falls through, which is usual, it ends at once.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.sampling.filter_digits import bound_by_digits
from tpdet.kernels.cuda.sampling.filter_row import row_of_slot, threshold_of
from tpdet.kernels.cuda.sampling.filter_runs import enough_of_runs, order_in_run
from tpdet.kernels.cuda.sampling.log_softmax import fixed_point
from tpdet.kernels.cuda.sampling.row_scan import value_of
from tpdet.kernels.cuda.sampling.sort_key_search import heaviest_bound


@triton.jit
def bound_of_window(orders, listed, top, vocabulary, top_k, numerator, above, mass_above, total):
    """The smallest kept order, from a window's list; 2^62 where the window was wrong."""
    bound = tl.full((), -9007199254740992, tl.int64)
    if top_k < vocabulary:
        bound = heaviest_bound(orders, listed.to(tl.int64), top_k - above)
    if numerator < 1073741824:
        weights = tl.where(listed & (orders >= bound), fixed_point(value_of(orders), top), 0)
        inside = tl.sum(weights, axis=0)
        if top_k < vocabulary:
            total = inside
        missing = threshold_of(numerator, total) - mass_above
        if (missing <= 0) | (inside < missing):
            bound = tl.full((), 4611686018427387904, tl.int64)
        else:
            bound = tl.maximum(bound, heaviest_bound(orders, weights, missing))
    return bound


@triton.jit
def bound_in_window(
    start,
    temperature,
    top,
    top_k,
    numerator,
    total,
    state,
    lists,
    parts_of,
    parts,
    width,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROW_PARTS: tl.constexpr,
):
    """A row's smallest kept order from its window (`filter_window`); 2^62 where that was wrong.

    state, lists and parts_of are the row's own; total: its mass.
    """
    high = tl.load(state + 1).to(tl.int32).to(tl.float32, bitcast=True)
    above, count = tl.load(state + 2), tl.load(state + 3)
    mass_above, middle = tl.load(state + 4), tl.load(state + 5)
    bound = tl.full((), 4611686018427387904, tl.int64)
    if high >= 0.0:
        if middle >= 0:
            run, kept, key = enough_of_runs(
                state + 6, top, width, top_k, numerator, above, mass_above, total
            )
            if kept > 0:
                bound = order_in_run(
                    start,
                    width,
                    temperature,
                    key,
                    parts_of + run * parts,
                    parts,
                    kept,
                    BLOCK,
                    ROW_PARTS,
                )
        elif count <= CAPACITY:
            at = tl.arange(0, CAPACITY)
            listed = at < count
            orders = tl.load(lists + at, mask=listed, other=0)
            bound = bound_of_window(
                orders, listed, top, width, top_k, numerator, above, mass_above, total
            )
    return bound


@triton.jit(do_not_specialize=["rows", "peak_parts"])
def bound_rest(
    logits,
    copies,
    table,
    peaks,
    slots,
    tops,
    bounds,
    lists,
    parts_of,
    state,
    digits,
    rows,
    width,
    stride,
    peak_parts,
    parts,
    FIELDS: tl.constexpr,
    TOPS: tl.constexpr,
    STATE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """bounds[slot] of rows that fall through (2^62); program (slot,). BLOCK: of `collect_window`.

    WINDOW and ROWS: whether the window, and whole rows where it was wrong, may answer.
    """
    await_earlier(DEPENDENT)
    slot = tl.program_id(0)
    if WINDOW:
        if tl.load(bounds + slot * 2) == 4611686018427387904:
            start, temperature, top, top_k, numerator = row_of_slot(
                logits,
                copies,
                table,
                peaks,
                slots,
                rows,
                width,
                stride,
                peak_parts,
                FIELDS,
                PARTS,
                WHOLE,
            )
            bound = bound_in_window(
                start,
                temperature,
                top,
                top_k,
                numerator,
                tl.load(tops + slot * TOPS + 2),
                state + slot * STATE,
                lists + slot.to(tl.int64) * CAPACITY,
                parts_of + slot * 3 * parts,
                parts,
                width,
                BLOCK,
                CAPACITY,
                ROW_PARTS,
            )
            tl.store(bounds + slot * 2, bound)
        tl.debug_barrier()  # read again, as the row is: nothing of it is held meanwhile
    if ROWS:
        bound = tl.load(bounds + slot * 2)
        if bound == 4611686018427387904:
            start, temperature, top, top_k, numerator = row_of_slot(
                logits,
                copies,
                table,
                peaks,
                slots,
                rows,
                width,
                stride,
                peak_parts,
                FIELDS,
                PARTS,
                WHOLE,
            )
            mine = digits + slot.to(tl.int64) * DIGITS
            bound = bound_by_digits(
                start, width, temperature, top, top_k, numerator, mine, ROW_BLOCK, DIGITS
            )
            tl.store(bounds + slot * 2, bound)
