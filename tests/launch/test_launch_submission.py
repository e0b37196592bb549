"""`tpdet.launch.submit`: submitit runs the ranks of a server, here on this host."""

import os
import re

import pytest

import tpdet.launch
from tests.lib.server.cluster import FLAGS, all_gone, ask, family, wait_ready
from tpdet.errors import NotFoundError
from tpdet.launch.life.stop import stop
from tpdet.launch.start import submission

submitit = pytest.importorskip("submitit", reason="pip install 'tpdet[slurm]'")


def test_a_slurm_job_drains_and_ends_together(tmp_path, monkeypatch):
    """What submitit would give sbatch; its `sbatch` is a fake that keeps the script."""
    for name in ("srun", "sbatch"):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/bash\ncp "$1" {tmp_path}/script; echo Submitted batch job 5\n')
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = tpdet.launch.submit(
        ["--model", "m"],
        nodes=2,
        ranks_per_node=8,
        gpus_per_node=8,
        folder=tmp_path / "jobs",
        cluster="slurm",
        slurm_partition="gpu",
    )
    script = (tmp_path / "script").read_text()
    assert job.job_id == "5" and "--kill-on-bad-exit=1" in script
    wanted = ("signal=TERM@60", "nodes=2", "ntasks-per-node=8", "partition=gpu")
    assert all(f"#SBATCH --{option}\n" in script for option in wanted), script
    assert len(re.findall("#SBATCH --signal", script)) == 1


def test_without_submitit_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(NotFoundError, match=r"tpdet\[slurm\]"):
        submission.submit([])


@pytest.mark.slow
def test_two_ranks_on_this_host_serve_and_drain(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = tmp_path / "run"
    flags = ["--model", str(tiny_model("qwen3", kv_heads=2)), *FLAGS, "--run-dir", str(run)]
    job = tpdet.launch.submit(
        flags, ranks_per_node=2, folder=tmp_path / "jobs", cluster="local", minutes=10
    )
    everyone = []
    try:
        ready = wait_ready(tmp_path, "run/ready.json", lambda: not job.done(), tmp_path / "none")
        everyone = family(run)
        assert ready["tp"] == 2 and ask(ready["url"])[0]
        assert stop(run) == 0
        assert job.results() == [0, 0]
    finally:
        job.cancel()
        assert all_gone(everyone)
