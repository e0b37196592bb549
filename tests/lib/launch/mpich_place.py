"""A virtual environment of its own in which mpi4py finds MPICH's library, and its mpirun."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest


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
