"""Two-kernel decode attention in its first form: what every later variant's bits are held against.

Every tile of a split is walked, every state goes through the workspace, and the merge is a launch
of its own.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.attention.decode import SplitStates
from tpdet.kernels.cuda.attention.operands import attention_call
from tpdet.kernels.cuda.attention.split import (
    PAGE,
    TILE,
    TILES,
    UNSEEN,
    add_tile,
    fresh_state,
    merge_factors,
    row_mass,
    sees,
    sees_split,
)


@triton.jit(do_not_specialize=["widest", "window", "row_count", "row_parts"])
def attend_splits(
    operands,
    states,
    splits,
    rows,
    tables,
    widest,
    window,
    row_count,
    row_parts,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: splits [N, 2] x row parts x key heads; workspaces [N, Hkv, row_count (, D)] fp32.

    A split that no row of its sequence sees is left unwritten, and no merge reads it.
    """
    KEY_HEADS: tl.constexpr = SHAPE.KEY_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD: tl.constexpr = SHAPE.HEAD
    LANES: tl.constexpr = SHAPE.LANES
    WINDOW: tl.constexpr = SHAPE.WINDOW
    head = tl.program_id(0) % KEY_HEADS
    work = tl.program_id(0) // KEY_HEADS
    part = work % row_parts
    pair = work // row_parts
    sequence = tl.load(splits + pair * 2)
    split = tl.load(splits + pair * 2 + 1)
    first_row = tl.load(rows + sequence * 3)
    count = tl.load(rows + sequence * 3 + 1)
    start = tl.load(rows + sequence * 3 + 2)
    row = part * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    low = part * ROWS // GROUP
    high = tl.minimum((part * ROWS + ROWS - 1) // GROUP, count - 1)
    needed = (low < count) & (split * PAGE <= start + high)
    if WINDOW:
        needed = needed & (split * PAGE + (PAGE - 1) > start + low - window)
    if needed:
        lane = tl.arange(0, LANES)
        inside = tl.arange(0, TILE)
        live = token < count
        to = (first_row + token).to(tl.int64)
        column = (head * GROUP + row % GROUP) * HEAD
        mask = live[:, None] & (lane < HEAD)[None, :]
        q_at = operands.q + to[:, None] * operands.q_stride + column[:, None] + lane[None, :]
        query = tl.load(q_at, mask=mask, other=0.0)
        position = start + token
        end = start + high + 1
        page = tl.load(tables + sequence * widest + split).to(tl.int64) * (KEY_HEADS * PAGE * HEAD)
        k_page = operands.k_pages + page + head * PAGE * HEAD
        v_page = operands.v_pages + page + head * PAGE * HEAD
        m, w, o = fresh_state(ROWS, LANES)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            place = tile * TILE + inside
            key = split * PAGE + place
            stored = key < end
            if WINDOW:
                stored = stored & (key > start + low - window)
            k_at = k_page + place[None, :] * HEAD + lane[:, None]
            v_at = v_page + place[:, None] * HEAD + lane[None, :]
            k = tl.load(k_at, mask=stored[None, :] & (lane < HEAD)[:, None], other=0.0)
            v = tl.load(v_at, mask=stored[:, None] & (lane < HEAD)[None, :], other=0.0)
            seen = sees(key[None, :], position[:, None], window, WINDOW)
            m, w, o = add_tile(query, k, v, seen, m, w, o, operands.scale, True)
        at = (pair * KEY_HEADS + head).to(tl.int64) * row_count + row
        tl.store(states.largest + at, m, mask=live)
        tl.store(states.mass + at, row_mass(w), mask=live)
        tl.store(states.total + at[:, None] * HEAD + lane[None, :], o, mask=mask)


@triton.jit(do_not_specialize=["window", "row_count", "short_rows"])
def merge_splits(
    out,
    states,
    short,
    rows,
    window,
    row_count,
    short_rows,
    SHAPE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Grid: short [S, 2] x tokens x query heads: one row's splits in ascending order.

    UNROLL splits are loaded ahead of the chain of merges: their loads overlap.
    """
    KEY_HEADS: tl.constexpr = SHAPE.KEY_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    HEAD: tl.constexpr = SHAPE.HEAD
    LANES: tl.constexpr = SHAPE.LANES
    WINDOW: tl.constexpr = SHAPE.WINDOW
    query_head = tl.program_id(0) % (KEY_HEADS * GROUP)
    work = tl.program_id(0) // (KEY_HEADS * GROUP)
    token = work % short_rows
    sequence = tl.load(short + work // short_rows * 2)
    first_pair = tl.load(short + work // short_rows * 2 + 1)
    first_row = tl.load(rows + sequence * 3)
    count = tl.load(rows + sequence * 3 + 1)
    start = tl.load(rows + sequence * 3 + 2)
    if token < count:
        position = start + token
        lane = tl.arange(0, LANES)
        row = token * GROUP + query_head % GROUP
        at = (first_pair * KEY_HEADS + query_head // GROUP).to(tl.int64) * row_count + row
        end = position // PAGE + 1
        begin = 0
        if WINDOW:
            begin = tl.maximum(position - window + 1, 0) // PAGE
        largest = tl.full((1,), UNSEEN, tl.float32)
        mass = tl.zeros((1,), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        for group in range(begin, end, UNROLL):
            for i in tl.static_range(UNROLL):
                split = group + i + tl.arange(0, 1)
                inside = split < end
                visible = inside & sees_split(split, position, window, WINDOW)
                where = at + split.to(tl.int64) * (KEY_HEADS * row_count)
                m = tl.load(states.largest + where, mask=inside, other=UNSEEN)
                w = tl.load(states.mass + where, mask=inside, other=0.0)
                o_at = states.total + where * HEAD + lane
                o = tl.load(o_at, mask=inside & (lane < HEAD), other=0.0)
                raised, a, b = merge_factors(largest, m)
                mass = tl.where(visible, mass * a + w * b, mass)
                total = tl.where(visible, total * a + o * b, total)
                largest = tl.where(visible, raised, largest)
        result = total * tl.div_rn(1.0, mass) + 0.0
        out_at = out + ((first_row + token).to(tl.int64) * (KEY_HEADS * GROUP) + query_head) * HEAD
        tl.store(out_at + lane, result.to(out.dtype.element_ty), mask=lane < HEAD)


def attend_reference(q, k_pages, v_pages, batch, window, rows=16, warps=4, stages=2):
    """Rows of short sequences [M, Hq, D]; every other row is zero."""
    out = torch.zeros_like(q)
    operands, shape, span, _ = attention_call(q, k_pages, v_pages, out, window, 0.0, None)
    count, splits = batch.short_rows * shape.GROUP, batch.splits.shape[0]
    parts, numbers = triton.cdiv(count, rows), splits * shape.KEY_HEADS * count
    largest, mass = (torch.empty(numbers, dtype=torch.float32, device=q.device) for _ in "lm")
    total = torch.empty(numbers, shape.HEAD, dtype=torch.float32, device=q.device)
    states = SplitStates(largest, mass, total)
    attend_splits[(splits * parts * shape.KEY_HEADS,)](
        operands,
        states,
        batch.splits,
        batch.rows,
        batch.tables,
        batch.tables.shape[1],
        span,
        count,
        parts,
        SHAPE=shape,
        ROWS=rows,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    merge_splits[(batch.short.shape[0] * batch.short_rows * q.shape[1],)](
        out,
        states,
        batch.short,
        batch.rows,
        span,
        count,
        batch.short_rows,
        SHAPE=shape,
        UNROLL=16,
        num_warps=max(1, shape.LANES // 128),
        enable_fp_fusion=False,
    )
    return out
