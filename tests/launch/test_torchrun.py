"""torchrun: the place that it tells a rank, and its command."""

import os
import sys

import pytest

from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import RankEnvironment, read_environment
from tpdet.launch.start.torchrun import rank_environment, torchrun_command

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_process_without_a_launcher_runs_alone():
    assert read_environment({"PATH": "/bin"}) == RankEnvironment()


def test_torchruns_environment_is_read():
    assert read_environment(TORCHRUN) == RankEnvironment(
        3, 8, 1, 2, launched=True, launcher="torchrun"
    )


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_a_half_set_environment_is_refused_by_name(missing):
    half = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UsageError, match=f"not {missing}.*torchrun"):
        read_environment(half)


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "8"}, {"RANK": "x"}, {"RANK": "-1"}, {"LOCAL_RANK": "2"}, {"WORLD_SIZE": "1"}],
)
def test_a_contradictory_environment_is_refused(wrong):
    with pytest.raises(UsageError, match="torchrun"):
        read_environment({**TORCHRUN, **wrong})


def test_the_command_runs_the_module_and_shares_the_cores(tmp_path):
    command = torchrun_command(2, ("-m", "tpdet.serve"), ["--model", "m"], tmp_path)
    assert command[:4] == [sys.executable, "-P", "-m", "torch.distributed.run"]
    assert command[-4:] == ["-m", "tpdet.serve", "--model", "m"]
    cores = len(os.sched_getaffinity(0))
    assert rank_environment(1, {})["OMP_NUM_THREADS"] == str(cores)
    assert rank_environment(10 * cores, {})["OMP_NUM_THREADS"] == "1"
    assert rank_environment(1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert rank_environment(1, {})["NCCL_NVLS_ENABLE"] == "0"
