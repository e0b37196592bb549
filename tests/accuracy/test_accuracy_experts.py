"""Choices, weights and layers of experts against fp64."""

import dataclasses

import pytest
import torch
import transformers

from tests.layers.test_experts import EXPERTS, ROUTING, choose
from tests.lib.bits import assert_same_bits
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.gated import interleaved
from tpdet.kernels.order import fold_tree

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


def test_a_sigmoid_and_a_bias_choose_as_an_fp64_router_but_for_near_ties():
    """Of GLM-4.5-Air: 128 experts, 8 chosen; the margin is that of the score with its bias."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(1000, 2048, generator=draw).bfloat16()
    router = (torch.randn(128, 2048, generator=draw) / 2048**0.5).bfloat16()
    bias = 0.3 * torch.randn(128, generator=draw)
    logits = ops.column_gemm(x, router, None, torch.float32)
    exact = x.double() @ router.double().T
    best = (exact.sigmoid() + bias.double()).topk(9, dim=1)
    margin = best.values[:, 7] - best.values[:, 8]
    clear = margin > 4e-5 * exact.abs().amax(1).clamp(min=1.0)
    routing, wanted = Routing(128, 8, sigmoid=True), best.indices[:, :8].sort(dim=1).values

    def found(bias):
        return torch.cat([choose(part, routing, bias)[0] for part in logits.split(250)]).long()

    assert torch.equal(found(bias)[clear], wanted[clear]) and (~clear).sum() < 0.01 * len(x)
    assert not torch.equal(found(bias.bfloat16().float())[clear], wanted[clear])  # control


@pytest.mark.slow
def test_a_layer_of_real_width_is_no_worse_than_transformers():
    """Qwen3-30B-A3B's layer of experts in bf16, and both against fp64 on the same weights."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=1,
        experts_implementation="eager",
    )
    draw = torch.Generator().manual_seed(9)
    block = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        for weight in block.parameters():
            width = weight.shape[-1] ** 0.5
            weight.copy_((torch.randn(weight.shape, generator=draw) / width).bfloat16())
        x = torch.randn(64, 2048, generator=draw).bfloat16()
        exact = block.double()(x.double()[None])[0].view(64, 2048)
        theirs = block.bfloat16()(x[None])[0].view(64, 2048).double()
        gates, ups = block.experts.gate_up_proj.chunk(2, dim=1)
        pairs = [interleaved(gate, up) for gate, up in zip(gates, ups, strict=True)]
        logits = ops.column_gemm(x, block.gate.weight, None, torch.float32)
        ids, weights = choose(logits, Routing(128, 8))
        lanes = Lanes(range(128), 128, 8, (fold_tree("tree", 8),))
        down = block.experts.down_proj
        sums = ops.expert_sums(x, ids, weights, torch.stack(pairs), down, (None, None), lanes)
    ours = sums.values[0].double()
    assert (ours - exact).norm() <= (theirs - exact).norm()
    assert (ours - exact).norm() < 0.01 * exact.norm()
