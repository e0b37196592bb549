"""Tensors carried by MPI arrive as sent, folds keep their bits, and a lost rank is an error."""

import json
import os
import subprocess
import sys

import pytest

from tests.comm.cases import CASES
from tests.lib.launchers import ENVIRONMENT, MPIRUN, make_mpich_place, needs_mpirun
from tpdet.comm.world.mpi_carrier import open_mpi
from tpdet.errors import UsageError

pytestmark = needs_mpirun


def run(ranks, folder, *arguments) -> subprocess.CompletedProcess:
    """tests.comm.mpi_rank by mpirun."""
    return subprocess.run(
        [
            MPIRUN,
            "-n",
            str(ranks),
            "--bind-to",
            "none",
            "--map-by",
            "slot:OVERSUBSCRIBE",
            sys.executable,
            "-m",
            "tests.comm.mpi_rank",
            str(folder),
            *arguments,
        ],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def reports(ranks, folder, kind="") -> list[dict]:
    return [json.loads((folder / f"{rank}{kind}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_world_carried_by_mpi_passes_every_case_and_leaves(tmp_path, ranks):
    done = run(ranks, tmp_path)
    assert done.returncode == 0, done.stderr
    for report in reports(ranks, tmp_path):
        assert report["cases"] == {case.__name__: "passed" for case in CASES}
        assert report["nodes"] == "passed"
        assert report["by"] == "mpi"  # ranks without GPUs need no MPI that takes their memory
        assert report["agreed"] == ["mpi, CUDA-aware", "mpi, staged"]
        assert report["carried"]["all_gather"] > 99 and report["carried"]["all_to_all"] > 39


@pytest.mark.slow
def test_mpich_carries_the_same_bits(tmp_path):
    """In an environment of its own, where mpi4py finds MPICH's library."""
    programs, output = make_mpich_place(tmp_path / "mpich"), tmp_path / "output"
    output.mkdir()
    command = [programs / "mpirun", "-n", "4", programs / "python", "-m", "tests.comm.mpi_rank"]
    done = subprocess.run(
        [*command, output],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for report in reports(4, output):
        assert {*report["cases"].values(), report["nodes"]} == {"passed"}
        assert report["carried"]["all_gather"] > 99


@pytest.mark.slow
def test_a_rank_that_mpi_waits_for_is_lost_after_the_timeout(tmp_path):
    done = run(4, tmp_path, "lose")
    assert done.returncode != 0
    for rank, report in enumerate(reports(3, tmp_path, ".lost")):
        assert report["message"].startswith(f"rank {rank} of 4 lost a peer in all_gather of (1048")
        # The first to give up leaves gloo too, so that the others hear of it; MPI tells nobody.
        assert report["message"].endswith("(timeout 1 s): MPI has no answer of all ranks")
        assert 0.9 < report["seconds"] < 5.0 and report["again"] == report["message"]


def test_ranks_that_mpi_does_not_know_are_refused():
    """A rank of torchrun is alone in MPI's eyes. In a process of its own: MPI starts there."""
    code = "from tpdet.comm.world.mpi_carrier import open_mpi; open_mpi(1, 2, 5.0)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    assert "transport mpi: MPI says rank 0 of 1, the launcher rank 1 of 2: start" in done.stderr


def test_a_missing_mpi4py_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'tpdet\[mpi\]'"):
        open_mpi(0, 2, 5.0)
