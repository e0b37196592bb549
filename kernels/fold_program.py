"""Fold expressions compiled to the steps of a stack machine: what the GPU's kernels execute.

    ((l0 + l1) + l2)   ->   read l0 | read l1, add once | read l2, add once, root 0 is complete

A step reads one operand onto the stack and then adds the two uppermost values, left operand first,
as often as it says. A step that completes a root takes its value off the stack. Operands are read
in ascending leaf order. Standard library only; `pointwise/fold.py` has the machine of the kernels.
"""

from collections.abc import Iterable
from functools import cache
from typing import Final, NamedTuple

from tpdet.kernels.order import Expression, FinalExpression, Slot, evaluate

OWN: Final = -1
"""The source of an operand that is one of this rank's own sums."""

UNFINISHED: Final = -1
"""The root of a step that completes none."""


class FoldStep(NamedTuple):
    """One step of a program.

    source: the rank whose slots hold the operand, or OWN; plane: the operand's index among this
    rank's own sums, or among all slots [ranks * slots]; additions: after the operand was read;
    root: the index of the root that is then complete, or UNFINISHED.
    """

    source: int
    plane: int
    additions: int = 0
    root: int = UNFINISHED


class FoldProgram(NamedTuple):
    """The fields of all steps, step after step: one compile-time argument of a kernel.

    A tuple a field, and no tuple of steps: Triton 3.6 forgets the names of fields that lie deeper.
    """

    sources: tuple[int, ...] = ()
    planes: tuple[int, ...] = ()
    additions: tuple[int, ...] = ()
    roots: tuple[int, ...] = ()

    @property
    def steps(self) -> list[FoldStep]:
        """The program step by step."""
        return [FoldStep(*fields) for fields in zip(*self, strict=True)]


NO_FOLD: Final = FoldProgram()


@cache
def own_program(roots: tuple[Expression, ...], first: int = 0) -> FoldProgram:
    """The roots that a rank sends, from its own sums; the sum of leaf `first` is plane 0."""
    return _program(_own_steps(root, first) for root in roots)


@cache
def slot_program(final: FinalExpression, slots: int) -> FoldProgram:
    """The whole fold from everyone's roots [ranks, slots], which are all at hand."""
    steps = evaluate(
        final, lambda slot: [FoldStep(OWN, slot.rank * slots + slot.index)], _then_added
    )
    return _program([steps])


@cache
def rank_program(
    final: FinalExpression, rank: int, roots: tuple[Expression, ...], slots: int
) -> FoldProgram:
    """The whole fold as `rank` sees it: its own roots from its own sums, the others' from slots.

    Own roots need not travel so, and the expression, hence every bit, stays the same.
    """

    def seen(slot: Slot) -> list[FoldStep]:
        if slot.rank == rank:
            return _own_steps(roots[slot.index], 0)
        return [FoldStep(slot.rank, slot.rank * slots + slot.index)]

    return _program([evaluate(final, seen, _then_added)])


def _own_steps(root: Expression, first: int) -> list[FoldStep]:
    return evaluate(root, lambda leaf: [FoldStep(OWN, leaf - first)], _then_added)


def _then_added(left: list[FoldStep], right: list[FoldStep]) -> list[FoldStep]:
    """Evaluate `left`, then `right`, then add the two."""
    *start, last = right
    return [*left, *start, last._replace(additions=last.additions + 1)]


def _program(roots: Iterable[list[FoldStep]]) -> FoldProgram:
    program: list[FoldStep] = []
    for number, (*start, last) in enumerate(roots):
        program += [*start, last._replace(root=number)]
    return FoldProgram(*zip(*program, strict=True))
