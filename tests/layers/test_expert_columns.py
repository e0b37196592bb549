"""Experts whole on ranks and cut over all of them: one digest, counted bytes, who fits."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.kernels.peer_host import FakeMemory
from tests.lib.thread_world import run_threads
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import EIGHTS, place_experts
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.expert_columns import PeerExperts
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.errors import UsageError
from tpdet.kernels import ops
from tpdet.kernels.inputs.gated import GROUP
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import fold_plan
from tpdet.layers.experts import ExpertMlp
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import make_partition
from tpdet.tools.worlds.shapes import named_config


def test_both_placements_have_one_digest(tiny_model):
    model, prompts = tiny_model("mixtral"), [ask("a", range(5, 25), max_tokens=2)]
    alone = run(model, prompts, dtype="bfloat16")
    found = run(model, prompts, tp=2, experts="columns", dtype="bfloat16")
    assert found.fingerprint == alone.fingerprint
    assert found.outputs == alone.outputs
    for place, logits in alone.logits.items():
        assert_same_bits(found.logits[place], logits)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["tree", "pairs", "sequential"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", (2, 4)),
        ("mixtral", (2, 4, 8)),
        ("gpt_oss", (2, 4, 8)),
        ("glm4_moe", (2, 4, 8)),
    ],
)
def test_columns_are_equal_in_every_fold_order_and_size(tiny_model, family, sizes, order):
    model, prompts = tiny_model(family), [ask("a", range(5, 300)), ask("b", range(7, 20))]
    settings = {"dtype": "bfloat16", "fold_order": order, "max_num_batched_tokens": 100}
    alone = run(model, prompts, **settings)
    for tp in sizes:
        for experts in ("lanes", "columns"):
            found = run(model, prompts, tp=tp, experts=experts, **settings)
            assert found.fingerprint == alone.fingerprint
            for place, logits in alone.logits.items():
                assert_same_bits(found.logits[place], logits)


def one_layer(config, world, experts, rows=3):
    """(h, y) of a layer of drawn weights, and the bytes that this rank received for a row."""
    partition = make_partition(config, world, "tree", None, "fold", experts)
    received = []
    gather = world.all_gather
    world.all_gather = lambda x: received.append(x.nbytes * (world.size - 1)) or gather(x)
    layer = ExpertMlp(WeightSource(None, torch.bfloat16, 3, False), partition, "layer")
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, config.hidden_size, generator=draw)
    batch = make_batch((PagedSequence(0, rows, 0, (0,)),))
    norm = Norm(torch.ones(config.hidden_size, dtype=torch.bfloat16), 1e-6)
    part = MicroBatch(batch, hidden, hidden.bfloat16(), False)
    pending = layer(part, Finish(hidden, norm))
    return *pending.result(), sum(received) / rows


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_a_dense_layer_or_of_two_gathers(tiny_model, ranks):
    config = dataclasses.replace(load_model_config(tiny_model("mixtral")), dtype="bfloat16")
    hidden, routing, width = config.hidden_size, config.mixture.routing, config.mixture.width
    of = {
        experts: run_threads(ranks, lambda world, e=experts: one_layer(config, world, e))
        for experts in ("lanes", "columns")
    }
    for h, y, _ in of["columns"]:
        assert_same_bits(h, of["lanes"][0][0])
        assert_same_bits(y, of["lanes"][0][1])
    assert {each[2] for each in of["lanes"]} == {4 * hidden * (ranks - 1)}
    gathered = (2 * routing.chosen * width + 4 * hidden) * (ranks - 1) / ranks
    assert {each[2] for each in of["columns"]} == {gathered}


@pytest.mark.parametrize("order", ["tree", "pairs", "sequential"])
def test_totals_travel_exactly_by_the_fold_of_large_steps(order):
    """Over peer memory ranks own rows then: other ranks' columns are +0."""
    ranks, rows, hidden = 4, 9, 64
    plan, sent = fold_plan(order, 8, ranks), []
    totals = torch.randn(rows, hidden)
    totals[0] = 0.0
    for rank in range(ranks):
        memory = FakeMemory(rank, ranks)
        fold = SimpleNamespace(
            carrier=PeerCarrier(memory),
            layout=SimpleNamespace(one_shot_rows=4),
            plan=plan,
            takes_one_shot=lambda rows: rows <= 4,
            fold_and_norm=lambda sums, finish: sent.append(sums),
        )
        columns = PeerExperts(fold, 64, (2, 32, hidden), torch.bfloat16)
        columns.add(totals.chunk(ranks, 1)[rank], Finish(torch.zeros(rows, hidden), None))
    slots = torch.zeros(ranks, plan.slots, rows, hidden)
    for rank, sums in enumerate(sent):
        assert sums.roots == tuple(range(len(plan.roots[rank])))
        slots[rank, : len(sums.values)] = sums.values
    assert_same_bits(ops.fold_final(slots, plan.final), totals)


def test_auto_takes_columns_for_few_large_experts(tiny_model):
    assert EIGHTS == GROUP
    found = {
        name: [place_experts(named_config(name), ranks, "auto") for ranks in (1, 2, 4, 8)]
        for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "glm-4.5-air")
    }
    assert found == {
        "qwen3-30b-a3b": ["lanes"] * 4,
        "qwen3-235b-a22b": ["lanes"] * 4,
        "mixtral-8x7b": ["lanes", "columns", "columns", "columns"],
        "glm-4.5-air": ["lanes"] * 4,
    }
    config = load_model_config(tiny_model("qwen3_moe"))
    with pytest.raises(UsageError, match=r"width 96 into whole blocks of 8: use --experts lanes$"):
        place_experts(config, 8, "columns")
    with pytest.raises(UsageError, match=r"qwen3 has no experts"):
        place_experts(load_model_config(tiny_model("qwen3")), 2, "columns")
