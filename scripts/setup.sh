#!/usr/bin/env bash
# Makes a virtual environment with tpdet and its tests' needs. Safe to repeat.
# torch >= 2.11 that is already installed is reused; else a local find-links file (if pip knows
# one), else PyTorch's own CPU wheels. On a machine with a GPU install the CUDA torch beforehand.
set -euo pipefail
venv=${1:-.venv}
python=${PYTHON:-python3}

has_torch() {
    "$1" - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
release = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
sys.exit(release < (2, 11))
PY
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tpdet needs Python 3.11 or newer; set PYTHON=python3.11" >&2
    exit 2
}
if [ ! -x "$venv/bin/python" ]; then
    if has_torch "$python"; then
        "$python" -m venv --system-site-packages "$venv"
    else
        "$python" -m venv "$venv"
    fi
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
if ! has_torch "$venv/bin/python"; then
    "${pip[@]}" --no-index --no-deps "torch>=2.11" 2>/dev/null ||
        "${pip[@]}" "torch>=2.11" --index-url https://download.pytorch.org/whl/cpu
fi
"${pip[@]}" --editable ".[test,plot,mpi,slurm,evaluation]"
"$venv/bin/python" -c 'import torch, tpdet; print("tpdet", tpdet.__version__, "torch", torch.__version__)'
