"""A fold as the steps of a stack, for the kernels that exchange sums over peer memory.

Operand i of a program is 16 bits of `where`: below 32,768 a plane of this rank's own sums, above
it 32,768 + source rank * slots + slot of what the peers pushed. Its step is 16 bits of `steps`:
the low eight count the additions that follow it, the high eight are a root's number + 1 where one
is finished. Python's integers are as long as they must be; the kernels read them at compile time.

A rank evaluates its own subtrees from its own sums, inside the final expression: they need not
travel, and the expression, hence every bit, stays the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpdet.kernels.order import Expression, FinalExpression, Slot

PEER = 1 << 15
STACK = 7
"""Values the kernels' stack holds: a balanced tree over 64 leaves."""

_DIGIT = 16


@dataclass(frozen=True)
class Program:
    """`count` operands; see the module's text for the digits of `where` and `steps`."""

    count: int
    where: int
    steps: int


def sending(roots: Sequence[Expression]) -> Program:
    """Fold own sums to the roots that a rank sends; root i ends with the digit i + 1."""
    return _program([list(_postfix(root)) for root in roots])


def finishing(
    final: FinalExpression, rank: int, roots: Sequence[Expression], slots: int
) -> Program:
    """The whole fold as `rank` sees it: its own roots over its own sums, the others' by slot."""

    def seen(node: FinalExpression) -> Expression:
        if not isinstance(node, Slot):
            return seen(node[0]), seen(node[1])
        return roots[node.index] if node.rank == rank else PEER + node.rank * slots + node.index

    return _program([list(_postfix(seen(final)))])


def _postfix(node: Expression) -> Iterator[tuple[int, int]]:
    """(operand, additions after it), in ascending leaf order."""
    if isinstance(node, int):
        yield node, 0
        return
    yield from _postfix(node[0])
    *start, (operand, additions) = _postfix(node[1])
    yield from start
    yield operand, additions + 1


def _program(roots: list[list[tuple[int, int]]]) -> Program:
    where: list[int] = []
    steps: list[int] = []
    for number, operands in enumerate(roots, 1):
        _check_depth(operands)
        where += [operand for operand, _ in operands]
        steps += [additions for _, additions in operands]
        steps[-1] += number << 8
    if len(roots) > 255:
        raise ValueError(f"{len(roots)} roots: a rank sends at most 255 over peer memory")
    return Program(len(where), _packed(where), _packed(steps))


def _check_depth(operands: list[tuple[int, int]]) -> None:
    depth = 0
    for _, additions in operands:
        depth += 1
        if depth > STACK:
            raise ValueError(f"a fold {depth} values deep: peer memory takes {STACK}, use gather")
        depth -= additions


def _packed(digits: list[int]) -> int:
    return sum(digit << (_DIGIT * i) for i, digit in enumerate(digits))
