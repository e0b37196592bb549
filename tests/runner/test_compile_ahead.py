"""Kernels compiled ahead: what start-up will launch, each by one rank, and never in its way."""

import hashlib
import logging
import os
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.compiled.test_recording import add_number
from tests.lib.kernels.driverless import (
    changed_by_a_journey,
    compile_for_hopper,
    take_gpu_kernels,
)
from tests.lib.thread_world import run_threads
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_memory import PeerTensor
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.kernels.cuda.compile import pool
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.known.answers import known_answers
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, fold_plan
from tpdet.kernels.partial_sums import PartialSums, relative_roots
from tpdet.models.warm_up import warm_up
from tpdet.runner import Runner
from tpdet.runner.graphs.engine_graphs import make_graphs
from tpdet.runner.start import compile_ahead
from tpdet.runner.start.compile_ahead import (
    CompilingAhead,
    KernelRequest,
    helping,
    open_helpers,
    share,
)
from tpdet.runner.start.start_times import StartTimes
from tpdet.server.front.metrics import Metrics
from tpdet.server.wire.protocol import Status

CPU = torch.device("cpu")


def digests(*names):
    return tuple(hashlib.sha256(str(name).encode()).digest() for name in names)


def test_ranks_of_a_host_compile_each_kernel_once_in_even_shares():
    (here,) = digests("here")
    common = digests(*range(40))
    everyone = [KernelRequest(here, (*common, *digests(f"rank {rank}"))) for rank in range(4)]
    shares = [share(everyone, rank) for rank in range(4)]
    taken = Counter(digest for mine in shares for digest in mine)
    assert set(taken) == {digest for asked in everyone for digest in asked.digests}
    assert set(taken.values()) == {1}
    assert [len(mine) for mine in shares] == [11] * 4
    assert all(
        set(mine) <= set(asked.digests) for mine, asked in zip(shares, everyone, strict=True)
    )


def test_ranks_apart_or_without_a_list_compile_for_themselves():
    here, there = digests("here", "there")
    common = digests(*range(6))
    everyone = [KernelRequest(here, common), KernelRequest(there, common), KernelRequest(here, ())]
    assert [len(share(everyone, rank)) for rank in range(3)] == [6, 6, 0]


@pytest.fixture
def compiled(monkeypatch):
    """Names of the threads' ranks by what they compiled; nothing is compiled."""
    calls = []
    monkeypatch.setattr(pool, "compile_all", lambda each, *more: calls.append(list(each)) or [])
    return calls


def test_a_rank_whose_work_fails_says_so_once_and_holds_nobody_up(
    monkeypatch, tmp_path, compiled, caplog
):
    compile_for_hopper(monkeypatch, tmp_path)

    def rank(world):
        def work():
            x = torch.zeros(32, dtype=torch.int32)
            add_number[1,](x, 32, 70)
            if world.rank == 1:
                raise RuntimeError("no such thing")
            world.all_gather(x)  # of which rank 1 knows nothing
            add_number[1,](x, 32, 71)

        return compile_ahead.compile_ahead(work, world)

    with caplog.at_level(logging.WARNING, "tpdet.engine"):
        assert run_threads(2, rank) == [2, 1]
    (record,) = caplog.records
    assert "one by one" in record.message and "RuntimeError: no such thing" in record.message
    assert sorted(len(each) for each in compiled) == [0, 1, 1, 1]


def test_a_triton_that_cannot_be_recorded_costs_time_only(monkeypatch, compiled, caplog):
    def refuse():
        raise RuntimeError("takes other arguments")

    monkeypatch.setattr("tpdet.kernels.cuda.compile.recording.check_triton", refuse)
    done = []
    assert compile_ahead.compile_ahead(lambda: done.append(1), SoloWorld()) == 0
    assert not done and "takes other arguments" in caplog.text


def test_kernels_that_do_not_compile_are_named_in_the_log(monkeypatch, tmp_path, caplog):
    compile_for_hopper(monkeypatch, tmp_path)
    monkeypatch.setattr(pool, "_compile", lambda each: f"{each.name}: no")
    work = lambda: add_number[1,](torch.zeros(32, dtype=torch.int32), 32, 72)
    assert compile_ahead.compile_ahead(work, SoloWorld()) == 1
    assert "1 of 1 kernels" in caplog.text and "add_number: no" in caplog.text


@pytest.fixture
def runner(tiny_model, monkeypatch, tmp_path):
    """An engine of the CPU whose steps go to the GPU's kernels from then on."""
    config = EngineConfig.from_values(
        model=str(tiny_model("mistral", sliding_window=300, layers=3)),
        dtype="bfloat16",
        device="cpu",
        kv_pages=4,
        max_num_seqs=20,
        max_num_batched_tokens=300,
        max_model_len=2048,
    )
    made = Runner.start(config, SoloWorld())
    compile_for_hopper(monkeypatch, tmp_path)
    take_gpu_kernels(monkeypatch)
    yield made
    made.close()


def warm(runner, model):
    warm_up(model, model, runner.pages, CPU, 20, 300, 2048, 256)


def test_one_layer_of_each_kind_asks_for_what_all_layers_ask_for(runner):
    with recording() as whole:
        warm(runner, runner.model)
    shallow = runner.model.shallow()
    with recording() as part:
        warm(runner, shallow)
    assert len(shallow.layers) < len(runner.model.layers)
    assert set(part) == set(whole) and len(whole) > 30


def test_graphs_ask_for_kernels_that_no_other_step_does(runner):
    config = EngineConfig.from_values(model="x", max_num_seqs=20)
    with recording() as steps:
        warm(runner, runner.model.shallow())
    with recording() as graphs:
        make_graphs(runner.model.shallow(), runner.pages, runner.sampled, config, 2048, 9984, False)
    names = [each.name for digest, each in graphs.items() if digest not in steps]
    assert "_resolve" in names and "attend_splits" in names


class Memory:
    """Peer memory of one rank of two, whose peer will never come."""

    multiprocessors, device = 132, CPU

    def __init__(self):
        self.world = SimpleNamespace(rank=0, size=2, timeout=1.0)

    def allocate(self, shape, dtype):
        return PeerTensor(torch.zeros(shape, dtype=dtype), torch.zeros(2, dtype=torch.int64))

    def host_words(self, count):
        return torch.zeros(count, dtype=torch.int64)

    def settle(self):
        pass


def test_an_exchange_is_rehearsed_without_a_peer_and_not_counted(monkeypatch, tmp_path):
    compile_for_hopper(monkeypatch, tmp_path)
    plan, hidden = fold_plan(DEFAULT_FOLD_ORDER, 8, 2), 64
    exchange = PeerExchange(plan, Memory(), 2048, hidden, torch.bfloat16, one_shot_rows=8)
    before = exchange._shared.own.clone()
    roots = relative_roots(plan.roots[0])
    counts = set()
    with exchange.carrier.rehearsal(), recording() as asked:
        for rows in (1, 5, 8, 1024, 2048, 2048, 5000):
            x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
            sums = PartialSums(torch.zeros(4, rows, hidden), roots)
            exchange.fold_and_norm(sums, Finish(x.float(), Norm(x[0], 1e-6)))
            exchange.carrier.all_gather(x)
            counts.add(exchange.carrier._turns)
    names = {each.name for each in asked.values()}
    assert "gather_words" in names and len(names) >= 3
    assert changed_by_a_journey(asked.values()) == []
    assert (
        len(counts) > 1 and exchange.carrier._turns == 0
    )  # each rank goes on with the same number
    assert torch.equal(exchange._shared.own, before)


@pytest.mark.slow
def test_after_compiling_ahead_nothing_is_left_to_compile(runner):
    def work():
        known_answers(CPU, torch.bfloat16)
        warm(runner, runner.model.shallow())

    assert compile_ahead.compile_ahead(work, SoloWorld()) > 60
    with recording() as left:
        known_answers(CPU, torch.bfloat16)
        warm(runner, runner.model)
    assert not left


def test_a_start_compiles_ahead_on_a_gpu_and_names_what_it_did_not_foresee(
    monkeypatch, tmp_path, caplog
):
    compile_for_hopper(monkeypatch, tmp_path)
    caplog.set_level(logging.INFO, "tpdet.engine")
    add = lambda number: add_number[1,](torch.zeros(32, dtype=torch.int32), 32, number)
    times, world = StartTimes(), SoloWorld()
    world.set_timeout(5.0)
    ahead = CompilingAhead(world, times, 3600.0, True)
    ahead.compile(lambda: add(80), "checks")
    for number in (80, 81):  # the driver without a GPU launches neither
        with pytest.raises(AttributeError):
            add(number)
    times.mark("warm-up")
    ahead.finish()
    said, unforeseen, line = caplog.messages
    assert said == "compiling kernels"
    assert unforeseen == "1 kernels were not foreseen and compiled in turn: add_number"
    assert line.startswith("engine up in ") and line.endswith("1 kernels known ahead")
    assert list(times.seconds) == ["checks", "compiling ahead", "warm-up"] and world.timeout == 5.0
    caplog.clear()
    for number, close in ((81, False), (82, True), (83, False)):
        with pytest.raises(AttributeError):
            add(number)
        if close:
            ahead.close()
    assert caplog.messages == [
        "add_number was compiled while serving: a step waited for it, no bit changes"
    ]


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (16, 1, (3, 4)), (16, 2, (1, 4)), (16, 3, (0, 5)), (16, 8, (0, 2)), (2, 1, (0, 2)),
        (4, 1, (1, 2)), (8, 1, (3, 2)), (1, 1, (0, 1)), (2, 4, (0, 1)), (128, 1, (3, 32)),
    ],
)  # fmt: skip
def test_helpers_and_ranks_share_the_cores(cores, ranks, expected):
    assert helping(cores, ranks) == expected


@pytest.mark.parametrize(
    ("cubins", "precompiled", "early"), [(0, False, True), (0, True, False), (33, False, False)]
)
def test_helpers_start_early_where_the_cache_is_empty(
    monkeypatch, tmp_path, cubins, precompiled, early
):
    compile_for_hopper(monkeypatch, tmp_path)
    for number in range(cubins):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "kernel.cubin").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert bool(open_helpers(SoloWorld(), precompiled).problems) == early


def test_helpers_that_fail_are_named_once_and_end_with_the_start(monkeypatch, tmp_path, caplog):
    compile_for_hopper(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    caches = type(add_number.device_caches)(add_number.create_binder)
    monkeypatch.setattr(add_number, "device_caches", caches)
    ahead = CompilingAhead(SoloWorld(), StartTimes(), 3600.0, True)

    def work():
        for number in (90, 91):
            add_number[1,](torch.zeros(32, dtype=torch.int32), 32, number)

    with caplog.at_level(logging.WARNING, "tpdet.engine"):
        ahead.compile(work, "checks")
    assert caplog.messages == [
        "this rank compiled for processes that failed: no process could be started "
        "(No such file or directory)"
    ]
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_a_start_on_the_cpu_compiles_nothing(compiled):
    times = StartTimes()
    ahead = CompilingAhead(SoloWorld(), times, 3600.0, False)
    ahead.compile(lambda: compiled.append("ran"), "checks")
    assert not compiled and not times.seconds


def test_the_seconds_of_a_start_are_a_metric(tiny_model):
    engine = Engine(EngineConfig.from_values(model=str(tiny_model()), device="cpu"), SoloWorld())
    seconds = engine.gauges["start_seconds"]
    assert 0 < seconds == sum(engine.runner.times.seconds.values())
    engine.close()
    status = Status("accepting", 0, 0, {"start_seconds": 12.5})
    assert b"tpdet_start_seconds 12.5" in Metrics("m", lambda: status).render()


def test_times_of_a_start_add_up():
    now = iter([10.0, 12.0, 15.5, 16.0])
    times = StartTimes(lambda: next(now))
    for phase in ("load", "warm-up", "load"):
        times.mark(phase)
    assert times.seconds == {"load": 2.5, "warm-up": 3.5} and times.total == 6.0
    assert str(times) == "6.0 s (load 2.5, warm-up 3.5)"
