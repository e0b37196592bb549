"""The launches of decode attention, their workspace and the counters of a fused merge."""

from functools import cache

import torch

from tpdet.kernels.cuda.attention.decode import DecodeForm, SplitStates, attend_splits
from tpdet.kernels.cuda.attention.merge_splits import merge_splits
from tpdet.kernels.cuda.attention.operands import AttentionCall, exponent_lines, page_tiles
from tpdet.kernels.cuda.attention.streamed import BOX, PROGRAMS, StreamedForm, attend_streamed
from tpdet.kernels.cuda.attention.streamed_codes import LATER
from tpdet.kernels.cuda.attention.variants import (
    STREAMED_HEADS,
    WARP_SPECIALISED_TYPES,
    AttentionVariant,
)
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import TILE_TOKENS

_LEAST_CHUNK, _CHUNK_VALUES = 32, 1 << 14  # splits, and fp32 values, that a merge loads together
_MERGE_UNROLL = 16
_MERGE_VALUES = 48  # fp32 values of states that a thread of a fused merge loads ahead
_MERGE_WARPS = 4  # what the layouts of `merge_splits` are made for
_WARP_THREADS = 32
_LEAST_LISTED = 128  # sequences: fewer have the kernel of so many
_LEAST_ARRIVALS = 1 << 14


def launch_decode(call: AttentionCall, batch: PagedBatch, variant: AttentionVariant) -> None:
    """Splits in parallel, then their merge, into the call's `out`.

    Each call makes its fp32 workspace. Raises RuntimeError in a graph's capture of a merge in the
    launch whose counters no earlier call made, ValueError where the variant is streamed and has no
    kernel for the head, the type, the rows of a sequence, a window, a cap or sinks.
    """
    if not batch.splits.shape[0]:
        return
    device, shape = call.operands.q.device, call.shape
    count = batch.splits.shape[0] * shape.KEY_HEADS * batch.short_rows * shape.GROUP
    largest, mass = (torch.empty(count, dtype=torch.float32, device=device) for _ in "lm")
    total = torch.empty(count, shape.HEAD, dtype=torch.float32, device=device)
    states = SplitStates(largest, mass, total)
    if variant.streamed:
        _launch_streamed(call, batch, variant, states)
        return
    _launch_splits(call, batch, variant, states)
    if not variant.fused:
        _launch_merge(call, batch, states)


def _launch_splits(
    call: AttentionCall, batch: PagedBatch, variant: AttentionVariant, states: SplitStates
) -> None:
    """Every split's state; where the variant is fused, out too."""
    operands, shape, window, cap = call
    device, row_count = operands.q.device, batch.short_rows * shape.GROUP
    row_parts = cdiv(row_count, variant.rows)
    arrivals = batch.splits
    if variant.fused:
        arrivals = arrival_counters(batch.rows.shape[0] * row_parts * shape.KEY_HEADS, device)
    attend_splits[(batch.splits.shape[0] * row_parts * shape.KEY_HEADS,)](
        operands,
        states,
        arrivals,
        batch.splits,
        batch.rows,
        batch.tables,
        batch.tables.shape[1],
        window,
        row_count,
        row_parts,
        shape,
        decode_form(variant, row_count, shape.LANES),
        cap,
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )


def _launch_streamed(
    call: AttentionCall, batch: PagedBatch, variant: AttentionVariant, states: SplitStates
) -> None:
    """All splits and their merge, by programs that stay, into the call's `out`."""
    _check_streamed(call, batch.short_rows, variant)
    operands, shape, _, _ = call
    device, sequences = operands.q.device, batch.rows.shape[0]
    fp8 = operands.k_pages.dtype == torch.uint8
    form = streamed_form(variant, sequences)
    boxes = page_tiles(call, BOX.value)
    programs = PROGRAMS * multiprocessors(device)
    attend_streamed[(min(programs, batch.splits.shape[0] * shape.KEY_HEADS),)](
        operands,
        *page_tiles(call, TILE_TOKENS),
        *boxes,
        *(exponent_lines(call) if fp8 else boxes),
        states,
        arrival_counters(sequences * shape.KEY_HEADS, device),
        (batch.rows, batch.tables),
        batch.tables.shape[1],
        sequences,
        batch.short_rows,
        shape,
        form,
        num_warps=variant.warps,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )


def _check_streamed(call: AttentionCall, short_rows: int, variant: AttentionVariant) -> None:
    q, shape, rows = call.operands.q, call.shape, short_rows * call.shape.GROUP
    more = shape.WINDOW or shape.SINKS or call.cap is not None or rows > variant.rows
    fp8 = call.operands.k_pages.dtype == torch.uint8
    more = more or (fp8 and (q.dtype == torch.float16 or variant.stages <= LATER.value))
    if more or shape.HEAD not in STREAMED_HEADS or q.dtype not in WARP_SPECIALISED_TYPES:
        raise ValueError(
            f"streamed attention of {rows} rows of {q.dtype} heads of {shape.HEAD}: it has up to "
            f"{variant.rows} rows, heads of {STREAMED_HEADS}, one of {WARP_SPECIALISED_TYPES}, "
            f"without window, soft-cap and sinks, and pages in fp8 of bf16 alone, by more stages "
            f"than {LATER.value}"
        )


def _launch_merge(call: AttentionCall, batch: PagedBatch, states: SplitStates) -> None:
    """All states of a row to its result, a program a row."""
    (_, _, _, out, sinks, _, _), shape, window, _ = call
    average = batch.splits.shape[0] // max(1, batch.short.shape[0])
    merge_splits[(batch.short.shape[0] * batch.short_rows * out.shape[1],)](
        out,
        states,
        sinks,
        batch.short,
        batch.rows,
        window,
        batch.short_rows * shape.GROUP,
        batch.short_rows,
        shape,
        merge_chunk(average, shape.LANES),
        num_warps=_MERGE_WARPS,
        enable_fp_fusion=False,
        **dependent_launch(out.device),
    )


def merge_chunk(splits: int, lanes: int) -> int:
    """How many splits the merge loads together, where a sequence has `splits` on average."""
    return max(_LEAST_CHUNK, min(next_power_of_2(splits), _CHUNK_VALUES // lanes))


@cache
def decode_form(variant: AttentionVariant, row_count: int, lanes: int) -> DecodeForm:
    """What a variant compiles the split kernel for, with `row_count` rows of a sequence."""
    fused = variant.fused
    merged = min(variant.rows, next_power_of_2(row_count)) if fused else 1
    ahead = _MERGE_VALUES * _WARP_THREADS * variant.warps // (merged * lanes)
    unroll = max(1, min(ahead, _MERGE_UNROLL)) if fused else 1
    return DecodeForm(variant.rows, variant.stages, variant.swapped, fused, merged, unroll)


@cache
def streamed_form(variant: AttentionVariant, sequences: int) -> StreamedForm:
    """What a variant compiles the streamed kernel for, with so many sequences in the batch."""
    listed = max(_LEAST_LISTED, next_power_of_2(sequences))
    return StreamedForm(variant.rows, variant.stages, listed)


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` or more int32 counters, zero before and after every launch, of one stream."""
    return _counters(max(next_power_of_2(count), _LEAST_ARRIVALS), device)


@cache
def _counters(size: int, device: torch.device) -> torch.Tensor:
    """Kept for good: captured graphs hold its address. Raises RuntimeError inside a capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run attention of this shape once before it is captured in a graph")
    return torch.zeros(size, dtype=torch.int32, device=device)
