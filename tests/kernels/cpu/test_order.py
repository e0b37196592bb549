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
    ("units", "leaves", "edges"),
    [
        (8, 8, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
        (32, 8, (0, 4, 8, 12, 16, 20, 24, 28, 32)),
        (9, 8, (0, 1, 2, 3, 4, 5, 6, 7, 9)),
        (14, 8, (0, 1, 3, 5, 7, 8, 10, 12, 14)),
        (28, 8, (0, 3, 7, 10, 14, 17, 21, 24, 28)),
        (3, 8, (0, 0, 0, 1, 1, 1, 2, 2, 3)),
        (28, 4, (0, 7, 14, 21, 28)),
    ],
)
def test_leaves_follow_from_the_model_alone(units, leaves, edges):
    cut = order.cut_leaves(units, 64, leaves)
    assert cut.edges == tuple(64 * edge for edge in edges)
    assert cut.equal == (units % leaves == 0)
    assert cut.alike == (units % leaves == 0 or units < leaves)
    assert len(cut.empty) == max(0, leaves - units)
    widths = cut.widths(range(leaves))
    assert sum(widths) == 64 * units and max(widths) - min(widths) <= 64


@given(ORDERS, st.integers(0, 3), st.sets(st.integers(0, 7), max_size=7))
def test_an_empty_leaf_is_no_operand_at_any_size(name, power, empty):
    ranks = 2**power
    share = 8 // ranks
    if any({*range(rank * share, (rank + 1) * share)} <= empty for rank in range(ranks)):
        with pytest.raises(ValueError, match="holds none of the leaves"):
            order.fold_plan(name, 8, ranks, tuple(sorted(empty)))
        return
    gone = tuple(sorted(empty))
    plan = order.fold_plan(name, 8, ranks, gone)
    alone = order.fold_plan(name, 8, 1, gone)
    assert through_plan(plan) == through_plan(alone)
    held = [leaf for roots in plan.roots for root in roots for leaf in order.operands(root)]
    assert held == [leaf for leaf in range(8) if leaf not in empty]
    assert plan.slots <= order.fold_plan(name, 8, ranks).slots


def test_a_sum_with_an_empty_side_is_the_other_side():
    cases = {
        "tree": "(l1+((l4+l5)+l6))",
        "pairs": "((l1+(l4+l5))+l6)",
        "sequential": "(((l1+l4)+l5)+l6)",
    }
    for name, wanted in cases.items():
        assert through_plan(order.fold_plan(name, 8, 1, (0, 2, 3, 7))) == wanted
    zero = -0.0
    values = {1: zero, 4: zero, 5: zero, 6: zero}
    (root,) = order.fold_plan("tree", 8, 1, (0, 2, 3, 7)).roots[0]
    kept = order.evaluate(root, values.__getitem__, lambda a, b: a + b)
    added = order.evaluate(
        order.fold_tree("tree", 8), lambda i: values.get(i, 0.0), lambda a, b: a + b
    )
    assert str(kept) == "-0.0" and str(added) == "0.0"


def test_equal_leaves_keep_their_contract_id_and_unequal_ones_have_their_own():
    base = {"device": "cpu", "dtype": "float32", "leaves": 8, "fold_order": "tree"}
    old = order.Contract(**base).identifier
    cuts = {heads: order.cut_leaves(heads, 64, 8).edges for heads in (8, 32, 9, 14, 4)}
    down = order.cut_leaves(96, 16, 8).edges

    def named(heads, **more):
        edges = (("attention", cuts[heads]), ("down", down))
        return order.Contract(**base | more, edges=edges).identifier

    assert named(8) == named(32) == old
    assert len({old, named(9), named(14), named(4)}) == 4
    uneven = (("attention", cuts[8]), ("down", order.cut_leaves(13, 16, 8).edges))
    assert order.Contract(**base, edges=uneven).identifier != old
    assert named(9, row_layers="gather") == named(8, row_layers="gather")


def test_only_models_with_linear_layers_name_them(monkeypatch):
    base = {"device": "cpu", "dtype": "float32", "leaves": 8, "fold_order": "tree"}
    dense = "8cb72b5b54055d05a6f9078ae132e062342f1bd41d7f5be0598c15dc1edd203f"
    assert order.Contract(**base).identifier == dense, "ids of other families stay"
    linear = order.Contract(**base, linear=True).identifier
    assert linear != dense
    monkeypatch.setattr(order, "LINEAR_GOLDEN_SHA256", "0" * 64)
    assert order.Contract(**base, linear=True).identifier != linear
    assert order.Contract(**base).identifier == dense


def test_the_contract_id_changes_with_every_part_of_the_contract():
    base = {"device": "cpu", "dtype": "float32", "leaves": 8, "fold_order": "pairs"}
    changed = [{"dtype": "bfloat16"}, {"leaves": 4}, {"fold_order": "tree"}, {"device": "cuda"}]
    ids = [order.Contract(**base | change).identifier for change in [{}, *changed]]
    assert len({*ids}) == len(ids)
    assert order.Contract(**base).identifier == ids[0]
