"""What the kernels of top-k and top-p read of a row: where it starts, its largest, k and P."""

import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling.gumbel_scores import scaled
from tpdet.kernels.cuda.sampling.row_scan import largest, source, value_of


@triton.jit
def threshold_of(numerator, total):
    """ceil(numerator * total / 2^30) in int64."""
    low = total & 1073741823
    return numerator * (total >> 30) + ((numerator * low + 1073741823) >> 30)


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
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Of a filtered row: where it starts, temperature, largest scaled value, k, P."""
    slot = tl.program_id(0)
    row = tl.load(slots + slot)
    fields = table + row * FIELDS
    temperature = tl.load(fields + 4).to(tl.int32).to(tl.float32, bitcast=True)
    if WHOLE:
        start = logits + slot.to(tl.int64) * stride
    else:
        start = source(logits, copies, row, tl.load(fields + 9), stride, width)
    top = scaled(value_of(largest(peaks + 1, row, rows, peak_parts, 2, PARTS)), temperature)
    return start, temperature, top, tl.load(fields + 6), tl.load(fields + 7)
