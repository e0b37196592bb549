"""Worlds and the memory of GPUs: who fits beside whom, what is refused, one model at a time."""

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.comm.device import GpuMemory
from tpdet.config import EngineConfig
from tpdet.errors import NotFoundError, ResourceError, TpdetError
from tpdet.runner import Runner
from tpdet.tools.bench import run as bench
from tpdet.tools.bench.spec import MixedSpec
from tpdet.tools.verify import rank, run
from tpdet.tools.verify.room import check_worlds, needed_bytes
from tpdet.tools.verify.run import verify_all
from tpdet.tools.verify.spec import VerifySpec
from tpdet.tools.worlds import room, worlds
from tpdet.tools.worlds.placement import run_placed
from tpdet.tools.worlds.room import check_sizes
from tpdet.tools.worlds.ways import USUAL, LaunchWay
from tpdet.tools.worlds.worlds import cause_of

GIB = 1 << 30
H200 = GpuMemory("GPU-a", int(139.8 * GIB), int(139.8 * GIB))
SPEC = VerifySpec(
    model="none",
    dtypes=("float32", "bfloat16"),
    fold_orders=("sequential", "tree"),
    batches=(1, 4),
    budgets=(100,),
    prompt_lengths=(5, 37),
    tokens=3,
    seed=0,
    control=False,
    device="cpu",
)


def spec_of(folder, shape, **changes):
    model = write_shape(folder / shape, shape)
    return msgspec.structs.replace(SPEC, model=str(model), **changes)


def test_a_rank_lets_go_of_a_model_before_it_loads_the_next(tiny_model, tmp_path, monkeypatch):
    """A GPU that holds one may have no room for two."""
    started, start = [], Runner.start

    def seen(config, world):
        alive = [settings for settings, model in started if model() is not None]
        assert not alive, f"{config.dtype} {config.fold_order} is loaded beside {alive}"
        runner = start(config, world)
        started.append(((config.dtype, config.fold_order), weakref.ref(runner.model)))
        return runner

    monkeypatch.setattr(rank, "Runner", SimpleNamespace(start=seen))
    model = tiny_model("qwen3", kv_heads=2, hidden=64, intermediate=128, layers=1)
    spec = msgspec.structs.replace(SPEC, model=str(model))
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
    assert rank.main([str(tmp_path)]) == 0
    assert [settings for settings, _ in started] == [
        ("float32", "sequential"),
        ("float32", "tree"),
        ("bfloat16", "sequential"),
        ("bfloat16", "tree"),
    ]


def test_ranks_that_share_a_gpu_hold_one_model_among_them(tmp_path):
    """30B parameters in float32 fit one H200 at any size, 70B in bf16 only two of them."""
    every = [(tp, USUAL) for tp in (1, 2, 4)]
    check_worlds(spec_of(tmp_path, "qwen3-30b-a3b"), every, [H200])
    large = spec_of(tmp_path, "llama-3-70b")
    said = r"TP 4: weights of \S+ in float32 take 65.7 GiB on each of 4 ranks that share a GPU, .*"
    with pytest.raises(ResourceError, match=f"{said}: use --dtype bfloat16, leave 4 out of --tp"):
        check_worlds(large, [(4, USUAL)], [H200])
    few = msgspec.structs.replace(large, dtypes=("bfloat16",))
    check_worlds(few, every, [H200])
    with pytest.raises(ResourceError, match=r"TP 1: .*, and the GPU has 139.8 GiB for both"):
        check_worlds(large, every, [H200, H200])
    check_worlds(large, [(2, USUAL), (4, USUAL)], [H200, H200])
    check_worlds(large, [(4, LaunchWay("slurm"))], [H200])  # GPUs of other hosts


def test_a_verification_is_refused_before_a_world_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(run, "gpus_here", lambda: [H200])
    monkeypatch.setattr(run, "verify", lambda *given: pytest.fail("a world starts"))
    small, large = (write_shape(tmp_path / name, name) for name in ("qwen3-8b", "llama-3-70b"))
    with pytest.raises(ResourceError, match="use --dtype bfloat16"):
        verify_all([str(small), str(large)], SPEC, (2,), None)


def test_a_benchmark_is_refused_before_a_world_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(bench, "gpus_here", lambda: [H200])
    monkeypatch.setattr(bench, "run_world", lambda *given: pytest.fail("a world starts"))
    model = str(write_shape(tmp_path / "shape", "llama-3-70b"))
    engine = EngineConfig.from_values(model=model)
    with pytest.raises(ResourceError, match=r"TP 1: .* at --gpu-memory-utilization 0.9: raise"):
        bench.run_worlds(
            (1,),
            MixedSpec(settings={}, requests=1, shortest=1, longest=1, generate=1, seed=0),
            engine,
        )
    check_sizes(engine.model_copy(update={"gpu_memory_utilization": 1.0}), (1,), [H200])


def test_a_shape_by_name_is_verified_with_random_weights_only(tmp_path, monkeypatch):
    verified = []
    monkeypatch.setattr(run, "verify", lambda spec, *given: verified.append(spec.model) or [])
    dummy = msgspec.structs.replace(SPEC, load_format="dummy")
    assert verify_all(["qwen3-8b", "qwen3-0.6b"], dummy, (1,), None) == 0
    assert [Path(model).name for model in verified] == ["qwen3-8b", "qwen3-0.6b"]
    with pytest.raises(NotFoundError, match=r"'qwen3-8b' is a shape .*: add --load-format dummy"):
        verify_all(["qwen3-8b"], SPEC, (1,), None)
    monkeypatch.chdir(tmp_path)
    write_shape("qwen3-8b", "qwen3-0.6b")
    assert verify_all(["qwen3-8b"], SPEC, (1,), None) == 0
    assert verified[2:] == ["qwen3-8b"]  # a directory of that name


def test_worlds_share_a_gpu_only_where_their_bytes_fit(tmp_path):
    spec = spec_of(tmp_path, "qwen3-8b")
    alone, drafted = (
        needed_bytes(msgspec.structs.replace(spec, relations=relations), 1, "steps", 1)
        for relations in (("alone",), ("alone", "draft_model"))
    )
    assert 31 * GIB < alone < 40 * GIB < drafted < 2 * alone
    held, most, lock = [], [], threading.Lock()

    def start(index, place):
        with lock:
            held.append(needs[index])
            most.append((len(held), sum(held)))
        turn.wait(0.2) if needs[index] == 60 else None
        with lock:
            held.remove(needs[index])

    turn, needs = threading.Event(), [60, 60, 40, 30, 150]
    run_placed([1] * 5, start, ["0"], 3, needs, 100)
    assert len(most) == 5 and all(bytes_ <= 100 or count == 1 for count, bytes_ in most)
    assert (2, 100) in most and (1, 150) in most


LOG = """\
Traceback (most recent call last):
{"event": "fatal", "code": "engine_dead", "exit": 75, "message": "rank 1 is gone"}
{"event": "fatal", "code": "no_res{"event": "fatal"}
{"event": "fatal", "code": "no_resource", "exit": 71, "message": "weights take 9 GiB: use more"}
{"event": "fatal", "code": "usage", "exit": 2, "message": "later"}
rank 1 ended with 71
"""


def test_a_world_ends_with_the_first_cause_and_no_other_words():
    error = cause_of(LOG, "the world of 2 ranks")
    assert str(error) == "the world of 2 ranks ended with 71: weights take 9 GiB: use more"
    assert (error.exit_code, error.code) == (71, "no_resource")
    assert cause_of("\n".join(LOG.splitlines()[:3]), "it") is None


def test_what_a_rank_refuses_is_said_once(tmp_path):
    with pytest.raises(TpdetError) as raised:
        worlds.run_world(2, "tpdet.tools.verify.rank", [str(tmp_path)], tmp_path)
    said = str(raised.value)
    assert said.startswith("the world of 2 ranks (self, auto) ended with 66: ") and "\n" not in said
    assert said.count("spec.json") == 1 and raised.value.exit_code == NotFoundError.exit_code


def test_gpus_of_this_host_count_as_empty(monkeypatch):
    monkeypatch.setattr(room.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        room.torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"GPU-{index}", total_memory=(2 - index) * GIB),
    )
    assert room.gpus_here() == [GpuMemory("GPU-0", 2 * GIB, 2 * GIB), GpuMemory("GPU-1", GIB, GIB)]
    assert room.smallest(room.gpus_here()).gpu == "GPU-1"
