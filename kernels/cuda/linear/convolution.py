"""The short convolution of linear attention on a GPU: four taps of each channel, then SiLU.

    y[p, c] = round(silu(((w0 * x[p-3] + w1 * x[p-2]) + w2 * x[p-1]) + w3 * x[p]))      fp32, no fma

SiLU is that of `pointwise/activation.py`. Rows before the step's are read from the ring of inputs;
the rows go there in a launch of its own, when all have been read. A sequence's single row has a
kernel of its own, which does both. The rows before a chunk at whose start a snapshot is taken go to
its tail.

Shapes: M rows, C channels. x, y [M, C]; weight [C, 4]; inputs [N, R, C]; tails [S, 3, C].
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import (
    ALONE,
    await_earlier,
    dependent_launch,
    take_first_turn,
)
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.linear.tables import (
    CHUNK,
    KEPT,
    PIECE_FIELDS,
    Tables,
    has_rows_alone,
    pieces_of_runs,
    rows_of_piece,
    sequence_of,
)
from tpdet.kernels.cuda.pointwise.activation import activate
from tpdet.kernels.inputs.activations import ACTIVATIONS
from tpdet.kernels.inputs.linear_state import TAPS, LinearState
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import CHUNK_TOKENS

_TAPS = tl.constexpr(TAPS)
_SILU = tl.constexpr(ACTIVATIONS["silu"])
_CHANNELS = 512
_ROW_CHANNELS = 512
_KEPT_CHANNELS = 1024
_ROWS = 16


@triton.jit
def row_at(row, x, stride, inputs, channels, spot, ring, fresh):
    """Where a row's channels begin: among a step's from x on if it is `fresh`, or in the ring.

    spot: the place in the ring of the row -(_TAPS - 1); fresh: the first row that is the step's.
    """
    spot += row + _TAPS - 1
    spot = tl.where(spot >= ring, spot - ring, spot)
    return tl.where(fresh <= row, x + row * stride, inputs + spot * channels)


@triton.jit
def load_taps(weight, column, there):
    """The four factors of each channel in fp32."""
    factors = ()
    for tap in tl.static_range(_TAPS):
        factor = tl.load(weight + column * _TAPS + tap, mask=there, other=0.0)
        factors = factors + (factor.to(tl.float32),)  # type: ignore[assignment] # noqa: RUF005
    return factors


@triton.jit
def tap_of(words, TAP: tl.constexpr, DTYPE: tl.constexpr):
    """A factor of each channel in fp32, of words int64 of four factors of two bytes."""
    factor = (words >> (16 * TAP)).to(tl.int16)
    return factor.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def taps_of_row(weight, column, there, DTYPE: tl.constexpr):
    """`load_taps`; where weight is int64, all four factors of a channel are read at once.

    Else the lines of a warp's channels come 16 times, for two bytes of eight each.
    """
    if weight.dtype.element_ty == tl.int64:
        words = tl.load(weight + column, mask=there, other=0)
        factors = (tap_of(words, 0, DTYPE), tap_of(words, 1, DTYPE))
        factors = factors + (tap_of(words, 2, DTYPE), tap_of(words, 3, DTYPE))  # type: ignore[assignment] # noqa: RUF005
    else:
        factors = load_taps(weight, column, there)
    return factors


@triton.jit
def convolve_rows(
    x,
    weight,
    y,
    inputs,
    tables,
    tails,
    stride,
    channels,
    ring,
    slots,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: parts of the channels x pieces of runs, and parts of ROWS rows of their chunk.

    A thread goes down the rows of its channels, and has the three before in registers.
    slots: N, behind which snapshots are counted.
    """
    await_earlier(DEPENDENT)
    parts: tl.constexpr = CHUNK // ROWS
    piece, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    first_row, slot, chunk, low, high = rows_of_piece(tables, piece)
    fields = tables.pieces + piece * PIECE_FIELDS
    _, start, end, _ = sequence_of(tables, tl.load(fields))
    if (end - start <= 1) | (part * ROWS >= high) | (part * ROWS + ROWS <= low):
        return
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = column < channels
    first = chunk * CHUNK + part * ROWS
    number = (first_row + part * ROWS).to(tl.int64)
    begin, stop = tl.maximum(low - part * ROWS, 0), tl.minimum(high - part * ROWS, ROWS)
    x += number * stride
    inputs += slot * ring * channels
    spot = (first + ring + 1 - _TAPS) % ring
    # 1. the rows before, which a snapshot takes
    rows = ()
    for row in tl.static_range(1 - _TAPS, 0):
        source = row_at(row, x, stride, inputs, channels, spot, ring, start - first)
        read = tl.where(begin < row + _TAPS, channels, 0)
        value = tl.load(source + column, mask=column < read, other=0.0)
        rows = rows + (value,)  # type: ignore[assignment] # noqa: RUF005
    snapshot = tl.load(fields + KEPT).to(tl.int64)
    if (part == 0) & (snapshot >= 0):
        tail = tails + (snapshot - slots) * (_TAPS - 1) * channels + column
        for tap in tl.static_range(_TAPS - 1):
            tl.store(tail + tap * channels, rows[tap], mask=there)
    # 2. this part's rows
    for row in tl.static_range(ROWS):
        source = row_at(row, x, stride, inputs, channels, spot, ring, start - first)
        read = tl.where((begin < row + _TAPS) & (stop > row), channels, 0)
        rows = rows + (tl.load(source + column, mask=column < read, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
    w0, w1, w2, w3 = load_taps(weight, column, there)
    for row in tl.static_range(ROWS):
        total = w0 * rows[row].to(tl.float32) + w1 * rows[row + 1].to(tl.float32)
        total = total + w2 * rows[row + 2].to(tl.float32)
        total = total + w3 * rows[row + 3].to(tl.float32)
        result = activate(total, _SILU).to(y.dtype.element_ty)
        target = y + (number * channels + row * channels)
        written = tl.where((begin <= row) & (stop > row), channels, 0)
        tl.store(target + column, result, mask=column < written)


@triton.jit
def keep_inputs(
    x,
    inputs,
    tables,
    stride,
    channels,
    ring,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The last `ring` rows go to the ring. Grid: parts of the channels x of the ring x runs."""
    await_earlier(DEPENDENT)
    first_row, start, end, slot = sequence_of(tables, tl.load(tables.runs + tl.program_id(2)))
    if end - start <= tl.program_id(1) * ROWS:
        return
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    back = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    position = end - 1 - back
    mask = ((back < ring) & (position >= start))[:, None] & (column < channels)
    number = (first_row + position - start).to(tl.int64)
    value = tl.load(x + number[:, None] * stride + column, mask=mask, other=0)
    stored = slot * ring + position % ring
    tl.store(inputs + stored[:, None] * channels + column, value, mask=mask)


@triton.jit
def convolve_row(
    x,
    weight,
    y,
    inputs,
    tables,
    stride,
    channels,
    ring,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sequences with one row, which goes to the ring too: sequences x parts of the channels."""
    await_earlier(DEPENDENT)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = column < channels
    factors = taps_of_row(weight, column, there, x.dtype.element_ty)  # they come beside the tables
    number, start, end, slot = sequence_of(tables, tl.program_id(0))
    if end - start != 1:
        return
    number, spot = number.to(tl.int64), start % ring
    inputs += slot * ring * channels
    new = tl.load(x + number * stride + column, mask=there, other=0)
    rows = ()
    for back in tl.static_range(_TAPS - 1, 0, -1):
        before = tl.where(spot < back, spot + ring, spot) - back
        value = tl.load(inputs + before * channels + column, mask=there, other=0)
        rows = rows + (value,)  # type: ignore[assignment] # noqa: RUF005
    rows = rows + (new,)  # type: ignore[assignment] # noqa: RUF005
    total = tl.zeros((CHANNELS,), tl.float32)
    for tap in tl.static_range(_TAPS):
        term = factors[tap] * rows[tap].to(tl.float32)
        total = term if tap == 0 else total + term
    tl.store(inputs + spot * channels + column, new, mask=there)
    result = activate(total, _SILU).to(y.dtype.element_ty)
    tl.store(y + number * channels + column, result, mask=there)


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, state: LinearState, batch: PagedBatch
) -> torch.Tensor:
    """x [M, C], weight [C, 4] -> [M, C] in x's dtype; stores x in the state's ring of inputs.

    Of a run longer than the ring its last rows are stored, and those before each snapshot in its
    tail. Rows that no sequence names are undefined. Of single rows alone it is one kernel, which
    may be the first of a pair.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tables = Tables.of(batch)
    channels, ring = x.shape[1], state.inputs.shape[1]
    if not len(tables.pieces):
        return y
    read, sizes = (x, weight.contiguous(), y, state.inputs, tables), (x.stride(0), channels, ring)
    if has_rows_alone(batch):
        of_row = (x, _joined(read[1]) if weight.dtype == x.dtype else read[1], *read[2:])
        forms = {"CHANNELS": _ROW_CHANNELS, "num_warps": 4, "enable_fp_fusion": False}
        grid = len(tables.states), cdiv(channels, _ROW_CHANNELS)
        first = ALONE if len(tables.runs) else take_first_turn()
        convolve_row[grid](*of_row, *sizes, **forms, **dependent_launch(x.device, first))
    if not len(tables.runs):
        return y
    grid = cdiv(channels, _CHANNELS), pieces_of_runs(batch) * (CHUNK_TOKENS // _ROWS)
    forms = {"ROWS": _ROWS, "CHANNELS": _CHANNELS, "num_warps": 4, "enable_fp_fusion": False}
    tails = state.tails, *sizes, len(state.inputs)
    convolve_rows[grid](*read, *tails, **forms, **dependent_launch(x.device))
    kept = cdiv(channels, _KEPT_CHANNELS), cdiv(ring, _ROWS), len(tables.runs)
    forms |= {"CHANNELS": _KEPT_CHANNELS}
    keep_inputs[kept](x, *read[3:], *sizes, **forms, **dependent_launch(x.device))
    return y


def _joined(weight: torch.Tensor) -> torch.Tensor:
    """Weight [C, 4] of 2-byte values as words int64 [C, 1], where it lies so; else as it is."""
    size = torch.int64.itemsize
    whole = weight.storage_offset() % TAPS == 0 and weight.data_ptr() % size == 0
    return weight.view(torch.int64) if whole and weight.itemsize * TAPS == size else weight
