"""Mixture of experts on the CPU: who is chosen, the bits of each expert's rows, lanes, loading."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.engine_harness import ask, run
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import check_modes, check_ranks, model_leaves
from tpdet.errors import CheckpointError, UsageError
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.gated import interleaved
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import Contract, fold_plan, fold_tree
from tpdet.kernels.partial_sums import relative_roots
from tpdet.tools.worlds.shapes import named_config

ROWS, HIDDEN, WIDTH, EXPERTS, CHOSEN, LANES = 21, 64, 48, 16, 3, 4
ROUTING = Routing(EXPERTS, CHOSEN)


def batch(rows):
    return make_batch((PagedSequence(0, rows, 0, (0,)),))


def choose(logits, routing=ROUTING, bias=None):
    return ops.choose_experts(logits, bias, batch(len(logits)), routing)[:2]


@pytest.fixture(scope="module")
def block():
    """x, logits, and the weights of all experts."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(shape, generator=draw)

    gates, ups = random(EXPERTS, WIDTH, HIDDEN) / 8, random(EXPERTS, WIDTH, HIDDEN) / 8
    gate_up = torch.stack([interleaved(g, u) for g, u in zip(gates, ups, strict=True)])
    down = random(EXPERTS, HIDDEN, WIDTH) / 7
    return (
        random(ROWS, HIDDEN).bfloat16(),
        random(ROWS, EXPERTS),
        gate_up.bfloat16(),
        down.bfloat16(),
    )


def sums(block, ids, weights, experts=range(EXPERTS), held=LANES, roots=tuple(range(LANES))):
    x, _, gate_up, down = block
    mine = slice(experts.start, experts.stop)
    lanes = Lanes(experts, EXPERTS, held, roots)
    return ops.expert_sums(x, ids, weights, gate_up[mine], down[mine], (None, None), lanes).values


def test_equal_scores_go_to_the_lowest_ids_and_nan_comes_last():
    ties = torch.zeros(1, EXPERTS)
    ties[0, 9] = 1.0
    assert choose(ties)[0].tolist() == [[0, 1, 9]]
    ties[0, 0] = torch.nan
    ties[0, 2] = -torch.inf
    ids, weights = choose(ties)
    assert ids.tolist() == [[1, 3, 9]] and not torch.isnan(weights[:, :0]).any()
    few = torch.full((1, EXPERTS), torch.nan)
    few[0, 5] = -torch.inf
    assert 5 in choose(few)[0].tolist()[0]


def dense_lanes(block, ids, weights, lanes, step):
    """The lanes by dense products of single rows, added in the order of `step`."""
    x, _, gate_up, down = block
    total = torch.zeros(lanes, ROWS, HIDDEN)
    for row in range(ROWS):
        for choice in range(CHOSEN)[::step]:
            expert = int(ids[row, choice])
            mixed = ops.gated_gemm(x[row : row + 1], gate_up[expert])
            y = ops.column_gemm(mixed, down[expert])
            total[expert // (EXPERTS // lanes), row] += weights[row, choice] * y[0].float()
    return total


def test_each_row_has_the_bits_of_a_dense_product_and_lanes_ascend(block):
    ids, weights = choose(block[1])
    assert_same_bits(sums(block, ids, weights), dense_lanes(block, ids, weights, LANES, 1))
    one_lane = sums(block, ids, weights, held=1, roots=(0,))
    assert_same_bits(one_lane, dense_lanes(block, ids, weights, 1, 1))
    assert not same_bits(one_lane, dense_lanes(block, ids, weights, 1, -1))


@pytest.mark.parametrize("order", ["tree", "pairs", "sequential"])
def test_ranks_send_the_roots_of_their_lanes(block, order):
    ids, weights = choose(block[1])
    whole = sums(block, ids, weights, roots=(fold_tree(order, LANES),))
    for ranks in (2, 4):
        plan, sent = fold_plan(order, LANES, ranks), []
        for rank in range(ranks):
            share = EXPERTS // ranks
            mine = range(rank * share, (rank + 1) * share)
            roots = relative_roots(plan.roots[rank])
            sent.append(sums(block, ids, weights, mine, LANES // ranks, roots))
        slots = torch.zeros(ranks, plan.slots, ROWS, HIDDEN)
        for rank, values in enumerate(sent):
            slots[rank, : len(values)] = values
        assert_same_bits(ops.fold_final(slots, plan.final), whole[0])


def test_nan_stays_in_its_row(block):
    x, logits, gate_up, down = block
    ids, weights = choose(logits)
    clean = sums(block, ids, weights)
    spoiled = x.clone()
    spoiled[4] = torch.nan
    bad = logits.clone()
    bad[4] = torch.nan
    found = sums((spoiled, bad, gate_up, down), *choose(bad))
    rest = [row for row in range(ROWS) if row != 4]
    assert_same_bits(found[:, rest], clean[:, rest])
    assert torch.isnan(found[:, 4]).any()


def leaves_of_shape(name):
    """Of a shape without a dense layer: the leaves of a down product name no contract."""
    leaves = model_leaves(named_config(name), None)
    assert not leaves.down.alike and [of for of, _ in leaves.edges] == ["attention"]
    return leaves.count


def test_leaves_fall_until_they_divide_the_experts(tiny_model):
    config = load_model_config(tiny_model("qwen3_moe"))
    assert model_leaves(config, None).count == 8

    def of(experts):
        routing = dataclasses.replace(config.mixture.routing, experts=experts)
        return dataclasses.replace(
            config, mixture=dataclasses.replace(config.mixture, routing=routing)
        )

    counts = {128: 8, 32: 8, 8: 8, 160: 8, 60: 4, 12: 4, 5: 1}
    assert {n: model_leaves(of(n), None).count for n in counts} == counts
    assert [leaves_of_shape(name) for name in ("gpt-oss-20b", "gpt-oss-120b")] == [8, 8]
    with pytest.raises(UsageError, match=r"leaves 8 do not divide 60 experts: use one of 1, 2, 4$"):
        model_leaves(of(60), 8)
    with pytest.raises(UsageError, match="--row-layers fold"):
        check_modes(config, "gather", approximate=False)
    with pytest.raises(UsageError, match="no approximate mode"):
        check_modes(config, "fold", approximate=True)


def test_real_mixtures_have_eight_leaves():
    shapes = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "gpt-oss-120b", "glm-4.5-air")
    for name in shapes:
        config = named_config(name)
        assert model_leaves(config, None).count == 8, name
        assert all(check_ranks(config, ranks, None) for ranks in (1, 2, 4, 8)), name
    cut = model_leaves(named_config("glm-4.5-air"), None)
    assert cut.shared.widths(range(8)) == (176,) * 8
    assert cut.down.widths(range(8)) == (*(1360, 1376) * 3, 1360, 1376)
    named = Contract("cuda", "bfloat16", 8, "tree", edges=cut.edges, experts=128)
    assert [name for name, _ in named.edges] == ["attention", "down", "shared"]


def test_layers_that_guess_tokens_are_not_read_and_others_are_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("glm4_moe"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    plain = run(folder, [ask("a", [5, 6], max_tokens=1)], dtype="bfloat16")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"eh_proj.weight has no place in this model"):
        run(folder, [ask("a", [5, 6], max_tokens=1)])
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"num_nextn_predict_layers": 1}))
    again = run(folder, [ask("a", [5, 6], max_tokens=1)], dtype="bfloat16")
    assert again.tokens("a") == plain.tokens("a")
    for settings in (
        {"n_group": 2},
        {"topk_group": 2},
        {"norm_topk_prob": False},
        {"scoring_func": "softmax"},
        {"n_shared_experts": 0},
        {"first_k_dense_replace": 3},
        {"routed_scaling_factor": "2"},
    ):
        path.write_text(json.dumps(whole | settings))
        with pytest.raises(CheckpointError, match=next(iter(settings))):
            load_model_config(folder)


def test_the_contract_names_experts_and_leaves_dense_ids_alone():
    dense = Contract("cpu", "bfloat16", 8, "tree")
    assert dense.identifier == dataclasses.replace(dense, experts=0).identifier
    ids = {dataclasses.replace(dense, experts=n).identifier for n in (0, 8, 16)}
    assert len(ids) == 3


@pytest.fixture
def copy(tiny_model, tmp_path):
    """A toy that may be damaged, and its tensors."""
    folder = shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model")
    return folder, load_file(folder / "model.safetensors")


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
BEYOND = "model.layers.1.mlp.experts.16.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(EXPERT), f"tensor {EXPERT} is in none of"),
        (
            lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:8].clone()}),
            f"tensor {EXPERT} has shape",
        ),
        (
            lambda tensors: tensors.update(
                {EXPERT.replace(".3.", ".16."): tensors[EXPERT].clone()}
            ),
            "has no place in this model",
        ),
        (
            lambda tensors: tensors.update({ROUTER: tensors[ROUTER][:15].clone()}),
            f"tensor {ROUTER} has shape",
        ),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_wrong_set_of_experts_is_refused_by_name(copy, change, said, tp):
    folder, tensors = copy
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        run(folder, [ask("a", [5, 6])], tp=tp)


def test_an_expert_that_two_files_hold_is_refused_by_name(copy):
    folder, tensors = copy
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({EXPERT: tensors[EXPERT]}, folder / "model-2.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(tensors, "model-1.safetensors") | {EXPERT: "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    with pytest.raises(CheckpointError, match=f"tensor {EXPERT} is (also|listed) in"):
        run(folder, [ask("a", [5, 6])])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_experts_per_tok": 17}, "there are 16 experts"),
        ({"moe_intermediate_size": 42}, "multiple of 8"),
        ({"mlp_only_layers": [9]}, "mlp_only_layers"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(copy, settings, said):
    folder, _ = copy
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(folder)
