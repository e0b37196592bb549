"""Adding leaf sums and subtree roots in the fold's order; fp32, one addition a node.

An expression reaches the kernel at compile time as a postfix program of bytes: for each operand,
the number of additions that follow it on a stack (low four bits) and, when a root is finished, its
slot + 1 (high four bits). Operands stand in ascending leaf order in every fold tree.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.order import Expression, FinalExpression, Slot

_STORE = 16  # slot + 1 is counted in this digit of a program byte
_ELEMENTS = 512
_MOST = 127


@triton.jit
def folded_operands(
    operands,
    elements,
    at,
    here,
    COUNT: tl.constexpr,
    WHERE: tl.constexpr,
    PROGRAM: tl.constexpr,
):
    """The one root of a program, at offsets `at` (int64, any shape) where `here`, in fp32."""
    s0 = tl.zeros(at.shape, tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    s4 = s0
    s5 = s0
    for i in tl.static_range(COUNT):
        s5 = s4
        s4 = s3
        s3 = s2
        s2 = s1
        s1 = s0
        base = operands + ((WHERE >> (8 * i)) & 255) * elements.to(tl.int64)
        s0 = tl.load(base + at, mask=here, other=0.0).to(tl.float32)
        for _ in tl.static_range((PROGRAM >> (8 * i)) & 15):
            s0 = s1 + s0
            s1 = s2
            s2 = s3
            s3 = s4
            s4 = s5
    return s0


@triton.jit
def fold_program(
    operands,
    y,
    elements,
    COUNT: tl.constexpr,
    WHERE: tl.constexpr,
    PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Byte i of WHERE: index of operand i in `operands` [.., elements]; of PROGRAM: its step."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < elements
    s0 = tl.zeros((BLOCK,), tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    s4 = s0
    s5 = s0
    for i in tl.static_range(COUNT):
        s5 = s4
        s4 = s3
        s3 = s2
        s2 = s1
        s1 = s0
        s0 = tl.load(operands + ((WHERE >> (8 * i)) & 255) * elements + at, mask=here, other=0.0)
        for _ in tl.static_range((PROGRAM >> (8 * i)) & 15):
            s0 = s1 + s0
            s1 = s2
            s2 = s3
            s3 = s4
            s4 = s5
        if ((PROGRAM >> (8 * i)) & 240) != 0:
            tl.store(y + (((PROGRAM >> (8 * i)) & 240) // 16 - 1) * elements + at, s0, mask=here)


def fold_roots(
    partials: torch.Tensor, first_leaf: int, roots: tuple[Expression, ...], slots: int
) -> torch.Tensor:
    """Fold a rank's leaves into what it sends.

    partials [L, ...] fp32, leaf `first_leaf + i` at index i -> [slots, ...] fp32; slots that this
    rank does not fill are zero.
    """
    where: list[int] = []
    steps: list[int] = []
    for slot, root in enumerate(roots):
        _compile(root, where, steps)
        steps[-1] += (slot + 1) * _STORE
    make = torch.empty if len(roots) == slots else torch.zeros
    sent = make(slots, *partials.shape[1:], dtype=torch.float32, device=partials.device)
    _launch(partials, sent, [leaf - first_leaf for leaf in where], steps)
    return sent


def fold_final(gathered: torch.Tensor, final: FinalExpression) -> torch.Tensor:
    """gathered [ranks, slots, ...] fp32 -> [...] fp32."""
    where: list[int] = []
    steps: list[int] = []
    slots = gathered.shape[1]
    _compile(_flat(final, slots), where, steps)
    steps[-1] += _STORE
    total = torch.empty(gathered.shape[2:], dtype=torch.float32, device=gathered.device)
    _launch(gathered.flatten(0, 1), total, where, steps)
    return total


@cache
def root_program(root: Expression) -> tuple[int, int, int]:
    """COUNT, WHERE and PROGRAM of one root for `folded_operands`. Raises ValueError."""
    where: list[int] = []
    steps: list[int] = []
    _compile(root, where, steps)
    _check(where, steps)
    return len(where), _packed(where), _packed(steps)


def _flat(node: FinalExpression, slots: int) -> Expression:
    """A final expression over indices into [ranks * slots]."""
    if isinstance(node, Slot):
        return node.rank * slots + node.index
    return _flat(node[0], slots), _flat(node[1], slots)


def _compile(node: Expression, where: list[int], steps: list[int]) -> None:
    """Append an expression's operands and the additions after each."""
    if isinstance(node, int):
        where.append(node)
        steps.append(0)
        return
    _compile(node[0], where, steps)
    _compile(node[1], where, steps)
    steps[-1] += 1


def _launch(operands: torch.Tensor, y: torch.Tensor, where: list[int], steps: list[int]) -> None:
    _check(where, steps)
    elements = operands[0].numel()
    if elements == 0:
        return
    fold_program[(triton.cdiv(elements, _ELEMENTS),)](
        operands.contiguous(),
        y,
        elements,
        COUNT=len(where),
        WHERE=_packed(where),
        PROGRAM=_packed(steps),
        BLOCK=_ELEMENTS,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(y.device),
    )


def _check(where: list[int], steps: list[int]) -> None:
    if max(where) > _MOST or max(steps) > 255:
        raise ValueError(f"{len(where)} operands: a fold on the GPU takes at most 15 slots")


def _packed(digits: list[int]) -> int:
    return sum(digit << (8 * i) for i, digit in enumerate(digits))
