"""What the kernels of top-k and top-p read of a row: where it starts, its largest, k and P.

slots   int64 [F]      the table's row of each filtered row
logits  fp32 [R, >= W] of all rows, or with WHOLE [F, V] of the filtered rows alone
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.row_peaks import largest_peak, sampled_row
from tpdet.kernels.cuda.sampling.row_table import (
    COPY,
    ROW_FIELDS,
    SAMPLED_PEAK,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_float,
)
from tpdet.kernels.cuda.sampling.sort_keys import value_of
from tpdet.kernels.exact.thresholds import KEEP_ALL
from tpdet.kernels.order import TOP_P_BITS

TOP_P_OFF = tl.constexpr(KEEP_ALL)
"""The numerator P that keeps every id."""
_TOP_P_BITS = tl.constexpr(TOP_P_BITS)


@triton.jit
def threshold_of(numerator, total):
    """ceil(numerator * total / 2^30) in int64."""
    low = total & (TOP_P_OFF - 1)
    return numerator * (total >> _TOP_P_BITS) + ((numerator * low + (TOP_P_OFF - 1)) >> _TOP_P_BITS)


@triton.jit
def row_of_slot(
    logits,
    copies,
    table,
    peaks,
    slots,
    rows,
    width,
    stride,
    peak_parts,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Of the program's filtered row: its start, temperature, largest scaled value, k and P."""
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields = table + row * ROW_FIELDS
    temperature = load_float(fields + TEMPERATURE)
    if WHOLE:
        start = logits + slot.to(tl.int64) * stride
    else:
        start = sampled_row(logits, copies, row, tl.load(fields + COPY), stride, width)
    peak = largest_peak(peaks + SAMPLED_PEAK, row, rows, peak_parts, PARTS)
    top = scaled(value_of(peak), temperature)
    return start, temperature, top, tl.load(fields + TOP_K), tl.load(fields + TOP_P)
