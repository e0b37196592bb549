"""The frame of the warp-specialised kernels (Hopper): one producer warp, two or more consumers.

The producer copies tiles into the stages of a pipeline in shared memory, and all consumers, a
warpgroup each, read them. Steps are counted from 0 for as long as a program lives; a step has slot
`step % stages`. Every slot has a barrier `full` (its tiles have arrived) and a barrier `free` (all
consumers are done with it):

    producer                                      consumer
    slot = slot_of(free, step)                    slot = slot_of(full, step)
    wait_free(free, step)                         wait_full(full, step)
    expect(full, slot, BYTES)                     ...  # matrix products read the slot
    copy_tile(tiles, at, full.index(slot), to)    release(free, step)

What lies in a stage stays with each kernel: GEMM waits for both operands at one `full` barrier,
attention for K and V at one each, so that its scores begin while V is still on its way.
"""

from functools import cache

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import builtin

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6
_of_memory = gl.shared_memory_descriptor
reinterpreted = getattr(_of_memory, "reinterpret", None) or _of_memory._reinterpret  # Triton 3.6

CONSUMERS = gl.constexpr(2)
CONSUMER_WARPS = gl.constexpr(4)  # a warpgroup; that of consumer 0 is the launch's num_warps
CONSUMER_ROWS = gl.constexpr(64)  # the height of a warpgroup's matrix instruction
PRODUCER_WARPS = gl.constexpr(1)


@cache
def tile_layout(line: int, bits: int, rank: int = 2) -> gl.NVMMASharedLayout:
    """A tile's layout, of `rank` dimensions: values of `bits` in swizzled lines of `line` bytes."""
    return gl.NVMMASharedLayout(line, bits, rank)


@gluon.constexpr_function
def accumulator_layout(columns):
    """The layout of a product [CONSUMER_ROWS, columns] in registers: 16 rows a warp."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr):
    """One barrier a slot, which `init_barriers` makes ready."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barriers(fulls, frees, RELEASES: gl.constexpr = CONSUMERS):
    """Make all barriers of a pipeline ready: tuples, one for each wait and release of a stage.

    RELEASES: how many times a slot is released.
    """
    STAGES: gl.constexpr = frees[0].shape[0]
    for slot in gl.static_range(STAGES):
        for part in gl.static_range(len(fulls)):
            mbarrier.init(fulls[part].index(slot), count=1)
        for part in gl.static_range(len(frees)):
            mbarrier.init(frees[part].index(slot), count=RELEASES)
    fence_async_shared()


@builtin
def run_warps(
    consume,
    pipeline,
    buffers,
    consumer_arguments,
    consumer_registers,
    produce,
    producer_arguments,
    producer_registers,
    count=CONSUMERS,
    _semantic=None,
    _generator=None,
):
    """Start consume(consumer, pipeline, buffers[consumer], ...) `count` times, produce(...) once.

    Each consumer is a warpgroup and has one of the `buffers` of shared memory for itself. Registers
    are those of a thread. This runs in the compiler: a function of the kernel's language would get
    `consume` as a constant, by which no warps can be started.
    """
    consumers, count = [], count.value
    for consumer in range(count):
        own = buffers.index(consumer, _semantic=_semantic)
        arguments = [gl.constexpr(consumer), pipeline, own, *consumer_arguments]
        consumers.append((consume, gl.tuple(arguments)))
    gl.warp_specialize(
        [*consumers, (produce, producer_arguments)],
        [CONSUMER_WARPS] * (count - 1) + [PRODUCER_WARPS],
        [consumer_registers] * (count - 1) + [producer_registers],
        _semantic=_semantic,
        _generator=_generator,
    )


@builtin
def limit_registers(registers, _semantic=None, _generator=None):
    """Launch the kernel with so many registers a thread, which its warps then share out anew.

    Gluon does not know the launch's `maxnreg`: with `warp_specialize` a program takes all registers
    of a multiprocessor, so that no second one has room there.
    """
    limit = _semantic.builder.get_int32_attr(registers.value)
    _generator.module.set_attr("ttg.maxnreg", limit)


@gluon.jit
def slot_of(barriers, step):
    """The slot of a step; `barriers` are any of the pipeline."""
    return step % barriers.shape[0]


@gluon.jit
def wait_free(free, step):
    """Producer: wait until all consumers are done with a step's slot; round one never waits."""
    mbarrier.wait(free.index(slot_of(free, step)), step // free.shape[0] & 1 ^ 1)


@gluon.jit
def expect(full, slot, BYTES: gl.constexpr):
    """Producer: the slot is full once this many bytes have arrived."""
    mbarrier.expect(full.index(slot), BYTES)


@gluon.jit
def wait_full(full, step):
    """Consumer: wait until the tiles of a step have arrived in its slot."""
    mbarrier.wait(full.index(slot_of(full, step)), step // full.shape[0] & 1)


@gluon.jit
def release(free, step):
    """Consumer: done with a step's slot. One thread says so, after every warp of the group."""
    barrier = free.index(slot_of(free, step))
    tl.debug_barrier()
    mbarrier.arrive(barrier, count=1)
