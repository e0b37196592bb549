"""The plan of every rank evaluates the very expression of one rank, for any order and size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpdet.kernels import order

LEAVES = st.sampled_from([1, 2, 4, 8, 16, 32])
ORDERS = st.sampled_from(order.FOLD_ORDERS)


def through_plan(plan: order.FoldPlan) -> str:
    """The expression that the ranks evaluate together, written out."""
    sent = [
        [order.evaluate(root, lambda i: f"l{i}", lambda a, b: f"({a}+{b})") for root in roots]
        for roots in plan.roots
    ]
    return order.evaluate(
        plan.final, lambda slot: sent[slot.rank][slot.index], lambda a, b: f"({a}+{b})"
    )


@given(ORDERS, LEAVES, st.integers(0, 5))
def test_every_tensor_parallel_size_evaluates_the_same_expression(name, leaves, power):
    ranks = min(2**power, leaves)
    plan = order.fold_plan(name, leaves, ranks)
    assert through_plan(plan) == order.describe(order.fold_tree(name, leaves))


@given(ORDERS, LEAVES, st.integers(0, 5))
def test_a_rank_sends_only_its_own_leaves_each_once(name, leaves, power):
    ranks = min(2**power, leaves)
    share = leaves // ranks
    for rank, roots in enumerate(order.fold_plan(name, leaves, ranks).roots):
        seen = []
        for root in roots:
            order.evaluate(root, seen.append, lambda a, b: None)
        assert seen == list(range(rank * share, (rank + 1) * share))


@given(LEAVES, ORDERS)
def test_summing_rank_results_in_rank_order_is_another_expression(leaves, name):
    """Negative control: adding each rank's chain in rank order is not what one rank does."""
    if leaves < 4:
        return
    half = leaves // 2
    naive = (order._chain(range(half)), order._chain(range(half, leaves)))
    single = order.fold_tree("sequential", leaves)
    assert order.describe(naive) != order.describe(single)


def test_partials_on_the_wire_are_those_of_the_documentation():
    sent = {
        name: [order.fold_plan(name, 8, ranks).slots for ranks in (2, 4, 8)]
        for name in order.FOLD_ORDERS
    }
    assert sent == {"sequential": [4, 2, 1], "pairs": [2, 1, 1], "tree": [1, 1, 1]}
    for name in order.FOLD_ORDERS:
        assert len(order.fold_plan(name, 8, 2).roots[0]) == 1


def test_by_default_a_rank_sends_one_partial_at_every_size():
    """What the default is chosen for; it is the only such order."""
    one = [
        name
        for name in order.FOLD_ORDERS
        if all(order.fold_plan(name, 8, ranks).slots == 1 for ranks in (1, 2, 4, 8))
    ]
    assert one == [order.DEFAULT_FOLD_ORDER] == ["tree"]


def test_pairs_is_a_chain_of_pairs():
    expression = order.describe(order.fold_tree("pairs", 8))
    assert expression == "((((l0+l1)+(l2+l3))+(l4+l5))+(l6+l7))"


def test_an_unfit_size_is_refused_with_the_sizes_that_fit():
    with pytest.raises(ValueError, match="size 3 does not divide 8 leaves: use one of 1, 2, 4, 8"):
        order.fold_plan("pairs", 8, 3)
    with pytest.raises(ValueError, match="fold order 'ring'"):
        order.fold_tree("ring", 8)
    with pytest.raises(ValueError, match="6 leaves"):
        order.fold_tree("tree", 6)


@pytest.mark.parametrize(
    ("heads", "reduced", "limit", "leaves"),
    [
        (8, (512, 1408), 8, 8),
        (32, (4096, 12288), 8, 8),
        (32, (4096, 12288), 16, 16),
        (14, (896, 4864), 8, 2),
        (8, (512, 16 * 4 * 3), 8, 4),
        (7, (448, 448), 8, 1),
    ],
)
def test_leaves_follow_from_the_model_alone(heads, reduced, limit, leaves):
    assert order.leaf_count(heads, reduced, limit) == leaves


def test_a_reduced_dimension_that_is_no_multiple_of_16_is_refused():
    with pytest.raises(ValueError, match="1000 is not a multiple of 16"):
        order.leaf_count(8, (1000,))


def test_the_contract_id_changes_with_every_part_of_the_contract():
    base = {"device": "cpu", "dtype": "float32", "leaves": 8, "fold_order": "pairs"}
    changed = [{"dtype": "bfloat16"}, {"leaves": 4}, {"fold_order": "tree"}, {"device": "cuda"}]
    ids = [order.Contract(**base | change).identifier for change in [{}, *changed]]
    assert len({*ids}) == len(ids)
    assert order.Contract(**base).identifier == ids[0]
