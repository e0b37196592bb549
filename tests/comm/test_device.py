"""Where a rank computes: what is chosen, what is refused, and which GPU is whose."""

import subprocess
import sys

import pytest
import torch

from tpdet.comm import device
from tpdet.comm.device import driver_version, open_world, ranks_per_gpu, resolve_device
from tpdet.comm.world.world import SoloWorld
from tpdet.errors import UsageError
from tpdet.kernels.known.answers import Forms, known_answers
from tpdet.launch.ranks.environment import RankEnvironment


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that torch sees some GPUs of one capability."""

    def pretend(count, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA Test")
        chosen = []
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


def place(rank, size):
    return RankEnvironment(rank=rank, size=size, local_rank=rank, local_size=size, launched=True)


def test_auto_is_the_cpu_without_a_gpu_and_the_gpu_with_one(gpus):
    gpus(0)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    gpus(1)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


def test_cuda_without_a_gpu_is_refused(gpus):
    gpus(0)
    with pytest.raises(UsageError, match=r"device cuda: torch .* use --device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_an_old_gpu_is_refused_and_never_passed_over(gpus, wanted):
    gpus(2, (7, 5))
    with pytest.raises(UsageError, match=r"NVIDIA Test has compute capability 7\.5.* need 8\.0"):
        resolve_device(wanted)


def test_each_rank_has_a_gpu_of_its_own(gpus):
    gpus(4)
    assert ranks_per_gpu(place(3, 4)) == 1
    assert ranks_per_gpu(place(0, 2)) == 1
    assert ranks_per_gpu(place(5, 8)) == 2


def test_more_ranks_than_gpus_are_refused_unless_they_may_share(gpus, monkeypatch):
    chosen = gpus(4)
    with pytest.raises(UsageError, match="8 ranks on a host with 4 GPUs"):
        open_world("cuda", 1.0, place(5, 8))
    asked = []
    monkeypatch.setattr(
        device, "DistributedWorld", lambda *given, **named: asked.append((given, named))
    )
    open_world("cuda", 1.0, place(5, 8), share_gpus=True)
    open_world("cuda", 1.0, place(3, 4), share_gpus=True)
    assert chosen == [2, 3]
    assert [named["staged"] for _, named in asked] == [True, False]
    assert [given[0] for given, _ in asked] == ["cuda", "cuda"]


def test_a_process_alone_is_a_world_of_one(gpus):
    chosen = gpus(2)
    assert isinstance(open_world("auto", 1.0, RankEnvironment()), SoloWorld)
    assert chosen == [0]


def test_the_driver_is_read_from_the_kernel(tmp_path, monkeypatch):
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 13.3.0\n"
    )
    monkeypatch.setattr(device, "DRIVER_FILE", file)
    assert driver_version() == "580.159.04"


def test_the_cpu_path_never_imports_triton():
    code = """
import sys, torch
import tpdet.llm, tpdet.tools.verify.run, tpdet.tools.bench.run
from tpdet.kernels.known.answers import known_answers
known_answers(torch.device("cpu"), torch.bfloat16)
print(*(name for name in sys.modules if name.partition(".")[0] == "triton"))
print(*(name for name in sys.modules if name.startswith("tpdet.kernels.cuda.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    triton, *cuda = done.stdout.splitlines()
    assert triton == ""
    plain = {"exchange", "exchange.arguments", "hardware"}  # data, without a kernel
    plain |= {"cost", "cost.roofline"}  # a formula
    assert {*" ".join(cuda).split()} <= {f"tpdet.kernels.cuda.{name}" for name in plain}


def test_known_answers_are_the_same_again_and_other_for_another_dtype():
    first, second, other = (
        known_answers(torch.device("cpu"), dtype)
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float16)
    )
    assert first == second
    assert [name for name in first if first[name] == other[name]] == ["log softmax", "sampler"]


def test_known_answers_are_those_of_the_forms_that_a_model_takes():
    plain, other = (
        known_answers(torch.device("cpu"), torch.bfloat16, forms)
        for forms in (Forms(), Forms("gelu_tanh", "layer", 2.0, 3.0, True))
    )
    changed = {name for name in plain if plain[name] != other[name]}
    assert changed == {
        *("norm", "gated gemm", "activation", "attention", "log softmax", "sampler"),
    }
    hybrid = known_answers(torch.device("cpu"), torch.bfloat16, Forms(linear=True))
    assert hybrid.items() - plain.items() == {("linear attention", hybrid["linear attention"])}
