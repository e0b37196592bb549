"""What a GPU has no room for is refused by name, before weights are loaded and later on."""

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.lib.thread_world import run_threads
from tpdet.cache.kv import page_bytes
from tpdet.checkpoint.model_config import load_model_config
from tpdet.comm.device import GpuMemory
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import ResourceError
from tpdet.layers.partition import state_shape
from tpdet.models.footprint import weight_bytes
from tpdet.runner import runner
from tpdet.runner.start import load_model, loading, memory
from tpdet.runner.start.contracts import partition_of

GPU = GpuMemory("GPU-a", 0, 0)


def cut(model, world, **settings):
    """The settings, this rank's share of the model, and bytes of its weights and of a page."""
    config = EngineConfig.from_values(model=str(model), device="cpu", **settings)
    share = partition_of(config, load_model_config(model, config.dtype), world)
    sizes = share.config.num_layers, len(share.key_heads), share.config.head_dim, torch.float32
    return config, share, weight_bytes(share), page_bytes(*sizes)


def refusal(monkeypatch, found, of):
    """What `check_room` says of a GPU with this memory; None where the weights fit."""
    monkeypatch.setattr(memory, "gpu_memory", lambda: found)
    try:
        memory.check_room(*of, torch.device("cuda"))
    except ResourceError as error:
        return str(error)
    return None


@pytest.mark.parametrize("pages", [None, 5])
def test_a_gpu_must_hold_weights_and_the_least_cache_to_the_byte(tiny_model, monkeypatch, pages):
    """`kv_pages` bounds the cache itself, and one page more takes what pad rows write."""
    *of, weights, page = cut(tiny_model("qwen3"), SoloWorld(), dtype="float32", kv_pages=pages)
    needed, kept = weights + page * (1 if pages is None else 6), 0 if pages else 1_048_575
    fits = replace(GPU, free=needed + kept, total=10 << 20)
    assert refusal(monkeypatch, fits, of) is None
    said = refusal(monkeypatch, replace(fits, free=fits.free - 1), of)
    assert said.startswith(f"weights of {of[0].model} in float32 take {weights / 2**20:.1f} MiB, ")
    assert "--dtype bfloat16" in said and said.endswith("or use more GPUs (--tp)")
    assert ("--kv-pages" in said) is (pages is not None)
    assert ("at --gpu-memory-utilization 0.9: " in said) is (pages is None)


def test_states_that_leave_no_room_are_said_before_weights_are_read(tiny_model, monkeypatch):
    model = tiny_model("qwen3_5_text", layers=2, kv_heads=2)
    *of, weights, _ = cut(model, SoloWorld(), dtype="bfloat16", max_num_seqs=10, kv_pages=1)
    slot, needed = state_shape(of[1]).slot_bytes(torch.bfloat16), memory.least_bytes(*of).bytes
    fits = replace(GPU, free=needed, total=needed)
    assert refusal(monkeypatch, fits, of) is None
    for short, fitting in ((1, 9), (slot, 9), (slot + 1, 8), (9 * slot, 1)):
        said = refusal(monkeypatch, replace(fits, free=needed - short), of)
        assert "the KV cache with states of 10 sequences at least" in said
        assert f": lower --max-num-seqs to {fitting}, " in said
        fewer = cut(model, SoloWorld(), dtype="bfloat16", max_num_seqs=fitting, kv_pages=1)[:2]
        assert refusal(monkeypatch, replace(fits, free=needed - short), fewer) is None
    assert "max-num-seqs" not in refusal(monkeypatch, replace(fits, free=weights), of)


def of_rank(values):
    """A function, of any arguments, that gives each thread of `run_threads` its rank's value."""
    return lambda *_: values[int(threading.current_thread().name.removeprefix("rank "))]


def test_ranks_that_share_a_gpu_are_counted_together_and_refuse_alike(tiny_model, monkeypatch):
    model = tiny_model("qwen3_moe")

    def said(gpus, spare):
        def rank(world):
            *of, weights, page = cut(model, world, dtype="float32", kv_pages=1)
            free = 2 * (weights + 2 * page) + spare
            found[world.rank] = GpuMemory(gpus[world.rank], free, 10 * free)
            with pytest.raises(ResourceError) if refused else nullcontext() as raised:
                memory.check_room(*of, torch.device("cuda"))
            return str(raised.value) if refused else None

        found, refused = [GPU, GPU], spare < 0 and gpus[0] == gpus[1]
        monkeypatch.setattr(memory, "gpu_memory", of_rank(found))
        return run_threads(2, rank)

    assert said(("GPU-a", "GPU-a"), 0) == [None, None]
    first, second = said(("GPU-a", "GPU-a"), -1)
    assert first == second and "on each of 2 ranks that share a GPU" in first
    assert first.endswith("or give each rank a GPU")
    assert said(("GPU-a", "GPU-b"), -1) == [None, None]


REMEDIES = [
    ((60, 100), {}, "raise --gpu-memory-utilization, or use more GPUs (--tp)"),
    ((50, 100), {}, "end what else runs on the GPU, or use more GPUs (--tp)"),
    ((50, 50), {}, "use more GPUs (--tp)"),
    ((50, 50), {"draft_model": "d"}, "leave --draft-model out, or use more GPUs"),
    ((59, 59), {"kv_pages": 9}, "lower --kv-pages, or use more GPUs (--tp)"),
]


@pytest.mark.parametrize(("found", "settings", "remedy"), REMEDIES)
def test_the_remedies_are_those_that_help(found, settings, remedy):
    settings = {"gpu_memory_utilization": 0.6, "model": "big"} | settings
    said = memory.why_no_room(
        EngineConfig.from_values(**settings),
        "bfloat16",
        [memory.Least(55 << 30, 5 << 30)],
        GpuMemory("GPU-a", *(size << 30 for size in found)),
    )
    assert said.startswith(
        "weights of big in bfloat16 take 55.0 GiB, the KV cache at least 5.0 GiB"
    )
    assert said.partition(": ")[2].startswith(remedy)


def test_the_remedies_name_a_dtype_only_where_half_as_much_would_do():
    config = EngineConfig.from_values(model="big", kv_pages=1)
    of = "float32", [memory.Least(100, 20)]
    assert "bfloat16" in memory.why_no_room(config, *of, GpuMemory("GPU-a", 60, 60))
    assert "bfloat16" not in memory.why_no_room(config, *of, GpuMemory("GPU-a", 59, 59))


def test_a_start_refuses_before_it_reads_a_weight(tiny_model, monkeypatch):
    """The check is part of the start, and the start is over before a kernel is tried."""
    asked = []

    def check(config, partition, device):
        asked.append((partition.config.family, device.type))
        raise ResourceError("no room")

    monkeypatch.setattr(load_model, "check_room", check)
    monkeypatch.setattr(loading.Loader, "open_source", lambda *given: asked.append("weights"))
    with pytest.raises(ResourceError, match="no room"):
        Engine(EngineConfig.from_values(model=str(tiny_model("qwen3"))), SoloWorld())
    assert asked == [("qwen3", "cpu")]


TORCH = (
    "CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 210.38 MiB is free. Process 7 has 139.59 GiB memory in use."
)
FULL = {
    "loading the weights": (
        loading,
        "Decoder",
        "more were needed, 210.38 MiB are free)",
    ),
    "trying the kernels and every size of step": (load_model, "agreed_pages", "--tp"),
    "making the KV pages and CUDA graphs": (runner, "VersionTable", "--gpu-memory-utilization"),
}


@pytest.mark.parametrize("doing", FULL)
def test_a_gpu_that_is_full_during_a_start_is_said_in_one_line(tiny_model, monkeypatch, doing):
    where, name, part = FULL[doing]

    def full(*given, **named):
        raise torch.OutOfMemoryError(TORCH)

    monkeypatch.setattr(where, name, full)
    config = EngineConfig.from_values(model=str(tiny_model("qwen3")), device="cpu", kv_pages=2)
    with pytest.raises(ResourceError) as raised:
        Engine(config, SoloWorld())
    said = str(raised.value)
    assert said.startswith(f"GPU memory ran out while {doing} of {config.model} (384.00 MiB")
    assert part in said and "--max-num-batched-tokens" in said and "\n" not in said
    assert raised.value.exit_code == 71


def test_another_error_of_a_start_keeps_its_name(tiny_model, monkeypatch):
    def broken(*given):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(loading, "Decoder", broken)
    config = EngineConfig.from_values(model=str(tiny_model("qwen3")), device="cpu", kv_pages=2)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Engine(config, SoloWorld())


def test_a_rank_without_room_for_a_page_ends_all_with_its_words(tiny_model, monkeypatch):
    config = EngineConfig.from_values(model=str(tiny_model("qwen3")))
    model = load_model_config(config.model, "auto")
    monkeypatch.setattr(memory, "free_gpu_bytes", of_rank([10**9, 0]))

    def rank(world):
        with pytest.raises(ResourceError) as raised:
            share = partition_of(config, model, world)
            memory.agreed_pages(config, share, 100, torch.device("cuda"))
        return str(raised.value)

    first, second = run_threads(2, rank)
    assert first == second and "raise it, lower --max-num-batched-tokens, or use more GPUs" in first


def test_states_of_all_who_may_run_have_room_or_are_refused(tiny_model, monkeypatch):
    """Snapshots get a quarter of what is left, four for each sequence at most."""
    model, cpu = tiny_model("qwen3_5_text", layers=2, kv_heads=2), torch.device("cpu")
    config, share, *_ = cut(model, SoloWorld(), dtype="float32", max_num_seqs=10)
    slot, snapshot = (size(torch.float32) for size in _sizes(share))
    for spare, snapshots in ((0, 0), (4 * snapshot * 7, 7), (2**40, 40)):
        free = 4 * (11 * slot + spare)
        monkeypatch.setattr(memory, "_available_memory", lambda free=free: free)
        assert memory.states_that_fit(config, share, cpu) == (10, snapshots)
        size = memory.agreed_pages(config, share, 1000, cpu)
        assert size.states == (10, snapshots) and size.pages >= 1
    monkeypatch.setattr(memory, "_available_memory", lambda: 4 * (11 * slot - 1))
    with pytest.raises(
        ResourceError, match="lower --max-num-seqs to 9, or use more ranks"
    ) as error:
        memory.states_that_fit(config, share, cpu)
    assert "for the 10 that may run" in str(error.value)
    alone = cut(model, SoloWorld(), enable_prefix_caching=False, max_num_seqs=2)[:2]
    assert memory.states_that_fit(*alone, cpu) == (2, 0)
    other = cut(tiny_model("qwen3"), SoloWorld())[:2]
    assert memory.states_that_fit(*other, cpu) is None


def _sizes(share):
    return state_shape(share).slot_bytes, state_shape(share).snapshot_bytes


def test_the_rank_with_the_least_room_says_how_many_snapshots_there_are(tiny_model, monkeypatch):
    model = tiny_model("qwen3_5_text", layers=2, kv_heads=2)
    rooms = [memory.StateRoom(3, 9), memory.StateRoom(3, 5)]
    monkeypatch.setattr(memory, "states_that_fit", of_rank(rooms))

    def rank(world):
        config = EngineConfig.from_values(model=str(model), device="cpu", kv_pages=2)
        share = partition_of(config, load_model_config(model, config.dtype), world)
        return memory.agreed_pages(config, share, 100, torch.device("cpu"))

    assert run_threads(2, rank) == [(2, (3, 5))] * 2
