"""Two levels: ranks on several nodes evaluate the very expression of one level, and its bits."""

import json
from contextlib import nullcontext

import pytest
import torch

from tests.comm.node_cases import folds_as_one_level, leaves_of, mine
from tests.lib import forked
from tests.lib.bits import assert_same_bits
from tests.lib.ports import free_port
from tests.lib.thread_world import run_threads
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.node import NodeExchange
from tpdet.comm.exchange.open import open_exchange
from tpdet.comm.world.nodes import open_nodes, split_nodes
from tpdet.errors import PeerLostError, UsageError
from tpdet.kernels import ops, order
from tpdet.kernels.node_plan import node_plan
from tpdet.kernels.partial_sums import gathered_sums
from tpdet.launch.ranks.node_name import NODE_VARIABLE

pytestmark = pytest.mark.long

SHAPES = [(2, 1), (2, 2), (2, 4), (4, 2), (2, 8)]
"""Nodes, and ranks of each."""
CASES = [
    (*shape, leaves) for leaves in (8, 16) for shape in SHAPES if leaves >= shape[0] * shape[1]
]


def through_levels(plan: order.FoldPlan, nodes: int) -> str:
    """The expression that ranks and nodes evaluate together, written out."""
    levels = node_plan(plan, nodes)

    def joined(a: str, b: str) -> str:
        return f"({a}+{b})"

    by_rank = [[order.describe(root) for root in roots] for roots in plan.roots]
    by_node = [
        [
            order.evaluate(
                root, lambda slot, n=node: by_rank[n * levels.ranks + slot.rank][slot.index], joined
            )
            for root in roots
        ]
        for node, roots in enumerate(levels.inside)
    ]
    return order.evaluate(levels.across, lambda slot: by_node[slot.rank][slot.index], joined)


@pytest.mark.parametrize("name", order.FOLD_ORDERS)
@pytest.mark.parametrize(("nodes", "ranks", "leaves"), CASES)
def test_two_levels_evaluate_the_expression_of_one(name, nodes, ranks, leaves):
    plan = order.fold_plan(name, leaves, nodes * ranks)
    assert through_levels(plan, nodes) == order.describe(order.fold_tree(name, leaves))


@pytest.mark.parametrize("name", order.FOLD_ORDERS)
@pytest.mark.parametrize(("nodes", "ranks", "leaves"), CASES)
def test_a_node_sends_what_a_rank_with_its_leaves_would(name, nodes, ranks, leaves):
    levels = node_plan(order.fold_plan(name, leaves, nodes * ranks), nodes)
    assert [len(roots) for roots in levels.inside] == [
        len(roots) for roots in order.fold_plan(name, leaves, nodes).roots
    ]


def test_partials_between_nodes_are_counted():
    """A node sends one partial of a tree; of a chain, the nodes after the first send several."""
    sent = {
        name: [node_plan(order.fold_plan(name, 16, 16), nodes).sent for nodes in (2, 4, 8)]
        for name in order.FOLD_ORDERS
    }
    assert sent == {"sequential": [8, 4, 2], "pairs": [4, 2, 1], "tree": [1, 1, 1]}


def test_summing_nodes_in_node_order_is_another_expression():
    """Negative control: a chain of each node's own chain is not what one level does."""
    plan = order.fold_plan("sequential", 8, 4)
    naive = "((((l0+l1)+l2)+l3)+(((l4+l5)+l6)+l7))"
    assert through_levels(plan, 2) != naive
    assert through_levels(order.fold_plan("tree", 4, 4), 2) == "((l0+l1)+(l2+l3))"


@pytest.mark.parametrize("name", order.FOLD_ORDERS)
def test_empty_leaves_are_in_neither_level(name):
    for heads in (4, 5, 7):
        empty = order.cut_leaves(heads, 64, 8).empty
        whole = order.fold_plan(name, 8, 1, empty)
        ((alone,),) = whole.roots
        for nodes in (1, 2, 4):
            found = through_levels(order.fold_plan(name, 8, 4, empty), nodes)
            assert found == order.describe(alone)


def test_nodes_that_hold_no_whole_subtrees_are_refused():
    plan = order.fold_plan("tree", 8, 4)
    with pytest.raises(ValueError, match="4 ranks on 3 nodes"):
        node_plan(plan, 3)
    a, b, c, d = plan.roots
    scattered = order.FoldPlan(8, (a, c, b, d), plan.final)
    with pytest.raises(ValueError, match=r"node 0 of 2 holds leaves \[0, 1, 4, 5\] of 8"):
        node_plan(scattered, 2)


@pytest.mark.parametrize(("nodes", "ranks", "leaves"), CASES)
def test_two_levels_give_the_bits_of_one(nodes, ranks, leaves):
    run_threads(nodes * ranks, lambda world: folds_as_one_level(world, nodes, leaves))


def test_the_bit_cases_would_notice_another_order():
    """Negative control: the leaves' values tell the three orders apart."""
    values = leaves_of(8, 3)
    found = [
        order.evaluate(order.fold_tree(name, 8), values.__getitem__, torch.add)
        for name in order.FOLD_ORDERS
    ]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_what_travels_between_nodes_is_folded_before():
    """Of a tree a node's one partial travels, in one operation; of many rows only a slice's."""
    seen = {}

    def look(world):
        plan = order.fold_plan("tree", 8, 4)
        nodes = split_nodes(world, 2)
        gather = nodes.across.all_gather
        shapes = seen.setdefault(world.rank, [])
        nodes.across.all_gather = lambda x: (shapes.append(tuple(x.shape)), gather(x))[1]
        for limit in (100, 1):
            NodeExchange(plan, nodes, sliced_rows=limit).everyones(
                mine(plan, leaves_of(8, 8), world)
            )

    run_threads(4, look)
    assert seen == {rank: [(1, 8, 16), (1, 4, 16)] for rank in range(4)}


class CountedColumns:
    """Stands for peer memory inside a node: columns of a part's ranks, and the calls."""

    def __init__(self, inside):
        self.inside, self.calls, self.rows = inside, [], []
        self.carrier = self

    def gather_columns(self, x):
        self.rows.append(len(x))
        return self.inside.all_gather(x).transpose(0, 1).reshape(len(x), -1)

    def rehearsal(self):
        return nullcontext(self.calls.append("rehearsal"))

    def report(self):
        self.calls.append("report")

    def check(self):
        self.calls.append("check")

    def set_timeout(self, seconds):
        self.calls.append(seconds)


@pytest.mark.parametrize("name", order.FOLD_ORDERS)
def test_few_rows_go_over_the_peer_memory_of_the_node_and_its_losses_are_reported(name):
    def check(world):
        nodes, plan = split_nodes(world, 2), order.fold_plan(name, 8, 4)
        peers = CountedColumns(nodes.inside)
        exchange = NodeExchange(plan, nodes, peers, sliced_rows=8)
        for rows in (1, 3, 8):
            values = leaves_of(8, rows)
            whole = order.evaluate(order.fold_tree(name, 8), values.__getitem__, torch.add)
            sums = exchange.everyones(mine(plan, values, world))
            assert_same_bits(ops.fold_roots(sums, 1)[0], whole)
        assert peers.rows == [plan.slots, 3 * plan.slots]
        exchange.carrier.report()
        exchange.carrier.check()
        exchange.carrier.set_timeout(3.0)
        with exchange.carrier.rehearsal():
            assert peers.calls == ["report", "check", 3.0, "rehearsal"]

    run_threads(4, check)


def test_several_nodes_choose_two_levels_and_one_does_not():
    plan = order.fold_plan("pairs", 8, 4)

    def chosen(transport):
        def made(world):
            return type(
                open_exchange(transport, plan, world, 64, 16, torch.float32, torch.device("cpu"))
            )

        return made

    for transport in ("auto", "gather"):
        for local_size, wanted in ((2, NodeExchange), (4, GatherExchange), (1, GatherExchange)):
            assert {*run_threads(4, chosen(transport), local_size=local_size)} == {wanted}
    with pytest.raises(UsageError, match="use --transport gather"):
        run_threads(4, chosen("peer"), local_size=2)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((0, 1, 0, 1), "ranks 0, 2 on node node0 and ranks 1, 3 on node node1"),  # dealt in turn
        ((0, 0, 0, 1, 1), "ranks 0, 1, 2 on node node0 and ranks 3, 4 on node node1"),
        ((0, 0, 1, 1, 0, 0, 1, 1), "ranks 0, 1, 4, 5 on node node0 and ranks 2, 3, 6, 7 on node "),
    ],
)
def test_ranks_that_do_not_lie_node_by_node_take_one_level_and_say_so(caplog, nodes, said):
    assert run_threads(len(nodes), open_nodes, nodes=nodes) == [None] * len(nodes)
    (record,) = caplog.records
    assert said in record.getMessage() and "with the same bits" in record.getMessage()
    assert "--distribution=block" in record.getMessage()


def test_nodes_are_known_by_name_and_neither_by_order_nor_by_local_ranks(caplog):
    """The second node may come first, and one node's ranks be dealt out to its sockets."""

    def opened(world):
        world.local_rank = (2, 0, 3, 1)[world.local_rank]  # nobody looks
        found = open_nodes(world)
        return found and (found.inside.rank, found.inside.size, found.across.rank)

    blocks = [(rank % 4, 4, rank // 4) for rank in range(8)]
    assert run_threads(8, opened, nodes=(1, 1, 1, 1, 0, 0, 0, 0)) == blocks
    assert run_threads(4, opened) == [None] * 4 and not caplog.records  # one node
    assert run_threads(3, opened, nodes=(0, 0, 1)) == [None] * 3 and not caplog.records


def test_a_parts_local_ranks_are_those_of_its_ranks_on_one_node():
    def places(world):
        part = world.part([[0, 1, 2], [3, 4, 5]])
        return part.local_rank, part.local_size

    in_turn = [(0, 2), (0, 1), (1, 2), (0, 1), (0, 2), (1, 2)]
    assert run_threads(6, places, nodes=(0, 1, 0, 1, 0, 0)) == in_turn
    assert run_threads(6, places) == [(0, 3), (1, 3), (2, 3)] * 2


def test_a_part_breaks_and_waits_with_the_whole():
    def function(world):
        part = world.part([[0, 1], [2, 3]])
        world.set_timeout(5.0)
        assert part.timeout == 5.0
        with world.without_peers():
            assert not part.all_gather(torch.ones(2)).any()
        assert part.all_gather(torch.tensor(world.rank)).tolist() == [
            world.rank // 2 * 2,
            world.rank // 2 * 2 + 1,
        ]
        with pytest.raises(ValueError, match="not cut again"):
            part.part([[0], [1]])
        with pytest.raises(ValueError, match="name each rank once"):
            world.part([[0, 1]])
        if world.rank == 3:
            raise ArithmeticError("rank 3 has had enough")
        with pytest.raises(PeerLostError, match="rank 3 ended"):
            part.barrier()  # ranks 0 and 1 come through here, and are told by the whole
            world.barrier()

    with pytest.raises(ArithmeticError, match="had enough"):
        run_threads(4, function)


def start_gloo(folder, nodes: int, ranks: int, leaves: int, places=None) -> list[dict]:
    """What the ranks of `nodes` pretended nodes report, who read the launcher's environment.

    places: the node and local rank of each rank; blocks, if not given.
    """
    size = nodes * ranks
    places = places or [divmod(rank, ranks) for rank in range(size)]
    shared = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "GROUP_WORLD_SIZE": str(nodes),
    }  # fmt: skip
    files = [folder / f"{rank}.json" for rank in range(size)]
    started = []
    try:
        for rank, file in enumerate(files):
            node, local = places[rank]
            place = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
            place[NODE_VARIABLE] = ("left", "right")[node] if nodes == 2 else f"node{node}"
            started.append(
                forked.forked(
                    "tests.comm.node_rank",
                    *(file, nodes, leaves),
                    environment=shared | place,
                    outputs=[folder / f"{rank}.log"] * 2,
                )
            )
        assert forked.exit_codes(started) == [0] * size
    finally:
        forked.end(started)
    return [json.loads(file.read_text()) for file in files]


def test_two_nodes_of_two_on_gloo(tmp_path):
    for rank, report in enumerate(start_gloo(tmp_path, 2, 2, 8)):
        assert report["exchange"] == "NodeExchange" and report["bits"] == "same"
        operation = {2: "barrier among 2 ranks of a part", 3: None}.get(rank, "barrier")
        lost = f"rank {rank} of 4 lost a peer in {operation} after" if operation else ""
        assert report["lost"].startswith(lost) and bool(report["lost"]) == bool(lost)


@pytest.mark.parametrize(
    ("places", "exchange"),
    [
        # Nodes of neighbours, dealt out within: what differs is shown by threads above.
        pytest.param([(0, 1), (0, 0), (1, 1), (1, 0)], "NodeExchange", marks=pytest.mark.slow),
        pytest.param([(0, 0), (1, 0), (0, 1), (1, 1)], "GatherExchange", marks=pytest.mark.slow),
        pytest.param([(1, 1), (0, 1), (0, 0), (1, 0)], "GatherExchange", marks=pytest.mark.slow),
    ],
)
def test_ranks_dealt_out_otherwise_have_the_same_bits_on_gloo(tmp_path, places, exchange):
    for report in start_gloo(tmp_path, 2, 2, 8, places):
        assert report["exchange"] == exchange and report["bits"] == "same"


def test_two_ranks_with_one_local_rank_are_refused_by_all_where_they_meet(tmp_path):
    with pytest.raises(AssertionError):
        start_gloo(tmp_path, 2, 2, 8, [(0, 0), (0, 0), (1, 0), (1, 1)])
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    wanted = (
        "UsageError: the launcher contradicts itself about node left, where 2 of 4 ranks are: rank "
        "0 says local rank 0 of 2, rank 1 says local rank 0 of 2: a node's local ranks count from"
    )
    assert all(wanted in log for log in logs), logs


@pytest.mark.slow
def test_two_nodes_of_eight_on_gloo_with_sixteen_leaves(tmp_path):
    for report in start_gloo(tmp_path, 2, 8, 16):
        assert report["exchange"] == "NodeExchange" and report["bits"] == "same"


def test_fold_roots_of_a_node_reads_no_unused_slot():
    """NaN in slots that a rank does not fill must not reach a sum."""
    plan = order.fold_plan("pairs", 8, 4)
    levels = node_plan(plan, 2)
    inside = torch.full((2, levels.slots + 1, 3, 4), float("nan"))
    inside[:, : levels.slots] = 1.0
    for roots in levels.inside:
        assert torch.isfinite(ops.fold_roots(gathered_sums(inside, *roots), len(roots))).all()
