"""Packed weights for many rows: one producer warp, consumer warpgroups that unpack (Hopper).

    y[r, m, n] = round(root r over sum over k of x[m, l * K + k] * w[l, n, k] + bias[n])
    w          as `chain.py` has it: codes and scales that become numbers in registers

A tile is 64 weight rows for each of two or three consumers, by ROWS rows of x, which they share;
the weight stands on the M side of the matrix instruction, in registers. The producer keeps the
pipeline full across leaves and tiles. While one of two consumers unpacks a step, products of its
last step and the other's run. Three have fewer registers, and unpack by 16 columns. Scales come
from memory ahead of their step, as stored.

A leaf's accumulator stays in registers; the leaf it pairs with, and the sum of earlier parts or
groups, rest in shared memory, where a finished tile leaves from, too. Two levels fit: a root of
groups of two parts does not. Products of experts have one leaf, and a block of rows has an expert
(`experts/sorted_tokens.py`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.gemm.packed import recipes
from tpdet.kernels.cuda.gemm.packed.chain import DENSE, OF_STEP
from tpdet.kernels.cuda.gemm.packed.numbers import (
    LINE_WORDS,
    code_layout,
    numbers,
    ordered_words,
    part_numbers,
    word_layout,
)
from tpdet.kernels.cuda.gemm.variants.chain import keep, send
from tpdet.kernels.cuda.gemm.variants.gated import join
from tpdet.kernels.cuda.gemm.variants.pointer import tile_origin
from tpdet.kernels.cuda.gemm.variants.root_form import RootShape
from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    accumulator_layout,
    allocate_barriers,
    copy_tile,
    expect,
    init_barriers,
    release,
    run_warps,
    slot_of,
    wait_free,
    wait_full,
)
from tpdet.kernels.inputs.gated import GROUP

_GROUP = gl.constexpr(GROUP)
_PARTS = gl.constexpr(4)  # of a step of 64 columns


class WarpPackedForm(NamedTuple):
    """What the kernel is compiled for; as `PackedForm` where names are alike.

    GROUPS: 1, a consumer's. SENT: tiles leave by the accelerator. CONSUMERS: two, or three, which
    unpack by 16 columns and fold no leaves.
    """

    RECIPE: int
    BITS: int
    ROWS: int
    GROUPS: int
    DEPTH: int
    STAGES: int
    SCALE_GROUP: int
    SCALE_ROWS: int
    BIAS: bool
    GATED: int
    ROOT: RootShape
    ODD: bool
    EXPERTS: int
    SENT: bool
    CONSUMERS: int = 2


class PackedPipeline(NamedTuple):
    """What the producer fills: codes [CONSUMERS * STAGES, 1, lines, 32], x [STAGES, ROWS, DEPTH];
    full, free: barriers."""

    codes: Any
    x: Any
    full: Any
    free: Any


class PackedSizes(NamedTuple):
    """m, n, roots: of y; steps: of a leaf. expert_ids: int32, how many blocks of rows there are
    and the expert of each; anything where there are no experts."""

    m: Any
    n: Any
    roots: Any
    steps: Any
    expert_ids: Any


class ScaleRows(NamedTuple):
    """Scales of a leaf and their zero points, as stored: [K / SCALE_GROUP groups, across]; row: a
    consumer's first."""

    scales: Any
    zeros: Any
    across: Any
    row: Any


@gluon.constexpr_function
def registers_of(consumers):
    """Registers of every thread: ptxas holds weights in registers to the fewest of any warp."""
    return 128 if consumers == 3 else 168


@gluon.jit
def _tile_count(sizes, FORM: gl.constexpr):
    wide = gl.cdiv(sizes.n, CONSUMER_ROWS * FORM.CONSUMERS)
    if FORM.EXPERTS != DENSE:
        count = gl.load(sizes.expert_ids + 0) * wide
    else:
        count = sizes.roots * gl.cdiv(sizes.m, FORM.ROWS) * wide
    return count


@gluon.jit
def _locate(tile, sizes, FORM: gl.constexpr):
    """A tile's first leaf or its expert, its root, first row of y, first weight row."""
    LEAVES: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    WIDE_ROWS: gl.constexpr = CONSUMER_ROWS * FORM.CONSUMERS
    wide = gl.cdiv(sizes.n, WIDE_ROWS)
    if FORM.EXPERTS != DENSE:
        block = tile // wide
        matrix = gl.load(sizes.expert_ids + (1 + block))
        root = block * 0
        row = block * FORM.ROWS
        column = tile % wide * WIDE_ROWS
    else:
        blocks = gl.cdiv(sizes.m, FORM.ROWS) * wide
        root = tile // blocks
        matrix = root * LEAVES
        row, column = tile_origin(tile % blocks, sizes.m, sizes.n, FORM.ROWS, WIDE_ROWS)
    return matrix, root, row, column


@gluon.jit
def _produce(code_tiles, x_tiles, pipeline, sizes, FORM: gl.constexpr):
    """The producer warp: all steps of all leaves of all tiles of this program."""
    LEAVES: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    CONSUMERS: gl.constexpr = FORM.CONSUMERS
    LINES: gl.constexpr = FORM.DEPTH * FORM.BITS // 16
    BYTES: gl.constexpr = CONSUMERS * LINES * 128 + FORM.ROWS * FORM.DEPTH * 2
    blocks = gl.cdiv(sizes.n, CONSUMER_ROWS)
    base = 0
    for tile in range(gl.program_id(0), _tile_count(sizes, FORM), gl.num_programs(0)):
        matrix, _, row, column = _locate(tile, sizes, FORM)
        row = row * (0 if FORM.EXPERTS == OF_STEP else 1)
        for leaf in range(LEAVES):
            block = (matrix + leaf) * blocks + column // CONSUMER_ROWS
            depth = (matrix + leaf) * sizes.steps * (FORM.DEPTH if FORM.EXPERTS == DENSE else 0)
            for step in range(sizes.steps):
                slot = slot_of(pipeline.free, base)
                wait_free(pipeline.free, base)
                expect(pipeline.full, slot, BYTES)
                full = pipeline.full.index(slot)
                line = step * LINES
                for consumer in gl.static_range(CONSUMERS):
                    own = pipeline.codes.index(CONSUMERS * slot + consumer)
                    copy_tile(code_tiles, [block + consumer, line, 0], full, own)
                corner = [row, depth + step * FORM.DEPTH]
                copy_tile(x_tiles, corner, full, pipeline.x.index(slot))
                base += 1


@gluon.jit
def _across(sizes, FORM: gl.constexpr):
    """Scales of a group along K."""
    return gl.cdiv(sizes.n, CONSUMER_ROWS) * (CONSUMER_ROWS // FORM.SCALE_ROWS)


@gluon.jit
def _scale_rows(scales, leaf, across, row, sizes, FORM: gl.constexpr):
    """A consumer's scales of a leaf, of those of all leaves and zero points."""
    begin = leaf * (sizes.steps * FORM.DEPTH // FORM.SCALE_GROUP) * across
    return ScaleRows(scales[0] + begin, scales[1] + begin, across, row)


@gluon.jit
def _scales_of(own, step, steps, FORM: gl.constexpr):
    """A step's scales [64, S] where a thread wants them, as stored, with zero points as words.

    They are 0 past the leaf's end.
    """
    S: gl.constexpr = FORM.DEPTH // FORM.SCALE_GROUP if FORM.DEPTH > FORM.SCALE_GROUP else 1
    WORDS: gl.constexpr = FORM.DEPTH * FORM.BITS // 32
    BY_ROW: gl.constexpr = gl.SliceLayout(2, word_layout(1, S, WORDS // S))
    row = own.row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_ROW))
    group = gl.arange(0, S, layout=gl.SliceLayout(0, BY_ROW))
    group += step * FORM.DEPTH // FORM.SCALE_GROUP
    row = row // FORM.SCALE_ROWS
    groups = steps * FORM.DEPTH // FORM.SCALE_GROUP
    inside = (row < own.across)[:, None] & (group < groups)[None, :]
    address = row[:, None] + group[None, :] * own.across
    scales = gl.load(own.scales + address, mask=inside, other=0)
    if recipes.zeroed(FORM.RECIPE):
        words = recipes.scale_words(scales, FORM.RECIPE)
        scales = recipes.with_zeros(words, gl.load(own.zeros + address, mask=inside, other=0))
    return scales


@gluon.jit
def _unpacked(pipeline, consumer, base, scales, FORM: gl.constexpr):
    """A consumer's weight [64, DEPTH] of the pipeline's step `base`, once its codes are there."""
    PASSES: gl.constexpr = FORM.DEPTH * FORM.BITS // 256
    wait_full(pipeline.full, base)
    slot = FORM.CONSUMERS * slot_of(pipeline.full, base) + consumer
    packed = pipeline.codes.index(slot).load(code_layout(1, PASSES))
    if not recipes.zeroed(FORM.RECIPE):
        scales = recipes.scale_words(scales, FORM.RECIPE)
    return numbers(packed, scales, FORM)


@gluon.jit
def _added(weight, pipeline, base, total):
    """total + the product of a step, which is on its way; that of the step before has ended."""
    narrow = pipeline.x.index(slot_of(pipeline.full, base)).permute((1, 0))
    total = warpgroup_mma(weight, narrow, total, is_async=True)
    return warpgroup_mma_wait(1, deps=(total,))


@gluon.jit
def _leaf_chain(pipeline, consumer, base, steps, own, FORM: gl.constexpr):
    """fp32 [64, ROWS]: a leaf's chain, from the pipeline's step `base` on.

    Two sets of weight registers take turns: products read one while the other is made.
    """
    ONE: gl.constexpr = FORM.SCALE_GROUP >= 2 * FORM.DEPTH  # two steps share their scales
    ROWS: gl.constexpr = FORM.ROWS
    total = gl.zeros((CONSUMER_ROWS, ROWS), gl.float32, layout=accumulator_layout(ROWS))
    first = _scales_of(own, 0, steps, FORM)
    second = first if ONE else _scales_of(own, 1, steps, FORM)
    even = _unpacked(pipeline, consumer, base, first, FORM)
    total = _added(even, pipeline, base, total)
    for pair in range((steps - 1) // 2):
        step = 2 * pair
        first = _scales_of(own, step + 2, steps, FORM)
        odd = _unpacked(pipeline, consumer, base + step + 1, second, FORM)
        second = first if ONE else _scales_of(own, step + 3, steps, FORM)
        total = _added(odd, pipeline, base + step + 1, total)
        release(pipeline.free, base + step)
        even = _unpacked(pipeline, consumer, base + step + 2, first, FORM)
        total = _added(even, pipeline, base + step + 2, total)
        release(pipeline.free, base + step + 1)
    last = base + steps - 1
    if not FORM.ODD:
        odd = _unpacked(pipeline, consumer, last, second, FORM)
        total = _added(odd, pipeline, last, total)
        release(pipeline.free, last - 1)
    total = warpgroup_mma_wait(0, deps=(total,))
    release(pipeline.free, last)
    return total


@gluon.jit
def _words_of(pipeline, consumer, base, PASS: gl.constexpr, FORM: gl.constexpr):
    """A consumer's words of a pass of the pipeline's step `base`; the first waits for its codes."""
    if PASS == 0:
        wait_full(pipeline.full, base)
    slot = FORM.CONSUMERS * slot_of(pipeline.full, base) + consumer
    codes = pipeline.codes.index(slot).slice(16 * PASS, 16, 1)
    return ordered_words(codes.load(code_layout(1, 1)), FORM)


@gluon.jit
def _step_added(
    total, words, scales, pipeline, consumer, base, ahead, FIRST: gl.constexpr, FORM: gl.constexpr
):
    """total + the products of a step, of which the last is on its way, and the words of `ahead`.

    words: of the step's first pass. The step before is free, if this is not the FIRST one. The
    assembler moves unpacking, but no load, in front of a product, so codes of 8 bits are loaded by
    32 columns.
    """
    if not recipes.zeroed(FORM.RECIPE):
        scales = recipes.scale_words(scales, FORM.RECIPE)
    x = pipeline.x.index(slot_of(pipeline.full, base))
    for part in gl.static_range(_PARTS):
        if part == 2 and FORM.BITS == 8:
            words = _words_of(pipeline, consumer, base, 1, FORM)
        weight = part_numbers(words, scales, part, FORM)
        narrow = x.slice(16 * part, 16, 1).permute((1, 0))
        total = warpgroup_mma(weight, narrow, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        if part == 0 and not FIRST:
            release(pipeline.free, base - 1)
    return total, _words_of(pipeline, consumer, ahead, 0, FORM)


@gluon.jit
def _leaf_chain_in_parts(pipeline, consumer, base, steps, own, FORM: gl.constexpr):
    """As `_leaf_chain`: 16 columns become numbers while the product of those before runs.

    Words are loaded a step ahead, of the last one once more, as nothing is behind it; scales two or
    three steps ahead.
    """
    ONE: gl.constexpr = FORM.SCALE_GROUP >= 2 * FORM.DEPTH  # two steps share their scales
    ROWS: gl.constexpr = FORM.ROWS
    first = _scales_of(own, 0, steps, FORM)
    last = base + steps - 1
    total = gl.zeros((CONSUMER_ROWS, ROWS), gl.float32, layout=accumulator_layout(ROWS))
    odd = first if ONE else _scales_of(own, 1, steps, FORM)
    even = _scales_of(own, 2, steps, FORM)
    words = _words_of(pipeline, consumer, base, 0, FORM)
    total, words = _step_added(total, words, first, pipeline, consumer, base, base + 1, True, FORM)
    for pair in range((steps - 1) // 2):
        step = base + 2 * pair
        next_odd = even if ONE else _scales_of(own, 2 * pair + 3, steps, FORM)
        next_even = _scales_of(own, 2 * pair + 4, steps, FORM)
        ahead = step + 2
        total, words = _step_added(
            total, words, odd, pipeline, consumer, step + 1, ahead, False, FORM
        )
        ahead = gl.minimum(step + 3, last)
        total, words = _step_added(
            total, words, even, pipeline, consumer, step + 2, ahead, False, FORM
        )
        odd = next_odd
        even = next_even
    if not FORM.ODD:
        total, words = _step_added(total, words, odd, pipeline, consumer, last, last, False, FORM)
    total = warpgroup_mma_wait(0, deps=(total,))
    release(pipeline.free, last)
    return total


@gluon.jit
def _leaf(pipeline, consumer, base, scales, leaf, row, sizes, FORM: gl.constexpr):
    """The sum of a leaf [64, ROWS]. scales: of all leaves, and zero points."""
    own = _scale_rows(scales, leaf, _across(sizes, FORM), row, sizes, FORM)
    return _leaf_chain(pipeline, consumer, base, sizes.steps, own, FORM)


@gluon.jit
def _part(pipeline, consumer, slot, base, scales, leaf, row, sizes, FORM: gl.constexpr):
    """The sum of a part: one leaf or two, of which the first rests in `slot`."""
    total = _leaf(pipeline, consumer, base, scales, leaf, row, sizes, FORM)
    if FORM.ROOT.PAIR == 2:
        keep(slot.permute((1, 0)), total, 0)
        later = _leaf(pipeline, consumer, base + sizes.steps, scales, leaf + 1, row, sizes, FORM)
        total = slot.permute((1, 0)).load(accumulator_layout(FORM.ROWS)) + later
    return total


@gluon.jit
def _folded(pipeline, consumer, slot, rest, base, scales, leaf, row, sizes, FORM: gl.constexpr):
    """A consumer's rows of one tile of one root; a sum that waits for others rests in memory."""
    BY_LANE: gl.constexpr = accumulator_layout(FORM.ROWS)
    TERMS: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS
    PAIR: gl.constexpr = FORM.ROOT.PAIR
    total = _part(pipeline, consumer, slot, base, scales, leaf, row, sizes, FORM)
    if TERMS > 1:
        for term in range(1, TERMS):
            keep(rest.permute((1, 0)), total, 0)
            begin = base + term * PAIR * sizes.steps
            first = leaf + term * PAIR
            later = _part(pipeline, consumer, slot, begin, scales, first, row, sizes, FORM)
            total = rest.permute((1, 0)).load(BY_LANE) + later
    return total


@gluon.jit
def _store_clipped(y, root, row, column, value, m, n):
    """y[root, row:, column:] = value [64, ROWS] of weight rows and rows, clipped at M and N."""
    BY_LANE: gl.constexpr = accumulator_layout(value.shape[1])
    columns = column + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_LANE))
    rows = row + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, BY_LANE))
    here = (columns < n)[:, None] & (rows < m)[None, :]
    to = y + columns[:, None] + ((root * m + rows).to(gl.int64) * n)[None, :]
    gl.store(to, value.to(y.dtype.element_ty), mask=here)


@gluon.jit
def _consume(consumer, pipeline, slot, rests, y_tiles, y, bias, scales, sizes, FORM: gl.constexpr):
    """A consumer warpgroup: its 64 of the weight rows in all tiles of this program."""
    LEAVES: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS * FORM.ROOT.PAIR
    PAIR: gl.constexpr = 2 if FORM.GATED else 1
    rest = rests.index(consumer)
    if FORM.CONSUMERS == 3:
        across = _across(sizes, FORM)
    base = 0
    for tile in range(gl.program_id(0), _tile_count(sizes, FORM), gl.num_programs(0)):
        matrix, root, row, column = _locate(tile, sizes, FORM)
        column += consumer * CONSUMER_ROWS
        # 1. the chains over K, their fold, the bias and the gates
        if FORM.CONSUMERS == 3:
            own = _scale_rows(scales, matrix, across, column, sizes, FORM)
            total = _leaf_chain_in_parts(pipeline, consumer, base, sizes.steps, own, FORM)
        else:
            total = _folded(
                pipeline, consumer, slot, rest, base, scales, matrix, column, sizes, FORM
            )
        base += LEAVES * sizes.steps
        if FORM.BIAS:
            BY_LANE: gl.constexpr = accumulator_layout(FORM.ROWS)
            biased = column + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, BY_LANE))
            own = bias + matrix * sizes.n
            shift = gl.load(own + biased, mask=biased < sizes.n, other=0.0)
            total = total + shift.to(gl.float32)[:, None]
        if FORM.GATED:
            PAIRS: gl.constexpr = CONSUMER_ROWS // (2 * _GROUP)
            ROWS: gl.constexpr = FORM.ROWS
            apart = total.reshape([PAIRS, 2, _GROUP, ROWS]).permute([0, 2, 3, 1])
            gate, up = apart.split()
            total = join(gate, up, FORM.GATED).reshape([CONSUMER_ROWS // 2, ROWS])
        # 2. store the tile: by the accelerator, while the next one is computed, or by threads
        if FORM.SENT:
            keep(slot.permute((1, 0)), total, 0)
            send(slot, y_tiles, [root * sizes.m + row, column // PAIR], column < sizes.n)
        else:
            _store_clipped(y, root, row, column, total, sizes.m, sizes.n)
    if FORM.SENT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "roots", "steps"])
def warp_packed_chain(
    code_tiles,
    x_tiles,
    y_tiles,
    scales,
    zeros,
    y,
    bias,
    expert_ids,
    m,
    n,
    roots,
    steps,
    FORM: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Tiles [64 * CONSUMERS, ROWS] of all roots, or of all blocks of experts, of which a program
    takes every num_programs-th.

    code_tiles [L * blocks, K / 64 * lines, 32] in blocks [1, lines of DEPTH, 32]; x_tiles [M, L *
    K] in blocks [ROWS, DEPTH]; y_tiles: y [roots * M, N] in blocks [ROWS, 64], gated [ROWS, 32];
    bias [L, N]. SENT: m is a multiple of ROWS if there are several roots. num_warps=4.
    """
    # 1. everything earlier in the stream is done
    await_earlier(DEPENDENT)
    # 2. the pipeline, a slot for each consumer's finished tile, and one for sums of groups
    ACROSS: gl.constexpr = CONSUMER_ROWS // 2 if FORM.GATED else CONSUMER_ROWS
    LINES: gl.constexpr = FORM.DEPTH * FORM.BITS // 16
    STAGES: gl.constexpr = FORM.STAGES
    CONSUMERS: gl.constexpr = FORM.CONSUMERS
    ROWS: gl.constexpr = FORM.ROWS
    RESTS: gl.constexpr = FORM.ROOT.GROUPS * FORM.ROOT.PARTS > 1
    USED: gl.constexpr = FORM.SENT or FORM.ROOT.PAIR > 1
    codes = gl.allocate_shared_memory(
        gl.int32, [CONSUMERS * STAGES, 1, LINES, LINE_WORDS], code_tiles.layout
    )
    x = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, FORM.DEPTH], x_tiles.layout)
    HELD: gl.constexpr = ROWS if USED else 8
    slots = gl.allocate_shared_memory(y_tiles.dtype, [CONSUMERS, HELD, ACROSS], y_tiles.layout)
    RESTING: gl.constexpr = ROWS if RESTS else 8
    rests = gl.allocate_shared_memory(y_tiles.dtype, [CONSUMERS, RESTING, ACROSS], y_tiles.layout)
    full = allocate_barriers(STAGES)
    free = allocate_barriers(STAGES)
    init_barriers((full,), (free,), CONSUMERS)
    # 3. the consumers and their producer
    pipeline = PackedPipeline(codes, x, full, free)
    sizes = PackedSizes(m, n, roots, steps, expert_ids)
    REGISTERS: gl.constexpr = registers_of(CONSUMERS)
    run_warps(
        _consume,
        pipeline,
        slots,
        (rests, y_tiles, y, bias, (scales, zeros), sizes, FORM),
        REGISTERS,
        _produce,
        (code_tiles, x_tiles, pipeline, sizes, FORM),
        REGISTERS,
        CONSUMERS,
    )
