"""The kernel benchmarks' operands and rows, with the CPU's kernels and made-up times."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.lib.thread_world import run_threads
from tpdet.cli import main
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.errors import TpdetError, UsageError
from tpdet.kernels import order
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.kernels.partial_sums import relative_roots
from tpdet.layers.products import LayerProduct
from tpdet.tools.bench import exchange as bench_exchange
from tpdet.tools.bench.kernels import attention, experts, gemm, sampler
from tpdet.tools.bench.spec import ExchangeSpec
from tpdet.tools.worlds.machine import Machine


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Times:
    """Calls every run on its first item; the i-th run takes i + 1 microseconds."""

    def __init__(self):
        self.results = []

    def __call__(self, runs, items, repeats):
        self.results.append([run(items[0]) for run in runs])
        return [index + 1.0 for index in range(len(runs))]


@pytest.fixture
def times(monkeypatch):
    found = Times()
    for module in (gemm, attention, experts, sampler, bench_exchange):
        for name, value in {
            "gpu_only": lambda bench: None,
            "this_gpu": Machine,
            "random_values": drawn,
            "times_us": found,
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gemm, "admit_products", lambda *arguments: None)
    monkeypatch.setattr(gemm, "rotated", lambda weight: [weight])
    monkeypatch.setattr(attention, "COLD_BYTES", 1)
    return found


def rows(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def close(ours, peer):
    error = (ours.double() - peer.double()).abs().max() / peer.double().abs().max()
    assert error < 0.03, float(error)


def test_products_beside_linear(times, monkeypatch, capsys):
    def small(partition):
        leaves = len(partition.mine)
        roots = write_roots(relative_roots(partition.plan.roots[0]))
        return (
            LayerProduct("qkv", Product("column", 48, 64)),
            LayerProduct("gate_up", Product("gated", 96, 64)),
            LayerProduct("o", Product("row", 32, 128 // leaves, leaves, roots)),
            LayerProduct("head", Product("head", 32, 64)),
        )

    monkeypatch.setattr(gemm, "model_products", small)
    arguments = ["bench", "gemm", "--rows", "1,300", "--tp", "2", "--model-shape", "qwen3-8b"]
    assert main(arguments) == 0
    found = rows(capsys)
    cases = [(r["case"], r["batch"], r["peer"]) for r in found]
    assert cases == [
        ("gemm qkv", 1, "linear"),
        ("gemm qkv", 300, "linear"),
        ("gemm gate_up", 1, "linear + activation"),
        ("gemm gate_up", 300, "linear + activation"),
        ("gemm o", 1, "linear + norm"),
        ("gemm o", 300, "linear + norm"),
        ("gemm head", 1, "linear"),
    ]
    assert all((r["value"], r["peer_value"], r["ratio"]) == (1.0, 2.0, 0.5) for r in found)
    assert found[0]["flops"] == 2 * 48 * 64 and found[0]["bytes"] == 2 * (48 * 64 + 48 + 64)
    gated = found[2]  # half as many outputs as weight rows
    assert gated["flops"] == 2 * 96 * 64 and gated["bytes"] == 2 * (96 * 64 + 48 + 64)
    row = next(r for r in found if r["case"] == "gemm o")  # the stream in fp32, in and out
    assert row["bytes"] == 2 * (32 * 128 + 128) + 2 * 32 + 8 * 32
    assert [ours.shape[1] for ours, _ in times.results[2:4]] == [48, 48]
    assert times.results[-1][0].dtype == torch.float32  # the head's
    for ours, peer in times.results:
        if isinstance(peer, tuple):  # leaves lie one behind the other in the same weight
            assert ours[1].shape == peer[1].shape
        else:
            close(ours, peer)


def test_attention_cases(times, monkeypatch, capsys):
    arguments = ["bench", "attention", "--decode", "2:70", "--prefill", "1:256", "--tp", "4",
                 "--model-shape", "qwen3-8b,llama-3-8b"]  # fmt: skip
    on_cpu = SimpleNamespace(CUDNN_ATTENTION=attention.SDPBackend.MATH)
    monkeypatch.setattr(attention, "SDPBackend", on_cpu)
    assert main(arguments) == 0
    found = rows(capsys)  # the second model's shard is the first's
    assert [(r["case"], r["batch"], r["context"]) for r in found] == [
        ("attention decode", 2, 70),
        ("attention prefill", 1, 256),
    ]
    assert "peer" not in found[0] and found[1]["peer"] == "cuDNN"
    assert times.results[0][0].shape == (2, 8, 128)


@pytest.mark.parametrize("text", ["1", "1:0", "a:2", "1:2:3"])
def test_pairs(text):
    assert attention.parse_pairs("1:2,30:4") == [(1, 2), (30, 4)]
    with pytest.raises(UsageError, match="pairs"):
        attention.parse_pairs(text)


def test_experts_are_timed_in_both_places_and_say_who_is_touched(times, tiny_model, capsys):
    model = str(tiny_model("glm4_moe"))
    arguments = ["--model-shape", model, "--tp", "1,2", "--rows", "1,5", "--skew", "0.5"]
    assert main(["bench", "experts", *arguments]) == 0
    found = rows(capsys)
    cases = [(row["mode"], row["tp"], row["batch"]) for row in found]
    placed = (("lanes", 1), ("lanes", 2), ("columns", 2))
    assert cases == [(*place, count) for place in placed for count in (1, 5)]
    told = {case: row["metrics"] for case, row in zip(cases, found, strict=True)}
    assert told["lanes", 1, 1]["experts_touched"] == told["columns", 2, 1]["experts_touched"] == 4
    assert told["lanes", 1, 5]["fullest_share"] == told["columns", 2, 5]["fullest_share"] == 1.0
    assert 0.5 <= told["lanes", 2, 5]["fullest_share"] < 1.0
    assert told["columns", 2, 5]["fullest_load"] == 1.0 > told["lanes", 2, 5]["fullest_load"] >= 0.5
    size = {case: row["bytes"] for case, row in zip(cases, found, strict=True)}
    assert size["columns", 2, 5] == size["lanes", 1, 5] / 2
    whole, cut = times.results[1][0], times.results[5][0]
    assert whole.values.shape == (1, 5, 256) and cut.values.shape == (1, 5, 128)
    assert main(["bench", "experts", "--model-shape", "qwen3-8b"]) == 2
    assert "qwen3-8b has no experts" in capsys.readouterr().err


def test_skewed_routers_choose_as_zipf_has_it():
    normal = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1))
    first = experts.skewed_logits(normal, 1.0).argmax(1).bincount(minlength=8) / len(normal)
    odds = 1.0 / torch.arange(1, 9)
    assert (first - odds / odds.sum()).abs().max() < 0.015
    even = experts.skewed_logits(normal, 0.0).argmax(1)
    assert torch.equal(even, normal.argmax(1)), "without skew the best stay the best"


def test_drawing_cases(times, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(sampler, "capture", lambda run, items: ran.append(run(items[0])))
    monkeypatch.setattr(sampler, "interleaved_us", lambda graphs, calls, repeats: [1.0, 2.0])
    assert main(["bench", "sampler", "--vocabulary", "500", "--batch", "3", "--tp", "1,4"]) == 0
    found = rows(capsys)
    assert [(r["mode"], r["tp"]) for r in found] == [(m, tp) for m in sampler.WAYS for tp in (1, 4)]
    ours, peer = ran[:2]  # greedy, whole rows
    assert ours.tokens.tolist() == peer[0].view(-1).tolist()
    close(ours.logprobs, peer[1].view(-1))


def test_torchs_way_keeps_to_its_filters():
    logits = drawn(64, 50, dtype=torch.float32) * 2
    likeliest = logits.argsort(dim=-1, descending=True, stable=True)
    for _ in range(20):
        ids, logprobs = sampler.torch_sample(logits, 1.0, top_k=2)
        assert ((ids == likeliest[:, :1]) | (ids == likeliest[:, 1:2])).all()
        assert (logprobs <= 0).all()
    assert torch.equal(sampler.torch_sample(logits, 1.0, top_p=1e-6)[0], likeliest[:, :1])


SPEC = ExchangeSpec(kilobytes=(1,), hidden=64, fold_order="pairs", repeats=3)


def exchange_case(world, exchange=None):
    plan = order.fold_plan("pairs", 8, world.size)
    gather = GatherExchange(plan, world)
    return bench_exchange.Case(world, plan, exchange or gather, SPEC, 8)


class Swapped(GatherExchange):
    """Other bits."""

    def fold_and_norm(self, sums, finish, plan=None):
        h, y = super().fold_and_norm(sums, finish, plan)
        return h, y + 1


def test_the_exchange_is_compared_before_it_is_timed(times, monkeypatch):
    monkeypatch.setattr(torch, "zeros", cpu_zeros(torch.zeros))
    assert run_threads(2, lambda world: exchange_case(world).check_bits()) == [None, None]

    def wrong(world):
        plan = order.fold_plan("pairs", 8, world.size)
        with pytest.raises(TpdetError, match="other bits"):
            exchange_case(world, Swapped(plan, world)).check_bits()

    run_threads(2, wrong)


def test_the_rows_of_an_exchange(times, monkeypatch):
    monkeypatch.setattr(torch, "zeros", cpu_zeros(torch.zeros))
    monkeypatch.setattr(bench_exchange.Case, "_times", lambda self, calls: [2.0, 8.0, 4.0, 1.0])
    found = run_threads(2, lambda world: exchange_case(world).rows(1))[0]
    assert [(r.peer, r.ratio) for r in found] == [
        ("NCCL + norm", 0.5),
        ("NCCL", 2.0),
        ("gather", 0.25),
    ]
    assert (found[0].batch, found[0].context, found[0].mode) == (8, 1, "pairs")


def cpu_zeros(zeros):
    return lambda *shape, device=None, **options: zeros(*shape, **options)
