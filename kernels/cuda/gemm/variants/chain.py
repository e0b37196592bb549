"""A chain over K by a consumer warpgroup of a warp-specialised kernel, stage by stage (Hopper)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tpdet.kernels.cuda.launch.warp_pipeline import (
    CONSUMER_ROWS,
    accumulator_layout,
    release,
    slot_of,
    wait_full,
)


@gluon.jit
def chain(wide, narrow, pipeline, consumer, at, steps, COLUMNS: gl.constexpr):
    """fp32 [CONSUMER_ROWS, COLUMNS] of `steps` stages, from the pipeline's step `at` on.

    wide: the operand of which a stage has CONSUMER_ROWS rows for each consumer, 0 and 1; narrow:
    the one of COLUMNS rows, which both read. A stage is released once the products that read it
    have ended.
    """
    BY_LANE: gl.constexpr = accumulator_layout(COLUMNS)
    total = gl.zeros((CONSUMER_ROWS, COLUMNS), gl.float32, layout=BY_LANE)
    for step in range(at, at + steps):
        slot = slot_of(pipeline.full, step)
        wait_full(pipeline.full, step)
        total = warpgroup_mma(
            wide.index(2 * slot + consumer),
            narrow.index(slot).permute((1, 0)),
            total,
            is_async=True,
        )
        total = warpgroup_mma_wait(1, deps=(total,))
        if step > at:
            release(pipeline.free, step - 1)
    total = warpgroup_mma_wait(0, deps=(total,))
    release(pipeline.free, at + steps - 1)
    return total
