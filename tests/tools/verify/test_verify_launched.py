"""`tpdet verify` of ranks that torchrun, srun and mpirun start: one digest, and a control's two."""

import json
import os
import subprocess
import sys

import pytest

from tests.lib.launchers import ENVIRONMENT, needs_mpirun, slurm_cluster

SHORT = (
    "--relations", "alone", "--dtype", "float32", "--prompt-lengths", "5,37", "--tokens", "3",
)  # fmt: skip


def verify(model, output, *arguments, environment=None, timeout=280):
    """`tpdet verify` on the CPU."""
    command = [sys.executable, "-m", "tpdet", "verify", model, "--device", "cpu", *SHORT]
    return subprocess.run(
        [*map(str, command), *map(str, arguments), "--output", str(output)],
        env=(environment or os.environ) | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def rows_of(done, output) -> list[dict]:
    """The rows of a verification in which all were equal."""
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(output.read_text())
    assert all(row["equal"] for row in run["rows"])
    return run["rows"]


def ways_of(rows) -> set[tuple]:
    return {(row["launcher"], row["transport"], row["tp"], row["nodes"]) for row in rows}


@needs_mpirun
@pytest.mark.slow
def test_ranks_of_mpirun_give_one_digest(tiny_model, tmp_path):
    output = tmp_path / "verify.json"
    done = verify(
        tiny_model("qwen3"),
        output,
        "--launcher",
        "mpi",
        "--transport",
        "mpi",
        "--tp",
        "1,2",
        "--fold-order",
        "tree",
    )
    rows = rows_of(done, output)
    assert ways_of(rows) == {("mpi", "mpi", 1, 1), ("mpi", "mpi", 2, 1)}
    assert len({row["digest"] for row in rows}) == 1


@needs_mpirun
@pytest.mark.slow
def test_stock_arithmetic_differs_under_mpirun_too(tiny_model, tmp_path):
    """Negative control: a launched world that adds in another order is found out."""
    output = tmp_path / "control.json"
    done = verify(
        tiny_model("qwen3"),
        output,
        "--control",
        "--fold-order",
        "pairs",
        "--launcher",
        "mpi",
        "--transport",
        "gather",
        "--tp",
        "1,4",
    )
    assert done.returncode == 1 and "DIFFERENT" in done.stdout, done.stdout + done.stderr
    (run,) = json.loads(output.read_text())
    assert [row["equal"] for row in run["rows"]] == [True, False]


@needs_mpirun
@pytest.mark.slow
@pytest.mark.timeout(2500)  # 163 processes of 35 worlds: 12 minutes of processor time
def test_every_launcher_transport_and_layout_of_nodes_gives_one_digest(tiny_model, tmp_path):
    output = tmp_path / "verify.json"
    with slurm_cluster(tmp_path / "slurm") as environment:
        done = verify(
            tiny_model("qwen3"),
            output,
            "--launcher",
            "torchrun,slurm,mpi",
            "--transport",
            "gather,mpi",
            "--tp",
            "1,2,4,8",
            "--nodes",
            "1,2,4",
            "--fold-order",
            "sequential",
            environment=environment,
            timeout=2400,
        )
    rows = rows_of(done, output)
    layouts = {(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (4, 4), (8, 4)}
    assert ways_of(rows) == {
        (launcher, "gather", *layout)
        for launcher in ("torchrun", "slurm", "mpi")
        for layout in layouts
    } | {("mpi", "mpi", *layout) for layout in layouts - {(1, 1)}}
    assert len({row["digest"] for row in rows}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_sixteen_ranks_of_sixteen_leaves_fold_in_two_levels_as_in_one(tiny_model, tmp_path):
    output = tmp_path / "verify.json"
    model = tiny_model("llama", heads=16, intermediate=512)
    done = verify(model, output, "--leaves", "16", "--tp", "1,16", "--nodes", "1,2,4", timeout=1200)
    rows = rows_of(done, output)
    assert {(row["tp"], row["nodes"]) for row in rows} == {(1, 1), (16, 1), (16, 2), (16, 4)}
    assert len({row["digest"] for row in rows}) == len({row["mode"] for row in rows}) == 3
