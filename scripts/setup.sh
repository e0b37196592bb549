#!/usr/bin/env bash
# setup.sh [VENV [serve|interpreted|test]]: makes a virtual environment with tpdet, or completes one.
# Safe to repeat, and in any order: "serve" installs what serving needs; "interpreted" adds what tests
# in Triton's interpreter need, "test" (the default) what all tests need: several times as long.
# An installed torch >= 2.11 is reused. Otherwise torch comes from a local find-links file (if pip
# knows one), else from PyTorch's CPU wheels. On a machine with a GPU install a CUDA torch first.
set -euo pipefail
venv=${1:-.venv}
what=${2:-test}
python=${PYTHON:-python3}
began=$SECONDS

has_torch() {
    "$1" - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
release = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
sys.exit(release < (2, 11))
PY
}

# Whether the outer Python's pip can install into the environment (pip 22.3): that saves seconds. The
# tests need a pip inside the environment, too.
pip_outside() {
    "$python" - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
sys.exit(tuple(int(part) for part in version("pip").split(".")[:2]) < (22, 3))
PY
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tpdet needs Python 3.11 or newer; set PYTHON=python3.11" >&2
    exit 2
}
goal=$what
case $what in
    serve) extras="" && size="about 250 MB" && cached="half a minute" ;;
    interpreted) extras="[interpreted]" && goal="test in the interpreter" && size="about 450 MB" && cached="a minute" ;;
    test) extras="[test,agents,plot,mpi,slurm,evaluation,rl,audit,batches]" && size="about 750 MB" && cached="2 minutes" ;;
    *) echo "setup.sh VENV $what: use serve, interpreted or test" >&2 && exit 2 ;;
esac
echo "making $venv to $goal: about $cached with packages from pip's cache, else as long as" \
    "$size take to download"
if [ ! -x "$venv/bin/python" ]; then
    if has_torch "$python"; then
        "$python" -m venv --without-pip --system-site-packages "$venv"
    else
        "$python" -m venv --without-pip "$venv"
    fi
fi
if [ "$what" != serve ] || ! pip_outside; then
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        "$python" scripts/progress.py --pip "adding pip" "$venv/bin/python" -m ensurepip --upgrade
fi
if pip_outside; then
    pip=("$python" -m pip --python "$venv/bin/python")
else
    pip=("$venv/bin/python" -m pip)
fi
# Modules are compiled when they are first imported; most of torch never is imported.
install() {
    "$python" scripts/progress.py --pip "$1" "${pip[@]}" --disable-pip-version-check install \
        --no-compile --progress-bar off "${@:2}"
}
# setuptools is installed before tpdet is built: a separate build environment would take seconds.
install "installing setuptools" "setuptools>=77"
# torch is installed first: as a dependency of tpdet it would bring gigabytes of CUDA packages.
if ! has_torch "$venv/bin/python"; then
    echo "looking for PyTorch on this machine"
    torch=(--no-index --no-deps "torch>=2.11")
    "${pip[@]}" install --quiet --dry-run "${torch[@]}" >/dev/null 2>&1 ||
        torch=("torch>=2.11" --index-url https://download.pytorch.org/whl/cpu)
    install "installing PyTorch" "${torch[@]}"
fi
install "installing tpdet and the packages to $goal" --no-build-isolation --editable ".$extras"
echo "$venv is ready to $goal, after $((SECONDS - began)) s"
