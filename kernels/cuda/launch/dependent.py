"""Dependent launches: a kernel's programs come to the GPU while the kernel before it goes.

    await_earlier(DEPENDENT)                                  # the kernel's first statement
    kernel[grid](.., num_warps=4, **dependent_launch(x.device))

CUDA calls it programmatic dependent launch (PTX: griddepcontrol). From the end of one kernel of a
CUDA graph to the start of the next takes 1.1 us plainly, 0.9 so, and a decode step has about 320.
Order and bits are those of plain launches:

- The programs come when every program of the kernel before has ended, and wait, before they touch
  memory, until everything earlier in the stream has ended and what it wrote is visible to them,
  peers' words that it waited for too. The kernel before has itself waited so: one wait covers all.
- A kernel launched plainly (a library's, torch's) waits for a dependent one as for any other.
- Nothing triggers its successor early but the first of a pair: programs that come early take room
  from programs that still run (2 us slower under decode attention). So every program of the kernel
  before has its room, also one that a peer waits for, and nothing here can block what it waits for.

A pair is two kernels of which neither touches what the other writes:

    with pair_of_launches():    # a small product, then a larger one of the same rows, which comes
        a = column_gemm(x, router)                                              # while it runs
        b = gated_gemm(x, gate_up)
    with pair_of_launches():    # the convolution of single rows, then `advance_late`
        y = short_convolution(x, taps, state, batch)
        o = gated_delta(*heads_of(y), a, b, gates, state, batch)

Once every program of the first has come, and found all that is earlier done, the second may start:
it waits as its programs end. So what follows waits for both, and the memory that the second writes
was free when the first one started. Behind a first one that lets nobody in (a library's product,
packed weights) the second starts as that ends. A second one for which anything else is launched, as
a copy of its operands, waits like all others.

While another stream overlaps this one (`multiprocessors.leaving`), launches are plain: a step then
waits for events between kernels, for which CUDA does not say what a dependent launch does in a
capture, and long kernels gain nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.launch.multiprocessors import all_free

Options = dict[str, int]
_PLAIN: Options = {"DEPENDENT": 0}
ALONE, FIRST, SECOND = 1, 2, 3
"""What DEPENDENT says of a dependent launch: it is no part of a pair, or which part."""
_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)

_turn: ContextVar[int] = ContextVar("turn", default=ALONE)  # of the kernel of pairs that comes next


@triton.jit
def await_earlier(DEPENDENT: tl.constexpr):
    """Wait until all that is earlier in the stream is done and visible; in Triton and in Gluon.

    The second of a pair does not: `await_first` is its last statement.
    """
    if DEPENDENT and DEPENDENT != _SECOND:
        gdc_wait()
    if DEPENDENT == _FIRST:
        gdc_launch_dependents()


@triton.jit
def await_first(DEPENDENT: tl.constexpr):
    """Wait, at the end of the second of a pair, until the first one is done and visible."""
    if DEPENDENT == _SECOND:
        gdc_wait()


def dependent_launch(device: torch.device, turn: int = ALONE) -> Options:
    """Keyword arguments of a launch of a kernel that takes DEPENDENT: dependent where that exists.

    Plain on the CPU (Triton's interpreter) and on GPUs before capability 9. Bits are the same.
    """
    dependent = all_free() and hardware.gpu_of(device).dependent_launches
    return {"DEPENDENT": turn, "launch_pdl": True} if dependent else _PLAIN


@contextmanager
def pair_of_launches() -> Iterator[None]:
    """While inside, the two kernels of a pair are launched, and nothing between them.

    It is of this thread: what others launch meanwhile is in no pair.
    """
    _turn.set(FIRST)
    try:
        yield
    finally:
        _turn.set(ALONE)


def take_turn() -> int:
    """The turn of the product that comes next, or of another kernel that may be a second one."""
    turn = _turn.get()
    if turn != ALONE:
        _turn.set(SECOND if turn == FIRST else ALONE)
    return turn


def take_first_turn() -> int:
    """The turn of a kernel that comes next and is the first of a pair, or alone."""
    return FIRST if take_turn() == FIRST else ALONE
