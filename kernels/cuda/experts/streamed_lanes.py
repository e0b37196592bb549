"""Lanes of many rows and what a shared expert adds to them, by programs that stay (Hopper).

    lane_g = (..((+0 + w_a * y_a) + w_b * y_b) ..) + leaf_g * s(gate)     as `shared_lanes.py`

    M, k, N   tokens, choices of a token (ids ascend), columns
    L, K      lanes of this rank, inputs of a leaf
    y [P, N], mixed [M, L * K], down [L, N, K]   2-byte values; gate fp32 [M, 1]
    sums      fp32 [R, M, N]: the roots of the rank's fold program over its lanes

A program has 64 rows and every `programs`-th block of 64 columns. What is the same in each block
(the rows' mixed values, where their choices lie, a flag 1 or 0 for each choice and lane) lies in
shared memory, and so does what it reads of the next block (weights, chosen rows) before it comes
there. Rows of `down` are copied in such an order that a thread's accumulators are 8 neighbouring
columns: it reads and writes vectors, and nothing changes its layout.

A product joins its lane by no select but by `fma(product, flag, lane)`. With the flag 1 that is
the rounded sum. With 0 it is the lane as it was: a sum that began at +0 is never -0, so a zero of
either sign leaves it alone. Only a product that is no number, or infinite, would spoil the other
lanes. Every root then holds no finite number, and the program walks its columns once more, adding
where a flag is set.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.experts.lanes import lane_of
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import allocate_barriers, copy_tile, tile_layout
from tpdet.kernels.cuda.pointwise.fold import push_and_add
from tpdet.kernels.cuda.pointwise.gate import opened

copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
ROWS, COLUMNS, WARPS = gl.constexpr(64), gl.constexpr(64), gl.constexpr(8)
VECTOR = gl.constexpr(8)  # neighbouring columns of a thread
_VALUE_BYTES = gl.constexpr(2)


class LaneOperands(NamedTuple):
    """The kernel's tensors, the numbers of rows M and columns N, this rank's first expert, and
    programs of the same rows.

    mixed_tiles: mixed in blocks [64, K]; down_tiles: down [L, 8, N / 16, 2, K], its columns by 2,
    by 16 and by 1, in blocks of all leaves and 64 columns.
    """

    y: Any
    ids: Any
    weights: Any
    positions: Any
    mixed_tiles: Any
    down_tiles: Any
    sums: Any
    rows: Any
    width: Any
    first: Any
    programs: Any


class LaneStages(NamedTuple):
    """What is copied to shared memory: the rows' mixed values [L, ROWS, K], a block's weights
    [L, 8, 4, 2, K] and the rows of y of each half of the choices [k / 2 * ROWS, COLUMNS]; barriers
    of mixed values and weights."""

    mixed: Any
    weights: Any
    chosen: tuple[Any, Any]
    mixed_here: Any
    weights_here: Any


class ChoiceTables(NamedTuple):
    """The rows' choices in shared memory: where the row of y of each begins [k * ROWS], counted in
    vectors of 8 values (-1: none), its weight [k, ROWS] and flags fp32 [k, ROWS, L]."""

    starts: Any
    weights: Any
    flags: Any


@gluon.constexpr_function
def sums_layout():
    """Sums [ROWS, COLUMNS]: 8 neighbouring columns of a thread, of two rows 8 apart."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0], [0, 8]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 64])


@gluon.constexpr_function
def flags_layout(lanes):
    """Flags [ROWS, lanes]: all those of its two rows in every thread."""
    registers = [[0, 1 << bit] for bit in range(lanes.bit_length() - 1)] + [[8, 0]]
    of_rows = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, of_rows, warps, [], [64, lanes])


@gluon.constexpr_function
def chains_layout():
    """A chain [ROWS, COLUMNS] of two warpgroups, 32 columns each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])


@gluon.jit
def by_column(chain):
    """A chain [ROWS, COLUMNS] of weights as `down_tiles` has them, its columns in order."""
    SUMS: gl.constexpr = sums_layout()
    apart = chain.reshape([ROWS, 2, 4, 4, 2]).permute([0, 3, 1, 2, 4])
    return gl.convert_layout(apart.reshape([ROWS, COLUMNS]), SUMS, assert_trivial=True)


@gluon.jit
def _ask_for_rows(stages, operands, first_row):
    """Copy all leaves' mixed values of the program's rows; rows past the end are zeros."""
    LEAVES: gl.constexpr = stages.mixed.shape[0]
    DEPTH: gl.constexpr = stages.mixed.shape[2]
    mbarrier.expect(stages.mixed_here, LEAVES * ROWS * DEPTH * _VALUE_BYTES)
    for leaf in gl.static_range(LEAVES):
        corner = [first_row, leaf * DEPTH]
        copy_tile(operands.mixed_tiles, corner, stages.mixed_here, stages.mixed.index(leaf))


@gluon.jit
def _ask_for_weights(stages, operands, part):
    """Copy all leaves' weights of a block of columns; past the last block those of that one, so
    that no copy needs a branch."""
    block = gl.minimum(part, operands.width // COLUMNS - 1)
    SIZE: gl.constexpr = stages.mixed.shape[0] * COLUMNS * stages.mixed.shape[2]
    mbarrier.expect(stages.weights_here, SIZE * _VALUE_BYTES)
    corner = [0, 0, block * (COLUMNS // 16), 0, 0]
    copy_tile(operands.down_tiles, corner, stages.weights_here, stages.weights)


@gluon.constexpr_function
def choices_of(half, chosen):
    """The first choice of a half, and how many it has; of one choice the second half has none."""
    first = half * ((chosen + 1) // 2)
    return first, (chosen + 1 - half) // 2


@gluon.jit
def _ask_for_choices(stages, tables, operands, part, HALF: gl.constexpr, CHOSEN: gl.constexpr):
    """Copy a block of columns of the rows of a half; zeros where a choice is another rank's, and
    past the last block."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    FIRST: gl.constexpr = choices_of(HALF, CHOSEN)[0]
    COUNT: gl.constexpr = choices_of(HALF, CHOSEN)[1]
    column = part * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPY))[None, :]
    if COUNT > 0:
        starts = tables.starts.slice(FIRST * ROWS, COUNT * ROWS)
        start = starts.load(gl.SliceLayout(1, COPY))[:, None]
        from_row = operands.y + column + start.to(gl.int64) * VECTOR
        here = (start >= 0) & (column < operands.width)
        copy_to_shared(stages.chosen[HALF], from_row, here)
    async_copy.commit_group()


@gluon.jit
def _note_choices(tables, operands, first_row, LEAVES: gl.constexpr, FORM: gl.constexpr):
    """Fill the tables of the rows' choices."""
    FLAGS: gl.constexpr = flags_layout(LEAVES)
    CHOSEN: gl.constexpr = FORM.CHOSEN
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, FLAGS)).to(gl.int64)
    real = row < operands.rows
    lanes = gl.arange(0, LEAVES, layout=gl.SliceLayout(0, FLAGS))[None, :]
    for choice in gl.static_range(CHOSEN):
        choice_index = row * CHOSEN + choice
        position = gl.load(operands.positions + choice_index, mask=real, other=-1)
        expert = gl.load(operands.ids + choice_index, mask=real, other=-1)
        weight = gl.load(operands.weights + choice_index, mask=real, other=0.0)
        own = position >= 0
        lane = lane_of(expert, position, operands.first, FORM.PER_LANE)
        start = gl.where(own, position * (operands.width // VECTOR), -1)
        tables.starts.slice(choice * ROWS, ROWS).store(start)
        tables.weights.index(choice).store(gl.where(own, weight, 0.0))
        tables.flags.index(choice).store(gl.where(lane[:, None] == lanes, 1.0, 0.0))


@gluon.jit
def _flags_of_lanes(flags, LEAVES: gl.constexpr):
    """Flags [ROWS, LEAVES] in shared memory -> of each lane, a tuple [ROWS, 1], in order."""
    SUMS: gl.constexpr = sums_layout()
    parts = (flags.load(flags_layout(LEAVES)),)
    for level in gl.static_range(LEAVES.bit_length() - 1):
        evens = ()
        odds = ()
        for i in gl.static_range(1 << level):
            even, odd = parts[i].reshape([ROWS, LEAVES >> level + 1, 2]).split()
            evens = evens + (even,)  # type: ignore[assignment] # noqa: RUF005
            odds = odds + (odd,)  # type: ignore[assignment] # noqa: RUF005
        parts = evens + odds  # type: ignore[assignment]
    lanes = ()
    for i in gl.static_range(LEAVES):
        lane = gl.convert_layout(
            parts[i].reshape([ROWS]), gl.SliceLayout(1, SUMS), assert_trivial=True
        )
        lanes = lanes + (lane[:, None],)  # type: ignore[assignment] # noqa: RUF005
    return lanes


@gluon.jit
def _with_choices(
    totals, stages, tables, HALF: gl.constexpr, CHOSEN: gl.constexpr, EXACT: gl.constexpr
):
    """The sums of each lane's weighted rows, a tuple [ROWS, COLUMNS] of the lanes, with a half of
    the choices more."""
    SUMS: gl.constexpr = sums_layout()
    FIRST: gl.constexpr = choices_of(HALF, CHOSEN)[0]
    COUNT: gl.constexpr = choices_of(HALF, CHOSEN)[1]
    for i in gl.static_range(COUNT):
        weight = tables.weights.index(FIRST + i).load(gl.SliceLayout(1, SUMS))[:, None]
        finished = stages.chosen[HALF].slice(i * ROWS, ROWS).load(SUMS)
        product = weight * finished.to(gl.float32)
        flags = _flags_of_lanes(tables.flags.index(FIRST + i), len(totals))
        more = ()
        for lane in gl.static_range(len(totals)):
            if EXACT:
                total = gl.where(flags[lane] > 0.0, totals[lane] + product, totals[lane])
            else:
                flag, _ = gl.broadcast(flags[lane], product)
                total = gl.fma(product, flag, totals[lane])
            more = more + (total,)  # type: ignore[assignment] # noqa: RUF005
        totals = more
    return totals


@gluon.jit
def _spoilt(root):
    """NaN where any of a thread's neighbouring values is not finite, else a zero."""
    return gl.sum((root * 0.0).reshape([ROWS, COLUMNS // VECTOR, VECTOR]), 2)


@gluon.jit
def _begin_leaf(stages, LEAF: gl.constexpr):
    """A leaf's chain [ROWS, COLUMNS], which then runs."""
    CHAINS: gl.constexpr = chains_layout()
    LEAVES: gl.constexpr = stages.mixed.shape[0]
    DEPTH: gl.constexpr = stages.mixed.shape[2]
    weights = stages.weights.reshape([LEAVES * COLUMNS, DEPTH])
    w = weights.slice(LEAF * COLUMNS, COLUMNS).permute((1, 0))
    none = gl.zeros((ROWS, COLUMNS), gl.float32, layout=CHAINS)
    return warpgroup_mma(stages.mixed.index(LEAF), w, none, use_acc=False, is_async=True)


@gluon.jit
def _walk(
    stages,
    tables,
    operands,
    factor,
    first_row,
    EXACT: gl.constexpr,
    FORM: gl.constexpr,
    PROGRAM: gl.constexpr,
):
    """All blocks of columns of this program; returns `_spoilt` of its roots, added up.

    EXACT: for the second time.
    """
    SUMS: gl.constexpr = sums_layout()
    LEAVES: gl.constexpr = len(PROGRAM.planes)
    spoilt = _spoilt(gl.zeros((ROWS, COLUMNS), gl.float32, layout=SUMS))
    width, programs = operands.width, operands.programs
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS)).to(gl.int64)[:, None]
    plane = operands.rows.to(gl.int64) * width
    begin = gl.program_id(0) % programs
    turn = 0  # how often weights have been copied and read
    if EXACT:
        turn += gl.cdiv(width // COLUMNS - begin, programs) + 1
    _ask_for_weights(stages, operands, begin)
    for half in gl.static_range(2):
        _ask_for_choices(stages, tables, operands, begin, half, FORM.CHOSEN)
    for part in range(begin, width // COLUMNS, programs):
        column = part * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))[None, :]
        inside = (row < operands.rows) & (column >= 0)
        # 1. each half of the choices; then its rows of the next block are on their way
        totals = ()
        for _ in gl.static_range(LEAVES):
            none = gl.zeros((ROWS, COLUMNS), gl.float32, layout=SUMS)
            totals = totals + (none,)  # type: ignore[assignment] # noqa: RUF005
        for half in gl.static_range(2):
            async_copy.wait_group(1)
            tl.debug_barrier()
            totals = _with_choices(totals, stages, tables, half, FORM.CHOSEN, EXACT)
            tl.debug_barrier()
            _ask_for_choices(stages, tables, operands, part + programs, half, FORM.CHOSEN)
        # 2. a lane is its sum and its leaf; and the fold over lanes
        mbarrier.wait(stages.weights_here, turn & 1)
        turn += 1
        stack = ()
        chain = _begin_leaf(stages, PROGRAM.planes[0])
        for i in gl.static_range(LEAVES):
            if i + 1 < LEAVES:
                later = _begin_leaf(stages, PROGRAM.planes[i + 1])
                ended, chain = warpgroup_mma_wait(1, deps=(chain, later))
            else:
                ended = warpgroup_mma_wait(0, deps=(chain,))
            added = by_column(ended)
            if FORM.GATED:
                added = added * factor
            stack = push_and_add(stack, totals[PROGRAM.planes[i]] + added, PROGRAM.additions[i])
            if PROGRAM.roots[i] >= 0:
                to = operands.sums + (PROGRAM.roots[i] * plane + row * width + column)
                gl.store(to, stack[0], mask=inside)
                spoilt += _spoilt(stack[0])
                stack = stack[1:]
        # 3. every warp is done with the weights
        tl.debug_barrier()
        _ask_for_weights(stages, operands, part + programs)
    # 4. what was asked for too much has come
    async_copy.wait_group(0)
    mbarrier.wait(stages.weights_here, turn & 1)
    tl.debug_barrier()
    return spoilt


@gluon.jit(do_not_specialize=["rows", "first", "programs"])
def stream_lanes(
    y,
    ids,
    weights,
    positions,
    mixed_tiles,
    down_tiles,
    gate,
    sums,
    rows,
    width,
    first,
    gate_stride,
    programs,
    FORM: gl.constexpr,
    PROGRAM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Blocks of 64 rows; `programs` neighbouring programs share one. num_warps=8.

    first: this rank's first expert.
    """
    await_earlier(DEPENDENT)
    LEAVES: gl.constexpr = len(PROGRAM.planes)
    DEPTH: gl.constexpr = FORM.DEPTH
    CHOSEN: gl.constexpr = FORM.CHOSEN
    EARLY: gl.constexpr = choices_of(0, CHOSEN)[1]
    LATER: gl.constexpr = max(1, choices_of(1, CHOSEN)[1])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 2, [1, 0])  # of y, so no bank is read twice
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SUMS: gl.constexpr = sums_layout()
    dtype: gl.constexpr = mixed_tiles.dtype
    operands = LaneOperands(
        y, ids, weights, positions, mixed_tiles, down_tiles, sums, rows, width, first, programs
    )
    first_row = gl.program_id(0) // programs * ROWS
    # 1. what is copied, and when it is here
    stages = LaneStages(
        gl.allocate_shared_memory(dtype, [LEAVES, ROWS, DEPTH], mixed_tiles.layout),
        gl.allocate_shared_memory(dtype, [LEAVES, 8, 4, 2, DEPTH], down_tiles.layout),
        (
            gl.allocate_shared_memory(dtype, [EARLY * ROWS, COLUMNS], ROW),
            gl.allocate_shared_memory(dtype, [LATER * ROWS, COLUMNS], ROW),
        ),
        allocate_barriers(1).index(0),
        allocate_barriers(1).index(0),
    )
    mbarrier.init(stages.mixed_here, count=1)
    mbarrier.init(stages.weights_here, count=1)
    fence_async_shared()
    tl.debug_barrier()
    _ask_for_rows(stages, operands, first_row)
    # 2. what is the same in every block of columns
    tables = ChoiceTables(
        gl.allocate_shared_memory(gl.int32, [CHOSEN * ROWS], LINE),
        gl.allocate_shared_memory(gl.float32, [CHOSEN, ROWS], LINE),
        gl.allocate_shared_memory(gl.float32, [CHOSEN, ROWS, LEAVES], TABLE),
    )
    _note_choices(tables, operands, first_row, LEAVES, FORM)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    factor = gl.full((ROWS, 1), 1.0, gl.float32, layout=SUMS)
    if FORM.GATED:
        scores = gl.load(gate + row.to(gl.int64) * gate_stride, mask=row < rows, other=0.0)
        factor = opened(scores)[:, None]
    tl.debug_barrier()
    mbarrier.wait(stages.mixed_here, 0)
    # 3. all columns; once more if a product was no finite number
    spoilt = _walk(stages, tables, operands, factor, first_row, False, FORM, PROGRAM)
    if gl.sum(gl.sum((spoilt != spoilt).to(gl.int32), 1), 0) > 0:
        _walk(stages, tables, operands, factor, first_row, True, FORM, PROGRAM)


def tile_descriptors(
    mixed: torch.Tensor, down: torch.Tensor
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The kernel's mixed_tiles and down_tiles (`LaneOperands`) of mixed [M, L * K], down [L, N, K].

    Of a block's columns, 16j + 2i + k is found in the order i, j, k.
    """
    held, width, leaf = down.shape
    strides = [width * leaf, 2 * leaf, 16 * leaf, leaf, 1]
    shape, block = ([held, 8, columns // 16, 2, leaf] for columns in (width, COLUMNS.value))
    return (
        TensorDescriptor.from_tensor(mixed, [ROWS.value, leaf], tile_layout(2 * leaf, 16)),
        TensorDescriptor(down, shape, strides, block, tile_layout(2 * leaf, 16, 5)),
    )
