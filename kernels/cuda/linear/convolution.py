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

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
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
_CHANNELS = 128
_ROW_CHANNELS = 512
_KEPT_CHANNELS = 1024
_ROWS = 16


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

    slots: N, behind which snapshots are counted.
    """
    await_earlier(DEPENDENT)
    parts: tl.constexpr = CHUNK // ROWS
    piece, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    first_row, slot, chunk, low, high = rows_of_piece(tables, piece)
    row = part * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    new = (row >= low) & (row < high)
    mask = new[:, None] & (column < channels)
    fields = tables.pieces + piece * PIECE_FIELDS
    _, start, end, _ = sequence_of(tables, tl.load(fields))
    if (end - start <= 1) | (part * ROWS >= high) | (part * ROWS + ROWS <= low):
        return
    first = chunk * CHUNK + part * ROWS
    snapshot = tl.load(fields + KEPT).to(tl.int64)
    if (part == 0) & (snapshot >= 0):
        lane = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        tail = tails + (snapshot - slots) * (_TAPS - 1) * channels + lane
        for tap in tl.static_range(_TAPS - 1):
            position = first + (tap + 1 - _TAPS)
            if position >= start:
                number = (first_row + (tap + 1 - _TAPS)).to(tl.int64)
                value = tl.load(x + number * stride + lane, mask=lane < channels)
            else:
                stored = slot * ring + (position + ring) % ring
                value = tl.load(inputs + stored * channels + lane, mask=lane < channels)
            tl.store(tail + tap * channels, value, mask=lane < channels)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tap in tl.static_range(_TAPS):
        position = first + tl.arange(0, ROWS) + (tap + 1 - _TAPS)
        fresh = position >= start
        number = (first_row + row + (tap + 1 - _TAPS)).to(tl.int64)
        value = tl.load(x + number[:, None] * stride + column, mask=mask & fresh[:, None], other=0)
        if first < start + _TAPS - 1:
            stored = slot * ring + (position + ring) % ring
            older = inputs + stored[:, None] * channels + column
            older = tl.load(older, mask=mask & (fresh == 0)[:, None], other=0)
            value = tl.where(fresh[:, None], value, older)
        factor = tl.load(weight + column * _TAPS + tap, mask=column < channels, other=0.0)
        term = factor.to(tl.float32) * value.to(tl.float32)
        total = term if tap == 0 else total + term
    target = y + (first_row + row).to(tl.int64)[:, None] * channels + column
    tl.store(target, activate(total, _SILU).to(y.dtype.element_ty), mask=mask)


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
    number, start, end, slot = sequence_of(tables, tl.program_id(0))
    if end - start != 1:
        return
    number = number.to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = column < channels
    new = tl.load(x + number * stride + column, mask=there, other=0)
    total = tl.zeros((CHANNELS,), tl.float32)
    for tap in tl.static_range(_TAPS):
        value = new
        if tap < _TAPS - 1:
            stored = slot * ring + (start + (tap + 1 - _TAPS) + ring) % ring
            value = tl.load(inputs + stored * channels + column, mask=there, other=0)
        factor = tl.load(weight + column * _TAPS + tap, mask=there, other=0.0).to(tl.float32)
        term = factor * value.to(tl.float32)
        total = term if tap == 0 else total + term
    tl.store(inputs + (slot * ring + start % ring) * channels + column, new, mask=there)
    result = activate(total, _SILU).to(y.dtype.element_ty)
    tl.store(y + number * channels + column, result, mask=there)


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, state: LinearState, batch: PagedBatch
) -> torch.Tensor:
    """x [M, C], weight [C, 4] -> [M, C] in x's dtype; stores x in the state's ring of inputs.

    Of a run longer than the ring its last rows are stored, and those before each snapshot in its
    tail. Rows that no sequence names are undefined.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tables = Tables.of(batch)
    channels, ring = x.shape[1], state.inputs.shape[1]
    if not len(tables.pieces):
        return y
    read, sizes = (x, weight.contiguous(), y, state.inputs, tables), (x.stride(0), channels, ring)
    if has_rows_alone(batch):
        forms = {"CHANNELS": _ROW_CHANNELS, "num_warps": 4, "enable_fp_fusion": False}
        grid = len(tables.states), cdiv(channels, _ROW_CHANNELS)
        convolve_row[grid](*read, *sizes, **forms, **dependent_launch(x.device))
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
