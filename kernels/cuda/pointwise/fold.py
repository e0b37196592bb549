"""Adding leaf sums and subtree roots in the fold's order; fp32, one addition a node.

A program of `kernels/fold_program.py` is known when a kernel is compiled, so its loop is unrolled
and its stack lives in registers. Shapes: C sums [C, ..] of `elements` fp32 values each.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.fold_program import FoldProgram, own_program, slot_program
from tpdet.kernels.order import Expression, FinalExpression

_ELEMENTS = 512


@triton.jit
def push_and_add(stack, value, ADDITIONS: tl.constexpr):
    """The stack machine of every kernel: `value` comes on top, then the two uppermost are added.

    stack: a tuple, its top first; the left operand of an addition is the lower one.
    """
    stack = (value,) + stack  # noqa: RUF005, Triton unpacks no tuple inside another
    for _ in tl.static_range(ADDITIONS):
        stack = (stack[1] + stack[0],) + stack[2:]  # noqa: RUF005
    return stack


@triton.jit
def folded_operands(operands, elements, at, here, PROGRAM: tl.constexpr):
    """The one root of a program, at offsets `at` (int64, any shape) where `here`, in fp32."""
    stack = ()
    for i in tl.static_range(len(PROGRAM.planes)):
        plane = operands + PROGRAM.planes[i] * elements.to(tl.int64)
        value = tl.load(plane + at, mask=here, other=0.0).to(tl.float32)
        stack = push_and_add(stack, value, PROGRAM.additions[i])
    return stack[0]  # type: ignore[misc] # no longer the empty tuple


@triton.jit
def fold_planes(
    operands, y, elements, PROGRAM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """operands [C, elements] -> y [roots, elements], BLOCK elements a program."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < elements
    stack = ()
    for i in tl.static_range(len(PROGRAM.planes)):
        value = tl.load(operands + PROGRAM.planes[i] * elements + at, mask=here, other=0.0)
        stack = push_and_add(stack, value, PROGRAM.additions[i])
        if PROGRAM.roots[i] >= 0:
            tl.store(y + PROGRAM.roots[i] * elements + at, stack[0], mask=here)
            stack = stack[1:]


def fold_roots(
    partials: torch.Tensor, first_leaf: int, roots: tuple[Expression, ...], slots: int
) -> torch.Tensor:
    """Fold a rank's leaves into what it sends.

    partials [L, ...] fp32, leaf `first_leaf + i` at index i -> [slots, ...] fp32; slots that this
    rank does not fill are zero.
    """
    make = torch.empty if len(roots) == slots else torch.zeros
    sent = make(slots, *partials.shape[1:], dtype=torch.float32, device=partials.device)
    _launch(partials, sent, own_program(roots, first_leaf))
    return sent


def fold_final(gathered: torch.Tensor, final: FinalExpression) -> torch.Tensor:
    """gathered [ranks, slots, ...] fp32 -> [...] fp32."""
    total = torch.empty(gathered.shape[2:], dtype=torch.float32, device=gathered.device)
    _launch(gathered.flatten(0, 1), total, slot_program(final, gathered.shape[1]))
    return total


def _launch(operands: torch.Tensor, y: torch.Tensor, program: FoldProgram) -> None:
    elements = operands[0].numel()
    if elements == 0:
        return
    fold_planes[(cdiv(elements, _ELEMENTS),)](
        operands.contiguous(),
        y,
        elements,
        PROGRAM=program,
        BLOCK=_ELEMENTS,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(y.device),
    )
