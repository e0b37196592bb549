"""Negative controls of experts: stock ways of choosing and combining give other bits."""

import torch

from tests.layers.test_experts import ROUTING, batch, choose
from tests.lib.bits import same_bits
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.gated import interleaved
from tpdet.kernels.order import fold_tree
from tpdet.tools.verify import control

EXPERTS, HIDDEN, WIDTH, ROWS = 16, 256, 32, 6


def layer():
    """x, ids, weights, and the weights of all experts."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, HIDDEN, generator=draw).bfloat16()
    gates, ups = (torch.randn(EXPERTS, WIDTH, HIDDEN, generator=draw) / 28 for _ in range(2))
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw) / 10
    gate_up = torch.stack([interleaved(g, u) for g, u in zip(gates, ups, strict=True)])
    chosen = choose(torch.randn(ROWS, EXPERTS, generator=draw), Routing(EXPERTS, 6))
    return x, *chosen, gate_up.bfloat16(), down.bfloat16(), (None, None)


def lanes(count, experts=range(EXPERTS)):
    return Lanes(experts, EXPERTS, count, (fold_tree("tree", count),))


def test_topk_orders_ties_as_it_likes():
    logits = torch.zeros(40, EXPERTS)
    logits[:, 9] = 1.0
    ours, _ = choose(logits)
    assert ours.tolist() == [[0, 1, 9]] * 40
    theirs, _, _ = control.choose_by_topk(logits, None, batch(40), ROUTING)
    assert theirs.tolist() != ours.tolist()


def test_index_add_over_a_ranks_experts_depends_on_the_ranks():
    """One sum over all experts, and the sum of those of two ranks; ours is one fold."""
    x, ids, weights, gate_up, down, none = layer()
    half = EXPERTS // 2

    def by(sums, count):
        parts = [range(half), range(half, EXPERTS)]
        whole = sums(x, ids, weights, gate_up, down, none, lanes(count)).values[0]
        each = [
            sums(
                x,
                ids,
                weights,
                gate_up[p.start : p.stop],
                down[p.start : p.stop],
                none,
                lanes(count // 2, p),
            ).values[0]
            for p in parts
        ]
        return same_bits(each[0] + each[1], whole), whole

    ours, total = by(ops.expert_sums, 8)
    theirs, stock = by(control.combine_by_index_add, 8)
    assert ours and not theirs
    assert not same_bits(total, stock)


def test_a_product_that_picks_its_tile_by_rows_shows_the_batch(monkeypatch):
    """Each row alone and among others: ours is one chain, however many rows an expert has."""
    x, ids, weights, gate_up, down, none = layer()
    x, gate_up, down = x.float(), gate_up.float(), down.float()  # bf16 would hide most of it

    def alike(sums):
        whole = sums(x, ids, weights, gate_up, down, none, lanes(8)).values[0]
        alone = [
            sums(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], gate_up, down, none, lanes(8))
            for i in range(ROWS)
        ]
        return same_bits(torch.cat([each.values[0] for each in alone]), whole)

    assert alike(ops.expert_sums)
    # As kernels for few rows do: K in two halves.
    plain = torch.mm

    def by_rows(left, right):
        if len(left) > 1:
            return plain(left, right)
        half = left.shape[1] // 2
        return plain(left[:, :half], right[:half]) + plain(left[:, half:], right[half:])

    monkeypatch.setattr(control.torch, "mm", by_rows)
    assert not alike(control.combine_by_index_add)
