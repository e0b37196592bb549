"""What every rank of a world on several nodes must find: the bits of one level, and of one rank."""

import torch

from tests.lib.bits import assert_same_bits
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.node import NodeExchange
from tpdet.comm.world.nodes import split_nodes
from tpdet.comm.world.world import World
from tpdet.kernels import ops, order
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, relative_roots

COLUMNS = 16
ROWS = (1, 3, 8)


def leaves_of(count: int, rows: int) -> torch.Tensor:
    """fp32 [count, rows, COLUMNS] whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(rows)
    scale = 10.0 ** torch.arange(count).remainder(5).view(-1, 1, 1)
    return torch.randn(count, rows, COLUMNS, generator=generator) * scale


def mine(plan: order.FoldPlan, leaves: torch.Tensor, world: World) -> PartialSums:
    """This rank's leaves and roots."""
    share = plan.leaves // world.size
    first = world.rank * share
    return PartialSums(leaves[first : first + share], relative_roots(plan.roots[world.rank]))


def folds_as_one_level(world: World, nodes: int, leaves: int) -> None:
    """Sums, residual stream and norm, of few rows and of sliced ones, in every fold order."""
    parts = split_nodes(world, nodes)
    assert (parts.across.size, parts.inside.size) == (nodes, world.size // nodes)
    assert (parts.across.rank, parts.inside.rank) == divmod(world.rank, parts.inside.size)
    for name in order.FOLD_ORDERS:
        plan = order.fold_plan(name, leaves, world.size)
        for rows in ROWS:
            values = leaves_of(leaves, rows)
            whole = order.evaluate(order.fold_tree(name, leaves), values.__getitem__, torch.add)
            sums = mine(plan, values, world)
            stream = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(9))
            finish = Finish(stream, Norm(torch.ones(COLUMNS), 1e-6))
            expected = GatherExchange(plan, world).fold_and_norm(sums, finish)
            for limit in (1, 100):
                exchange = NodeExchange(plan, parts, sliced_rows=limit)
                what = f"{name}, {nodes} nodes, {rows} rows, sliced from {limit}"
                assert_same_bits(ops.fold_roots(exchange.everyones(sums), 1)[0], whole, what)
                found = exchange.fold_and_norm(sums, finish)
                for ours, theirs in zip(found, expected, strict=True):
                    assert_same_bits(ours, theirs, what)
