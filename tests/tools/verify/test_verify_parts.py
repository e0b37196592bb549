"""What a verification consists of: relations by name, worlds and their GPUs, the log of logits."""

import hashlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tpdet.errors import TpdetError, UsageError
from tpdet.tools.verify import parts
from tpdet.tools.verify.cases import circumstances
from tpdet.tools.verify.compare import Relation
from tpdet.tools.verify.logits_log import LogitsLog, position_header
from tpdet.tools.verify.parts import Part, parts_of
from tpdet.tools.verify.relations import (
    GROUPS,
    PROCESSES,
    STEPS,
    order_of_processes,
    parse_relations,
    relations_help,
    that_apply,
    that_apply_to,
)
from tpdet.tools.verify.report import sizes_without_difference
from tpdet.tools.verify.spec import VerifySpec
from tpdet.tools.worlds.machine import count_gpus
from tpdet.tools.worlds.placement import Place, gpu_names, run_placed
from tpdet.tools.worlds.ways import LaunchWay

SPEC = VerifySpec(
    model="none",
    dtypes=("float32",),
    fold_orders=("pairs",),
    batches=(1, 4, 16),
    budgets=(100,),
    prompt_lengths=(5, 4096),
    tokens=4,
    seed=0,
    control=False,
    device="cpu",
    relations=GROUPS["all"],
)
QUIET = parts.WorldRuns(Console(quiet=True))


def test_relations_are_chosen_by_group_or_name_and_hold_the_reference():
    assert parse_relations("all") == (*STEPS, *PROCESSES)
    assert parse_relations("steps") == tuple(STEPS)
    assert parse_relations("processes") == (
        *("alone", "fresh", "cache", "eager", "gather", "experts", "packed"),
    )
    assert parse_relations("fresh,batch") == ("alone", "batch", "fresh")
    with pytest.raises(UsageError, match="relation 'graph'"):
        parse_relations("graph")
    assert all(f"{name}: " in relations_help() for name in GROUPS["all"])


def test_the_cpu_has_no_kernel_cache_and_no_graphs_and_the_control_only_steps():
    everything = GROUPS["all"]
    assert that_apply(everything, "cuda", False) == everything[:-1]
    assert that_apply(everything, "cpu", False) == (*STEPS, "fresh", "experts", "packed")
    assert that_apply(everything, "cuda", True) == tuple(STEPS)


def test_pooled_prompts_have_the_relations_in_which_no_text_follows():
    generated = that_apply_to(GROUPS["all"], None)
    assert set(GROUPS["all"]) - set(generated) == {"prefixes", "packed"}
    assert "packed" in that_apply_to(GROUPS["all"], None, quantised=True)
    assert "draft_model" not in that_apply_to(GROUPS["steps"], None, hybrid=True)
    last = that_apply_to(GROUPS["steps"], "last")
    assert last == ("alone", "batch", "chunks", "whole", "preempted", "prefixes")
    assert that_apply_to(last, "mean") == last[:-1], "a mean reads no pages of the cache"


def test_other_processes_run_for_the_default_fold_order():
    assert order_of_processes(("sequential", "pairs", "tree")) == "tree"
    assert order_of_processes(("pairs", "sequential")) == "pairs"


def test_the_first_circumstance_is_alone_and_one_holds_every_prompt_in_a_step():
    names = [found.name for found in circumstances(SPEC) if not found.drafts]
    assert names == [
        "alone",
        "batch 4",
        "batch 16",
        "chunks of 100",
        "not chunked",
        "preempted",
        "prefix hits",
        "prefill of decode",
        "prompts not scored",
        "not scored, chunks of 100",
        "repeating texts",
    ]
    assert all(each.drafts or each.texts for each in circumstances(SPEC)[len(names) - 1 :])
    (whole,) = (found for found in circumstances(SPEC) if found.name == "not chunked")
    assert whole.budget > sum(SPEC.prompt_lengths)
    preempted = [found.budget for found in circumstances(SPEC) if found.preempt_every]
    assert min(preempted) > sum(SPEC.prompt_lengths), "a long prompt would never end"


def test_the_reference_comes_first_and_one_start_serves_fresh_and_eager():
    found = parts_of(SPEC, [(1, LaunchWay()), (2, LaunchWay())])
    assert found == [
        Part(1, "steps"),
        Part(2, "steps"),
        Part(1, "fresh"),
        Part(2, "fresh"),
        Part(1, "cache"),
        Part(2, "cache"),
    ]


@pytest.mark.parametrize(("worlds_per_gpu", "most"), [(1, 1), (2, 2)])
def test_worlds_run_side_by_side_but_never_more_on_a_gpu_than_allowed(worlds_per_gpu, most):
    sizes, lock, load, seen = [1, 2, 4, 8, 1, 2, 1, 1], threading.Lock(), {}, []
    turn = threading.Barrier(2, timeout=10)

    def start(index, place):
        assert len(place.gpus) == min(sizes[index], 4)
        with lock:
            seen.append(index)
            for gpu in place.gpus:
                load[gpu] = load.get(gpu, 0) + 1
                assert load[gpu] <= most
        if sizes[index] == 2:
            turn.wait()  # the two worlds of two run at the same time
        with lock:
            for gpu in place.gpus:
                load[gpu] -= 1

    run_placed(sizes, start, ["4", "5", "6", "7"], worlds_per_gpu)
    assert sorted(seen) == list(range(8)) and seen[0] == 3
    assert set(load) == {"4", "5", "6", "7"}


def test_without_gpus_worlds_run_in_turn_and_a_failure_ends_it():
    seen = []

    def start(index, place):
        assert place == Place(()) and place.environment == {}
        seen.append(index)
        if index == 1:
            raise TpdetError("lost")

    with pytest.raises(TpdetError, match="lost"):
        run_placed([1, 2, 4], start, [])
    assert seen == [0, 1]


def test_a_failed_world_on_a_gpu_is_raised():
    def start(index, place):
        raise TpdetError(f"world {index} is lost")

    with pytest.raises(TpdetError, match="world 1 is lost"):
        run_placed([1, 2], start, ["0", "1"])


def test_gpus_keep_the_names_that_the_caller_may_see(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1a")
    assert gpu_names(2) == ["3", "GPU-1a"]
    assert Place(("3", "1")).environment == {"CUDA_VISIBLE_DEVICES": "3,1"}


@pytest.mark.parametrize("compiles", [True, False])
def test_an_empty_kernel_cache_must_have_been_compiled_into(monkeypatch, tmp_path, compiles):
    started = []

    def run_world(tp, module, arguments, folder, environment, way, launchers):
        started.append(environment)
        (folder / "report.json").write_text(
            '{"tp": 1, "vocab_size": 4, "fingerprints": {}, "traces": [], "machine": {}, "seen": '
            '{"launcher": "", "nodes": 1, "by_mpi": "", "node_folds": 0}}'
        )
        if "TRITON_CACHE_DIR" in environment:
            cache = folder / "kernels"
            assert environment["TRITON_CACHE_DIR"] == str(cache) and not any(cache.iterdir())
            if compiles:
                (cache / "kernel").write_text("")

    monkeypatch.setattr(parts, "run_world", run_world)
    if not compiles:
        with pytest.raises(TpdetError, match="no kernel was compiled"):
            parts.run_worlds(SPEC, [(1, LaunchWay())], QUIET, tmp_path)
        return
    reports = parts.run_worlds(SPEC, [(1, LaunchWay())], QUIET, tmp_path)
    assert len(reports) == 3 and ["TRITON_CACHE_DIR" in found for found in started] == [
        False,
        False,
        True,
    ]


def test_large_and_small_logits_are_digested_in_their_order_and_recomputed_ones_compared(tmp_path):
    for vocabulary in (8, 40_000):  # hashed at once, and by threads
        path = tmp_path / f"{vocabulary}"
        log = LogitsLog(path)
        log.names[3] = "probe-0"
        values = torch.arange(3 * vocabulary, dtype=torch.float32).view(3, vocabulary)
        row = lambda admission: SimpleNamespace(admission=admission, samples=1)
        log.tap(row(9), 0, values)  # a neighbour
        log.tap(row(3), 5, values)
        log.tap(row(3), 6, values[1:2])  # again, alike
        log.tap(row(3), 7, values[0:1])  # again, with other bits
        log.close({})
        wanted = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in values]
        assert list(log.digests) == ["probe-0"]
        found = log.digests["probe-0"]
        assert [found[5], found[6]] == wanted[:2]
        assert found[7] == f"recomputed: {wanted[2]} then {wanted[0]}"
        assert path.read_bytes().startswith(position_header("probe-0", 5))


def test_a_control_must_differ_at_every_size():
    def relation(tp, equal):
        named = {"dtype": "float32", "mode": "pairs", "circumstance": "alone"}
        return Relation(**named, tp=tp, equal=equal, digest="a", reference="b", positions=1)

    found = [relation(1, True), relation(2, False), relation(4, True), relation(2, True)]
    assert sizes_without_difference(found) == [4]


def test_ranks_that_share_a_gpu_count_it_once(monkeypatch):
    seen = [b"host GPU-1", b"host GPU-2", b"host GPU-1", b"other GPU-1"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1")
    )
    asked = []
    world = SimpleNamespace(gather_bytes=lambda said: asked.append(said) or seen)
    assert count_gpus(world) == 3
    assert asked == [f"{os.uname().nodename} GPU-1".encode()]
