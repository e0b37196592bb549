"""Decode attention by programs that stay: one warp copies tiles ahead, four add them up (Hopper).

    S       sequences of the batch, of which the short ones have up to `short_rows` rows in a step
    R       rows of an item (ROWS): a token and a query head of the group each
    D       lanes of a head (HEAD)
    k_tiles, v_tiles    the pages [P * Hkv * 256, D] in blocks of [64, D]; k_boxes, v_boxes: [16, D]
                        in fp8 pairs of lanes, int16 [64, D / 2], and a page has 256 / D more rows
    k_exponents, v_exponents    pages in fp8 as bytes in blocks of [1, 64]; else any
    lists    rows [S, 3] and tables [S, widest], int32, as is arrivals [S * Hkv]
    states   the workspace, `SplitStates`

`tile_line.py` deals out the splits. Those of an item that one program has merge in registers, one
after another. Else their states go through the workspace, as in `decode.py`, and the program that
completes the item merges all of them, in ascending order. Two programs share a
multiprocessor.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tpdet.kernels.cuda.attention.fp8_tiles import (
    EXPONENT_LINES,
    EXPONENTS,
    page_rows,
    placed_lanes,
    raised_query,
)
from tpdet.kernels.cuda.attention.split import PAGE, TILE, TILES, UNSEEN, sees_split
from tpdet.kernels.cuda.attention.streamed_codes import coded_split
from tpdet.kernels.cuda.attention.streamed_split import (
    StreamedRows,
    StreamedTiles,
    merge_swapped,
    number_layout,
    streamed_split,
    swapped_layout,
)
from tpdet.kernels.cuda.attention.tile_line import end_sequence, sequence_of, tile_line
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import (
    allocate_barriers,
    copy_tile,
    expect,
    init_barriers,
    limit_registers,
    slot_of,
    wait_free,
)

PROGRAMS = 2  # of a multiprocessor
REGISTERS, COPYING_REGISTERS = gl.constexpr(128), gl.constexpr(40)  # of a thread
BOX = gl.constexpr(16)  # keys that are copied together at a sequence's end
_BOXES = gl.constexpr(TILE // BOX)
_OUTSIDE = gl.constexpr(1 << 30)  # a row that no pages have: zeros are copied
_AHEAD = gl.constexpr(4)  # splits whose states are loaded ahead of their merge


class StreamedForm(NamedTuple):
    """What `attend_streamed` is compiled for: rows of an item, 8 or 16; LISTED: see `tile_line`."""

    ROWS: int
    STAGES: int
    LISTED: int


class PageTiles(NamedTuple):
    """The pages by tiles, by boxes of them, and by exponents."""

    k: Any
    v: Any
    k_boxes: Any
    v_boxes: Any
    k_exponents: Any
    v_exponents: Any


@gluon.jit
def _allocate_tiles(tiles, STAGES: gl.constexpr):
    """Stages, and barriers by which K and V of each are waited for and released apart."""
    ACROSS: gl.constexpr = tiles.k.block_type.shape[1]
    k = gl.allocate_shared_memory(tiles.k.dtype, [STAGES, TILE, ACROSS], tiles.k.layout)
    v = gl.allocate_shared_memory(tiles.k.dtype, [STAGES, TILE, ACROSS], tiles.k.layout)
    k_full = allocate_barriers(STAGES)
    v_full = allocate_barriers(STAGES)
    k_free = allocate_barriers(STAGES)
    if tiles.k.dtype == gl.int16:
        LINES: gl.constexpr = tiles.k_exponents.layout
        exponents = gl.allocate_shared_memory(gl.uint8, [STAGES, EXPONENT_LINES, EXPONENTS], LINES)
        v_free = k_free
        init_barriers((k_full, v_full), (k_free,), 1)
    else:
        exponents = k
        v_free = allocate_barriers(STAGES)
        init_barriers((k_full, v_full), (k_free, v_free), 1)
    return StreamedTiles(k, v, exponents, k_full, v_full, k_free, v_free)


@gluon.jit
def _copy_keys(tiles, boxes, full, stages, slot, row, keys, MORE: gl.constexpr):
    """Ask for a tile of `keys` keys from a row of the pages on; whole boxes behind are zeros.

    MORE: bytes that will come beside it.
    """
    expect(full, slot, tiles.block_type.nbytes + MORE)
    if keys > TILE - BOX:
        copy_tile(tiles, [row, 0], full.index(slot), stages.index(slot))
    else:
        for box in gl.static_range(_BOXES):
            first = gl.where(box * BOX < keys, row + box * BOX, _OUTSIDE)
            part = stages.index(slot).slice(box * BOX, BOX)
            copy_tile(boxes, [first, 0], full.index(slot), part)


@gluon.jit
def _produce(tiles, pipeline, line, tables, widest, SHAPE: gl.constexpr):
    """The copying warp: all tiles of the program's part, one after another."""
    KEY_HEADS: gl.constexpr = SHAPE.KEY_HEADS
    FP8: gl.constexpr = tiles.k.dtype == gl.int16
    MORE: gl.constexpr = 2 * EXPONENTS * FP8
    step = 0
    for sequence in range(line.begin.sequence, end_sequence(line)):
        _row, count, start, splits, begin, end = sequence_of(line, sequence, KEY_HEADS)
        for unit in range(begin, end):
            head = unit // splits
            split = unit - head * splits
            number = gl.load(tables + sequence * widest + split)
            page_of_head = number * KEY_HEADS + head
            first = page_of_head * page_rows(SHAPE.HEAD, FP8)
            keys = gl.minimum(start + count - split * PAGE, PAGE)
            for tile in range(0, gl.cdiv(keys, TILE)):
                slot = slot_of(pipeline.k_free, step)
                row = first + tile * TILE
                rest = keys - tile * TILE
                wait_free(pipeline.k_free, step)
                full = pipeline.k_full
                _copy_keys(tiles.k, tiles.k_boxes, full, pipeline.k, slot, row, rest, MORE)
                if FP8:
                    line_at = (
                        page_of_head * (EXPONENTS // 16 * (SHAPE.HEAD + 1)) + SHAPE.HEAD * 4 + tile
                    )
                    lines = pipeline.exponents.index(slot)
                    copy_tile(tiles.k_exponents, [line_at, 0], full.index(slot), lines.slice(0, 1))
                    copy_tile(tiles.v_exponents, [line_at, 0], full.index(slot), lines.slice(2, 1))
                wait_free(pipeline.v_free, step)
                full = pipeline.v_full
                _copy_keys(tiles.v, tiles.v_boxes, full, pipeline.v, slot, row, rest, 0)
                step += 1


@gluon.jit
def _load_query(
    operands,
    first_row,
    count,
    head,
    there,
    ROWS: gl.constexpr,
    SHAPE: gl.constexpr,
    FP8: gl.constexpr,
):
    """The rows of an item [R, D], if it is there; those past `count` tokens are zeros."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, FLAT))
    lane = placed_lanes(SHAPE.HEAD, gl.SliceLayout(0, FLAT), FP8)
    token = row // SHAPE.GROUP
    column = (head * SHAPE.GROUP + row % SHAPE.GROUP) * SHAPE.HEAD
    line = (first_row + token).to(gl.int64) * operands.q_stride + column
    live = (token < count) & there
    return gl.load(operands.q + line[:, None] + lane[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def _fresh(ROWS: gl.constexpr, HEAD: gl.constexpr):
    """The state of an item before its first split: largest, mass [R] and total [D, R]."""
    SCORE: gl.constexpr = swapped_layout(ROWS)
    largest = gl.full((ROWS,), UNSEEN, gl.float32, layout=gl.SliceLayout(0, SCORE))
    mass = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(0, SCORE))
    return largest, mass, gl.zeros((HEAD, ROWS), gl.float32, layout=SCORE)


@gluon.jit
def _merge_item(states, first, stride, splits, position, live, HEAD: gl.constexpr):
    """Mass [R] and total [D, R] of an item, whose states other programs wrote too.

    first, stride: where its states stand, from row 0 of split 0 on.
    """
    ROWS: gl.constexpr = live.shape[0]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORE))
    lane = gl.arange(0, HEAD, layout=gl.SliceLayout(1, SCORE))
    largest, mass, total = _fresh(ROWS, HEAD)
    for group in range(0, splits, _AHEAD):
        for i in gl.static_range(_AHEAD):
            split = group + i
            inside = live & (split < splits)
            visible = inside & sees_split(split, position, 0, False)
            state = (first + split * stride + row).to(gl.int64)
            o_at = states.total + state[None, :] * HEAD + lane[:, None]
            m = gl.load(states.largest + state, mask=inside, other=UNSEEN, cache_modifier=".cg")
            w = gl.load(states.mass + state, mask=inside, other=0.0, cache_modifier=".cg")
            o = gl.load(o_at, mask=inside[None, :], other=0.0, cache_modifier=".cg")
            largest, mass, total = merge_swapped(largest, mass, total, visible, m, w, o)
    return mass, total


@gluon.jit
def _store_result(
    operands, mass, total, first_row, head, live, SHAPE: gl.constexpr, FP8: gl.constexpr
):
    """An item's rows of the output, from its mass [R] and total [D, R]."""
    ROWS: gl.constexpr = live.shape[0]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SCORE)
    row = gl.arange(0, ROWS, layout=BY_ROW)
    lane = placed_lanes(SHAPE.HEAD, gl.SliceLayout(1, SCORE), FP8)
    one = gl.full((ROWS,), 1.0, gl.float32, layout=BY_ROW)
    result = total * gl.div_rn(one, gl.where(live, mass, 1.0))[None, :] + 0.0
    to = (first_row + row // SHAPE.GROUP).to(gl.int64) * (SHAPE.KEY_HEADS * SHAPE.GROUP)
    to += head * SHAPE.GROUP + row % SHAPE.GROUP
    out_at = operands.out + to[None, :] * SHAPE.HEAD + lane[:, None]
    gl.store(out_at, result.to(operands.out.dtype.element_ty), mask=live[None, :])


@gluon.jit
def _consume(
    pipeline,
    query,
    weights,
    exchange,
    operands,
    states,
    arrivals,
    line,
    row_count,
    SHAPE: gl.constexpr,
    FORM: gl.constexpr,
):
    """The four warps that add up: all splits of the part, and the results of its items."""
    KEY_HEADS: gl.constexpr = SHAPE.KEY_HEADS
    HEAD: gl.constexpr = SHAPE.HEAD
    FP8: gl.constexpr = pipeline.k.dtype == gl.int16
    ROWS: gl.constexpr = query.shape[0]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    ones = gl.full((TILE, TILE), 1.0, query.dtype, layout=OPERAND)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORE))
    lane = gl.arange(0, HEAD, layout=gl.SliceLayout(1, SCORE))
    stride = KEY_HEADS * row_count  # of the states of splits
    step = 0
    for sequence in range(line.begin.sequence, end_sequence(line)):
        first_row, count, start, splits, begin, end = sequence_of(line, sequence, KEY_HEADS)
        pairs = gl.where(sequence == line.begin.sequence, line.begin.pairs, line.end.pairs)
        token = row // SHAPE.GROUP
        live = token < count
        divisor = gl.maximum(splits, 1)
        first_head = begin // divisor
        end_head = gl.cdiv(end, divisor)
        there = begin < end
        loaded = _load_query(operands, first_row, count, first_head, there, ROWS, SHAPE, FP8)
        for head in range(first_head, end_head):
            # 1. rows of q, and of the next key head
            lack = operands.scale
            if FP8:
                loaded, lack = raised_query(loaded, gl.SliceLayout(0, SCORE))
            query.store(loaded)
            fence_async_shared()
            tl.debug_barrier()
            more = head + 1 < end_head
            loaded = _load_query(operands, first_row, count, head + 1, more, ROWS, SHAPE, FP8)
            rows = StreamedRows(
                query,
                lack,
                weights,
                exchange,
                ones,
                start + token,
                start,
                start + count,
                operands.scale,
            )
            low = gl.maximum(begin - head * splits, 0)
            high = gl.minimum(end - head * splits, splits)
            whole = high - low == splits
            first = (pairs * KEY_HEADS + head) * row_count
            largest, mass, total = _fresh(ROWS, HEAD)
            for split in range(low, high):
                # 2. the state of a split
                tiles = gl.minimum(gl.cdiv(start + count, TILE) - split * TILES, TILES)
                if FP8:
                    m, w, o = coded_split(rows, pipeline, step, split, tiles)
                else:
                    m, w, o = streamed_split(rows, pipeline, step, split, tiles, BOX)
                step += tiles
                # 3. merge it, or leave it to the program that completes the item
                if whole:
                    visible = live & sees_split(split, start + token, 0, False)
                    largest, mass, total = merge_swapped(largest, mass, total, visible, m, w, o)
                else:
                    state = (first + split * stride + row).to(gl.int64)
                    o_at = states.total + state[None, :] * HEAD + lane[:, None]
                    gl.store(states.largest + state, m, mask=live)
                    gl.store(states.mass + state, w, mask=live)
                    gl.store(o_at, o, mask=live[None, :])
            # 4. arrive; the last program to do so merges all splits. A part that lies inside one
            #    split arrives with none: should it find all there, it writes the same result again
            complete = whole
            if not whole:
                tl.debug_barrier()  # all states of this program come before its arrival
                arrival = arrivals + (sequence * KEY_HEADS + head)
                arrived = gl.atomic_add(arrival, high - low, sem="acq_rel")
                complete = arrived + high - low == splits
                if complete:
                    gl.store(arrival, 0)
                    mass, total = _merge_item(
                        states, first, stride, splits, start + token, live, HEAD
                    )
            # 5. the result
            if complete:
                _store_result(operands, mass, total, first_row, head, live, SHAPE, FP8)


@gluon.jit(do_not_specialize=["widest", "sequences", "short_rows"])
def attend_streamed(
    operands,
    k_tiles,
    v_tiles,
    k_boxes,
    v_boxes,
    k_exponents,
    v_exponents,
    states,
    arrivals,
    lists,
    widest,
    sequences,
    short_rows,
    SHAPE: gl.constexpr,
    FORM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs. `arrivals` is zero before and after. num_warps=4.

    There is no window, no cap and no sink.
    """
    await_earlier(DEPENDENT)
    FP8: gl.constexpr = k_tiles.dtype == gl.int16
    limit_registers(REGISTERS)
    HEAD: gl.constexpr = SHAPE.HEAD
    LAYOUT: gl.constexpr = number_layout()
    dtype: gl.constexpr = operands.q.dtype.element_ty
    # 1. shared memory: the stages, the rows of an item, the weights of two tiles
    tiles = PageTiles(k_tiles, v_tiles, k_boxes, v_boxes, k_exponents, v_exponents)
    pipeline = _allocate_tiles(tiles, FORM.STAGES)
    query = gl.allocate_shared_memory(dtype, [FORM.ROWS, HEAD], LAYOUT)
    exchange = query
    if FP8:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        exchange = gl.allocate_shared_memory(gl.float32, [4, FORM.ROWS], FLAT)
        SIZE: gl.constexpr = [2, 2 * FORM.ROWS, TILE]
        weights = gl.allocate_shared_memory(dtype, SIZE, LAYOUT)
    else:
        weights = gl.allocate_shared_memory(dtype, [2, FORM.ROWS, TILE], LAYOUT)
    # 2. the warps that add up, and the one that copies
    line = tile_line(lists[0], sequences, short_rows, SHAPE.KEY_HEADS, FORM.LISTED)
    row_count = short_rows * SHAPE.GROUP
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    pipeline,
                    query,
                    weights,
                    exchange,
                    operands,
                    states,
                    arrivals,
                    line,
                    row_count,
                    SHAPE,
                    FORM,
                ),
            ),
            (_produce, (tiles, pipeline, line, lists[1], widest, SHAPE)),
        ],
        [1],
        [COPYING_REGISTERS],
    )
