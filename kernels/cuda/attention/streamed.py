"""Decode attention by programs that stay: one warp copies tiles ahead, four add them up (Hopper).

    S       sequences of the batch, of which the short ones have up to `short_rows` rows in a step
    R       rows of an item (ROWS): a token and a query head of the group each
    D       lanes of a head (HEAD)
    k_tiles, v_tiles    the pages [P * Hkv * 256, D] in blocks of [64, D]; k_boxes, v_boxes: [16, D]
                        in fp8 a page has 256 / D more rows, its exponents
    words    the pages of K and of V, as int32 where they are in fp8
    rows [S, 3], tables [S, widest], arrivals [S * Hkv]: int32; states: the workspace, `SplitStates`

`tile_line.py` deals out the splits. Those of an item that one program has merge in registers, one
after another. Else their states go through the workspace, as in `decode.py`, and the program that
completes the item merges all of them, in ascending order. Two programs share a
multiprocessor, or three.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tpdet.kernels.cuda.attention.fp8_tiles import (
    CONVERT_WARPS,
    allocate_factors,
    convert,
    page_rows,
)
from tpdet.kernels.cuda.attention.split import PAGE, TILE, TILES, UNSEEN, sees_split
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

BOX = gl.constexpr(16)  # keys that are copied together at a sequence's end
_BOXES = gl.constexpr(TILE // BOX)
_OUTSIDE = gl.constexpr(1 << 30)  # a row that no pages have: zeros are copied
_CODE_STAGES = gl.constexpr(2)
_AHEAD = gl.constexpr(4)  # splits whose states are loaded ahead of their merge


class StreamedForm(NamedTuple):
    """What `attend_streamed` is compiled for: rows of an item, 8 or 16; LISTED: see `tile_line`.

    PROGRAMS: of a multiprocessor, of which each then has so many registers a thread.
    """

    ROWS: int
    STAGES: int
    LISTED: int
    PROGRAMS: int = 2


@gluon.constexpr_function
def registers_of(programs, fp8):
    """Registers of a thread at the launch, of those that convert, and of the one that copies."""
    if not fp8:
        return 128, 0, 40
    return (80, 48, 40) if programs == 2 else (56, 40, 24)


class StreamedPages(NamedTuple):
    """Pages of sequences, and the pages of K and of V in fp8 as int32."""

    tables: Any
    widest: Any
    words: Any


class PageTiles(NamedTuple):
    """The pages by tiles and by boxes of them."""

    k: Any
    v: Any
    k_boxes: Any
    v_boxes: Any


@gluon.jit
def _allocate_tiles(
    dtype: gl.constexpr, STAGES: gl.constexpr, HEAD: gl.constexpr, LAYOUT: gl.constexpr
):
    """Stages, and barriers by which K and V of each are waited for and released apart."""
    k = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD], LAYOUT)
    v = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD], LAYOUT)
    k_full = allocate_barriers(STAGES)
    v_full = allocate_barriers(STAGES)
    k_free = allocate_barriers(STAGES)
    v_free = allocate_barriers(STAGES)
    init_barriers((k_full, v_full), (k_free, v_free), 1)
    return StreamedTiles(k, v, k_full, v_full, k_free, v_free)


@gluon.jit
def _copy_keys(tiles, boxes, full, stages, slot, row, keys):
    """Ask for a tile of `keys` keys from a row of the pages on; whole boxes behind are zeros."""
    expect(full, slot, tiles.block_type.nbytes)
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
    step = 0
    for sequence in range(line.begin.sequence, end_sequence(line)):
        _row, count, start, splits, begin, end = sequence_of(line, sequence, KEY_HEADS)
        for unit in range(begin, end):
            head = unit // splits
            split = unit - head * splits
            number = gl.load(tables + sequence * widest + split)
            first = (number * KEY_HEADS + head) * page_rows(tiles.k.dtype, SHAPE.HEAD)
            keys = gl.minimum(start + count - split * PAGE, PAGE)
            for tile in range(0, gl.cdiv(keys, TILE)):
                slot = slot_of(pipeline.k_free, step)
                row = first + tile * TILE
                rest = keys - tile * TILE
                wait_free(pipeline.k_free, step)
                _copy_keys(tiles.k, tiles.k_boxes, pipeline.k_full, pipeline.k, slot, row, rest)
                wait_free(pipeline.v_free, step)
                _copy_keys(tiles.v, tiles.v_boxes, pipeline.v_full, pipeline.v, slot, row, rest)
                step += 1


@gluon.jit
def _load_query(operands, first_row, count, head, there, ROWS: gl.constexpr, SHAPE: gl.constexpr):
    """The rows of an item [R, D], if it is there; those past `count` tokens are zeros."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, FLAT))
    lane = gl.arange(0, SHAPE.HEAD, layout=gl.SliceLayout(0, FLAT))
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
def _store_result(operands, mass, total, first_row, head, live, SHAPE: gl.constexpr):
    """An item's rows of the output, from its mass [R] and total [D, R]."""
    ROWS: gl.constexpr = live.shape[0]
    SCORE: gl.constexpr = swapped_layout(ROWS)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SCORE)
    row = gl.arange(0, ROWS, layout=BY_ROW)
    lane = gl.arange(0, SHAPE.HEAD, layout=gl.SliceLayout(1, SCORE))
    one = gl.full((ROWS,), 1.0, gl.float32, layout=BY_ROW)
    result = total * gl.div_rn(one, gl.where(live, mass, 1.0))[None, :] + 0.0
    to = (first_row + row // SHAPE.GROUP).to(gl.int64) * (SHAPE.KEY_HEADS * SHAPE.GROUP)
    to += head * SHAPE.GROUP + row % SHAPE.GROUP
    out_at = operands.out + to[None, :] * SHAPE.HEAD + lane[:, None]
    gl.store(out_at, result.to(operands.out.dtype.element_ty), mask=live[None, :])


@gluon.jit
def _consume(
    pipeline, query, weights, operands, states, arrivals, line, row_count, SHAPE: gl.constexpr
):
    """The four warps that add up: all splits of the part, and the results of its items."""
    KEY_HEADS: gl.constexpr = SHAPE.KEY_HEADS
    HEAD: gl.constexpr = SHAPE.HEAD
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
        rows = StreamedRows(
            query, weights, ones, start + token, start, start + count, operands.scale
        )
        divisor = gl.maximum(splits, 1)
        first_head = begin // divisor
        end_head = gl.cdiv(end, divisor)
        loaded = _load_query(operands, first_row, count, first_head, begin < end, ROWS, SHAPE)
        for head in range(first_head, end_head):
            # 1. rows of q, and of the next key head
            query.store(loaded)
            fence_async_shared()
            tl.debug_barrier()
            more = head + 1 < end_head
            loaded = _load_query(operands, first_row, count, head + 1, more, ROWS, SHAPE)
            low = gl.maximum(begin - head * splits, 0)
            high = gl.minimum(end - head * splits, splits)
            whole = high - low == splits
            first = (pairs * KEY_HEADS + head) * row_count
            largest, mass, total = _fresh(ROWS, HEAD)
            for split in range(low, high):
                # 2. the state of a split
                tiles = gl.minimum(gl.cdiv(start + count, TILE) - split * TILES, TILES)
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
                _store_result(operands, mass, total, first_row, head, live, SHAPE)


@gluon.jit(do_not_specialize=["widest", "sequences", "short_rows"])
def attend_streamed(
    operands,
    k_tiles,
    v_tiles,
    k_boxes,
    v_boxes,
    words,
    states,
    arrivals,
    rows,
    tables,
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
    FP8: gl.constexpr = k_tiles.dtype == gl.uint8
    SHARES: gl.constexpr = registers_of(FORM.PROGRAMS, FP8)
    LAUNCHED: gl.constexpr = SHARES[0]
    CONVERTING: gl.constexpr = SHARES[1]
    COPYING: gl.constexpr = SHARES[2]
    limit_registers(LAUNCHED)
    HEAD: gl.constexpr = SHAPE.HEAD
    LAYOUT: gl.constexpr = number_layout()
    dtype: gl.constexpr = operands.q.dtype.element_ty
    # 1. shared memory: the stages, the rows of an item, the weights of two tiles
    pipeline = _allocate_tiles(dtype, FORM.STAGES, HEAD, LAYOUT)
    query = gl.allocate_shared_memory(dtype, [FORM.ROWS, HEAD], LAYOUT)
    weights = gl.allocate_shared_memory(dtype, [2, FORM.ROWS, TILE], LAYOUT)
    # 2. the warps that add up, and the one that copies
    line = tile_line(rows, sequences, short_rows, SHAPE.KEY_HEADS, FORM.LISTED)
    tiles = PageTiles(k_tiles, v_tiles, k_boxes, v_boxes)
    row_count = short_rows * SHAPE.GROUP
    if FP8:
        # 3. between them those that make numbers of what is copied
        CODES: gl.constexpr = k_tiles.layout
        codes = _allocate_tiles(k_tiles.dtype, _CODE_STAGES, HEAD, CODES)
        pages = StreamedPages(tables, widest, words)
        factors = allocate_factors()
        gl.warp_specialize(
            [
                (
                    _consume,
                    (pipeline, query, weights, operands, states, arrivals, line, row_count, SHAPE),
                ),
                (convert, (codes, pipeline, factors, pages, line, SHAPE)),
                (_produce, (tiles, codes, line, tables, widest, SHAPE)),
            ],
            [CONVERT_WARPS, 1],
            [CONVERTING, COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (pipeline, query, weights, operands, states, arrivals, line, row_count, SHAPE),
                ),
                (_produce, (tiles, pipeline, line, tables, widest, SHAPE)),
            ],
            [1],
            [COPYING],
        )
