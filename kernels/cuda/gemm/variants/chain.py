"""A chain over K, stage by stage: a producer warp fills, a consumer warpgroup adds (Hopper).

Of a step, both consumers read the `narrow` operand, and each 64 rows of the `wide` one. Products by
the weight of experts have the weight on the wide side, all others x.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    CONSUMERS,
    accumulator_layout,
    copy_tile,
    expect,
    release,
    slot_of,
    wait_free,
    wait_full,
)

send_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # Triton 3.6
WIDE_ROWS = gl.constexpr(CONSUMERS.value * CONSUMER_ROWS.value)
PRODUCER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)
_VALUE_BYTES = gl.constexpr(2)  # of both operands


class ChainPipeline(NamedTuple):
    """What the producer fills; each slot of `wide` holds one consumer's rows.

    wide [CONSUMERS * STAGES, CONSUMER_ROWS, DEPTH]; narrow [STAGES, COLUMNS, DEPTH]; rest: more
    rows beside the narrow ones [STAGES, REST, DEPTH], or None; full, free: barriers.
    """

    wide: Any
    narrow: Any
    rest: Any
    full: Any
    free: Any


@gluon.jit
def fill(
    pipeline, step, wide_tiles, wide_row, wide_depth, narrow_tiles, rest_tiles, narrow_row, depth
):
    """Producer: copy the operands of a step into its slot, once it is free."""
    COLUMNS: gl.constexpr = pipeline.narrow.shape[1]
    DEPTH: gl.constexpr = pipeline.narrow.shape[2]
    REST: gl.constexpr = 0 if rest_tiles is None else pipeline.rest.shape[1]
    slot = slot_of(pipeline.free, step)
    wait_free(pipeline.free, step)
    expect(pipeline.full, slot, (WIDE_ROWS + COLUMNS + REST) * DEPTH * _VALUE_BYTES)
    full = pipeline.full.index(slot)
    copy_tile(wide_tiles, [wide_row, wide_depth], full, pipeline.wide.index(2 * slot))
    second = [wide_row + CONSUMER_ROWS, wide_depth]
    copy_tile(wide_tiles, second, full, pipeline.wide.index(2 * slot + 1))
    copy_tile(narrow_tiles, [narrow_row, depth], full, pipeline.narrow.index(slot))
    if REST > 0:
        copy_tile(rest_tiles, [narrow_row + COLUMNS, depth], full, pipeline.rest.index(slot))


@gluon.jit
def chain(pipeline, consumer, at, steps, COLUMNS: gl.constexpr):
    """fp32 [CONSUMER_ROWS, COLUMNS] of `steps` stages, from the pipeline's step `at` on.

    A stage is released once the products that read it have ended.
    """
    BY_LANE: gl.constexpr = accumulator_layout(COLUMNS)
    total = gl.zeros((CONSUMER_ROWS, COLUMNS), gl.float32, layout=BY_LANE)
    for step in range(at, at + steps):
        slot = slot_of(pipeline.full, step)
        wait_full(pipeline.full, step)
        wide = pipeline.wide.index(2 * slot + consumer)
        narrow = pipeline.narrow.index(slot).permute((1, 0))
        total = warpgroup_mma(wide, narrow, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        if step > at:
            release(pipeline.free, step - 1)
    total = warpgroup_mma_wait(0, deps=(total,))
    release(pipeline.free, at + steps - 1)
    return total


@gluon.jit
def keep(slot, value, LEAVING: gl.constexpr):
    """slot = value, rounded, once what was there has been sent and read by every warp.

    LEAVING: tiles of other slots of this consumer that may still be on their way.
    """
    tma.store_wait(LEAVING)
    tl.debug_barrier()
    slot.store(value.to(slot.dtype))


@gluon.jit
def send(slot, tiles, at, here):
    """Send what every warp of this consumer keeps in `slot` to `at`, if `here`."""
    fence_async_shared()
    tl.debug_barrier()
    if here:
        send_tile(tiles, at, slot)
