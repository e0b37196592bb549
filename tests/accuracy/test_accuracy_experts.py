"""Weights of chosen experts against fp64."""

import dataclasses

import pytest
import torch

from tests.layers.test_experts import EXPERTS, ROUTING, choose
from tests.lib.bits import assert_same_bits
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Routing

CHOSEN = ROUTING.chosen


def test_weights_are_those_of_fp64_whatever_rows_stand_beside():
    logits = 4 * torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(1))
    ids, weights = choose(logits)
    exact = logits.double().softmax(1)
    best = exact.topk(CHOSEN, dim=1).indices.sort(dim=1).values
    assert ids.tolist() == best.tolist()
    picked = exact.gather(1, best)
    assert torch.allclose(weights.double(), picked / picked.sum(1, keepdim=True), rtol=1e-6, atol=0)
    over_all = choose(logits, dataclasses.replace(ROUTING, over_chosen=False))[1]
    assert torch.allclose(over_all.double(), picked, rtol=1e-6, atol=0)
    for row in (0, 49):
        alone = choose(logits[row : row + 1].clone())
        assert alone[0][0].tolist() == ids[row].tolist()
        assert_same_bits(alone[1][0], weights[row])


@pytest.mark.parametrize(
    ("experts", "chosen", "hidden", "biased"), [(128, 8, 2048, False), (32, 4, 2880, True)]
)
def test_the_choice_is_that_of_an_fp64_router_but_for_near_ties(experts, chosen, hidden, biased):
    """Of Qwen3-30B-A3B and gpt-oss: rows whose margin lies below the bound are counted."""
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(1000, hidden, generator=generator).bfloat16()
    router = (torch.randn(experts, hidden, generator=generator) / hidden**0.5).bfloat16()
    bias = torch.randn(experts, generator=generator).bfloat16() if biased else None
    logits = ops.column_gemm(x, router, bias, torch.float32)
    exact = x.double() @ router.double().T + (0.0 if bias is None else bias.double())
    best = exact.topk(chosen + 1, dim=1)
    margin = best.values[:, -2] - best.values[:, -1]
    clear = margin > 4e-5 * exact.abs().amax(1).clamp(min=1.0)
    wanted = best.indices[:, :chosen].sort(dim=1).values

    def found(logits):
        return torch.cat([choose(part, Routing(experts, chosen))[0] for part in logits.split(250)])

    ids = found(logits)
    assert torch.equal(ids[clear].long(), wanted[clear])
    assert (~clear).sum() < 0.01 * len(x)
    rounded = found(logits.bfloat16().float())
    assert not torch.equal(rounded[clear].long(), wanted[clear])  # negative control


def test_sigmoid_scores_are_chosen_with_a_bias_and_weighed_without_it():
    logits = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(2))
    bias = torch.linspace(0.9, -0.9, EXPERTS)
    routing = Routing(EXPERTS, CHOSEN, sigmoid=True, scale=2.5)
    ids, weights = choose(logits, routing, bias)
    scores = logits.double().sigmoid()
    best = (scores + bias).topk(CHOSEN, dim=1).indices.sort(dim=1).values
    assert ids.tolist() == best.tolist()
    assert ids.tolist() != choose(logits, routing)[0].tolist()
    picked = scores.gather(1, best)
    expected = 2.5 * picked / picked.sum(1, keepdim=True)
    assert torch.allclose(weights.double(), expected, rtol=1e-6, atol=0)


def test_small_scores_keep_their_weights_and_none_is_divided_by_zero():
    logits = torch.full((1, EXPERTS), -40.0)
    logits[0, 0], logits[0, 7] = 5.0, -39.0
    bias = torch.zeros(EXPERTS)
    bias[3], bias[7] = 9.0, 8.0
    routing = Routing(EXPERTS, 2, sigmoid=True)
    ids, weights = choose(logits, routing, bias)
    assert ids.tolist() == [[3, 7]]
    expected = torch.tensor([[-40.0, -39.0]]).double().softmax(1)
    assert torch.allclose(weights.double(), expected, rtol=1e-6, atol=0)
    assert choose(torch.full((1, EXPERTS), -200.0), routing)[1].tolist() == [[0.0, 0.0]]
    one_nan = torch.arange(EXPERTS, dtype=torch.float32)[None].clone()
    one_nan[0, 2] = torch.nan
    for over_chosen in (True, False):
        found = choose(one_nan, dataclasses.replace(ROUTING, over_chosen=over_chosen))
        assert found[0].tolist() == [[13, 14, 15]] and bool(torch.isfinite(found[1]).all())
