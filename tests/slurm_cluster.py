"""A real Slurm of two nodes on this host, up for as long as tests want it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "slurm_two_nodes.sh"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and srun speak to it; skips where there is none to be had."""
    try:
        up = subprocess.run([SCRIPT, "up", folder], capture_output=True, text=True, timeout=60)
        if up.returncode == 2 or up.returncode == 3:
            pytest.skip(f"no Slurm here: {up.stderr.strip()}")
        assert up.returncode == 0, up.stderr
        # One host stands for two: its names are not known, and gloo needs only the loopback.
        places = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        yield os.environ | places | {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        down = subprocess.run([SCRIPT, "down", folder], capture_output=True, text=True, timeout=60)
        assert down.returncode == 0, down.stderr
