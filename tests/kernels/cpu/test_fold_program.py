"""Programs of a stack machine say what the expressions say that they were compiled from."""

import pytest

from tpdet.kernels import order
from tpdet.kernels.fold_program import (
    OWN,
    UNFINISHED,
    FoldStep,
    own_program,
    rank_program,
    slot_program,
)
from tpdet.kernels.order import describe, evaluate, fold_plan, fold_tree
from tpdet.kernels.partial_sums import relative_roots


def run(program, read):
    """What a stack machine makes of a program: expressions by root number, in words."""
    stack, roots = [], {}
    for step in program.steps:
        stack.append(read(step))
        for _ in range(step.additions):
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
        if step.root != UNFINISHED:
            assert step.root not in roots
            roots[step.root] = stack.pop()
    assert not stack
    return [roots[number] for number in range(len(roots))]


def test_a_program_is_written_out():
    assert own_program(((3, (4, 5)), 6), 3).steps == [
        FoldStep(OWN, 0),
        FoldStep(OWN, 1),
        FoldStep(OWN, 2, additions=2, root=0),
        FoldStep(OWN, 3, root=1),
    ]


@pytest.mark.parametrize("name", order.FOLD_ORDERS)
@pytest.mark.parametrize("leaves", [8, 64, 256])
def test_every_rank_evaluates_the_whole_tree(name, leaves):
    whole = describe(fold_tree(name, leaves))
    for ranks in (1, 2, 4, 8):
        plan, share = fold_plan(name, leaves, ranks), leaves // ranks
        by_slot = {
            rank * plan.slots + index: describe(root)
            for rank, roots in enumerate(plan.roots)
            for index, root in enumerate(roots)
        }
        found = run(slot_program(plan.final, plan.slots), lambda step, at=by_slot: at[step.plane])
        assert found == [whole]
        for rank in range(ranks):
            first, wanted = rank * share, [describe(root) for root in plan.roots[rank]]
            relative = relative_roots(plan.roots[rank])
            own = lambda step, first=first: f"l{first + step.plane}"
            assert run(own_program(relative), own) == wanted
            assert run(own_program(plan.roots[rank], first), own) == wanted

            def seen(step, own=own, by_slot=by_slot, plan=plan):
                if step.source == OWN:
                    return own(step)
                assert step.plane // plan.slots == step.source
                return by_slot[step.plane]

            program = rank_program(plan.final, rank, relative, plan.slots)
            assert run(program, seen) == [whole]
            assert {step.source for step in program.steps} == {OWN, *range(ranks)} - {rank}


def test_steps_read_in_the_order_of_the_expression():
    for name in order.FOLD_ORDERS:
        seen = []
        evaluate(fold_tree(name, 16), seen.append, lambda left, right: None)
        assert [step.plane for step in own_program((fold_tree(name, 16),)).steps] == seen
