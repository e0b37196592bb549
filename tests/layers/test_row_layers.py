"""Row layers without a fold: bits over sizes, the contract, what is refused, exchanges."""

import itertools
import json
import random
import subprocess
import sys

import pytest
import torch

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.some_slow import some_slow
from tests.lib.thread_world import run_threads
from tpdet.checkpoint.model_config import load_model_config
from tpdet.comm.exchange.columns import ColumnExchange
from tpdet.comm.exchange.fold import Exchange, GatherExchange
from tpdet.comm.exchange.peer_columns import open_columns
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.errors import DisagreementError, UsageError
from tpdet.kernels import ops, order
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.order import cut_leaves
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.gathered_linear import GatheredLinear
from tpdet.layers.linear import RowLinear
from tpdet.layers.partition import make_partition
from tpdet.layers.row_layers import row_rule
from tpdet.runner import Runner
from tpdet.tools.worlds.lists import parse_row_layers

PAIRS_FLOAT32 = "c833341102a7696e1beecd4b89d526202cd26fbaf87a32246e82c7e15eb5d3b6"
TREE_FLOAT32 = "8cb72b5b54055d05a6f9078ae132e062342f1bd41d7f5be0598c15dc1edd203f"


def probes():
    draw = random.Random(3)
    return [
        ask("long", [draw.randrange(1024) for _ in range(280)], prompt_logprobs=1),
        ask("short", [draw.randrange(1024) for _ in range(7)], temperature=0.9, seed=5),
    ]


@pytest.fixture(scope="module")
def alone(tiny_model):
    """The probes at TP 1, by row layers and dtype."""
    made = {}

    def get(row_layers, dtype):
        if (row_layers, dtype) not in made:
            model = tiny_model("qwen3", kv_heads=2)
            made[row_layers, dtype] = run(model, probes(), row_layers=row_layers, dtype=dtype)
        return made[row_layers, dtype]

    return get


@pytest.mark.parametrize(
    ("tp", "dtype"),
    some_slow(
        [(2, "float32"), (4, "bfloat16")], itertools.product((2, 4), ("float32", "bfloat16"))
    ),
)
def test_every_size_gives_the_bits_of_one_rank(tiny_model, alone, tp, dtype):
    crowd = [ask(f"n{i}", range(i, 20 + 9 * i)) for i in range(4)]
    settings = {"row_layers": "gather", "dtype": dtype, "max_num_batched_tokens": 100}
    mixed = [crowd[0], *probes(), *crowd[1:]]
    found = run(tiny_model("qwen3", kv_heads=2), mixed, tp=tp, **settings)
    wanted = alone("gather", dtype)
    for key, logits in wanted.logits.items():
        assert_same_bits(found.logits[key], logits, str(key))
    for name in ("long", "short"):
        assert found.answer(name) == wanted.answer(name)
    assert found.fingerprint == wanted.fingerprint


def test_it_is_another_contract_with_other_bits(alone):
    """Negative control: the probes tell it from the fold."""
    folded, gathered = alone("fold", "float32"), alone("gather", "float32")
    different = [
        key
        for key, logits in gathered.logits.items()
        if key in folded.logits and not same_bits(logits, folded.logits[key])
    ]
    assert different
    assert folded.fingerprint.split("-")[1] != gathered.fingerprint.split("-")[1]


def test_fold_order_and_leaves_do_not_reach_its_bits(tiny_model, alone):
    settings = {"row_layers": "gather", "fold_order": "tree", "leaves": 2, "tp": 2}
    found = run(tiny_model("qwen3", kv_heads=2), probes(), dtype="float32", **settings)
    wanted = alone("gather", "float32")
    for key, logits in wanted.logits.items():
        assert_same_bits(found.logits[key], logits, str(key))
    assert found.fingerprint.split("-")[1] == wanted.fingerprint.split("-")[1]


def test_unasked_the_contract_is_that_of_the_default_order():
    """Nothing but the default decides it: the id of `tree`, not that of `pairs`."""
    config = EngineConfig.from_values(model="x")
    found = order.Contract("cpu", "float32", 8, config.fold_order, row_layers=config.row_layers)
    assert config.fold_order == order.DEFAULT_FOLD_ORDER
    assert found.identifier == TREE_FLOAT32 != PAIRS_FLOAT32


def test_the_contract_names_what_reaches_a_bit():
    base = {"device": "cpu", "dtype": "float32", "leaves": 8, "fold_order": "pairs"}
    assert order.Contract(**base).identifier == PAIRS_FLOAT32, "ids of folded contracts stay"
    other_order = order.Contract(**base | {"fold_order": "tree"})
    assert other_order.identifier == TREE_FLOAT32, "ids of folded contracts stay"
    gathered = order.Contract(**base, row_layers="gather").identifier
    assert gathered not in (PAIRS_FLOAT32, TREE_FLOAT32)
    for same in ({"leaves": 4}, {"fold_order": "tree"}):
        assert order.Contract(**base | same, row_layers="gather").identifier == gathered
    for other in ({"dtype": "bfloat16"}, {"device": "cuda"}):
        assert order.Contract(**base | other, row_layers="gather").identifier != gathered
    with pytest.raises(ValueError, match="row layers 'ring'"):
        _ = order.Contract(**base, row_layers="ring").identifier
    with pytest.raises(UsageError, match="row_layers"):
        EngineConfig.from_values(model="x", row_layers="ring")


def test_ranks_that_differ_refuse_to_start(tiny_model):
    settings = {"model": str(tiny_model()), "kv_pages": 8, "device": "cpu"}

    def start(world):
        row_layers = order.ROW_LAYERS[world.rank]
        with pytest.raises(DisagreementError, match=r"config\.contract: .*1 more fields differ"):
            Runner.start(EngineConfig.from_values(row_layers=row_layers, **settings), world)

    run_threads(2, start)


def test_the_rule_owns_shards_and_exchange(tiny_model):
    config = load_model_config(tiny_model())
    cpu = torch.device("cpu")
    for name, kind, held in (
        ("fold", RowLinear, ("row", 8, 256, 48)),
        ("gather", GatheredLinear, ("column", 1, 256, 384)),
    ):
        partition = make_partition(config, SoloWorld(), "pairs", None, name)
        rule = row_rule(partition)
        product = rule.product(partition, "o", 256, cut_leaves(24, 16, 8)).product
        assert rule is kind and (product.kind, product.leaves, product.n, product.k) == held
        made = rule.open_exchange("auto", partition, 64, torch.float32, cpu)
        assert isinstance(made, GatherExchange)

    class Other:
        """An exchange of neither kind."""

    for kind in (RowLinear, GatheredLinear):
        with pytest.raises(TypeError, match="open one that does"):
            other = partition.by(Arithmetic(Other()))
            kind(None, other, "x", 256, cut_leaves(24, 16, 8))


def test_columns_are_gathered_added_and_normed_over_any_transport():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(5, 64, generator=generator).bfloat16()
    residual = torch.randn(5, 64, generator=generator)
    weight = torch.randn(64, generator=generator).bfloat16()
    h = whole.float() + residual

    def check(world):
        plan = order.fold_plan("pairs", 8, world.size)
        sizes = 8, (64, 64), torch.bfloat16, torch.device("cpu")
        for transport in ("auto", "gather"):
            made = open_columns(transport, plan, world, *sizes)
            assert isinstance(made, ColumnExchange) and isinstance(made, Exchange)
            mine = whole.chunk(world.size, dim=1)[world.rank]
            assert_same_bits(made.gather_columns(mine), whole)
            found = made.gather_and_norm(mine, Finish(residual, Norm(weight, 1e-6)))
            assert_same_bits(found[0], h)
            assert_same_bits(found[1], ops.rms_norm(h, Norm(weight, 1e-6)))
            assert made.overlap_programs == 0 and made.carrier.memory is None
        if world.size > 1:
            with pytest.raises(UsageError, match="use --transport gather"):
                open_columns("peer", plan, world, *sizes)

    check(SoloWorld())
    for ranks in (2, 4):
        run_threads(ranks, check)
    alone = open_columns(
        "peer",
        order.fold_plan("pairs", 8, 1),
        SoloWorld(),
        8,
        (64, 64),
        torch.bfloat16,
        torch.device("cpu"),
    )
    assert alone.gather_columns(whole) is whole, "a single rank copies nothing"


@pytest.mark.slow  # above ranks are threads; `verify/test_verify.py` has the command
@pytest.mark.parametrize(("tps", "modes"), [("1,2", "gather"), ("1,2,4", "fold,gather")])
def test_verify_shows_it_at_every_size(tiny_model, tmp_path, tps, modes):
    output = tmp_path / "verify.json"
    relations = "batch" if modes == "gather" else "batch,chunks"
    command = [
        sys.executable, "-m", "tpdet", "verify", str(tiny_model("qwen3", kv_heads=2)),
        "--row-layers", modes, "--fold-order", "tree", "--tp", tps, "--dtype", "bfloat16",
        "--relations", relations, "--batch", "1,4", "--budget", "100", "--tokens", "3",
        "--output", str(output),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = json.loads(output.read_text())
    digests = {}
    for row in record["rows"]:
        assert row["equal"]
        digests.setdefault(row["mode"], set()).add(row["digest"])
    assert all(len(found) == 1 for found in digests.values())
    assert digests.keys() == ({"gather"} if modes == "gather" else {"tree", "gather"})
    assert digests["gather"] != digests.get("tree")
    found = sorted({row["tp"] for row in record["rows"] if row["mode"] == "gather"})
    assert ",".join(map(str, found)) == tps


def test_row_layers_are_named_by_a_list():
    assert parse_row_layers("gather,fold") == ("fold", "gather")
    assert parse_row_layers("gather") == ("gather",)
    for text, control in (("fold,ring", False), ("", False), ("gather", True)):
        with pytest.raises(UsageError, match="fold"):
            parse_row_layers(text, control)
