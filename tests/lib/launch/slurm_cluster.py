"""A real Slurm of two nodes on this host, up for as long as tests want it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lib.tree import ROOT

SCRIPT = ROOT / "scripts" / "slurm_two_nodes.sh"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and srun speak to it; skips where there is none to be had."""
    try:
        up = subprocess.run([SCRIPT, "up", folder], capture_output=True, text=True, timeout=60)
        if up.returncode == 2 or up.returncode == 3:
            pytest.skip(f"no Slurm here: {up.stderr.strip()}")
        assert up.returncode == 0, up.stderr
        yield slurm_environment(folder)
    finally:
        down = subprocess.run([SCRIPT, "down", folder], capture_output=True, text=True, timeout=60)
        assert down.returncode == 0, down.stderr


def slurm_environment(folder: Path) -> dict[str, str]:
    """What sbatch, srun and the jobs start in."""
    # The nodes' addresses are the loopback's. Open MPI wants to be told that root is meant.
    return os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
